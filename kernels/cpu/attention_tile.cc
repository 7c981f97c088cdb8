#include "kernels/cpu/attention_tile.h"

#include <algorithm>
#include <limits>

#include "kernels/cpu/key_tile.h"
#include "kernels/cpu/simd.h"

// Offsets inside a tile fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace zipage::cpu {
namespace {

// Query rows of one register block: with two vectors a row, 12 sums stay in registers.
constexpr int kBlockRows = 6;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

template <int kLanes, typename T>
ZIPAGE_INLINE void WidenValues(const void* const* rows, int num_slots, int head_dim,
                               float* values) {
  const int padded = PaddedHeadDim(head_dim);
  for (int j = 0; j < num_slots; ++j) {
    const T* row = static_cast<const T*>(rows[j]);
    float* to = values + j * padded;
    int i = 0;
    for (; i + kLanes <= head_dim; i += kLanes) Store<kLanes>(to + i, Load<kLanes>(row + i));
    if (i < head_dim) Store<kLanes>(to + i, LoadPartial<kLanes>(row + i, head_dim - i));
  }
}

// Turns a row's scores into weights exp(score - max), in place, and rescales what the row holds.
template <int kLanes>
ZIPAGE_INLINE void UpdateRow(float* scores, int num_visible, float* max, float* sum, float* out,
                             int padded) {
  constexpr int kVecs = kTileSlots / kLanes;
  constexpr int kSumVecs = kSumLanes / kLanes;
  if (num_visible <= 0) {
    for (int v = 0; v < kVecs; ++v) Store<kLanes>(scores + v * kLanes, Vec<kLanes>{});
    return;
  }
  VecI<kLanes> lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  Vec<kLanes> score[kVecs];
  Vec<kLanes> top = Broadcast<kLanes>(*max);
  for (int v = 0; v < kVecs; ++v) {
    score[v] = Load<kLanes>(scores + v * kLanes);
    score[v] = lane + v * kLanes < num_visible ? score[v] : Broadcast<kLanes>(kMinusInfinity);
    top = score[v] > top ? score[v] : top;
  }
  const float new_max = ReduceMax<kLanes>(top);
  Vec<kLanes> total[kSumVecs];
  for (int v = 0; v < kSumVecs; ++v) total[v] = Load<kLanes>(sum + v * kLanes);
  if (new_max != *max) {
    const Vec<kLanes> rescale = ExpVec<kLanes>(Broadcast<kLanes>(*max - new_max));
    for (int v = 0; v < kSumVecs; ++v) total[v] *= rescale;
    for (int i = 0; i < padded; i += kLanes)
      Store<kLanes>(out + i, Load<kLanes>(out + i) * rescale);
    *max = new_max;
  }
  for (int v = 0; v < kVecs; ++v) {
    const Vec<kLanes> weight = ExpVec<kLanes>(score[v] - new_max);
    Store<kLanes>(scores + v * kLanes, weight);
    total[v % kSumVecs] += weight;
  }
  for (int v = 0; v < kSumVecs; ++v) Store<kLanes>(sum + v * kLanes, total[v]);
}

template <int kLanes, int kRows>
ZIPAGE_INLINE void AddTileToRows(const PackedTile& tile, int first_slot, const SoftmaxRows& rows,
                                 int begin) {
  alignas(64) float scores[kRows * kTileSlots];
  const int padded = PaddedHeadDim(rows.head_dim);
  const float* q = rows.q + static_cast<int64_t>(begin) * rows.head_dim;
  float* out = rows.out + static_cast<int64_t>(begin) * padded;
  for (int j = 0; j < kTileSlots; j += 2 * kLanes) {
    Product<kLanes, kRows, 2, false>(q, rows.head_dim, 1, tile.keys + j, kTileSlots, rows.head_dim,
                                     scores + j, kTileSlots);
  }
  for (int r = 0; r < kRows; ++r) {
    UpdateRow<kLanes>(scores + r * kTileSlots, rows.visible[begin + r] - first_slot,
                      rows.max + begin + r, rows.sum + (begin + r) * kSumLanes, out + r * padded,
                      padded);
  }
  // Rows before the last see fewer slots: their weights are 0 there, which leaves their sums as
  // they are.
  const int num_slots = std::min(kTileSlots, rows.visible[begin + kRows - 1] - first_slot);
  int i = 0;
  for (; i + 2 * kLanes <= padded; i += 2 * kLanes) {
    Product<kLanes, kRows, 2, true>(scores, kTileSlots, 1, tile.values + i, padded, num_slots,
                                    out + i, padded);
  }
  if (i < padded) {
    Product<kLanes, kRows, 1, true>(scores, kTileSlots, 1, tile.values + i, padded, num_slots,
                                    out + i, padded);
  }
}

}  // namespace

template <int kLanes>
ZIPAGE_INLINE void PackTileImpl(const void* const* key_rows, const void* const* value_rows,
                                int num_slots, int head_dim, DType dtype, const PackedTile& tile) {
  if (dtype == DType::kFloat32) {
    TransposeKeys<float>(key_rows, num_slots, head_dim, tile.keys);
    WidenValues<kLanes, float>(value_rows, num_slots, head_dim, tile.values);
  } else {
    TransposeKeys<BFloat16>(key_rows, num_slots, head_dim, tile.keys);
    WidenValues<kLanes, BFloat16>(value_rows, num_slots, head_dim, tile.values);
  }
}

