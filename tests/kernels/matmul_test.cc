#include "kernels/matmul.h"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/kernels/random_data.h"

namespace zipage {
namespace {

using cpu::Bf16Matmul;
using cpu::PackedLinear;
using testing::Tensor;

bool Supported(DType dtype) {
  return dtype == DType::kFloat32 || cpu::CpuBf16Matmul() != Bf16Matmul::kNone;
}

// y[m, n] of the formula, from weights rounded to the compute type.
double Expected(const Tensor& x, const Tensor& w, const std::vector<float>& bias, int64_t m,
                int64_t n, int64_t k, DType compute) {
  double sum = bias.empty() ? 0 : bias[n];
  for (int64_t i = 0; i < k; ++i) {
    Tensor rounded(compute, 1);
    rounded.Set(0, w.Get(n * k + i));
    sum += static_cast<double>(x.Get(m * k + i)) * rounded.Get(0);
  }
  return sum;
}

class MatmulTest : public ::testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    if (!Supported(GetParam())) GTEST_SKIP() << "THIS CPU HAS NO BF16 MATMUL";
  }
  std::mt19937_64 rng_{testing::FreshSeed()};
};
INSTANTIATE_TEST_SUITE_P(Types, MatmulTest, ::testing::Values(DType::kFloat32, DType::kBFloat16),
                         [](const auto& info) { return std::string(DTypeName(info.param)); });

TEST_P(MatmulTest, MatchesTheFormulaForOddSizesAndEverySourceType) {
  const DType compute = GetParam();
  for (DType source : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    for (const auto& [n, k] :
         {std::pair<int64_t, int64_t>{1, 1}, {33, 17}, {192, 64}, {100, 130}}) {
      for (const bool with_bias : {false, true}) {
        const Tensor w = Tensor::Random(source, n * k, &rng_);
        const std::vector<float> bias =
            with_bias ? testing::RandomFloats(n, &rng_) : std::vector<float>();
        PackedLinear linear(n, k, compute);
        linear.SetRows(0, n, w.data(), source, k);
        if (with_bias) linear.SetBias(0, n, bias.data(), DType::kFloat32);
        ASSERT_TRUE(linear.Pack().ok());
        for (const int64_t m : {1, 2, 7, 33, 65}) {
          const Tensor x = Tensor::Random(compute, m * k, &rng_);
          for (DType out : {DType::kFloat32, compute}) {
            Tensor y = Tensor::Poison(out, m * n);
            ASSERT_TRUE(linear.Apply(x.data(), y.data(), m, out).ok());
            for (int64_t i = 0; i < m * n; i += 1 + static_cast<int64_t>(rng_() % 7)) {
              const double expected = Expected(x, w, bias, i / n, i % n, k, compute);
              ASSERT_NEAR(y.Get(i), expected,
                          testing::RoundingOf(out) * std::abs(expected) + 1e-5 * std::sqrt(k))
                  << n << " x " << k << ", " << m << " rows";
            }
          }
        }
      }
    }
  }
}

TEST_P(MatmulTest, PiecesOfShardedAndFusedMatricesLandInTheirRows) {
  const DType compute = GetParam();
  const int64_t k = 48;
  const Tensor q = Tensor::Random(DType::kBFloat16, 10 * 2 * k, &rng_);
  const Tensor v = Tensor::Random(DType::kFloat32, 6 * k, &rng_);
  const std::vector<float> bias = testing::RandomFloats(6, &rng_);
  PackedLinear linear(16, k, compute);
  // The second half of the columns of q, as rank 1 of 2 takes them.
  linear.SetRows(0, 10, static_cast<const BFloat16*>(q.data()) + k, DType::kBFloat16, 2 * k);
  linear.SetRows(10, 6, v.data(), DType::kFloat32, k);
  linear.SetBias(10, 6, bias.data(), DType::kFloat32);
  ASSERT_TRUE(linear.Pack().ok());
  EXPECT_GE(linear.packed_bytes(), 16 * k * DTypeSize(compute));
  Tensor w(DType::kFloat32, 16 * k);
  for (int64_t i = 0; i < 16 * k; ++i) {
    w.Set(i, i < 10 * k ? q.Get(i / k * 2 * k + k + i % k) : v.Get(i - 10 * k));
  }
  std::vector<float> whole_bias(16);
  std::copy(bias.begin(), bias.end(), whole_bias.begin() + 10);
  const Tensor x = Tensor::Random(compute, 3 * k, &rng_);
  std::vector<float> y(3 * 16);
  ASSERT_TRUE(linear.Apply(x.data(), y.data(), 3, DType::kFloat32).ok());
  for (int64_t i = 0; i < 3 * 16; ++i) {
    ASSERT_NEAR(y[i], Expected(x, w, whole_bias, i / 16, i % 16, k, compute), 1e-4);
  }
}

