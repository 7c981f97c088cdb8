// Attention of sequences with one new token. A CTA takes one segment of one sequence for one KV
// head and up to 16 of its query heads, which are the rows of the tensor-core tile: keys and values
// are read once. Each warp streams its own slots (every fourth group of 16) through a pipeline of
// its own, so no barrier stands between the loads. Bytes: 4 * head_dim a slot and KV head; the rest
// (queries, partial results of under 1 / 32 of that) stays in the L2 cache.

#include "kernels/cuda/device/attention.cuh"
#include "kernels/cuda/device/launch.cuh"

namespace zipage::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRows = 16;      // query heads of a tile
constexpr int kSlots = 16;     // that a warp takes at a time
constexpr int kStages = 2;     // groups of slots of a warp that are under way or in use
constexpr int kCtasPerSm = 3;  // as shared memory allows at head_dim 128

template <int kHeadDim>
struct Shared {
  static constexpr int kQuery = kRows * kRowBytes<kHeadDim>;
  static constexpr int kKeys = kSlots * kRowBytes<kHeadDim>;
  static constexpr int kStage = 2 * kKeys;  // keys, values
  static constexpr int kPipelines = kWarps * kStages * kStage;
  static constexpr int kMerged = kWarps * kRows * (kHeadDim + 2) * static_cast<int>(sizeof(float));
  // The warps' results take the place of the pipelines.
  static constexpr int kBytes = kQuery + (kPipelines > kMerged ? kPipelines : kMerged);
};

// The work of a CTA.
struct Segment {
  int seq;
  int index;  // of the segment
  int num_segments;
  int begin, end;  // slots
  int kv_head;
  int first_head;  // query head of the tile's first row
  int num_heads;   // rows in use
};

// False if there is no such segment, or the sequence does not decode.
__device__ bool FindSegment(const PagedAttentionParams& p, Segment* s) {
  const int group = p.q_heads / p.kv_heads;
  const int tiles = (group + kRows - 1) / kRows;
  s->seq = blockIdx.z;
  s->index = blockIdx.y;
  const int context_len = p.context_len[s->seq];
  if (p.query_start[s->seq + 1] - p.query_start[s->seq] != 1) return false;
  const auto slots = static_cast<int>(SegmentSlots(context_len));
  s->begin = s->index * slots;
  if (s->begin >= context_len) return false;
  s->end = min(context_len, s->begin + slots);
  s->num_segments = (context_len + slots - 1) / slots;
  s->kv_head = blockIdx.x / tiles;
  const int tile = blockIdx.x % tiles;
  s->first_head = s->kv_head * group + tile * kRows;
  s->num_heads = min(kRows, group - tile * kRows);
  return true;
}

// Queries to shared memory, as bf16 rows; rows that are not in use are zero.
template <int kHeadDim>
__device__ void LoadQueries(const PagedAttentionParams& p, const Segment& s, char* shared) {
  constexpr int kChunks = kHeadDim / 8;
  const auto* q = static_cast<const __nv_bfloat16*>(p.q) + p.query_start[s.seq] * p.q_stride +
                  int64_t{s.first_head} * kHeadDim;
  for (int c = threadIdx.x; c < kRows * kChunks; c += kThreads) {
    const int row = c / kChunks;
    uint4 chunk = {};
    if (row < s.num_heads) chunk = *reinterpret_cast<const uint4*>(q + c * 8);
    *reinterpret_cast<uint4*>(shared + row * kRowBytes<kHeadDim> + c % kChunks * 16) = chunk;
  }
}

// One warp's running softmax over the slots it has seen, for rows lane / 4 and lane / 4 + 8.
template <int kHeadDim>
struct WarpState {
  float max[2] = {-INFINITY, -INFINITY};  // of the scores times log2(e)
  float sum[2] = {};                      // over this lane's columns only, until the end
  float out[kHeadDim / 8][4] = {};
};

