#pragma once
// Vectors for the CPU kernels, as GCC vector extensions of a width that is a template argument, and
// the choice of that width at run time.
//
// Binaries are portable: a leaf function Name is written once as an inlined template
// NameImpl<kLanes> and made by ZIPAGE_LEAF, which compiles it for x86-64-v4 (AVX-512) with 16
// lanes, for v3 (AVX2, FMA) with 8 and for the baseline with 4, and calls the best one this machine
// runs. A target attribute does not reach callees, lambdas or OpenMP regions, so everything here is
// inlined by force and kernels call leaves from their parallel regions. (target_clones cannot vary
// the width, and vectors wider than the registers are taken apart lane by lane.)

#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/tensor.h"

// NOLINTBEGIN(bugprone-macro-parentheses): types and parameter lists take none.
// Defines `Return Name Params` from NameImpl<lanes>; Args are the names of the parameters, in
// brackets.
#if defined(__x86_64__)
#define ZIPAGE_LEAF(Return, Name, Params, Args)                             \
  __attribute__((target("arch=x86-64-v4"))) static Return Name##V4 Params { \
    return Name##Impl<16> Args;                                             \
  }                                                                         \
  __attribute__((target("arch=x86-64-v3"))) static Return Name##V3 Params { \
    return Name##Impl<8> Args;                                              \
  }                                                                         \
  static Return Name##Baseline Params { return Name##Impl<4> Args; }        \
  Return Name Params {                                                      \
    const int lanes = VectorLanes();                                        \
    if (lanes == 16) return Name##V4 Args;                                  \
    return lanes == 8 ? Name##V3 Args : Name##Baseline Args;                \
  }
