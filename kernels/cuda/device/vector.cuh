#pragma once
// Elements as floats: single ones, and up to 16 bytes of them at a time.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

namespace zipage::cuda {

__device__ inline float ToFloat32(float value) { return value; }
__device__ inline float ToFloat32(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float ToFloat32(__half value) { return __half2float(value); }

// Rounds to nearest, ties to even.
template <typename T>
__device__ T FromFloat32(float value) {
  if constexpr (sizeof(T) == 4) {
    return value;
  } else {
    return __float2bfloat16_rn(value);
  }
}

// Elements of 16 bytes.
template <typename T>
constexpr int kVectorOf = 16 / sizeof(T);

// The unsigned type of kBytes bytes, so that loads and stores are one instruction.
template <int kBytes>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = uint16_t;
};
template <>
struct WordOf<4> {
  using Type = uint32_t;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

// REQUIRES: p is aligned to the kN elements.
template <int kN, typename T>
__device__ void LoadFloats(const T* p, float (&out)[kN]) {
  using Word = typename WordOf<kN * sizeof(T)>::Type;
  const Word word = *reinterpret_cast<const Word*>(p);
  T values[kN];
  memcpy(values, &word, sizeof(word));
#pragma unroll
  for (int i = 0; i < kN; ++i) out[i] = ToFloat32(values[i]);
}

template <int kN, typename T>
__device__ void StoreFloats(T* p, const float (&in)[kN]) {
  using Word = typename WordOf<kN * sizeof(T)>::Type;
  T values[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) values[i] = FromFloat32<T>(in[i]);
  Word word;
  memcpy(&word, values, sizeof(word));
  *reinterpret_cast<Word*>(p) = word;
}

}  // namespace zipage::cuda