// Starts the copies of the 16 slots from `first` on. row: of lane l, the cache row of slot first +
// l % 16.
template <int kHeadDim>
__device__ void CopySlots(const PagedAttentionParams& p, const Segment& s, int first, int64_t row,
                          uint32_t stage) {
  constexpr int kChunks = kHeadDim / 8;
  const int lane = threadIdx.x % kWarp;
  const auto* keys = static_cast<const __nv_bfloat16*>(p.key_cache);
  const auto* values = static_cast<const __nv_bfloat16*>(p.value_cache);
#pragma unroll
  for (int i = 0; i < kSlots * kChunks / kWarp; ++i) {
    const int c = i * kWarp + lane;
    const int slot = c / kChunks;
    const int64_t from = __shfl_sync(kAllLanes, row, slot);
    const bool valid = first + slot < s.end;
    const int64_t at = (from * p.kv_heads + s.kv_head) * kHeadDim + c % kChunks * 8;
    const uint32_t to = stage + slot * kRowBytes<kHeadDim> + c % kChunks * 16;
    CopyAsync16(to, keys + at, valid);
    CopyAsync16(to + Shared<kHeadDim>::kKeys, values + at, valid);
  }
}

// Takes 16 slots whose keys and values are in shared memory into the state.
template <int kHeadDim>
__device__ void TakeSlots(const Segment& s, int first, float scale, uint32_t query, uint32_t stage,
                          WarpState<kHeadDim>* state) {
  constexpr int kRow = kRowBytes<kHeadDim>;
  const int lane = threadIdx.x % kWarp;
  const int matrix = lane / 8;
  const uint32_t q_at = query + (lane % 16) * kRow + (lane / 16) * 16;
  const uint32_t k_at = stage + (lane % 8 + matrix / 2 * 8) * kRow + matrix % 2 * 16;
  float scores[2][4] = {};
#pragma unroll
  for (int k = 0; k < kHeadDim / 16; ++k) {
    uint32_t a[4], b[4];
    LoadMatrices(a, q_at + k * 32);
    LoadMatrices(b, k_at + k * 32);
    MultiplyAdd(scores[0], a, b[0], b[1]);
    MultiplyAdd(scores[1], a, b[2], b[3]);
  }
  float new_max[2] = {state->max[0], state->max[1]};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      const bool valid = first + n * 8 + lane % 4 * 2 + c % 2 < s.end;
      scores[n][c] = valid ? scores[n][c] * scale : -INFINITY;
      new_max[c / 2] = fmaxf(new_max[c / 2], scores[n][c]);
    }
  }
  float rescale[2];
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(kAllLanes, new_max[r], 1));
    new_max[r] = fmaxf(new_max[r], __shfl_xor_sync(kAllLanes, new_max[r], 2));
    rescale[r] = ExpBelow(state->max[r], new_max[r]);
    state->max[r] = new_max[r];
    state->sum[r] *= rescale[r];
  }
  uint32_t weights[4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float w0 = ExpBelow(scores[n][2 * r], new_max[r]);
      const float w1 = ExpBelow(scores[n][2 * r + 1], new_max[r]);
      state->sum[r] += w0 + w1;
      weights[2 * n + r] = PackBFloat16(w0, w1);
    }
  }
  const uint32_t v_at = stage + Shared<kHeadDim>::kKeys + (lane % 16) * kRow + (lane / 16) * 16;
#pragma unroll
  for (int n = 0; n < kHeadDim / 16; ++n) {
    uint32_t b[4];
    LoadMatricesTransposed(b, v_at + n * 32);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float(&out)[4] = state->out[2 * n + half];
      out[0] *= rescale[0];
      out[1] *= rescale[0];
      out[2] *= rescale[1];
      out[3] *= rescale[1];
      MultiplyAdd(out, weights, b[2 * half], b[2 * half + 1]);
    }
  }
}

// Groups of slots of one warp: the i-th begins at slot first + i * kStep.
constexpr int kStep = kWarps * kSlots;

