// Causal attention of sequences with several new tokens. A CTA takes 128 rows of one sequence and
// KV head, a row being a (new token, query head) pair, so that the query heads of a KV head share
// the keys and values they read (FlashAttention-2, Dao, 2023, with the group packed into rows).
// Tiles of slots start at multiples of kTileSlots: a row's result does not depend on the rows it
// shares a CTA with. Bytes: 4 * head_dim a visible slot, KV head and tile of 128 rows.

#include "kernels/cuda/device/attention.cuh"
#include "kernels/cuda/device/launch.cuh"

namespace zipage::cuda {
namespace {

constexpr int kTileRows = 128;
constexpr int kTileSlots = 64;
constexpr int kMaxWarps = 8;
// 16-row tiles of a warp: with two, what it loads of keys and values serves twice the products.
// At head_dim 256 their outputs would not fit the registers.
template <int kHeadDim>
constexpr int kRowTiles = kHeadDim <= 128 ? 2 : 1;
template <int kHeadDim>
constexpr int kWarpRows = 16 * kRowTiles<kHeadDim>;
template <int kHeadDim>
constexpr int kThreads = kTileRows / kWarpRows<kHeadDim>* kWarp;

template <int kHeadDim>
struct Shared {
  static constexpr int kQuery = kTileRows * kRowBytes<kHeadDim>;
  static constexpr int kKeys = kTileSlots * kRowBytes<kHeadDim>;
  static constexpr int kStage = 2 * kKeys;  // keys, values
  static constexpr int kBytes = kQuery + 2 * kStage;
};

// The work of a CTA.
struct Tile {
  int seq;
  int first_token;  // of the sequence
  int num_tokens;   // new ones of the sequence
  int context_len;
  int first_row;  // row r is new token r / group, query head r % group of the KV head
  int num_rows;   // of the sequence
  int kv_head;
  int group;
  int num_slots;  // that any row of the tile sees

