#include "kernels/key_similarity.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "glog/logging.h"
#include "kernels/cpu/key_tile.h"
#include "kernels/cpu/score_rows.h"

// Offsets inside a tile fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace zipage::cpu {
namespace {

// Columns, and vectors of rows, of one register block of C: its sums stay in registers.
constexpr int kBlockColumns = 8;
constexpr int kTileBlocks = kTileSlots / kBlockColumns;
template <int kLanes>
constexpr int kBlockVecs = kLanes == 16 ? 2 : 1;

constexpr float kAlike = 0.5F;
constexpr float kLeastNorm = 1e-6F;

// The keys that are compared with each other: those of a block or of a whole table.
struct Group {
  float* unit;     // [num_tiles, head_dim, kTileSlots] keys over their norms; 0 past num_keys
  float* total;    // [head_dim] their sum
  float* row_sum;  // [num_tiles * kTileSlots]
  int64_t num_keys;
  int64_t num_tiles;
  int head_dim;

  float* Tile(int64_t tile) const { return unit + tile * head_dim * kTileSlots; }
};

// For the columns of one tile of C, the search for the last alike row.
struct Search {
  bool found[kTileSlots];
  int missing[kTileBlocks];  // columns of each block that have not found theirs
  int num_missing;
};

Search StartSearch(const Group& group, int64_t tile) {
  Search search = {};
  for (int c = 0; c < kTileSlots; ++c) {
    search.found[c] = tile * kTileSlots + c >= group.num_keys;
    if (!search.found[c]) ++search.missing[c / kBlockColumns];
  }
  for (const int missing : search.missing) search.num_missing += missing;
  return search;
}

// Looks through one block, cosines[kBlockColumns, count] with rows [first_row, first_row + count),
// from the last row down, and takes what is found from that row's sum.
void LookThrough(const Group& group, int64_t tile, int block, int64_t first_row, int count,
                 const float* cosines, Search* search) {
  for (int c = block * kBlockColumns; c < (block + 1) * kBlockColumns; ++c, cosines += count) {
    for (int r = count; r-- > 0 && !search->found[c];) {
      if (!(cosines[r] > kAlike) || first_row + r == tile * kTileSlots + c) continue;
      group.row_sum[first_row + r] -= cosines[r];
      search->found[c] = true;
      --search->missing[block];
      --search->num_missing;
    }
  }
}

// Fills one tile of unit keys and adds them to the total. key_rows: [num_slots].
template <int kLanes>
ZIPAGE_INLINE void FillTileImpl(const Group& group, int64_t tile, const void* const* key_rows,
                                int num_slots, DType dtype) {
  constexpr int kVecs = kTileSlots / kLanes;
  float* const keys = group.Tile(tile);
  if (dtype == DType::kFloat32) {
    TransposeKeys<float>(key_rows, num_slots, group.head_dim, keys);
  } else {
    TransposeKeys<BFloat16>(key_rows, num_slots, group.head_dim, keys);
  }
  Vec<kLanes> squares[kVecs] = {};
  for (int64_t i = 0; i < group.head_dim; ++i) {
    for (int v = 0; v < kVecs; ++v) {
      const Vec<kLanes> k = Load<kLanes>(keys + i * kTileSlots + v * kLanes);
      squares[v] += k * k;
    }
  }
  alignas(64) float inverse[kTileSlots];
  std::memcpy(inverse, squares, sizeof(inverse));
  for (float& x : inverse) {
    const float norm = std::sqrt(x);
    x = 1.0F / (norm < kLeastNorm ? kLeastNorm : norm);
  }
  for (int64_t i = 0; i < group.head_dim; ++i) {
    Vec<kLanes> sum = {};
    for (int v = 0; v < kVecs; ++v) {
      float* const at = keys + i * kTileSlots + v * kLanes;
      const Vec<kLanes> u = Load<kLanes>(at) * Load<kLanes>(inverse + v * kLanes);
      Store<kLanes>(at, u);
      sum += u;
    }
    group.total[i] += ReduceSum<kLanes>(sum);
  }
}

ZIPAGE_LEAF(void, FillTile,
            (const Group& group, int64_t tile, const void* const* key_rows, int num_slots,
             DType dtype),
            (group, tile, key_rows, num_slots, dtype))

// Row sums of one tile with nothing but the diagonal zero: sum_n u[m].u[n] - u[m].u[m] =
// u[m].(total - u[m]).
template <int kLanes>
ZIPAGE_INLINE void SumRowsImpl(const Group& group, int64_t tile) {
  constexpr int kVecs = kTileSlots / kLanes;
  const float* const keys = group.Tile(tile);
  Vec<kLanes> sum[kVecs] = {};
  for (int64_t i = 0; i < group.head_dim; ++i) {
    for (int v = 0; v < kVecs; ++v) {
      const Vec<kLanes> u = Load<kLanes>(keys + i * kTileSlots + v * kLanes);
      sum[v] += u * (group.total[i] - u);
    }
  }
  std::memcpy(group.row_sum + tile * kTileSlots, sum, sizeof(sum));
}

ZIPAGE_LEAF(void, SumRows, (const Group& group, int64_t tile), (group, tile))

// Takes the last alike row of each column of one tile from that row's sum. Goes through the rows
// from the last one down and stops when all columns have found theirs: with many alike that is
// soon.
template <int kLanes>
ZIPAGE_INLINE void TakeLastAlikeImpl(const Group& group, int64_t tile) {
  constexpr int kVecs = kBlockVecs<kLanes>;
  constexpr int kRows = kVecs * kLanes;
  Search search = StartSearch(group, tile);
  const float* const columns = group.Tile(tile);
  for (int64_t other = group.num_tiles; other-- > 0 && search.num_missing > 0;) {
    for (int first = kTileSlots - kRows; first >= 0; first -= kRows) {
      const float* const rows = group.Tile(other) + first;
      for (int block = 0; block < kTileBlocks; ++block) {
        if (search.missing[block] == 0) continue;
        alignas(64) float cosines[kBlockColumns * kRows];
        Product<kLanes, kBlockColumns, kVecs, false>(columns + block * kBlockColumns, 1, kTileSlots,
                                                     rows, kTileSlots, group.head_dim, cosines,
                                                     kRows);
        Vec<kLanes> top = Load<kLanes>(cosines);
        for (int v = 1; v < kBlockColumns * kVecs; ++v) {
          const Vec<kLanes> cosine = Load<kLanes>(cosines + v * kLanes);
          top = cosine > top ? cosine : top;
        }
        if (ReduceMax<kLanes>(top) > kAlike) {
          LookThrough(group, tile, block, other * kTileSlots + first, kRows, cosines, &search);
        }
      }
    }
  }
}

ZIPAGE_LEAF(void, TakeLastAlike, (const Group& group, int64_t tile), (group, tile))

// out = exp((r - max r) * scale), over its sum unless max_norm (its maximum is 1).
template <int kLanes>
ZIPAGE_INLINE void SoftmaxImpl(const float* r, int64_t n, float scale, bool max_norm, float* out) {
  float max = -std::numeric_limits<float>::infinity();
  for (int64_t j = 0; j < n; ++j) max = r[j] > max ? r[j] : max;
  Vec<kLanes> sums = {};
  for (int64_t j = 0; j < n; j += kLanes) {
    const int64_t count = n - j < kLanes ? n - j : kLanes;
    const Vec<kLanes> x = LoadPartial<kLanes>(r + j, count);
    const Vec<kLanes> weight = ExpVec<kLanes>((x - max) * scale);
    StorePartial<kLanes>(out + j, weight, count);
    sums += LoadPartial<kLanes>(out + j, count);
  }
  if (max_norm) return;
  const float factor = 1.0F / ReduceSum<kLanes>(sums);
  for (int64_t j = 0; j < n; ++j) out[j] *= factor;
}

ZIPAGE_LEAF(void, Softmax, (const float* r, int64_t n, float scale, bool max_norm, float* out),
            (r, n, scale, max_norm, out))

// What one thread works in.
class Workspace {
 public:
  void Compare(const KeySimilarityParams& p, const ScoreRow& row) {
    const int64_t length = p.lightning ? p.shape.block_size : row.num_slots;
    Resize(p, length);
    float* const row_sum = p.row_sum + row.first_score;
    for (int64_t first = 0; first < row.num_slots; first += length) {
      Fill(p, row, first);
      for (int64_t tile = 0; tile < group_.num_tiles; ++tile) SumRows(group_, tile);
      for (int64_t tile = 0; tile < group_.num_tiles; ++tile) TakeLastAlike(group_, tile);
      std::copy_n(group_.row_sum, length, row_sum + first);
    }
    const float scale = 1.0F / (p.temperature * static_cast<float>(length));
    Softmax(row_sum, row.num_slots, scale, p.max_norm, p.similarity + row.first_score);
  }