// Cache rows of the first groups if segments have their least length, which is the usual case: read
// before the sequence's length is there, so that one wait fewer stands before the first copies.
struct EarlyRows {
  int64_t row[kStages];
};
__device__ EarlyRows LoadEarlyRows(const PagedAttentionParams& p, int block_shift) {
  const int32_t* table = p.block_tables + int64_t{blockIdx.z} * p.max_blocks;
  const int first = blockIdx.y * kMinSegmentSlots + threadIdx.x / kWarp * kSlots;
  const int last = p.max_blocks * p.block_size - 1;  // entries of the table that are not needed are
  EarlyRows early;                                   // nonsense, but may be read
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    const int j = first + i * kStep + static_cast<int>(threadIdx.x) % kSlots;
    early.row[i] = CacheRow(table, min(j, last), p.block_size, block_shift);
  }
  return early;
}

// The slots of this warp, streamed through its stages.
template <int kHeadDim>
class SlotStream {
 public:
  __device__ SlotStream(const PagedAttentionParams& p, const Segment& s, int block_shift,
                        uint32_t pipeline)
      : p_(p),
        s_(s),
        block_shift_(block_shift),
        pipeline_(pipeline),
        first_(s.begin + static_cast<int>(threadIdx.x) / kWarp * kSlots),
        count_((s.end - first_ + kStep - 1) / kStep) {}

  // Starts the copies of the first groups.
  __device__ void Start(const EarlyRows& early) {
    const bool is_early = s_.begin == static_cast<int>(blockIdx.y) * kMinSegmentSlots;
#pragma unroll
    for (int i = 0; i < kStages; ++i) {
      if (i < count_) Copy(i, is_early ? early.row[i] : RowOf(i));
      CommitCopies();
    }
  }
  __device__ void Run(uint32_t query, WarpState<kHeadDim>* state) {
    int64_t next_row = RowOf(kStages);
    const float scale = p_.scale * kLog2E;
    for (int i = 0; i < count_; ++i) {
      WaitForCopies<kStages - 1>();
      __syncwarp();
      TakeSlots<kHeadDim>(s_, first_ + i * kStep, scale, query, StageOf(i), state);
      __syncwarp();
      if (i + kStages < count_) {
        Copy(i + kStages, next_row);
        next_row = RowOf(i + kStages + 1);
      }
      CommitCopies();
    }
    WaitForCopies<0>();
  }

 private:
  __device__ int64_t RowOf(int i) const {
    const int j = first_ + i * kStep + static_cast<int>(threadIdx.x) % kSlots;
    const int32_t* table = p_.block_tables + int64_t{s_.seq} * p_.max_blocks;
    return j < s_.end ? CacheRow(table, j, p_.block_size, block_shift_) : 0;
  }
  __device__ uint32_t StageOf(int i) const {
    return pipeline_ + i % kStages * Shared<kHeadDim>::kStage;
  }
  __device__ void Copy(int i, int64_t row) const {
    CopySlots<kHeadDim>(p_, s_, first_ + i * kStep, row, StageOf(i));
  }

  const PagedAttentionParams& p_;
  const Segment& s_;
  int block_shift_;
  uint32_t pipeline_;
  int first_;
  int count_;
};

// Partial results (maximum, sum, four elements of the output, not yet divided), merged in order.
// The loads of all of them are under way together. stats_at(i): maximum and sum of the i-th.
struct Merged {
  float max = -INFINITY;
  float sum = 0;
  float4 out = {};
};
template <int kMost, typename StatsAt, typename OutAt>
__device__ Merged Merge(int count, StatsAt stats_at, OutAt out_at) {
  float2 stats[kMost];
  float4 outs[kMost];
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    stats[i] = i < count ? stats_at(i) : make_float2(-INFINITY, 0);
    outs[i] = i < count ? out_at(i) : float4{};
  }
  Merged merged;
#pragma unroll
  for (int i = 0; i < kMost; ++i) merged.max = fmaxf(merged.max, stats[i].x);