  // Slots that a row sees.
  __device__ int Visible(int row) const {
    return context_len - num_tokens + min(row, num_rows - 1) / group + 1;
  }
};

// Tiles of a sequence: none if it decodes.
__device__ int NumTiles(const PagedAttentionParams& p, int seq, int group) {
  const int tokens = p.query_start[seq + 1] - p.query_start[seq];
  return tokens > 1 ? (tokens * group + kTileRows - 1) / kTileRows : 0;
}

// Finds the tile of this CTA: tiles are numbered sequence after sequence, the last tile of a
// sequence, which has the most work, first. False if there are fewer. All threads call.
__device__ bool FindTile(const PagedAttentionParams& p, Tile* tile) {
  __shared__ int found[2];  // sequence, its first tile
  __shared__ int warp_sums[kMaxWarps];
  const int threads = static_cast<int>(blockDim.x);
  const int group = p.q_heads / p.kv_heads;
  const int wanted = blockIdx.y;
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  if (threadIdx.x == 0) found[0] = -1;
  int before = 0;
  for (int first = 0; first < p.num_seqs && before <= wanted; first += threads) {
    const int seq = first + static_cast<int>(threadIdx.x);
    const int tiles = seq < p.num_seqs ? NumTiles(p, seq, group) : 0;
    int sum = tiles;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int below = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += below;
    }
    if (lane == kWarp - 1) warp_sums[warp] = sum;
    __syncthreads();
    int total = 0;
    for (int w = 0; w < threads / kWarp; ++w) {
      if (w < warp) sum += warp_sums[w];
      total += warp_sums[w];
    }
    const int begin = before + sum - tiles;
    if (begin <= wanted && wanted < before + sum) {
      found[0] = seq;
      found[1] = begin;
    }
    before += total;
    __syncthreads();
  }
  __syncthreads();
  if (found[0] < 0) return false;
  tile->seq = found[0];
  tile->group = group;
  tile->first_token = p.query_start[tile->seq];
  tile->num_tokens = p.query_start[tile->seq + 1] - tile->first_token;
  tile->context_len = p.context_len[tile->seq];
  tile->num_rows = tile->num_tokens * group;
  const int index = NumTiles(p, tile->seq, group) - 1 - (wanted - found[1]);
  tile->first_row = index * kTileRows;
  tile->kv_head = blockIdx.x;
  tile->num_slots = tile->Visible(tile->first_row + kTileRows - 1);
  return true;
}

template <int kHeadDim>
__device__ void LoadQueries(const PagedAttentionParams& p, const Tile& tile, uint32_t to) {
  constexpr int kChunks = kHeadDim / 8;
  const auto* q = static_cast<const __nv_bfloat16*>(p.q);
  for (int c = threadIdx.x; c < kTileRows * kChunks; c += kThreads<kHeadDim>) {
    const int row = tile.first_row + c / kChunks;
    const bool valid = row < tile.num_rows;
    const int64_t token = tile.first_token + (valid ? row / tile.group : 0);
    const int64_t head = tile.kv_head * tile.group + row % tile.group;
    CopyAsync16(to + c / kChunks * kRowBytes<kHeadDim> + c % kChunks * 16,
                q + token * p.q_stride + head * kHeadDim + c % kChunks * 8, valid);
  }
}

// Starts the copies of the tile's slots [first, first + kTileSlots); zeros past the last slot.
template <int kHeadDim>
__device__ void CopySlots(const PagedAttentionParams& p, const Tile& tile, int first,
                          int block_shift, uint32_t stage) {
  constexpr int kChunks = kHeadDim / 8;
  const auto* keys = static_cast<const __nv_bfloat16*>(p.key_cache);
  const auto* values = static_cast<const __nv_bfloat16*>(p.value_cache);
  const int32_t* table = p.block_tables + int64_t{tile.seq} * p.max_blocks;
#pragma unroll
  for (int i = 0; i < kTileSlots * kChunks / kThreads<kHeadDim>; ++i) {
    const int c = i * kThreads<kHeadDim> + static_cast<int>(threadIdx.x);
    const int slot = first + c / kChunks;
    const bool valid = slot < tile.num_slots;
    const int64_t row = valid ? CacheRow(table, slot, p.block_size, block_shift) : 0;
    const int64_t at = (row * p.kv_heads + tile.kv_head) * kHeadDim + c % kChunks * 8;
    const uint32_t to = stage + c / kChunks * kRowBytes<kHeadDim> + c % kChunks * 16;
    CopyAsync16(to, keys + at, valid);
    CopyAsync16(to + Shared<kHeadDim>::kKeys, values + at, valid);
  }
}

// A warp's running softmax. Of row tile t a lane has rows 16 * t + lane / 4 and 8 further on.
template <int kHeadDim>
struct WarpState {
  float max[kRowTiles<kHeadDim>][2];  // of the scores times log2(e)
  float sum[kRowTiles<kHeadDim>][2];  // over this lane's columns only, until the end
  float out[kRowTiles<kHeadDim>][kHeadDim / 8][4];

  __device__ WarpState() {
#pragma unroll
    for (int t = 0; t < kRowTiles<kHeadDim>; ++t) {
      max[t][0] = max[t][1] = -INFINITY;
      sum[t][0] = sum[t][1] = 0;
#pragma unroll
      for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) out[t][n][c] = 0;
      }
    }
  }
};

template <int kHeadDim>
using TileScores = float[kRowTiles<kHeadDim>][kTileSlots / 8][4];

// Scores of the warp's rows with the tile's slots, before scaling.
template <int kHeadDim>
__device__ void Scores(uint32_t query, uint32_t stage, TileScores<kHeadDim>& scores) {
  constexpr int kRow = kRowBytes<kHeadDim>;
  const int lane = threadIdx.x % kWarp;
  const uint32_t q_at = query + (lane % 16) * kRow + (lane / 16) * 16;
  const uint32_t k_at = stage + (lane % 8 + lane / 16 * 8) * kRow + lane / 8 % 2 * 16;
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    uint32_t a[kRowTiles<kHeadDim>][4];
#pragma unroll
    for (int t = 0; t < kRowTiles<kHeadDim>; ++t) LoadMatrices(a[t], q_at + t * 16 * kRow + k * 32);
#pragma unroll
    for (int n = 0; n < kTileSlots / 16; ++n) {
      uint32_t b[4];
      LoadMatrices(b, k_at + n * 16 * kRow + k * 32);
#pragma unroll
      for (int t = 0; t < kRowTiles<kHeadDim>; ++t) {
        MultiplyAdd(scores[t][2 * n], a[t], b[0], b[1]);
        MultiplyAdd(scores[t][2 * n + 1], a[t], b[2], b[3]);
      }
    }
  }
}

