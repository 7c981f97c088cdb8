#include "kernels/window_scores.h"

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

// Query rows and vectors of columns of one register block: its sums stay in registers.
constexpr int kBlockRows = 8;
template <int kLanes>
constexpr int kBlockVecs = kLanes == 16 ? 2 : 1;

// Logits that a thread holds, unless the group of a single query has more already: they stay in or
// near a second-level cache.
constexpr int64_t kMaxLogits = 1 << 19;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Some consecutive window queries of one sequence, layer and KV head, and their logits.
struct QueryRows {
  float* q;       // [padded rows, head_dim] scaled; a query's group, then the next query's
  float* logits;  // [padded rows, stride]
  float* factor;  // [num_rows]: what exp(logit - max) lacks to be a probability
  int num_rows;   // queries * group; buffers hold a multiple of kBlockRows
  int group;
  int head_dim;
  int64_t visible;  // slots that the first query sees; each later query sees one more
  int64_t stride;   // at least num_tiles * kTileSlots
  int64_t num_tiles;
};

// Logits of one tile's slots. key_rows: [num_slots]; keys: [head_dim, kTileSlots] to work in.
template <int kLanes>
ZIPAGE_INLINE void AddTileImpl(const QueryRows& rows, int64_t tile, const void* const* key_rows,
                               int num_slots, DType dtype, float* keys) {
  constexpr int kVecs = kBlockVecs<kLanes>;
  if (dtype == DType::kFloat32) {
    TransposeKeys<float>(key_rows, num_slots, rows.head_dim, keys);
  } else {
    TransposeKeys<BFloat16>(key_rows, num_slots, rows.head_dim, keys);
  }
  for (int64_t r = 0; r < rows.num_rows; r += kBlockRows) {
    float* const logits = rows.logits + r * rows.stride + tile * kTileSlots;
    for (int j = 0; j < kTileSlots; j += kVecs * kLanes) {
      Product<kLanes, kBlockRows, kVecs, false>(rows.q + r * rows.head_dim, rows.head_dim, 1,
                                                keys + j, kTileSlots, rows.head_dim, logits + j,
                                                rows.stride);
    }
  }
}

ZIPAGE_LEAF(void, AddTile,
            (const QueryRows& rows, int64_t tile, const void* const* key_rows, int num_slots,
             DType dtype, float* keys),
            (rows, tile, key_rows, num_slots, dtype, keys))

// Turns a row's logits into exp(logit - max), 0 for slots that it does not see; sets its factor.
template <int kLanes>
ZIPAGE_INLINE void WeighRowImpl(const QueryRows& rows, int64_t r) {
  constexpr int kVecs = kTileSlots / kLanes;
  float* const row = rows.logits + r * rows.stride;
  const int64_t end = rows.num_tiles * kTileSlots;
  for (int64_t j = rows.visible + r / rows.group; j < end; ++j) row[j] = kMinusInfinity;
  Vec<kLanes> top[kVecs];
  for (int v = 0; v < kVecs; ++v) top[v] = Broadcast<kLanes>(kMinusInfinity);
  for (int64_t first = 0; first < end; first += kTileSlots) {
    for (int v = 0; v < kVecs; ++v) {
      const Vec<kLanes> z = Load<kLanes>(row + first + v * kLanes);
      top[v] = z > top[v] ? z : top[v];
    }
  }
  float max = kMinusInfinity;
  for (int v = 0; v < kVecs; ++v) max = std::max(max, ReduceMax<kLanes>(top[v]));
  Vec<kLanes> sum[kVecs] = {};
  for (int64_t first = 0; first < end; first += kTileSlots) {
    for (int v = 0; v < kVecs; ++v) {
      float* const at = row + first + v * kLanes;
      const Vec<kLanes> weight = ExpVec<kLanes>(Load<kLanes>(at) - max);
      Store<kLanes>(at, weight);
      sum[v] += weight;
    }
  }
  float total = 0;
  for (int v = 0; v < kVecs; ++v) total += ReduceSum<kLanes>(sum[v]);
  rows.factor[r] = 1.0F / total;
}

ZIPAGE_LEAF(void, WeighRow, (const QueryRows& rows, int64_t r), (rows, r))

// sums[j] += the largest of the group's probabilities of slot j, query after query.
template <int kLanes>
ZIPAGE_INLINE void AddProbabilitiesImpl(const QueryRows& rows, float* sums) {
  for (int64_t first = 0; first < rows.num_rows; first += rows.group) {
    const float* const weights = rows.logits + first * rows.stride;
    for (int64_t j = 0; j < rows.num_tiles * kTileSlots; j += kLanes) {
      Vec<kLanes> top = {};
      for (int g = 0; g < rows.group; ++g) {
        const Vec<kLanes> probability =
            Load<kLanes>(weights + g * rows.stride + j) * rows.factor[first + g];
        top = probability > top ? probability : top;
      }
      Store<kLanes>(sums + j, Load<kLanes>(sums + j) + top);
    }
  }
}

ZIPAGE_LEAF(void, AddProbabilities, (const QueryRows& rows, float* sums), (rows, sums))