ZIPAGE_LEAF(void, PackTile,
            (const void* const* key_rows, const void* const* value_rows, int num_slots,
             int head_dim, DType dtype, const PackedTile& tile),
            (key_rows, value_rows, num_slots, head_dim, dtype, tile))

void ResetRows(const SoftmaxRows& rows) {
  std::fill_n(rows.max, rows.num_rows, kMinusInfinity);
  std::fill_n(rows.sum, static_cast<int64_t>(rows.num_rows) * kSumLanes, 0.0F);
  std::fill_n(rows.out, static_cast<int64_t>(rows.num_rows) * PaddedHeadDim(rows.head_dim), 0.0F);
}

template <int kLanes>
ZIPAGE_INLINE void AddTileImpl(const PackedTile& tile, int first_slot, const SoftmaxRows& rows) {
  int begin = 0;
  for (; begin + kBlockRows <= rows.num_rows; begin += kBlockRows) {
    if (rows.visible[begin + kBlockRows - 1] > first_slot) {
      AddTileToRows<kLanes, kBlockRows>(tile, first_slot, rows, begin);
    }
  }
  if (begin == rows.num_rows || rows.visible[rows.num_rows - 1] <= first_slot) return;
  switch (rows.num_rows - begin) {
    case 1:
      return AddTileToRows<kLanes, 1>(tile, first_slot, rows, begin);
    case 2:
      return AddTileToRows<kLanes, 2>(tile, first_slot, rows, begin);
    case 3:
      return AddTileToRows<kLanes, 3>(tile, first_slot, rows, begin);
    case 4:
      return AddTileToRows<kLanes, 4>(tile, first_slot, rows, begin);
    default:
      return AddTileToRows<kLanes, 5>(tile, first_slot, rows, begin);
  }
}

ZIPAGE_LEAF(void, AddTile, (const PackedTile& tile, int first_slot, const SoftmaxRows& rows),
            (tile, first_slot, rows))

template <int kLanes>
ZIPAGE_INLINE void MergeRowsImpl(const SoftmaxRows& from, const SoftmaxRows& into) {
  const int padded = PaddedHeadDim(into.head_dim);
  for (int r = 0; r < into.num_rows; ++r) {
    if (from.max[r] == kMinusInfinity) continue;
    const float new_max = std::max(from.max[r], into.max[r]);
    const Vec<kLanes> from_scale = ExpVec<kLanes>(Broadcast<kLanes>(from.max[r] - new_max));
    const Vec<kLanes> into_scale = ExpVec<kLanes>(Broadcast<kLanes>(into.max[r] - new_max));
    for (int i = r * kSumLanes; i < (r + 1) * kSumLanes; i += kLanes) {
      Store<kLanes>(into.sum + i, Load<kLanes>(into.sum + i) * into_scale +
                                      Load<kLanes>(from.sum + i) * from_scale);
    }
    for (int i = r * padded; i < (r + 1) * padded; i += kLanes) {
      Store<kLanes>(into.out + i, Load<kLanes>(into.out + i) * into_scale +
                                      Load<kLanes>(from.out + i) * from_scale);
    }
    into.max[r] = new_max;
  }
}

ZIPAGE_LEAF(void, MergeRows, (const SoftmaxRows& from, const SoftmaxRows& into), (from, into))

template <int kLanes>
ZIPAGE_INLINE void FinishRowImpl(const SoftmaxRows& rows, int row, DType dtype, void* dst) {
  const float* out = rows.out + static_cast<int64_t>(row) * PaddedHeadDim(rows.head_dim);
  Vec<kLanes> sum = Load<kLanes>(rows.sum + row * kSumLanes);
  for (int i = kLanes; i < kSumLanes; i += kLanes)
    sum += Load<kLanes>(rows.sum + row * kSumLanes + i);
  const float inverse = 1.0F / ReduceSum<kLanes>(sum);
  for (int i = 0; i < rows.head_dim; ++i) {
    if (dtype == DType::kFloat32) {
      static_cast<float*>(dst)[i] = out[i] * inverse;
    } else {
      static_cast<BFloat16*>(dst)[i] = ToBFloat16(out[i] * inverse);
    }
  }
}

ZIPAGE_LEAF(void, FinishRow, (const SoftmaxRows& rows, int row, DType dtype, void* dst),
            (rows, row, dtype, dst))

template <int kLanes>
ZIPAGE_INLINE void ScaleRowImpl(const void* src, DType dtype, int n, float scale, float* dst) {
  if (dtype == DType::kFloat32) {
    for (int i = 0; i < n; ++i) dst[i] = static_cast<const float*>(src)[i] * scale;
  } else {
    for (int i = 0; i < n; ++i) dst[i] = ToFloat(static_cast<const BFloat16*>(src)[i]) * scale;
  }
}

ZIPAGE_LEAF(void, ScaleRow, (const void* src, DType dtype, int n, float scale, float* dst),
            (src, dtype, n, scale, dst))

}  // namespace zipage::cpu

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
