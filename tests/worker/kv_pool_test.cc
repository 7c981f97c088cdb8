#include "worker/kv_pool.h"

#include "gtest/gtest.h"
#include "worker/cpu_backend.h"
#include "worker/query_windows.h"

namespace zipage {
namespace {

constexpr size_t kMiB = 1 << 20;
// 2 * 4 layers * 256 positions * 4 heads * 32 * 4 bytes = 1 MiB a block
constexpr KvShape kShape{.num_layers = 4, .block_size = 256, .kv_heads = 4, .head_dim = 32};

TEST(KvPoolTest, ABlockIsAllLayersKeysValuesAndScores) {
  EXPECT_EQ(kShape.block_bytes(), kMiB);
  KvShape half = kShape;
  half.dtype = DType::kBFloat16;
  EXPECT_EQ(half.block_bytes(), kMiB / 2);
  half.has_scores = true;
  EXPECT_EQ(half.block_bytes(), kMiB / 2 + 4 * 256 * 4 * sizeof(float));
}

TEST(KvPoolTest, PlanesOfLayersDoNotOverlap) {
  CpuBackend backend(1);
  KvShape shape = kShape;
  shape.has_scores = true;
  const auto pool = KvPool::Create(shape, 3, &backend);
  ASSERT_TRUE(pool.ok());
  const auto* first = static_cast<uint8_t*>(pool->key(0));
  const auto offset = [first](void* plane) { return static_cast<uint8_t*>(plane) - first; };
  EXPECT_EQ(offset(pool->value(0)), 3 * kShape.plane_bytes());
  EXPECT_EQ(offset(pool->value(3)), 7 * 3 * kShape.plane_bytes());
  EXPECT_EQ(offset(pool->key(2)), 2 * pool->kv_layer_stride() * sizeof(float));
  EXPECT_EQ(offset(pool->stored_scores(0)), 8 * 3 * kShape.plane_bytes());
  EXPECT_EQ(pool->stored_scores(3) - pool->stored_scores(0), 3 * pool->score_layer_stride());
  EXPECT_EQ(offset(pool->stored_scores(3) + pool->score_layer_stride()), 3 * shape.block_bytes());
}

TEST(KvPoolTest, WithoutScoresThereAreNone) {
  CpuBackend backend(1);
  const auto pool = KvPool::Create(kShape, 3, &backend);
  ASSERT_TRUE(pool.ok());
  EXPECT_EQ(pool->stored_scores(0), nullptr);
}

TEST(KvPoolTest, APoolLargerThanMemoryCostsNothingUntilItIsWritten) {
  CpuBackend backend(1);
  const auto pool = KvPool::Create(kShape, 1 << 20, &backend);  // 1 TiB
  ASSERT_TRUE(pool.ok()) << pool.status();
  static_cast<float*>(pool->value(3))[0] = 1.0F;
  EXPECT_EQ(static_cast<float*>(pool->value(3))[1], 0.0F);
}

TEST(KvPoolTest, QueryWindowsOfLayersDoNotOverlap) {
  CpuBackend backend(1);
  const QueryWindowShape shape{
      .num_layers = 3, .window = 16, .q_heads = 8, .head_dim = 32, .dtype = DType::kBFloat16};
  EXPECT_EQ(shape.slot_bytes(), 3 * 16 * 8 * 32 * 2);
  const auto windows = QueryWindows::Create(shape, 5, &backend);
  ASSERT_TRUE(windows.ok());
  EXPECT_EQ(static_cast<uint8_t*>(windows->layer(2)) - static_cast<uint8_t*>(windows->layer(0)),
            2 * 5 * shape.plane_bytes());
  EXPECT_EQ(windows->layer_stride(), 5 * 16 * 8 * 32);
}

}  // namespace
}  // namespace zipage