#pragma unroll
  for (int i = 0; i < kMost; ++i) {
    const float factor = ExpBelow(stats[i].x, merged.max);
    merged.sum += stats[i].y * factor;
    merged.out.x += outs[i].x * factor;
    merged.out.y += outs[i].y * factor;
    merged.out.z += outs[i].z * factor;
    merged.out.w += outs[i].w * factor;
  }
  return merged;
}

__device__ void StoreOutput(const Merged& m, __nv_bfloat16* to) {
  const uint2 words = {PackBFloat16(m.out.x / m.sum, m.out.y / m.sum),
                       PackBFloat16(m.out.z / m.sum, m.out.w / m.sum)};
  *reinterpret_cast<uint2*>(to) = words;
}

// The warps' states to shared memory: [kWarps, kRows, kHeadDim] outputs, then pairs (maximum, sum).
template <int kHeadDim>
__device__ void StoreWarpState(WarpState<kHeadDim>* state, float* results) {
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  auto* stats = reinterpret_cast<float2*>(results + kWarps * kRows * kHeadDim);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = warp * kRows + lane / 4 + 8 * r;
    state->sum[r] += __shfl_xor_sync(kAllLanes, state->sum[r], 1);
    state->sum[r] += __shfl_xor_sync(kAllLanes, state->sum[r], 2);
    if (lane % 4 == 0) stats[row] = make_float2(state->max[r], state->sum[r]);
#pragma unroll
    for (int n = 0; n < kHeadDim / 8; ++n) {
      float2* to = reinterpret_cast<float2*>(results + row * kHeadDim + n * 8 + lane % 4 * 2);
      *to = make_float2(state->out[n][2 * r], state->out[n][2 * r + 1]);
    }
  }
}

// Waits for nobody: true in the CTA that ends last of the segments of its sequence and heads.
__device__ bool IsLastSegment(const Segment& s, int32_t* counters) {
  __shared__ bool is_last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    int32_t* counter = counters + int64_t{s.seq} * gridDim.x + blockIdx.x;
    is_last = atomicAdd(counter, 1) == s.num_segments - 1;
    if (is_last) *counter = 0;
  }
  __syncthreads();
  if (is_last) __threadfence();
  return is_last;
}

// Partial results in scratch: [num_seqs, segments, q_heads, kHeadDim], then pairs (maximum, sum).
template <int kHeadDim>
class Partials {
 public:
  __device__ Partials(const PagedAttentionParams& p, const Segment& s, float* memory)
      : outs_(memory),
        stats_(reinterpret_cast<float2*>(memory +
                                         int64_t{p.num_seqs} * gridDim.y * p.q_heads * kHeadDim)),
        first_(int64_t{s.seq} * gridDim.y * p.q_heads + s.first_head),
        stride_(p.q_heads) {}
  __device__ void Store(int segment, int row, int element, const Merged& m) {
    const int64_t at = first_ + segment * stride_ + row;
    *reinterpret_cast<float4*>(outs_ + at * kHeadDim + element) = m.out;
    if (element == 0) stats_[at] = make_float2(m.max, m.sum);
  }
  // Other CTAs wrote them: not through this SM's cache.
  __device__ float2 StatsAt(int segment, int row) const {
    return __ldcg(stats_ + first_ + segment * stride_ + row);
  }
  __device__ float4 OutAt(int segment, int row, int element) const {
    const int64_t at = first_ + segment * stride_ + row;
    return __ldcg(reinterpret_cast<const float4*>(outs_ + at * kHeadDim + element));
  }

 private:
  float* outs_;
  float2* stats_;
  int64_t first_;
  int64_t stride_;
};