 private:
  void Resize(const KeySimilarityParams& p, int64_t num_keys) {
    group_.num_keys = num_keys;
    group_.num_tiles = (num_keys + kTileSlots - 1) / kTileSlots;
    group_.head_dim = p.head_dim;
    group_.unit = Reserve(group_.num_tiles * p.head_dim * kTileSlots, &unit_lines_);
    group_.total = Reserve(p.head_dim, &total_lines_);
    group_.row_sum = Reserve(group_.num_tiles * kTileSlots, &row_sum_lines_);
  }

  // The group of slots first and up.
  void Fill(const KeySimilarityParams& p, const ScoreRow& row, int64_t first) {
    const PoolSlots slots(p.shape, row, row.table, p.head_dim, p.key_layer_stride,
                          DTypeSize(p.dtype));
    std::fill_n(group_.total, p.head_dim, 0.0F);
    for (int64_t tile = 0; tile < group_.num_tiles; ++tile) {
      const void* key_rows[kTileSlots];
      const auto num_slots =
          static_cast<int>(std::min<int64_t>(kTileSlots, group_.num_keys - tile * kTileSlots));
      for (int j = 0; j < num_slots; ++j) {
        key_rows[j] = static_cast<const char*>(p.key) + slots.Offset(first + tile * kTileSlots + j);
      }
      FillTile(group_, tile, key_rows, num_slots, p.dtype);
    }
  }

  Group group_ = {};
  std::vector<Line> unit_lines_, total_lines_, row_sum_lines_;
};

}  // namespace

void KeySimilarity(const KeySimilarityParams& p) {
  CheckShape(p.shape);
  CHECK(p.dtype != DType::kFloat16) << "keys are float32 or bfloat16";
  CHECK_GT(p.head_dim, 0);
  CHECK_GT(p.temperature, 0);
  const int64_t num_rows = NumScoreRows(p.shape);
#pragma omp parallel if (num_rows > 1)
  {
    Workspace workspace;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < num_rows; ++r) workspace.Compare(p, ScoreRowAt(p.shape, r));
  }
}

}  // namespace zipage::cpu

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
