#pragma once
// Fresh random inputs for the kernel tests. Every run draws another seed and prints it;
// ZIPAGE_TEST_SEED=n repeats a run.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <limits>
#include <random>
#include <vector>

#include "kernels/tensor.h"

namespace zipage::testing {

inline uint64_t FreshSeed() {
  const char* given = std::getenv("ZIPAGE_TEST_SEED");
  const uint64_t seed =
      given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
  std::cout << "ZIPAGE_TEST_SEED=" << seed << "\n";
  return seed;
}

// Elements of either activation type, read and written as floats.
class Tensor {
 public:
  Tensor(DType dtype, size_t size) : dtype_(dtype), bytes_(size * DTypeSize(dtype)) {}

  // Normally distributed values, rounded to the type.
  static Tensor Random(DType dtype, size_t size, std::mt19937_64* rng, float scale = 1.0F) {
    Tensor tensor(dtype, size);
    std::normal_distribution<float> normal(0.0F, scale);
    for (size_t i = 0; i < size; ++i) tensor.Set(i, normal(*rng));
    return tensor;
  }
  // NaN everywhere: whatever is read of it and not written before shows in the result.
  static Tensor Poison(DType dtype, size_t size) {
    Tensor tensor(dtype, size);
    for (size_t i = 0; i < size; ++i) tensor.Set(i, std::numeric_limits<float>::quiet_NaN());
    return tensor;
  }

  float Get(size_t i) const {
    if (dtype_ == DType::kFloat32) return reinterpret_cast<const float*>(bytes_.data())[i];
    if (dtype_ == DType::kBFloat16) {
      return ToFloat(reinterpret_cast<const BFloat16*>(bytes_.data())[i]);
    }
    return ToFloat(reinterpret_cast<const Float16*>(bytes_.data())[i]);
  }
  void Set(size_t i, float value) {
    if (dtype_ == DType::kFloat32) {
      reinterpret_cast<float*>(bytes_.data())[i] = value;
    } else if (dtype_ == DType::kBFloat16) {
      reinterpret_cast<BFloat16*>(bytes_.data())[i] = ToBFloat16(value);
    } else {
      reinterpret_cast<Float16*>(bytes_.data())[i] = ToFloat16(value);
    }
  }
  // Whether elements [begin, begin + count) have the same bits as other's from other_begin on.
  bool SameBits(size_t begin, const Tensor& other, size_t other_begin, size_t count) const {
    const size_t width = DTypeSize(dtype_);
    return std::memcmp(bytes_.data() + begin * width, other.bytes_.data() + other_begin * width,
                       count * width) == 0;
  }

  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }
  size_t size() const { return bytes_.size() / DTypeSize(dtype_); }
  DType dtype() const { return dtype_; }

 private:
  DType dtype_;
  std::vector<char> bytes_;
};

inline std::vector<float> RandomFloats(size_t size, std::mt19937_64* rng, float scale = 1.0F) {
  std::normal_distribution<float> normal(0.0F, scale);
  std::vector<float> values(size);
  for (float& value : values) value = normal(*rng);
  return values;
}

// What rounding to the type may add to a result, relative to it.
inline float RoundingOf(DType dtype) { return dtype == DType::kFloat32 ? 1e-6F : 1.0F / 256; }

}  // namespace zipage::testing
