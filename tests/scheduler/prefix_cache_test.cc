#include "scheduler/prefix_cache.h"

#include <gtest/gtest.h>

namespace zipage {
namespace {

const std::vector<TokenId> kA = {1, 2, 3, 4};
const std::vector<TokenId> kB = {5, 6, 7, 8};

uint64_t SameForAll(uint64_t, std::span<const TokenId>) { return 7; }

TEST(PrefixCacheTest, FindsAContentOnlyUnderItsParentAndSalt) {
  for (const BlockHash hash : {&Xxh3BlockHash, &SameForAll}) {
    PrefixCache cache(8, hash);
    const ContentId a = cache.Hold({}, 0, kA, 0);
    const ContentId ab = cache.Hold(a, 0, kB, 1);
    const ContentId b = cache.Hold({}, 0, kB, 2);
    EXPECT_EQ(cache.Find({}, 0, kA), a);
    EXPECT_EQ(cache.Find(a, 0, kB), ab);
    EXPECT_EQ(cache.Find({}, 0, kB), b);
    EXPECT_NE(ab, b);
    EXPECT_FALSE(cache.Find(b, 0, kB).has_value());
    EXPECT_FALSE(cache.Find({}, 1, kA).has_value());
    EXPECT_EQ(cache.BlockOf(ab), 1);
    cache.CheckInvariants();
  }
}

TEST(PrefixCacheTest, HashDependsOnParentAndTokens) {
  EXPECT_NE(Xxh3BlockHash(0, kA), Xxh3BlockHash(1, kA));
  EXPECT_NE(Xxh3BlockHash(0, kA), Xxh3BlockHash(0, kB));
  EXPECT_EQ(Xxh3BlockHash(3, kA), Xxh3BlockHash(3, kA));
}

TEST(PrefixCacheTest, AContentEndsWithItsLastBlock) {
  PrefixCache cache(4, &Xxh3BlockHash);
  const ContentId a = cache.Hold({}, 0, kA, 0);
  EXPECT_EQ(cache.Hold({}, 0, kA, 3), a);
  EXPECT_FALSE(cache.KeepIdle(0)) << "block 3 holds it too";
  EXPECT_FALSE(cache.Holds(0));
  EXPECT_EQ(cache.BlockOf(a), 3);
  EXPECT_TRUE(cache.KeepIdle(3));
  EXPECT_EQ(cache.num_idle(), 1);
  EXPECT_EQ(cache.Find({}, 0, kA), a);
  EXPECT_EQ(cache.Reclaim(), 3);
  EXPECT_FALSE(cache.Find({}, 0, kA).has_value());
  EXPECT_EQ(cache.num_idle(), 0);
  cache.CheckInvariants();
}

TEST(PrefixCacheTest, ADuplicateRenewsTheIdleBlockOfItsContent) {
  PrefixCache cache(4, &Xxh3BlockHash);
  const ContentId a = cache.Hold({}, 0, kA, 0);
  ASSERT_TRUE(cache.KeepIdle(0));
  cache.Hold({}, 0, kA, 1);  // Computed again, in block 1,
  cache.Hold(a, 0, kB, 2);   // and continued.
  EXPECT_EQ(cache.BlockOf(a), 1) << "rather the one in use";
  ASSERT_TRUE(cache.KeepIdle(2));
  cache.CheckInvariants();
  ASSERT_FALSE(cache.KeepIdle(1));
  cache.CheckInvariants();
  EXPECT_EQ(cache.Reclaim(), 2) << "the child, though block 0 was idle before it";
  EXPECT_EQ(cache.Reclaim(), 0);
}

TEST(PrefixCacheDeathTest, ABlockHoldsOneContent) {
  PrefixCache cache(4, &Xxh3BlockHash);
  cache.Hold({}, 0, kA, 0);
  EXPECT_DEATH(cache.Hold({}, 0, kB, 0), "holds a content already");
  EXPECT_DEATH(cache.Use(0), "block 0");
}

}  // namespace
}  // namespace zipage
