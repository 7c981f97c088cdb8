#include "worker/kv_pool.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/cpu_backend.h"

namespace zipage {
namespace {

using testing::HasSubstr;

class BackendWithMemory : public CpuBackend {
 public:
  explicit BackendWithMemory(size_t bytes) : CpuBackend(1), bytes_(bytes) {}
  absl::StatusOr<size_t> AvailableMemory() const override { return bytes_; }

 private:
  size_t bytes_;
};

constexpr size_t kMiB = 1 << 20;
// 2 * 4 layers * 256 positions * 4 heads * 32 * 4 bytes = 1 MiB a block
constexpr KvShape kShape{.num_layers = 4, .block_size = 256, .kv_heads = 4, .head_dim = 32};

TEST(KvPoolTest, ABlockIsAllLayersKeysAndValues) {
  EXPECT_EQ(kShape.block_bytes(), kMiB);
  KvShape half = kShape;
  half.dtype = DType::kBFloat16;
  EXPECT_EQ(half.block_bytes(), kMiB / 2);
}

TEST(KvPoolTest, TheGivenNumberWins) {
  Config config;
  config.num_kvcache_blocks = 77;
  config.kv_cache_memory_gb = 1;
  EXPECT_EQ(*CountKvBlocks(config, kShape, 4096, BackendWithMemory(77 * kMiB)), 77);
  const absl::Status status =
      CountKvBlocks(config, kShape, 4096, BackendWithMemory(76 * kMiB)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("give at most 76"));
}

TEST(KvPoolTest, TheGivenMemoryIsFilled) {
  Config config;
  config.kv_cache_memory_gb = 0.5;
  EXPECT_EQ(*CountKvBlocks(config, kShape, 4096, BackendWithMemory(512 * kMiB)), 512);
  const absl::Status status =
      CountKvBlocks(config, kShape, 4096, BackendWithMemory(511 * kMiB)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("kv_cache_memory_gb is 0.5"));
}

TEST(KvPoolTest, AutomaticallyTakesHalfSharedByTheRanksButNoMoreThanCanBeUsed) {
  Config config;
  config.max_num_seqs = 256;
  EXPECT_EQ(*CountKvBlocks(config, kShape, 1 << 20, BackendWithMemory(1000 * kMiB)), 500);
  config.tp = 2;
  EXPECT_EQ(*CountKvBlocks(config, kShape, 1 << 20, BackendWithMemory(1000 * kMiB)), 250);
  EXPECT_EQ(*CountKvBlocks(config, kShape, 1 << 20, BackendWithMemory(100'000 * kMiB)), 2048);
  config.max_num_seqs = 10;
  EXPECT_EQ(*CountKvBlocks(config, kShape, 300, BackendWithMemory(1000 * kMiB)), 20);
  config.max_num_seqs = 1;
  EXPECT_EQ(*CountKvBlocks(config, kShape, 16, BackendWithMemory(1000 * kMiB)), 2);
}

TEST(KvPoolTest, FewerThanTwoBlocksIsAnErrorWithTheCure) {
  const absl::Status status =
      CountKvBlocks(Config(), kShape, 4096, BackendWithMemory(kMiB)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("2 blocks of 256 positions"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("kv_cache_memory_gb 0.002 or more"));
}

TEST(KvPoolTest, PlanesOfLayersDoNotOverlap) {
  CpuBackend backend(1);
  const auto pool = KvPool::Create(kShape, 3, &backend);
  ASSERT_TRUE(pool.ok());
  const auto* first = static_cast<uint8_t*>(pool->key(0));
  EXPECT_EQ(static_cast<uint8_t*>(pool->value(0)) - first, 3 * kShape.plane_bytes());
  EXPECT_EQ(static_cast<uint8_t*>(pool->value(3)) - first, 7 * 3 * kShape.plane_bytes());
}

TEST(KvPoolTest, APoolLargerThanMemoryCostsNothingUntilItIsWritten) {
  CpuBackend backend(1);
  const auto pool = KvPool::Create(kShape, 1 << 20, &backend);  // 1 TiB
  ASSERT_TRUE(pool.ok()) << pool.status();
  static_cast<float*>(pool->value(3))[0] = 1.0F;
  EXPECT_EQ(static_cast<float*>(pool->value(3))[1], 0.0F);
}

}  // namespace
}  // namespace zipage
