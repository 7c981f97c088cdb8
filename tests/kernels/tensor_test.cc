#include "kernels/tensor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/kernels/random_data.h"

namespace zipage {
namespace {

TEST(TensorTest, EveryHalfPrecisionValueSurvivesTheRoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto b = static_cast<uint16_t>(bits);
    const float f16 = ToFloat(Float16{b});
    const float bf16 = ToFloat(BFloat16{b});
    if (std::isnan(f16)) {
      EXPECT_TRUE(std::isnan(ToFloat(ToFloat16(f16))));
    } else {
      ASSERT_EQ(ToFloat16(f16).bits, b);
    }
    if (std::isnan(bf16)) {
      EXPECT_TRUE(std::isnan(ToFloat(ToBFloat16(bf16))));
    } else {
      ASSERT_EQ(ToBFloat16(bf16).bits, b);
    }
  }
}

TEST(TensorTest, HalfPrecisionDecodesAsTheStandardSays) {
  EXPECT_EQ(ToFloat(Float16{0x3C00}), 1.0F);
  EXPECT_EQ(ToFloat(Float16{0xC000}), -2.0F);
  EXPECT_EQ(ToFloat(Float16{0x7BFF}), 65504.0F);
  EXPECT_EQ(ToFloat(Float16{0x0001}), 0x1p-24F);
  EXPECT_EQ(ToFloat(Float16{0x0400}), 0x1p-14F);
  EXPECT_EQ(ToFloat(Float16{0x7C00}), INFINITY);
  EXPECT_EQ(ToFloat(BFloat16{0x3F80}), 1.0F);
}

// Rounds with nearbyint, in double, at the precision of a format.
double Rounded(double value, int mantissa_bits, int lowest_exponent) {
  const int exponent = value == 0 ? lowest_exponent : std::max(std::ilogb(value), lowest_exponent);
  const double unit = std::ldexp(1.0, exponent - mantissa_bits);
  return std::nearbyint(value / unit) * unit;
}

TEST(TensorTest, RoundsToNearestEven) {
  std::mt19937_64 rng(testing::FreshSeed());
  for (int i = 0; i < 2'000'000; ++i) {
    auto bits = static_cast<uint32_t>(rng());
    if (i % 2 == 0) bits &= 0xFFFFF000U | static_cast<uint32_t>(rng() & 1U);  // ties and near ties
    if (i % 4 == 1) bits = (bits & 0x80FFFFFFU) | 0x38000000U;  // around the fp16 subnormals
    const float value = std::bit_cast<float>(bits);
    if (!std::isfinite(value)) continue;
    const double f16 = Rounded(value, 10, -14);
    if (std::abs(f16) < 65520) {
      ASSERT_EQ(ToFloat(ToFloat16(value)), f16) << value;
    } else {
      ASSERT_EQ(ToFloat(ToFloat16(value)), std::copysign(INFINITY, value)) << value;
    }
    const double bf16 = Rounded(value, 7, -126);
    if (std::abs(bf16) < 0x1p128) {
      ASSERT_EQ(ToFloat(ToBFloat16(value)), bf16) << value;
    }
  }
}

}  // namespace
}  // namespace zipage