// What one thread works in.
class Workspace {
 public:
  void Score(const WindowScoresParams& p, const ScoreRow& row) {
    Resize(p, row.num_slots);
    const PoolSlots slots(p.shape, row, row.table, p.head_dim, p.key_layer_stride,
                          DTypeSize(p.dtype));
    std::fill_n(sums_, rows_.num_tiles * kTileSlots, 0.0F);
    for (int query = 0; query < p.window; query += max_queries_) {
      LoadQueries(p, row, query, std::min(max_queries_, p.window - query));
      for (int64_t tile = 0; tile < rows_.num_tiles; ++tile) {
        const void* key_rows[kTileSlots];
        const int64_t first = tile * kTileSlots;
        const auto num_slots =
            static_cast<int>(std::min<int64_t>(kTileSlots, row.num_slots - first));
        for (int j = 0; j < num_slots; ++j) {
          key_rows[j] = static_cast<const char*>(p.key) + slots.Offset(first + j);
        }
        AddTile(rows_, tile, key_rows, num_slots, p.dtype, keys_);
      }
      for (int r = 0; r < rows_.num_rows; ++r) WeighRow(rows_, r);
      AddProbabilities(rows_, sums_);
    }
    float* const score = p.score + row.first_score;
    for (int64_t j = 0; j < row.num_slots; ++j) score[j] = sums_[j] / static_cast<float>(p.window);
  }

 private:
  void Resize(const WindowScoresParams& p, int64_t num_slots) {
    rows_.group = p.q_heads / p.shape.kv_heads;
    rows_.head_dim = p.head_dim;
    rows_.num_tiles = (num_slots + kTileSlots - 1) / kTileSlots;
    // A line more, so that the rows of a block do not compete for the same lines of the cache.
    rows_.stride = rows_.num_tiles * kTileSlots + 16;
    max_queries_ = static_cast<int>(
        std::clamp<int64_t>(kMaxLogits / (rows_.stride * rows_.group), 1, p.window));
    const int64_t num_rows = int64_t{max_queries_} * rows_.group;
    const int64_t padded = (num_rows + kBlockRows - 1) / kBlockRows * kBlockRows;
    rows_.q = Reserve(padded * p.head_dim, &query_lines_);
    rows_.logits = Reserve(padded * rows_.stride, &logit_lines_);
    rows_.factor = Reserve(num_rows, &factor_lines_);
    keys_ = Reserve(int64_t{p.head_dim} * kTileSlots, &key_lines_);
    sums_ = Reserve(rows_.num_tiles * kTileSlots, &sum_lines_);
  }

  // Window queries [first, first + count), scaled; rows of zeros after them fill the last block.
  void LoadQueries(const WindowScoresParams& p, const ScoreRow& row, int first, int count) {
    rows_.num_rows = count * rows_.group;
    rows_.visible = row.num_slots - p.window + first + 1;
    const auto scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.head_dim)));
    const int64_t window_row = int64_t{p.query_slot[row.seq]} * p.window + first;
    float* to = rows_.q;
    for (int r = 0; r < rows_.num_rows; ++r) {
      const int64_t head = int64_t{row.head} * rows_.group + r % rows_.group;
      const int64_t from = row.layer * p.window_layer_stride +
                           ((window_row + r / rows_.group) * p.q_heads + head) * p.head_dim;
      for (int i = 0; i < p.head_dim; ++i) {
        const float q = p.dtype == DType::kFloat32
                            ? static_cast<const float*>(p.query_window)[from + i]
                            : ToFloat(static_cast<const BFloat16*>(p.query_window)[from + i]);
        *to++ = q * scale;
      }
    }
    const int missing = (kBlockRows - rows_.num_rows % kBlockRows) % kBlockRows;
    std::fill_n(to, int64_t{missing} * p.head_dim, 0.0F);
  }

  QueryRows rows_ = {};
  int max_queries_ = 0;
  float* keys_ = nullptr;  // one tile
  float* sums_ = nullptr;  // [num_tiles * kTileSlots]
  std::vector<Line> query_lines_, logit_lines_, factor_lines_, key_lines_, sum_lines_;
};

void CheckParams(const WindowScoresParams& p) {
  CheckShape(p.shape);
  CHECK(p.dtype != DType::kFloat16) << "keys are float32 or bfloat16";
  CHECK(p.window >= 1 && p.window <= p.shape.block_size)
      << "a window of " << p.window << " in blocks of " << p.shape.block_size;
  CHECK(p.q_heads > 0 && p.q_heads % p.shape.kv_heads == 0)
      << p.q_heads << " over " << p.shape.kv_heads;
  CHECK_GT(p.head_dim, 0);
  for (int s = 0; s < p.shape.batch; ++s) {
    CHECK_GE(p.query_slot[s], 0) << "sequence " << s;
  }
}

}  // namespace

void WindowScores(const WindowScoresParams& p) {
  CheckParams(p);
  const int64_t num_rows = NumScoreRows(p.shape);
#pragma omp parallel if (num_rows > 1)
  {
    Workspace workspace;
#pragma omp for schedule(dynamic, 1)
    for (int64_t r = 0; r < num_rows; ++r) workspace.Score(p, ScoreRowAt(p.shape, r));
  }
}

}  // namespace zipage::cpu

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
