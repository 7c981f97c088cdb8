// Embedding, RmsNorm and SiluMul against their formulas.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/embedding.h"
#include "kernels/rms_norm.h"
#include "kernels/silu_mul.h"
#include "tests/kernels/random_data.h"

namespace zipage {
namespace {

using testing::Tensor;

class ElementwiseTest : public ::testing::TestWithParam<DType> {
 protected:
  std::mt19937_64 rng_{testing::FreshSeed()};
};
INSTANTIATE_TEST_SUITE_P(Types, ElementwiseTest,
                         ::testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

TEST_P(ElementwiseTest, ShardsOfAnEmbeddingSumToTheWholeTable) {
  for (DType table_dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    const int64_t vocab = 37;
    const int64_t hidden = 19;
    const Tensor table = Tensor::Random(table_dtype, vocab * hidden, &rng_);
    std::vector<int32_t> ids = {0, 36, 12, 13, 12, 5};
    const auto tokens = static_cast<int64_t>(ids.size());
    std::vector<float> sum(static_cast<size_t>(tokens * hidden));
    for (int64_t first : {0, 13}) {
      Tensor out = Tensor::Poison(GetParam(), sum.size());
      const int64_t rows = first == 0 ? 13 : vocab - 13;
      const char* shard = static_cast<const char*>(table.data()) +
                          static_cast<size_t>(first * hidden) * DTypeSize(table_dtype);
      cpu::Embedding(
          {ids.data(), shard, out.data(), tokens, hidden, first, rows, table_dtype, GetParam()});
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += out.Get(i);
    }
    for (size_t i = 0; i < sum.size(); ++i) {
      const size_t row = static_cast<size_t>(ids[i / hidden]);
      Tensor expected(GetParam(), 1);
      expected.Set(0, table.Get(row * hidden + i % hidden));
      ASSERT_EQ(sum[i], expected.Get(0));
    }
  }
}

TEST_P(ElementwiseTest, RmsNormAddsTheResidualAndNormalizes) {
  for (const bool with_residual : {false, true}) {
    for (const bool with_index : {false, true}) {
      for (const int64_t hidden : {1, 15, 16, 64, 333, 896}) {
        const int64_t sources = 7;
        const Tensor x = Tensor::Random(GetParam(), sources * hidden, &rng_, 3.0F);
        const Tensor old = Tensor::Random(GetParam(), sources * hidden, &rng_);
        Tensor residual = old;
        const std::vector<float> weight = testing::RandomFloats(hidden, &rng_);
        std::vector<int32_t> index = {5, 0, 6};
        const int64_t rows = with_index ? 3 : sources;
        Tensor out = Tensor::Poison(GetParam(), rows * hidden);
        cpu::RmsNorm({x.data(), with_residual ? residual.data() : nullptr,
                      with_index ? index.data() : nullptr, weight.data(), out.data(), rows, hidden,
                      1e-5F, GetParam()});
        for (int64_t r = 0; r < rows; ++r) {
          const size_t from = (with_index ? index[r] : r) * hidden;
          double squares = 0;
          std::vector<double> h(hidden);
          for (int64_t i = 0; i < hidden; ++i) {
            h[i] = x.Get(from + i);
            if (with_residual) {
              Tensor sum(GetParam(), 1);
              sum.Set(0, x.Get(from + i) + old.Get(from + i));
              h[i] = sum.Get(0);
              ASSERT_EQ(residual.Get(from + i), h[i]);
            }
            squares += h[i] * h[i];
          }
          for (int64_t i = 0; i < hidden; ++i) {
            const double expected = h[i] / std::sqrt(squares / hidden + 1e-5) * weight[i];
            ASSERT_NEAR(out.Get(r * hidden + i), expected,
                        testing::RoundingOf(GetParam()) * (1e-3 + std::abs(expected)) * 2)
                << hidden << " " << r << " " << i;
          }
        }
        if (with_index && with_residual) {
          EXPECT_TRUE(residual.SameBits(hidden, old, hidden, hidden)) << "row 1 was not asked for";
        }
      }
    }
  }
}

TEST_P(ElementwiseTest, ARowOfRmsNormDoesNotDependOnTheOthers) {
  const int64_t hidden = 896;
  const int64_t rows = 150;  // enough for several threads
  const Tensor x = Tensor::Random(GetParam(), rows * hidden, &rng_);
  const std::vector<float> weight = testing::RandomFloats(hidden, &rng_);
  Tensor all(GetParam(), rows * hidden);
  cpu::RmsNorm(
      {x.data(), nullptr, nullptr, weight.data(), all.data(), rows, hidden, 1e-6F, GetParam()});
  for (int32_t r : {0, 77, 149}) {
    Tensor one(GetParam(), hidden);
    cpu::RmsNorm({x.data(), nullptr, &r, weight.data(), one.data(), 1, hidden, 1e-6F, GetParam()});
    EXPECT_TRUE(all.SameBits(r * hidden, one, 0, hidden)) << r;
  }
}

TEST_P(ElementwiseTest, SiluMulFollowsItsFormulaToTheEndsOfTheRange) {
  for (const int64_t n : {1, 17, 96, 4097, 4864}) {
    const int64_t tokens = 9;
    Tensor gate_up = Tensor::Random(GetParam(), tokens * 2 * n, &rng_, 8.0F);
    gate_up.Set(0, 1000.0F);
    if (n > 4) {
      gate_up.Set(1, -1000.0F);
      gate_up.Set(2, -87.5F);
      gate_up.Set(3, 0.0F);
      gate_up.Set(4, -3e38F);
    }
    Tensor out = Tensor::Poison(GetParam(), tokens * n);
    cpu::SiluMul({gate_up.data(), out.data(), tokens, n, GetParam()});
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t i = 0; i < n; ++i) {
        const double gate = gate_up.Get(t * 2 * n + i);
        const double up = gate_up.Get(t * 2 * n + n + i);
        const double expected = gate / (1 + std::exp(-gate)) * up;
        ASSERT_NEAR(out.Get(t * n + i), expected,
                    testing::RoundingOf(GetParam()) * std::abs(expected) + 1e-8)
            << gate << " " << up;
      }
    }
  }
}

TEST_P(ElementwiseTest, ANanReachesTheOutputOfSiluMul) {
  Tensor gate_up = Tensor::Random(GetParam(), 2 * 32, &rng_);
  gate_up.Set(7, NAN);
  gate_up.Set(32 + 9, NAN);
  Tensor out(GetParam(), 32);
  cpu::SiluMul({gate_up.data(), out.data(), 1, 32, GetParam()});
  for (size_t i = 0; i < 32; ++i) EXPECT_EQ(std::isnan(out.Get(i)), i == 7 || i == 9) << i;
}

}  // namespace
}  // namespace zipage
