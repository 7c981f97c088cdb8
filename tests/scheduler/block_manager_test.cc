#include "scheduler/block_manager.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>

namespace zipage {
namespace {

constexpr int kBlockSize = 4;

std::vector<TokenId> Tokens(int num, TokenId first = 0) {
  std::vector<TokenId> tokens(num);
  for (int i = 0; i < num; ++i) tokens[i] = first + i;
  return tokens;
}

uint64_t SameForAll(uint64_t, std::span<const TokenId>) { return 7; }
uint64_t OneBit(uint64_t parent, std::span<const TokenId> tokens) {
  return Xxh3BlockHash(parent, tokens) & 1;
}

TEST(BlockManagerTest, HandsOutEveryBlockOnceAndTakesThemBack) {
  BlockManager blocks(10, kBlockSize);
  BlockTable table = blocks.Take({}, 10);
  std::set<BlockId> distinct(table.blocks.begin(), table.blocks.end());
  EXPECT_EQ(distinct.size(), 10U);
  EXPECT_EQ(blocks.num_available(), 0);
  EXPECT_EQ(blocks.num_used(), 10);
  blocks.Release(&table);
  EXPECT_TRUE(table.blocks.empty());
  EXPECT_EQ(blocks.num_free(), 10);
  blocks.CheckInvariants({});
}

TEST(BlockManagerDeathTest, NeverFreesABlockTwiceNorGivesOneThatIsNotThere) {
  BlockManager blocks(2, kBlockSize);
  BlockTable table = blocks.Take({}, 2);
  BlockTable copy = table;
  EXPECT_DEATH(blocks.Append(&table), "Check failed");
  blocks.Release(&table);
  EXPECT_DEATH(blocks.Release(&copy), "released twice");
}

TEST(BlockManagerTest, AMatchLeavesATokenToCompute) {
  BlockManager blocks(10, kBlockSize);
  const std::vector<TokenId> tokens = Tokens(12);
  BlockTable table = blocks.Take({}, 3);
  blocks.Publish(tokens, 12, 0, &table);
  const std::span<const TokenId> all(tokens);
  EXPECT_EQ(blocks.Match(all, 0).blocks.size(), 2U);
  EXPECT_EQ(blocks.Match(all.first(9), 0).blocks.size(), 2U);
  EXPECT_EQ(blocks.Match(all.first(8), 0).blocks.size(), 1U);
  EXPECT_EQ(blocks.Match(all.first(4), 0).blocks.size(), 0U);
  EXPECT_EQ(blocks.Match(Tokens(13), 0).blocks.size(), 3U);
  EXPECT_EQ(blocks.Match(Tokens(13), 0).num_idle, 0);
  EXPECT_TRUE(blocks.Match(Tokens(13), 1).blocks.empty()) << "another salt";
  blocks.Release(&table);
  EXPECT_EQ(blocks.num_cached(), 3);
  EXPECT_EQ(blocks.Match(Tokens(13), 0).num_idle, 3);
}

TEST(BlockManagerTest, ReclaimsTheLeastRecentlyUsedAndChildrenBeforeParents) {
  BlockManager blocks(4, kBlockSize);
  const std::vector<TokenId> a = Tokens(9, 0);
  const std::vector<TokenId> b = Tokens(9, 100);
  BlockTable ta = blocks.Take({}, 2);
  blocks.Publish(a, 8, 0, &ta);
  BlockTable tb = blocks.Take({}, 2);
  blocks.Publish(b, 8, 0, &tb);
  blocks.Release(&ta);
  blocks.Release(&tb);
  ta = blocks.Take(blocks.Match(a, 0), 2);  // a is the more recently used now.
  blocks.Release(&ta);
  BlockTable other = blocks.Take({}, 1);
  EXPECT_EQ(blocks.Match(b, 0).blocks.size(), 1U) << "the child goes first";
  EXPECT_EQ(blocks.Match(a, 0).blocks.size(), 2U);
  blocks.Append(&other);
  EXPECT_EQ(blocks.Match(b, 0).blocks.size(), 0U);
  EXPECT_EQ(blocks.Match(a, 0).blocks.size(), 2U);
  const BlockTable* tables[] = {&other};
  blocks.CheckInvariants(tables);
}

TEST(BlockManagerTest, ABlockInUseIsNeverReclaimed) {
  BlockManager blocks(4, kBlockSize);
  BlockTable first = blocks.Take({}, 2);
  blocks.Publish(Tokens(8), 8, 0, &first);
  BlockTable second = blocks.Take(blocks.Match(Tokens(9), 0), 3);
  blocks.Release(&first);
  EXPECT_EQ(blocks.num_available(), 1);
  EXPECT_EQ(blocks.num_cached(), 0) << "the second table uses them";
  BlockTable third = blocks.Take({}, 1);
  EXPECT_EQ(blocks.num_available(), 0);
  EXPECT_NE(third.blocks[0], second.blocks[0]);
  EXPECT_NE(third.blocks[0], second.blocks[1]);
}

TEST(BlockManagerTest, EqualContentsInTwoBlocksBecomeOne) {
  BlockManager blocks(8, kBlockSize);
  BlockTable first = blocks.Take({}, 2);
  BlockTable second = blocks.Take({}, 2);
  blocks.Publish(Tokens(8), 8, 0, &first);
  blocks.Publish(Tokens(8), 8, 0, &second);
  blocks.Release(&first);
  EXPECT_EQ(blocks.num_free(), 6);
  blocks.Release(&second);
  EXPECT_EQ(blocks.num_free(), 6);
  EXPECT_EQ(blocks.num_cached(), 2);
  blocks.CheckInvariants({});
}

// ---------------------------------------------------------------- packing

TEST(BlockManagerTest, PacksInPlaceWhatNobodyElseNeeds) {
  BlockManager blocks(10, kBlockSize);
  BlockTable table = blocks.Take({}, 6);
  const std::vector<BlockId> before = table.blocks;
  EXPECT_EQ(blocks.NumTakenByPack(table, 0, 4), 0);
  blocks.Pack(0, 4, &table);
  EXPECT_TRUE(std::equal(table.blocks.begin(), table.blocks.end(), before.begin()));
  EXPECT_EQ(table.blocks.size(), 4U);
  EXPECT_TRUE(table.packed);
  EXPECT_EQ(blocks.num_available(), 4) << "the others are read until the plan is made";
  EXPECT_EQ(blocks.num_retiring(), 2);
  blocks.Retire();
  EXPECT_EQ(blocks.num_available(), 6);
  blocks.Publish(Tokens(16), 16, 0, &table);
  EXPECT_TRUE(blocks.Match(Tokens(17), 0).blocks.empty()) << "a packed table is not published";
  const BlockTable* tables[] = {&table};
  blocks.CheckInvariants(tables);
}

TEST(BlockManagerTest, PacksSharedBlocksIntoNewOnesAndLeavesThePinned) {
  BlockManager blocks(10, kBlockSize);
  BlockTable first = blocks.Take({}, 4);
  blocks.Publish(Tokens(16), 16, 0, &first);
  BlockTable second = blocks.Take(blocks.Match(Tokens(16), 0), 4);  // Shares three.
  const std::vector<BlockId> before = first.blocks;
  EXPECT_EQ(blocks.NumTakenByPack(first, 1, 3), 2);
  blocks.Pack(1, 3, &first);
  EXPECT_EQ(first.blocks[0], before[0]);
  EXPECT_EQ(first.num_published, 1);
  for (size_t i = 1; i < 3; ++i) {
    EXPECT_EQ(std::ranges::count(before, first.blocks[i]), 0);
    EXPECT_EQ(std::ranges::count(second.blocks, first.blocks[i]), 0);
  }
  blocks.Retire();
  const BlockTable* tables[] = {&first, &second};
  blocks.CheckInvariants(tables);
  EXPECT_EQ(blocks.num_cached(), 1) << "the last block, which nobody else has";
  EXPECT_EQ(blocks.Match(Tokens(17), 0).blocks.size(), 4U) << "all is still known";
}

TEST(BlockManagerTest, PackForgetsWhatTheCacheAloneNeedsWhenNoBlockIsLeft) {
  for (int64_t num_spare = 0; num_spare <= 5; ++num_spare) {
    BlockManager blocks(4 + num_spare, kBlockSize);
    BlockTable table = blocks.Take({}, 4);
    const std::vector<BlockId> before = table.blocks;
    blocks.Publish(Tokens(16), 16, 0, &table);
    EXPECT_EQ(blocks.NumTakenByPack(table, 0, 4), 0) << "none is needed";
    blocks.Pack(0, 4, &table);
    blocks.Retire();
    const BlockTable* tables[] = {&table};
    blocks.CheckInvariants(tables);
    // What is known still is what no write reaches: the beginning.
    const std::vector<BlockId> known = blocks.Match(Tokens(17), 0).blocks;
    EXPECT_EQ(static_cast<int64_t>(known.size()), std::min<int64_t>(num_spare, 4));
    EXPECT_TRUE(std::equal(known.begin(), known.end(), before.begin()));
    for (const BlockId block : known) EXPECT_EQ(std::ranges::count(table.blocks, block), 0);
  }
}

TEST(BlockManagerDeathTest, PackNeedsBlocksForSharedOnes) {
  BlockManager blocks(4, kBlockSize);
  BlockTable first = blocks.Take({}, 3);
  blocks.Publish(Tokens(12), 12, 0, &first);
  BlockTable second = blocks.Take(blocks.Match(Tokens(12), 0), 3);
  EXPECT_EQ(blocks.num_available(), 0);
  EXPECT_DEATH(blocks.Pack(0, 2, &first), "Check failed");
  EXPECT_DEATH(blocks.Pack(0, 4, &first), "Check failed") << "more blocks than there are";
}

// Random tables over few distinct token sequences. Every block remembers the history that its table
// wrote to it, so a match is checked against what the block really holds.
void RunRandomTables(BlockHash hash, int seed) {
  std::mt19937 rng(seed);
  const int num_blocks = 24;
  BlockManager blocks(num_blocks, kBlockSize, hash);
  struct Owner {
    std::vector<TokenId> tokens;
    uint64_t salt = 0;
    BlockTable table;
  };
  using History = std::pair<uint64_t, std::vector<TokenId>>;
  std::vector<std::unique_ptr<Owner>> owners;
  std::map<BlockId, History> content;
  int64_t num_hits = 0;
  int64_t num_packed = 0;
  // What a packed block holds is its table's alone.
  const auto pack = [&](Owner* owner) {
    BlockTable& table = owner->table;
    const std::vector<BlockId> source = table.blocks;
    const auto num_source = static_cast<int64_t>(source.size());
    const int64_t num_target = 1 + static_cast<int64_t>(rng() % source.size());
    const int64_t num_pinned = std::min<int64_t>(num_target, static_cast<int64_t>(rng() % 3));
    const int64_t num_available = blocks.num_available();
    const int64_t num_taken = blocks.NumTakenByPack(table, num_pinned, num_target);
    if (num_taken > num_available) return;
    blocks.Pack(num_pinned, num_target, &table);
    ASSERT_LE(blocks.num_available(), num_available - num_taken);
    ASSERT_EQ(static_cast<int64_t>(table.blocks.size()), num_target);
    for (int64_t i = 0; i < num_target; ++i) {
      const BlockId block = table.blocks[i];
      if (i < num_pinned) {
        ASSERT_EQ(block, source[i]);
        continue;
      }
      ASSERT_EQ(std::ranges::count(table.blocks, block), 1);
      const auto in_source = std::ranges::find(source, block) - source.begin();
      ASSERT_TRUE(in_source == i || in_source == num_source) << "a block stays in its place";
      for (const auto& other : owners) {
        ASSERT_TRUE(other.get() == owner || std::ranges::count(other->table.blocks, block) == 0);
      }
      content[block] = {~uint64_t{0}, {static_cast<TokenId>(++num_packed)}};
    }
    // What it was packed from is nobody's while the plan is made.
    if (blocks.num_available() > 0) {
      BlockTable next = blocks.Take({}, blocks.num_available());
      for (const BlockId block : next.blocks) ASSERT_EQ(std::ranges::count(source, block), 0);
      for (const BlockId block : next.blocks) content.erase(block);
      blocks.Release(&next);
    }
    blocks.Retire();
  };
  for (int op = 0; op < 5000; ++op) {
    if (rng() % 3 != 0 || owners.empty()) {
      auto owner = std::make_unique<Owner>();
      owner->salt = rng() % 8 == 0 ? 1 : 0;
      for (unsigned i = 0, n = 1 + rng() % 30; i < n; ++i) owner->tokens.push_back(rng() % 10 == 0);
      const PrefixMatch match = blocks.Match(owner->tokens, owner->salt);
      for (size_t i = 0; i < match.blocks.size(); ++i) {
        const std::span<const TokenId> all(owner->tokens);
        const auto prefix = all.first((i + 1) * kBlockSize);
        ASSERT_EQ(content.at(match.blocks[i]),
                  History(owner->salt, {prefix.begin(), prefix.end()}));
        ++num_hits;
      }
      const int64_t needed = blocks.NumBlocksFor(static_cast<int64_t>(owner->tokens.size()));
      if (blocks.NumTaken(match, needed) > blocks.num_available()) continue;
      owner->table = blocks.Take(match, needed);
      const int64_t known = rng() % (owner->tokens.size() + 1);
      for (size_t i = match.blocks.size(); i < owner->table.blocks.size(); ++i) {
        const size_t end = std::min(owner->tokens.size(), (i + 1) * kBlockSize);
        content[owner->table.blocks[i]] = {owner->salt,
                                           {owner->tokens.begin(), owner->tokens.begin() + end}};
      }
      blocks.Publish(owner->tokens, known, owner->salt, &owner->table);
      owners.push_back(std::move(owner));
    } else if (rng() % 3 == 0) {
      pack(owners[rng() % owners.size()].get());
      if (::testing::Test::HasFatalFailure()) return;
    } else {
      const size_t index = rng() % owners.size();
      Owner& owner = *owners[index];
      if (rng() % 2 == 0) {
        blocks.Publish(owner.tokens, static_cast<int64_t>(owner.tokens.size()), owner.salt,
                       &owner.table);
      }
      blocks.Release(&owner.table);
      owners.erase(owners.begin() + index);
    }
    std::vector<const BlockTable*> tables;
    for (const auto& owner : owners) tables.push_back(&owner->table);
    blocks.CheckInvariants(tables);
  }
  for (const auto& owner : owners) blocks.Release(&owner->table);
  blocks.CheckInvariants({});
  EXPECT_EQ(blocks.num_available(), num_blocks);
  EXPECT_GT(num_hits, 500);
  EXPECT_GT(num_packed, 200);
}

TEST(BlockManagerTest, KeepsItsInvariantsUnderRandomTables) {
  for (int seed = 0; seed < 5; ++seed) RunRandomTables(&Xxh3BlockHash, seed);
}

TEST(BlockManagerTest, AHashCollisionNeverGivesWrongContent) {
  for (int seed = 0; seed < 5; ++seed) {
    RunRandomTables(&SameForAll, seed);
    RunRandomTables(&OneBit, seed);
  }
}

}  // namespace
}  // namespace zipage
