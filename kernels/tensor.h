#pragma once
// Element types of weights, activations and caches, and their conversions. Storage only: all
// arithmetic is fp32.

#include <bit>
#include <cstddef>
#include <cstdint>

namespace zipage {

// Activations and KV caches are kFloat32 or kBFloat16; kFloat16 occurs in checkpoints only.
enum class DType : uint8_t { kFloat32, kBFloat16, kFloat16 };

// Bytes of one element.
constexpr size_t DTypeSize(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// "float32", "bfloat16" or "float16", as in config.json.
constexpr const char* DTypeName(DType dtype) {
  return dtype == DType::kFloat32 ? "float32" : dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}

// The upper half of an IEEE binary32.
struct BFloat16 {
  uint16_t bits;
};

// IEEE binary16.
struct Float16 {
  uint16_t bits;
};

// Exact.
inline float ToFloat(float value) { return value; }
inline float ToFloat(BFloat16 value) {
  return std::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
}
inline float ToFloat(Float16 value) {
  const uint32_t sign = static_cast<uint32_t>(value.bits & 0x8000U) << 16;
  const uint32_t magnitude = value.bits & 0x7FFFU;
  if (magnitude < 0x0400U) {  // zero or subnormal: a multiple of 2^-24
    const float f = static_cast<float>(magnitude) * 0x1p-24F;
    return std::bit_cast<float>(std::bit_cast<uint32_t>(f) | sign);
  }
  // Infinity and NaN keep their mantissa under the widest exponent.
  const uint32_t rebias = magnitude >= 0x7C00U ? (255U - 31U) << 23 : (127U - 15U) << 23;
  return std::bit_cast<float>(sign | ((magnitude << 13) + rebias));
}

// Rounds to nearest, ties to even; overflows to infinity; a NaN stays a (quiet) NaN.
inline BFloat16 ToBFloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = bits + 0x7FFFU + ((bits >> 16) & 1U);
  const bool is_nan = (bits & 0x7FFFFFFFU) > 0x7F800000U;
  return {static_cast<uint16_t>((is_nan ? bits | 0x00400000U : rounded) >> 16)};
}
inline Float16 ToFloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000U);
  const uint32_t magnitude = bits & 0x7FFFFFFFU;
  if (magnitude > 0x7F800000U) return {static_cast<uint16_t>(sign | 0x7E00U)};
  if (magnitude >= 0x477FF000U) return {static_cast<uint16_t>(sign | 0x7C00U)};  // 65520 and more
  if (magnitude < 0x38800000U) {  // under 2^-14: the float adder rounds to multiples of 2^-24
    const float f = std::bit_cast<float>(magnitude) + 0.5F;
    return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(f) - 0x3F000000U))};
  }
  const uint32_t rounded = magnitude - ((127U - 15U) << 23) + 0xFFFU + ((magnitude >> 13) & 1U);
  return {static_cast<uint16_t>(sign | (rounded >> 13))};
}

}  // namespace zipage