// Scales and masks the scores of one row tile, moves its maxima on, rescales its sums and outputs
// and leaves the weights, exp2(score - maximum), in the scores' place. visible: slots that the
// lane's two rows see.
template <int kHeadDim>
__device__ void Softmax(int first, const int (&visible)[2], float scale, int tile,
                        WarpState<kHeadDim>* state, float (&scores)[kTileSlots / 8][4]) {
  const int lane = threadIdx.x % kWarp;
  const bool masks = first + kTileSlots > min(visible[0], visible[1]);
  float(&max)[2] = state->max[tile];
  float new_max[2] = {max[0], max[1]};
#pragma unroll
  for (int n = 0; n < kTileSlots / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const bool hidden = masks && first + n * 8 + lane % 4 * 2 + c % 2 >= visible[c / 2];
      scores[n][c] = hidden ? -INFINITY : scores[n][c] * scale;
      new_max[c / 2] = fmaxf(new_max[c / 2], scores[n][c]);
    }
  }
  float rescale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(kAllLanes, new_max[r], 1));
    new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(kAllLanes, new_max[r], 2));
    rescale[r] = ExpBelow(max[r], new_max[r]);
    max[r] = new_max[r];
    state->sum[tile][r] *= rescale[r];
  }
#pragma unroll
  for (int n = 0; n < kHeadDim / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) state->out[tile][n][c] *= rescale[c / 2];
  }
#pragma unroll
  for (int n = 0; n < kTileSlots / 8; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      // Slot 0 is visible to every row, so the maximum is a number from the first tile on.
      scores[n][c] = exp2f(scores[n][c] - new_max[c / 2]);
      state->sum[tile][c / 2] += scores[n][c];
    }
  }
}

