#pragma once
// Tiles of keys in fp32 with the slots side by side, and products with them: what the CPU kernels
// that hold keys against something share. Inlined into leaves (simd.h).

#include <cstdint>
#include <cstring>
#include <vector>

#include "kernels/cpu/simd.h"
#include "kernels/tensor.h"

// Offsets inside a tile fit an int.
// NOLINTBEGIN(bugprone-implicit-widening-of-multiplication-result)

namespace zipage::cpu {

// Slots of one tile; tiles begin at multiples of it.
constexpr int kTileSlots = 64;

// Sixteen floats that start a cache line, so that no vector straddles two.
struct alignas(64) Line {
  float lanes[16];
};

// At least num_floats, not preserving what was there.
inline float* Reserve(int64_t num_floats, std::vector<Line>* lines) {
  const auto num_lines = static_cast<size_t>((num_floats + 15) / 16);
  if (lines->size() < num_lines) lines->resize(num_lines);
  return lines->data()->lanes;
}

ZIPAGE_INLINE Vec<4> Load4(const float* p) {
  Vec<4> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
ZIPAGE_INLINE Vec<4> Load4(const BFloat16* p) {
  using U16 = uint16_t __attribute__((vector_size(8)));
  using U32 = uint32_t __attribute__((vector_size(16)));
  U16 half;
  std::memcpy(&half, p, sizeof(half));
  return std::bit_cast<Vec<4>>(__builtin_convertvector(half, U32) << 16);
}

// keys[i, j] = rows[j][i] for i < head_dim, j < num_slots, in 4 x 4 transpositions; 0 for the other
// j < kTileSlots.
template <typename T>
ZIPAGE_INLINE void TransposeKeys(const void* const* rows, int num_slots, int head_dim,
                                 float* keys) {
  int j = 0;
  for (; j + 4 <= num_slots; j += 4) {
    const T* r[4];
    for (int s = 0; s < 4; ++s) r[s] = static_cast<const T*>(rows[j + s]);
    int i = 0;
    for (; i + 4 <= head_dim; i += 4) {
      const Vec<4> a = Load4(r[0] + i);
      const Vec<4> b = Load4(r[1] + i);
      const Vec<4> c = Load4(r[2] + i);
      const Vec<4> d = Load4(r[3] + i);
      const Vec<4> ab_low = __builtin_shufflevector(a, b, 0, 4, 1, 5);
      const Vec<4> cd_low = __builtin_shufflevector(c, d, 0, 4, 1, 5);
      const Vec<4> ab_high = __builtin_shufflevector(a, b, 2, 6, 3, 7);
      const Vec<4> cd_high = __builtin_shufflevector(c, d, 2, 6, 3, 7);
      const Vec<4> columns[4] = {__builtin_shufflevector(ab_low, cd_low, 0, 1, 4, 5),
                                 __builtin_shufflevector(ab_low, cd_low, 2, 3, 6, 7),
                                 __builtin_shufflevector(ab_high, cd_high, 0, 1, 4, 5),
                                 __builtin_shufflevector(ab_high, cd_high, 2, 3, 6, 7)};
      for (int s = 0; s < 4; ++s) {
        std::memcpy(keys + (i + s) * kTileSlots + j, &columns[s], sizeof(Vec<4>));
      }
    }
    for (; i < head_dim; ++i) {
      for (int s = 0; s < 4; ++s) keys[i * kTileSlots + j + s] = ToFloat(r[s][i]);
    }
  }
  for (; j < num_slots; ++j) {
    const T* row = static_cast<const T*>(rows[j]);
    for (int i = 0; i < head_dim; ++i) keys[i * kTileSlots + j] = ToFloat(row[i]);
  }
  if (num_slots == kTileSlots) return;
  for (int i = 0; i < head_dim; ++i) {
    for (int s = num_slots; s < kTileSlots; ++s) keys[i * kTileSlots + s] = 0.0F;
  }
}

// c[r, :] (+)= sum_i a[r * a_row + i * a_step] * b[i, :] for kRows rows and kLanes * kVecs columns,
// i ascending: one chain for each element, whichever elements are beside it.
template <int kLanes, int kRows, int kVecs, bool kAccumulate>
ZIPAGE_INLINE void Product(const float* a, int64_t a_row, int64_t a_step, const float* b,
                           int64_t ldb, int n, float* c, int64_t ldc) {
  Vec<kLanes> sum[kRows][kVecs];
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) {
      if constexpr (kAccumulate) {
        sum[r][v] = Load<kLanes>(c + r * ldc + v * kLanes);
      } else {
        sum[r][v] = Vec<kLanes>{};
      }
    }
  }
  for (int i = 0; i < n; ++i) {
    Vec<kLanes> row[kVecs];
    for (int v = 0; v < kVecs; ++v) row[v] = Load<kLanes>(b + i * ldb + v * kLanes);
    for (int r = 0; r < kRows; ++r) {
      for (int v = 0; v < kVecs; ++v) sum[r][v] += a[r * a_row + i * a_step] * row[v];
    }
  }
  for (int r = 0; r < kRows; ++r) {
    for (int v = 0; v < kVecs; ++v) Store<kLanes>(c + r * ldc + v * kLanes, sum[r][v]);
  }
}

}  // namespace zipage::cpu

// NOLINTEND(bugprone-implicit-widening-of-multiplication-result)