// The end of a CTA: merges the warps' results in shared memory, then, in the last CTA of the
// sequence and heads, all segments.
template <int kHeadDim>
__device__ void Finish(const PagedAttentionParams& p, const Segment& s, const float* results,
                       const PagedAttentionScratch& scratch) {
  constexpr int kVectors = kHeadDim / 4;
  const auto* stats = reinterpret_cast<const float2*>(results + kWarps * kRows * kHeadDim);
  auto* out = static_cast<__nv_bfloat16*>(p.out) +
              (int64_t{p.query_start[s.seq]} * p.q_heads + s.first_head) * kHeadDim;
  Partials<kHeadDim> partials(p, s, scratch.partials);
  for (int i = threadIdx.x; i < s.num_heads * kVectors; i += kThreads) {
    const int row = i / kVectors;
    const int element = i % kVectors * 4;
    const Merged merged = Merge<kWarps>(
        kWarps, [&](int w) { return stats[w * kRows + row]; },
        [&](int w) {
          return *reinterpret_cast<const float4*>(results + (w * kRows + row) * kHeadDim + element);
        });
    if (s.num_segments == 1) {
      StoreOutput(merged, out + row * kHeadDim + element);
    } else {
      partials.Store(s.index, row, element, merged);
    }
  }
  if (s.num_segments == 1 || !IsLastSegment(s, scratch.counters)) return;
  for (int i = threadIdx.x; i < s.num_heads * kVectors; i += kThreads) {
    const int row = i / kVectors;
    const int element = i % kVectors * 4;
    const Merged merged = Merge<kMaxSegments>(
        s.num_segments, [&](int segment) { return partials.StatsAt(segment, row); },
        [&](int segment) { return partials.OutAt(segment, row, element); });
    StoreOutput(merged, out + row * kHeadDim + element);
  }
}

template <int kHeadDim>
__global__ void __launch_bounds__(kThreads, kHeadDim <= 128 ? kCtasPerSm : 1)
    DecodeKernel(PagedAttentionParams p, PagedAttentionScratch scratch, int block_shift) {
  extern __shared__ __align__(16) char shared[];
  const EarlyRows early = LoadEarlyRows(p, block_shift);
  Segment s;
  if (!FindSegment(p, &s)) return;
  char* const pipelines = shared + Shared<kHeadDim>::kQuery;
  SlotStream<kHeadDim> stream(
      p, s, block_shift,
      SharedAddress(pipelines) + threadIdx.x / kWarp * kStages * Shared<kHeadDim>::kStage);
  stream.Start(early);
  LoadQueries<kHeadDim>(p, s, shared);
  __syncthreads();
  WarpState<kHeadDim> state;
  stream.Run(SharedAddress(shared), &state);
  __syncthreads();
  StoreWarpState<kHeadDim>(&state, reinterpret_cast<float*>(pipelines));
  __syncthreads();
  Finish<kHeadDim>(p, s, reinterpret_cast<const float*>(pipelines), scratch);
}

template <int kHeadDim>
absl::Status Launch(const PagedAttentionParams& p, const PagedAttentionScratch& scratch,
                    Stream stream) {
  constexpr int kBytes = Shared<kHeadDim>::kBytes;
  if (absl::Status status = AllowSharedMemory(DecodeKernel<kHeadDim>, kBytes, "PagedDecode");
      !status.ok()) {
    return status;
  }
  const int tiles = CeilDiv(p.q_heads / p.kv_heads, kRows);
  const dim3 grid(p.kv_heads * tiles, MaxSegments(p), p.num_seqs);
  DecodeKernel<kHeadDim><<<grid, kThreads, kBytes, stream>>>(p, scratch, BlockShift(p.block_size));
  return LaunchStatus("PagedDecode");
}

}  // namespace

absl::Status LaunchDecode(const PagedAttentionParams& p, const PagedAttentionScratch& scratch,
                          Stream stream) {
  switch (p.head_dim) {
    case 64:
      return Launch<64>(p, scratch, stream);
    case 96:
      return Launch<96>(p, scratch, stream);
    case 128:
      return Launch<128>(p, scratch, stream);
    default:
      return Launch<256>(p, scratch, stream);
  }
}

}  // namespace zipage::cuda