// Takes the slots [first, first + kTileSlots) into the state.
template <int kHeadDim>
__device__ void TakeSlots(int first, const int (&visible)[kRowTiles<kHeadDim>][2], float scale,
                          uint32_t query, uint32_t stage, WarpState<kHeadDim>* state) {
  constexpr int kRow = kRowBytes<kHeadDim>;
  const int lane = threadIdx.x % kWarp;
  TileScores<kHeadDim> scores = {};
  Scores<kHeadDim>(query, stage, scores);
#pragma unroll
  for (int t = 0; t < kRowTiles<kHeadDim>; ++t) {
    Softmax<kHeadDim>(first, visible[t], scale, t, state, scores[t]);
  }
  const uint32_t v_at = stage + Shared<kHeadDim>::kKeys + (lane % 16) * kRow + (lane / 16) * 16;
#pragma unroll
  for (int k = 0; k < kTileSlots / 16; ++k) {
    uint32_t weights[kRowTiles<kHeadDim>][4];
#pragma unroll
    for (int t = 0; t < kRowTiles<kHeadDim>; ++t) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float(&pair)[4] = scores[t][2 * k + i / 2];
        weights[t][i] = PackBFloat16(pair[i % 2 * 2], pair[i % 2 * 2 + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kHeadDim / 16; ++n) {
      uint32_t b[4];
      LoadMatricesTransposed(b, v_at + k * 16 * kRow + n * 32);
#pragma unroll
      for (int t = 0; t < kRowTiles<kHeadDim>; ++t) {
        MultiplyAdd(state->out[t][2 * n], weights[t], b[0], b[1]);
        MultiplyAdd(state->out[t][2 * n + 1], weights[t], b[2], b[3]);
      }
    }
  }
}

template <int kHeadDim>
__device__ void StoreRows(const PagedAttentionParams& p, const Tile& tile, int first_row,
                          WarpState<kHeadDim>* state) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles<kHeadDim>; ++i) {
    const int t = i / 2;
    const int r = i % 2;
    float sum = state->sum[t][r];
    sum += __shfl_xor_sync(kAllLanes, sum, 1);
    sum += __shfl_xor_sync(kAllLanes, sum, 2);
    const int row = first_row + lane / 4 + 8 * i;
    if (row >= tile.num_rows) continue;
    const int64_t token = tile.first_token + row / tile.group;
    const int64_t head = tile.kv_head * tile.group + row % tile.group;
    auto* out = static_cast<__nv_bfloat16*>(p.out) + (token * p.q_heads + head) * kHeadDim;
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      *reinterpret_cast<uint32_t*>(out + n * 8 + lane % 4 * 2) =
          PackBFloat16(state->out[t][n][2 * r] / sum, state->out[t][n][2 * r + 1] / sum);
    }
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads<kHeadDim>, kHeadDim <= 128 ? 2 : 1)
    PrefillKernel(PagedAttentionParams p, int block_shift) {
  extern __shared__ __align__(16) char shared[];
  Tile tile;
  if (!FindTile(p, &tile)) return;
  const uint32_t query = SharedAddress(shared);
  const uint32_t stages = query + Shared<kHeadDim>::kQuery;
  const auto stage_of = [&](int i) { return stages + i % 2 * Shared<kHeadDim>::kStage; };
  LoadQueries<kHeadDim>(p, tile, query);
  CopySlots<kHeadDim>(p, tile, 0, block_shift, stage_of(0));
  CommitCopies();
  const int warp_row = static_cast<int>(threadIdx.x) / kWarp * kWarpRows<kHeadDim>;
  const int first_row = tile.first_row + warp_row;
  int visible[kRowTiles<kHeadDim>][2];
#pragma unroll
  for (int i = 0; i < 2 * kRowTiles<kHeadDim>; ++i) {
    visible[i / 2][i % 2] =
        tile.Visible(first_row + static_cast<int>(threadIdx.x) % kWarp / 4 + 8 * i);
  }
  const int warp_visible = tile.Visible(first_row + kWarpRows<kHeadDim> - 1);
  const bool in_use = first_row < tile.num_rows;
  WarpState<kHeadDim> state;
  const int count = (tile.num_slots + kTileSlots - 1) / kTileSlots;
  for (int i = 0; i < count; ++i) {
    WaitForCopies<0>();
    // The tile is there for all warps, and none still reads the other stage.
    __syncthreads();
    if (i + 1 < count) {
      CopySlots<kHeadDim>(p, tile, (i + 1) * kTileSlots, block_shift, stage_of(i + 1));
      CommitCopies();
    }
    if (!in_use || i * kTileSlots >= warp_visible) continue;
    TakeSlots<kHeadDim>(i * kTileSlots, visible, p.scale * kLog2E,
                        query + warp_row * kRowBytes<kHeadDim>, stage_of(i), &state);
  }
  if (in_use) StoreRows<kHeadDim>(p, tile, first_row, &state);
}

template <int kHeadDim>
absl::Status Launch(const PagedAttentionParams& p, Stream stream) {
  constexpr int kBytes = Shared<kHeadDim>::kBytes;
  if (absl::Status status = AllowSharedMemory(PrefillKernel<kHeadDim>, kBytes, "PagedPrefill");
      !status.ok()) {
    return status;
  }
  // Every sequence has at most one tile that is not full. What is too much ends at once.
  const int64_t rows = p.num_tokens * (p.q_heads / p.kv_heads);
  const dim3 grid(p.kv_heads, CeilDiv(rows, int64_t{kTileRows}) + p.num_seqs);
  PrefillKernel<kHeadDim>
      <<<grid, kThreads<kHeadDim>, kBytes, stream>>>(p, BlockShift(p.block_size));
  return LaunchStatus("PagedPrefill");
}

}  // namespace

absl::Status LaunchPrefill(const PagedAttentionParams& p, Stream stream) {
  switch (p.head_dim) {
    case 64:
      return Launch<64>(p, stream);
    case 96:
      return Launch<96>(p, stream);
    case 128:
      return Launch<128>(p, stream);
    default:
      return Launch<256>(p, stream);
  }
}

}  // namespace zipage::cuda
