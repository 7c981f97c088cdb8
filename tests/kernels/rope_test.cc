#include "kernels/rope.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/kernels/random_data.h"

namespace zipage {
namespace {

using testing::Tensor;

struct Case {
  int q_heads, kv_heads, head_dim;
  bool norm;
  DType dtype;
};

// One head as the formula says, in double.
std::vector<double> Rotated(const Tensor& x, size_t begin, int head_dim, const float* table,
                            const float* weight, double eps) {
  const int half = head_dim / 2;
  std::vector<double> u(head_dim);
  double squares = 0;
  for (int i = 0; i < head_dim; ++i) {
    u[i] = x.Get(begin + i);
    squares += u[i] * u[i];
  }
  for (int i = 0; weight != nullptr && i < head_dim; ++i) {
    u[i] *= weight[i] / std::sqrt(squares / head_dim + eps);
  }
  std::vector<double> out(head_dim);
  for (int i = 0; i < half; ++i) {
    out[i] = u[i] * table[i] - u[half + i] * table[half + i];
    out[half + i] = u[half + i] * table[i] + u[i] * table[half + i];
  }
  return out;
}

void RunCase(const Case& c, std::mt19937_64* rng) {
  SCOPED_TRACE(::testing::Message() << c.q_heads << "/" << c.kv_heads << " x " << c.head_dim);
  const int64_t tokens = 41;
  const int64_t max_position = 300;
  const int64_t num_slots = 96;
  const int64_t d = c.head_dim;
  const int64_t row = (c.q_heads + 2 * c.kv_heads) * d;
  const int64_t kv_size = c.kv_heads * d;
  std::vector<float> inv_freq(d / 2);
  for (size_t i = 0; i < inv_freq.size(); ++i) inv_freq[i] = std::pow(1e4F, -2.0F * i / d);
  std::vector<float> table(max_position * d);
  BuildRopeTable(inv_freq.data(), c.head_dim, max_position, 1.25F, table.data());
  std::vector<int32_t> positions(tokens);
  for (int32_t& position : positions) position = static_cast<int32_t>((*rng)() % max_position);
  std::vector<int64_t> slots(num_slots);
  std::iota(slots.begin(), slots.end(), 0);
  std::shuffle(slots.begin(), slots.end(), *rng);
  const Tensor before = Tensor::Random(c.dtype, tokens * row, rng);
  Tensor qkv = before;
  Tensor keys = Tensor::Poison(c.dtype, num_slots * kv_size);
  Tensor values = Tensor::Poison(c.dtype, num_slots * kv_size);
  const std::vector<float> q_weight = testing::RandomFloats(d, rng);
  const std::vector<float> k_weight = testing::RandomFloats(d, rng);
  const float* qw = c.norm ? q_weight.data() : nullptr;
  const float* kw = c.norm ? k_weight.data() : nullptr;
  cpu::RopeAndCache({qkv.data(), positions.data(), slots.data(), table.data(), qw, kw, keys.data(),
                     values.data(), tokens, max_position, num_slots, c.q_heads, c.kv_heads,
                     c.head_dim, 1e-6F, c.dtype});
  for (int64_t t = 0; t < tokens; ++t) {
    const float* table_row = table.data() + positions[t] * d;
    for (int h = 0; h < c.q_heads + c.kv_heads; ++h) {
      const bool is_query = h < c.q_heads;
      const auto expected =
          Rotated(before, t * row + h * d, c.head_dim, table_row, is_query ? qw : kw, 1e-6);
      for (int64_t i = 0; i < d; ++i) {
        const float got = is_query ? qkv.Get(t * row + h * d + i)
                                   : keys.Get(slots[t] * kv_size + (h - c.q_heads) * d + i);
        ASSERT_NEAR(got, expected[i], testing::RoundingOf(c.dtype) * (4 + std::abs(expected[i])))
            << "token " << t << " head " << h;
      }
    }
    const size_t value_at = t * row + (c.q_heads + c.kv_heads) * d;
    ASSERT_TRUE(values.SameBits(slots[t] * kv_size, before, value_at, kv_size));
    const size_t key_at = t * row + c.q_heads * d;
    ASSERT_TRUE(qkv.SameBits(key_at, before, key_at, 2 * kv_size)) << "keys or values changed";
  }
  for (int64_t s = tokens; s < num_slots; ++s) {
    for (int64_t i = 0; i < kv_size; ++i) {
      ASSERT_TRUE(std::isnan(keys.Get(slots[s] * kv_size + i))) << "slot " << slots[s];
      ASSERT_TRUE(std::isnan(values.Get(slots[s] * kv_size + i))) << "slot " << slots[s];
    }
  }
}

TEST(RopeTest, RotatesQueriesAndWritesExactlyItsSlots) {
  std::mt19937_64 rng(testing::FreshSeed());
  for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (bool norm : {false, true}) {
      RunCase({14, 2, 64, norm, dtype}, &rng);
      RunCase({9, 3, 64, norm, dtype}, &rng);
      RunCase({4, 1, 128, norm, dtype}, &rng);
      RunCase({2, 2, 80, norm, dtype}, &rng);
      RunCase({3, 1, 6, norm, dtype}, &rng);
    }
  }
}

TEST(RopeTest, TheTableHoldsTheScaledCosineAndSineOfTheRoundedAngle) {
  const std::vector<float> inv_freq = {1.0F, 0.0173F};
  std::vector<float> table(1000 * 4);
  BuildRopeTable(inv_freq.data(), 4, 1000, 2.0F, table.data());
  for (int p = 0; p < 1000; ++p) {
    for (int i = 0; i < 2; ++i) {
      const float angle = static_cast<float>(p) * inv_freq[i];
      ASSERT_NEAR(table[p * 4 + i], 2 * std::cos(static_cast<double>(angle)), 3e-7);
      ASSERT_NEAR(table[p * 4 + 2 + i], 2 * std::sin(static_cast<double>(angle)), 3e-7);
    }
  }
}

TEST(RopeDeathTest, RefusesASlotOutsideThePool) {
  std::vector<float> qkv(3 * 4), table(4), cache(2 * 4);
  const int32_t position = 0;
  const int64_t slot = 2;
  const RopeAndCacheParams p = {qkv.data(),
                                &position,
                                &slot,
                                table.data(),
                                nullptr,
                                nullptr,
                                cache.data(),
                                cache.data(),
                                1,
                                1,
                                2,
                                1,
                                1,
                                4,
                                1e-6F,
                                DType::kFloat32};
  EXPECT_DEATH(cpu::RopeAndCache(p), "token 0 goes to slot 2 of 2");
}

}  // namespace
}  // namespace zipage
