#pragma once
// Sixteen-lane vectors for the CPU kernels, as GCC vector extensions: one source for every instruction
// set, split into narrower registers where sixteen lanes do not fit one.
//
// Binaries are portable: a leaf function marked ZIPAGE_MULTIVERSION is compiled for x86-64-v4 (AVX-512),
// v3 (AVX2, FMA) and the baseline, and bound once at load. The mark does not reach callees, lambdas or
// OpenMP regions, so everything here is inlined by force and kernels call marked leaves from their
// parallel regions. Marked functions cannot be templates: they dispatch to inlined templates inside.

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/tensor.h"

// Sanitizers intercept before the dynamic loader can resolve the clones.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(ZIPAGE_SANITIZE)
#define ZIPAGE_MULTIVERSION \
  __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define ZIPAGE_MULTIVERSION
#endif
#define ZIPAGE_INLINE static inline __attribute__((always_inline))

namespace zipage::cpu {

constexpr int kLanes = 16;
using Vec = float __attribute__((vector_size(64)));
using VecI = int32_t __attribute__((vector_size(64)));
using VecHalf = uint16_t __attribute__((vector_size(32)));
using Vec8 = float __attribute__((vector_size(32)));
using Vec4 = float __attribute__((vector_size(16)));

ZIPAGE_INLINE Vec Broadcast(float value) { return value - Vec{}; }

// Sixteen consecutive elements, at any alignment.
ZIPAGE_INLINE Vec Load(const float* p) {
  Vec v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
ZIPAGE_INLINE Vec Load(const BFloat16* p) {
  VecHalf half;
  std::memcpy(&half, p, sizeof(half));
  return std::bit_cast<Vec>(__builtin_convertvector(half, VecI) << 16);
}

ZIPAGE_INLINE void Store(float* p, Vec v) { std::memcpy(p, &v, sizeof(v)); }
ZIPAGE_INLINE void Store(BFloat16* p, Vec v) {
  using VecU = uint32_t __attribute__((vector_size(64)));
  const VecU bits = std::bit_cast<VecU>(v);
  const VecU rounded = bits + 0x7FFFU + ((bits >> 16) & 1U);
  const VecU quiet = bits | 0x00400000U;
  const VecHalf half = __builtin_convertvector(((v != v) ? quiet : rounded) >> 16, VecHalf);
  std::memcpy(p, &half, sizeof(half));
}

// The first n < 16 elements; the other lanes are 0.
template <typename T>
ZIPAGE_INLINE Vec LoadPartial(const T* p, int64_t n) {
  Vec v = {};
  for (int64_t i = 0; i < n; ++i) v[i] = ToFloat(p[i]);
  return v;
}
ZIPAGE_INLINE void StorePartial(float* p, Vec v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = v[i];
}
ZIPAGE_INLINE void StorePartial(BFloat16* p, Vec v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = ToBFloat16(v[i]);
}

// Sum and maximum of the lanes, as a tree of fixed shape. The maximum ignores NaN lanes where it can.
ZIPAGE_INLINE float ReduceSum(Vec v) {
  Vec8 half[2];
  std::memcpy(half, &v, sizeof(v));
  half[0] += half[1];
  Vec4 quarter[2];
  std::memcpy(quarter, half, sizeof(half[0]));
  quarter[0] += quarter[1];
  return (quarter[0][0] + quarter[0][2]) + (quarter[0][1] + quarter[0][3]);
}
ZIPAGE_INLINE float ReduceMax(Vec v) {
  Vec8 half[2];
  std::memcpy(half, &v, sizeof(v));
  half[0] = half[0] > half[1] ? half[0] : half[1];
  Vec4 quarter[2];
  std::memcpy(quarter, half, sizeof(half[0]));
  const Vec4 q = quarter[0] > quarter[1] ? quarter[0] : quarter[1];
  const float a = q[0] > q[1] ? q[0] : q[1];
  const float b = q[2] > q[3] ? q[2] : q[3];
  return a > b ? a : b;
}

// exp(x) for F = Vec, I = VecI or F = float, I = int32_t; the two are the same sequence of operations.
// Within 2 units in the last place for x from -87.3 to 88; 0 below, NaN for NaN. REQUIRES: x <= 88.
// Range reduction by powers of two and the polynomial of Cephes' expf (S. Moshier).
template <typename F, typename I>
ZIPAGE_INLINE F Exp(F x) {
  constexpr float kLowest = -87.3F;  // exp(kLowest) is still a normal number
  constexpr float kRound = 0x1.8p23F;  // adding it rounds to an integer, held in the low mantissa bits
  const F zero = x - x;
  const F clamped = x < kLowest ? zero + kLowest : x;
  const F shifted = clamped * 1.44269504F + kRound;
  const F n = shifted - kRound;
  const F r = (clamped - n * 0.693359375F) - n * -2.12194440e-4F;  // n * 0.693359375 is exact
  F poly = zero + 1.9875691500e-4F;
  poly = poly * r + 1.3981999507e-3F;
  poly = poly * r + 8.3334519073e-3F;
  poly = poly * r + 4.1665795894e-2F;
  poly = poly * r + 1.6666665459e-1F;
  poly = poly * r + 5.0000001201e-1F;
  poly = poly * (r * r) + r + 1.0F;
  const F scale = std::bit_cast<F>((std::bit_cast<I>(shifted) + 127) << 23);
  return x < kLowest ? F{} : poly * scale;
}

}  // namespace zipage::cpu
