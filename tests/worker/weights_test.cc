#include "worker/model/weights.h"

#include "gtest/gtest.h"

namespace zipage {
namespace {

TEST(WeightsTest, EvenShardsCoverEverythingOnceAndDifferByOneAtMost) {
  for (int64_t total : {4, 5, 31, 512, 151'937}) {
    for (int tp : {1, 2, 3, 4}) {
      int64_t end = 0;
      for (int rank = 0; rank < tp; ++rank) {
        const Shard shard = EvenShard(total, rank, tp);
        EXPECT_EQ(shard.begin, end);
        EXPECT_GE(shard.size(), total / tp);
        EXPECT_LE(shard.size(), (total + tp - 1) / tp);
        end = shard.end;
      }
      EXPECT_EQ(end, total);
    }
  }
}

TEST(WeightsTest, EveryRankHoldsTheKvHeadsOfItsQueryHeads) {
  ModelConfig config;
  config.num_heads = 8;
  config.intermediate_size = 64;
  config.vocab_size = 100;
  for (int kv_heads : {1, 2, 4, 8}) {
    config.num_kv_heads = kv_heads;
    for (int tp : {1, 2, 4, 8}) {
      for (int rank = 0; rank < tp; ++rank) {
        const ModelShard shard = MakeModelShard(config, rank, tp);
        ASSERT_EQ(shard.heads.size() % shard.kv_heads.size(), 0);
        const int64_t group = shard.heads.size() / shard.kv_heads.size();
        for (int64_t i = 0; i < shard.heads.size(); ++i) {
          EXPECT_EQ((shard.heads.begin + i) / (config.num_heads / config.num_kv_heads),
                    shard.kv_heads.begin + i / group)
              << kv_heads << " KV heads, rank " << rank << " of " << tp;
        }
      }
    }
  }
}

}  // namespace
}  // namespace zipage
