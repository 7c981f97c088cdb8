#include "worker/cpu_backend.h"

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/matmul.h"

namespace zipage {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(CpuBackendTest, AutoIsBFloat16OnlyForABFloat16ModelOnACpuThatIsFastAtIt) {
  const CpuBackend backend(1);
  EXPECT_EQ(*backend.ResolveDType("auto", DType::kFloat32), DType::kFloat32);
  EXPECT_EQ(*backend.ResolveDType("auto", DType::kFloat16), DType::kFloat32);
  const bool native = cpu::CpuBf16Matmul() == cpu::Bf16Matmul::kNative;
  EXPECT_EQ(*backend.ResolveDType("auto", DType::kBFloat16),
            native ? DType::kBFloat16 : DType::kFloat32);
  EXPECT_EQ(*backend.ResolveDType("float32", DType::kBFloat16), DType::kFloat32);
  EXPECT_EQ(backend.ResolveDType("bfloat16", DType::kFloat32).ok(),
            cpu::CpuBf16Matmul() != cpu::Bf16Matmul::kNone);
  const absl::Status half = backend.ResolveDType("float16", DType::kFloat16).status();
  EXPECT_EQ(half.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(half.message()), HasSubstr("use dtype auto or float32"));
}

TEST(CpuBackendTest, MemoryIsZeroAndOwnedOnce) {
  CpuBackend backend(1);
  ASSERT_GT(*backend.AvailableMemory(), 0);
  for (size_t bytes : {size_t{1}, size_t{5000}, size_t{9} << 20}) {
    auto memory = backend.Allocate(bytes, "a test");
    ASSERT_TRUE(memory.ok());
    EXPECT_EQ(memory->as<char>()[bytes - 1], 0);
    memory->as<char>()[bytes - 1] = 7;
    DeviceMemory moved = *std::move(memory);
    EXPECT_EQ(moved.as<char>()[bytes - 1], 7);
    EXPECT_EQ(memory->as<char>(), nullptr);
  }
  const auto status = backend.Allocate(size_t{1} << 60, "the KV cache").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("the KV cache"));
}

TEST(CpuBackendTest, StacksTheRowsOfFusedAndShardedMatrices) {
  CpuBackend backend(2);
  // Two matrices of four columns, of which the shard takes the middle two.
  const std::vector<float> a = {9, 1, 2, 9, 9, 3, 4, 9};
  const std::vector<BFloat16> b = {ToBFloat16(9), ToBFloat16(5), ToBFloat16(6), ToBFloat16(9)};
  const std::vector<float> bias_a = {10, 20};
  const std::vector<float> bias_b = {30};
  const std::vector<LinearPart> parts = {{.weight = a.data() + 1,
                                          .num_rows = 2,
                                          .row_stride = 4,
                                          .bias = bias_a.data(),
                                          .dtype = DType::kFloat32},
                                         {.weight = b.data() + 1,
                                          .num_rows = 1,
                                          .row_stride = 4,
                                          .bias = bias_b.data(),
                                          .dtype = DType::kBFloat16}};
  auto linear = backend.LoadLinear(parts, 2, DType::kFloat32);
  ASSERT_TRUE(linear.ok()) << linear.status();
  const std::vector<float> x = {1, 10, 2, 0};
  std::vector<float> y(6);
  ASSERT_TRUE(backend.Multiply(linear->get(), x.data(), y.data(), 2, DType::kFloat32).ok());
  EXPECT_THAT(y, ElementsAre(31, 63, 95, 12, 26, 40));
}

TEST(CpuBackendTest, ACorruptedRowIsMarkedAndItsNeighboursAreSampled) {
  CpuBackend backend(2);
  const int64_t vocab = 40'000;
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (float bad : {nan, infinity, -infinity}) {
    std::vector<float> logits(3 * vocab, 0.5F);
    logits[123] = 2;
    logits[vocab + 39'999] = bad;
    logits[2 * vocab + 7] = 3;
    const std::vector<SampleRow> rows(3, {.temperature = 0, .num_logprobs = 1});
    std::vector<int32_t> tokens(3, -1);
    SampleOutput output;
    const absl::Status status = backend.Sample(logits.data(), vocab, rows, tokens.data(), &output);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_THAT(tokens, ElementsAre(123, 0, 7));
    EXPECT_THAT(output.corrupted, ElementsAre(0, 1, 0));
    EXPECT_EQ(output.logprobs[2].token, 7);
  }
}

TEST(CpuBackendTest, MovesTokensAndRows) {
  CpuBackend backend(1);
  const std::vector<int32_t> index = {3, 0, 2};
  std::vector<int32_t> last = {10, 11, 12, 13};
  std::vector<int32_t> ids(3);
  backend.GatherTokens(last.data(), index.data(), ids.data(), 3);
  EXPECT_THAT(ids, ElementsAre(13, 10, 12));
  ids = {1, 2, 3};
  backend.ScatterTokens(ids.data(), index.data(), last.data(), 3);
  EXPECT_THAT(last, ElementsAre(2, 11, 3, 1));
  std::vector<int32_t> wide(6, -1);
  backend.CopyRows(wide.data() + 1, 12, last.data(), 8, 8, 2);
  EXPECT_THAT(wide, ElementsAre(-1, 2, 11, -1, 3, 1));
}

}  // namespace
}  // namespace zipage