TEST_P(MatmulTest, ARowIsBitIdenticalForEveryNumberOfRowsWithBrgemmKernels) {
  const int64_t n = 896;
  const int64_t k = 320;
  const int64_t max_rows = 150;
  PackedLinear linear(n, k, GetParam());
  linear.SetRows(0, n, Tensor::Random(DType::kFloat32, n * k, &rng_).data(), DType::kFloat32, k);
  ASSERT_TRUE(linear.Pack().ok());
  const Tensor x = Tensor::Random(GetParam(), max_rows * k, &rng_);
  Tensor all(DType::kFloat32, max_rows * n);
  ASSERT_TRUE(linear.Apply(x.data(), all.data(), max_rows, DType::kFloat32).ok());
  for (int64_t m = 1; m < max_rows; m += 1 + m / 8) {
    const auto kernel = linear.KernelName(m, DType::kFloat32);
    ASSERT_TRUE(kernel.ok());
    const bool exact = kernel->rfind("brg", 0) == 0;
    Tensor y(DType::kFloat32, m * n);
    ASSERT_TRUE(linear.Apply(x.data(), y.data(), m, DType::kFloat32).ok());
    if (exact) {
      ASSERT_TRUE(all.SameBits(0, y, 0, m * n)) << m << " rows by " << *kernel;
    } else {
      for (int64_t i = 0; i < m * n; ++i) {
        ASSERT_NEAR(y.Get(i), all.Get(i), 1e-3) << m << " rows by " << *kernel;
      }
    }
  }
}

TEST_P(MatmulTest, ManyNumbersOfRowsKeepWorking) {
  PackedLinear linear(16, 16, GetParam());
  const Tensor w = Tensor::Random(GetParam(), 16 * 16, &rng_);
  linear.SetRows(0, 16, w.data(), GetParam(), 16);
  ASSERT_TRUE(linear.Pack().ok());
  const Tensor x = Tensor::Random(GetParam(), 400 * 16, &rng_);
  std::vector<float> y(400 * 16);
  for (int64_t m = 0; m < 400; ++m) {
    ASSERT_TRUE(linear.Apply(x.data(), y.data(), m, DType::kFloat32).ok());
    if (m == 0) continue;
    ASSERT_NEAR(y[m * 16 - 1], Expected(x, w, {}, m - 1, 15, 16, GetParam()), 1e-4);
  }
  PackedLinear moved = std::move(linear);
  EXPECT_TRUE(moved.Apply(x.data(), y.data(), 1, DType::kFloat32).ok());
}

TEST(MatmulBf16Test, PackSaysWhenTheCpuHasNoBf16) {
  if (cpu::CpuBf16Matmul() != Bf16Matmul::kNone) {
    GTEST_SKIP() << "THIS CPU HAS BF16 MATMUL; run with ONEDNN_MAX_CPU_ISA=AVX2";
  }
  PackedLinear linear(16, 16, DType::kBFloat16);
  const absl::Status status = linear.Pack();
  EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented) << status;
}

}  // namespace
}  // namespace zipage