#else
#define ZIPAGE_LEAF(Return, Name, Params, Args) \
  Return Name Params { return Name##Impl<4> Args; }
#endif
// NOLINTEND(bugprone-macro-parentheses)
#define ZIPAGE_INLINE static inline __attribute__((always_inline))

namespace zipage::cpu {

// Lanes of the widest vectors this machine has registers for: 16, 8 or 4. Not more than the
// variable ONEDNN_MAX_CPU_ISA allows, so that it turns the whole CPU backend into an older
// machine's.
int VectorLanes();

// Typedefs, because GCC drops an attribute that depends on a template argument from an alias.
template <int kLanes>
struct VectorTypes {
  typedef float Float __attribute__((vector_size(4 * kLanes)));
  typedef int32_t Int __attribute__((vector_size(4 * kLanes)));
  typedef uint32_t Unsigned __attribute__((vector_size(4 * kLanes)));
  typedef uint16_t Half __attribute__((vector_size(2 * kLanes)));
  typedef double Double __attribute__((vector_size(4 * kLanes)));        // half as many lanes
  typedef uint64_t Unsigned64 __attribute__((vector_size(4 * kLanes)));  // the same
};
template <int kLanes>
using Vec = typename VectorTypes<kLanes>::Float;
template <int kLanes>
using VecI = typename VectorTypes<kLanes>::Int;

// The value in all lanes. (GCC 12 fills a plain vector initializer lane by lane where the baseline
// lacks such registers; an addition becomes one broadcast and one add, an operand of a product
// costs nothing.)
template <int kLanes>
ZIPAGE_INLINE Vec<kLanes> Broadcast(float value) {
  return Vec<kLanes>{} + value;
}

// Consecutive elements, at any alignment.
template <int kLanes>
ZIPAGE_INLINE Vec<kLanes> Load(const float* p) {
  Vec<kLanes> v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
template <int kLanes>
ZIPAGE_INLINE Vec<kLanes> Load(const BFloat16* p) {
  typename VectorTypes<kLanes>::Half half;
  std::memcpy(&half, p, sizeof(half));
  return std::bit_cast<Vec<kLanes>>(__builtin_convertvector(half, VecI<kLanes>) << 16);
}

template <int kLanes>
ZIPAGE_INLINE void Store(float* p, Vec<kLanes> v) {
  std::memcpy(p, &v, sizeof(v));
}
template <int kLanes>
ZIPAGE_INLINE void Store(BFloat16* p, Vec<kLanes> v) {
  using Unsigned = typename VectorTypes<kLanes>::Unsigned;
  const auto bits = std::bit_cast<Unsigned>(v);
  const Unsigned rounded = bits + 0x7FFFU + ((bits >> 16) & 1U);
  const Unsigned quiet = bits | 0x00400000U;
  const Unsigned chosen = ((v != v) ? quiet : rounded) >> 16;
  const auto half = __builtin_convertvector(chosen, typename VectorTypes<kLanes>::Half);
  std::memcpy(p, &half, sizeof(half));
}

// The first n < kLanes elements; the other lanes are 0.
template <int kLanes, typename T>
ZIPAGE_INLINE Vec<kLanes> LoadPartial(const T* p, int64_t n) {
  Vec<kLanes> v = {};
  for (int64_t i = 0; i < n; ++i) v[i] = ToFloat(p[i]);
  return v;
}
template <int kLanes>
ZIPAGE_INLINE void StorePartial(float* p, Vec<kLanes> v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = v[i];
}
template <int kLanes>
ZIPAGE_INLINE void StorePartial(BFloat16* p, Vec<kLanes> v, int64_t n) {
  for (int64_t i = 0; i < n; ++i) p[i] = ToBFloat16(v[i]);
}

// Sum and maximum of the lanes, as a tree of fixed shape. The maximum ignores NaN lanes where it
// can.
template <int kLanes>
ZIPAGE_INLINE float ReduceSum(Vec<kLanes> v) {
  if constexpr (kLanes == 4) {
    return (v[0] + v[2]) + (v[1] + v[3]);
  } else {
    Vec<kLanes / 2> half[2];
    std::memcpy(half, &v, sizeof(v));
    return ReduceSum<kLanes / 2>(half[0] + half[1]);
  }
}
template <int kLanes>
ZIPAGE_INLINE float ReduceMax(Vec<kLanes> v) {
  if constexpr (kLanes == 4) {
    const float a = v[0] > v[1] ? v[0] : v[1];
    const float b = v[2] > v[3] ? v[2] : v[3];
    return a > b ? a : b;
  } else {
    Vec<kLanes / 2> half[2];
    std::memcpy(half, &v, sizeof(v));
    return ReduceMax<kLanes / 2>(half[0] > half[1] ? half[0] : half[1]);
  }
}

// exp(x) for F, I = a Vec and VecI or float and int32_t; all are the same sequence of
// operations. Within 2 units in the last place for x from -87.3 to 88; 0 below, NaN for NaN.
// REQUIRES: x <= 88. Range reduction by powers of two and the polynomial of Cephes' expf (S.
// Moshier).
template <typename F, typename I>
ZIPAGE_INLINE F Exp(F x) {
  constexpr float kLowest = -87.3F;  // exp(kLowest) is still a normal number
  constexpr float kRound =
      0x1.8p23F;  // adding it rounds to an integer, held in the low mantissa bits
  const F clamped = x < kLowest ? F{} + kLowest : x;
  const F shifted = clamped * 1.44269504F + kRound;
  const F n = shifted - kRound;
  const F r = (clamped - n * 0.693359375F) - n * -2.12194440e-4F;  // n * 0.693359375 is exact
  F poly = F{} + 1.9875691500e-4F;
  poly = poly * r + 1.3981999507e-3F;
  poly = poly * r + 8.3334519073e-3F;
  poly = poly * r + 4.1665795894e-2F;
  poly = poly * r + 1.6666665459e-1F;
  poly = poly * r + 5.0000001201e-1F;
  poly = poly * (r * r) + r + 1.0F;
  const F scale = std::bit_cast<F>((std::bit_cast<I>(shifted) + 127) << 23);
  return x < kLowest ? F{} : poly * scale;
}

template <int kLanes>
ZIPAGE_INLINE Vec<kLanes> ExpVec(Vec<kLanes> x) {
  return Exp<Vec<kLanes>, VecI<kLanes>>(x);
}

}  // namespace zipage::cpu
