#include "scheduler/block_manager.h"

#include <glog/logging.h>

#include <algorithm>
#include <utility>

namespace zipage {

BlockManager::BlockManager(int64_t num_blocks, int block_size, BlockHash hash)
    : block_size_(block_size), ref_counts_(num_blocks), cache_(num_blocks, hash) {
  CHECK_GT(block_size, 0);
  free_.reserve(num_blocks);
  for (int64_t block = num_blocks; block-- > 0;) free_.push_back(static_cast<BlockId>(block));
}

PrefixMatch BlockManager::Match(std::span<const TokenId> tokens, uint64_t salt) const {
  PrefixMatch match;
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  for (int64_t end = block_size_; end < num_tokens; end += block_size_) {
    const std::optional<ContentId> content =
        cache_.Find(match.content, salt, tokens.subspan(end - block_size_, block_size_));
    if (!content.has_value()) break;
    match.content = content;
    match.blocks.push_back(cache_.BlockOf(*content));
    if (cache_.IsIdle(match.blocks.back())) ++match.num_idle;
  }
  return match;
}

BlockTable BlockManager::Take(const PrefixMatch& match, int64_t num_blocks) {
  CHECK_LE(NumTaken(match, num_blocks), num_available());
  const auto num_matched = static_cast<int64_t>(match.blocks.size());
  CHECK_LE(num_matched, num_blocks);
  BlockTable table;
  table.blocks.reserve(num_blocks);
  table.blocks = match.blocks;
  table.num_published = num_matched;
  table.content = match.content;
  // All matched blocks are in use before the first is allocated, which might reclaim one of them.
  for (const BlockId block : match.blocks) {
    if (ref_counts_[block]++ == 0) cache_.Use(block);
  }
  while (static_cast<int64_t>(table.blocks.size()) < num_blocks) Append(&table);
  return table;
}

BlockId BlockManager::Append(BlockTable* table) {
  const BlockId block = Allocate();
  table->blocks.push_back(block);
  return block;
}

BlockId BlockManager::Allocate() {
  CHECK_GT(num_available(), 0) << "of " << num_blocks() << " blocks";
  BlockId block = 0;
  if (free_.empty()) {
    block = cache_.Reclaim();
  } else {
    block = free_.back();
    free_.pop_back();
  }
  CHECK_EQ(ref_counts_[block], 0) << "block " << block << " is in use";
  ref_counts_[block] = 1;
  return block;
}

void BlockManager::Publish(std::span<const TokenId> tokens, int64_t num_tokens, uint64_t salt,
                           BlockTable* table) {
  if (table->packed) return;
  CHECK_LE(num_tokens, static_cast<int64_t>(tokens.size()));
  CHECK_LE(num_tokens, static_cast<int64_t>(table->blocks.size()) * block_size_);
  while ((table->num_published + 1) * block_size_ <= num_tokens) {
    const int64_t index = table->num_published++;
    table->content =
        cache_.Hold(table->content, salt, tokens.subspan(index * block_size_, block_size_),
                    table->blocks[index]);
  }
}

void BlockManager::Release(BlockTable* table) {
  // Last first: a child's block becomes idle before its parent's, and is reclaimed before it.
  for (auto it = table->blocks.rbegin(); it != table->blocks.rend(); ++it) DropReference(*it);
  *table = BlockTable();
}

void BlockManager::DropReference(BlockId block) {
  CHECK_GT(ref_counts_[block], 0) << "block " << block << " released twice";
  if (--ref_counts_[block] > 0) return;
  if (!cache_.Holds(block) || !cache_.KeepIdle(block)) free_.push_back(block);
}

void BlockManager::Retire() {
  for (const BlockId block : retiring_) DropReference(block);
  retiring_.clear();
}

int64_t BlockManager::NumTakenByPack(const BlockTable& table, int64_t num_pinned,
                                     int64_t num_blocks) const {
  return std::count_if(table.blocks.begin() + num_pinned, table.blocks.begin() + num_blocks,
                       [this](BlockId block) { return ref_counts_[block] > 1; });
}

void BlockManager::Pack(int64_t num_pinned, int64_t num_blocks, BlockTable* table) {
  const std::vector<BlockId>& source = table->blocks;
  CHECK(num_pinned <= num_blocks && num_blocks <= static_cast<int64_t>(source.size()));
  CHECK_LE(NumTakenByPack(*table, num_pinned, num_blocks), num_available());
  // All new blocks are taken before any is given back, so that none of them is a source.
  std::vector<BlockId> target(source.begin(), source.begin() + num_blocks);
  std::vector<int64_t> cached;  // Indices of blocks that the prefix cache alone needs.
  for (int64_t i = num_pinned; i < num_blocks; ++i) {
    if (ref_counts_[source[i]] > 1) {
      target[i] = Allocate();
    } else if (cache_.Holds(source[i])) {
      cached.push_back(i);
    }
  }
  auto next = cached.begin();
  for (; next != cached.end() && num_available() > 0; ++next) target[*next] = Allocate();
  if (next != cached.end()) {
    // No block is idle now, so nobody but later blocks of this table can hold a child of theirs.
    for (auto i = static_cast<int64_t>(source.size()); i-- > *next;) {
      if (ref_counts_[source[i]] == 1 && cache_.Holds(source[i])) cache_.Forget(source[i]);
    }
  }
  for (auto i = static_cast<int64_t>(source.size()); i-- > num_pinned;) {
    if (i >= num_blocks || target[i] != source[i]) retiring_.push_back(source[i]);
  }
  table->blocks = std::move(target);
  table->num_published = std::min(table->num_published, num_pinned);
  table->content.reset();
  if (table->num_published > 0) {
    table->content = cache_.ContentOf(table->blocks[table->num_published - 1]);
  }
  table->packed = true;
}

void BlockManager::CheckInvariants(std::span<const BlockTable* const> tables) const {
  cache_.CheckInvariants();
  CHECK(retiring_.empty());
  std::vector<int32_t> num_tables(ref_counts_.size());
  for (const BlockTable* table : tables) {
    CHECK_LE(table->num_published, static_cast<int64_t>(table->blocks.size()));
    CHECK_EQ(table->content.has_value(), table->num_published > 0);
    for (size_t i = 0; i < table->blocks.size(); ++i) {
      const BlockId block = table->blocks[i];
      ++num_tables[block];
      const bool published = static_cast<int64_t>(i) < table->num_published;
      CHECK_EQ(cache_.Holds(block), published) << "block " << block;
      CHECK(published || ref_counts_[block] == 1) << "block " << block << " is shared, not full";
    }
  }
  std::vector<bool> is_free(ref_counts_.size());
  for (const BlockId block : free_) {
    CHECK(!is_free[block]) << "block " << block << " is free twice";
    CHECK(!cache_.Holds(block)) << "block " << block << " is free and cached";
    is_free[block] = true;
  }
  int64_t num_cached = 0;
  for (size_t block = 0; block < ref_counts_.size(); ++block) {
    CHECK_EQ(ref_counts_[block], num_tables[block]) << "references of block " << block;
    const bool idle = cache_.IsIdle(static_cast<BlockId>(block));
    const bool used = ref_counts_[block] > 0;
    CHECK_EQ((is_free[block] ? 1 : 0) + (idle ? 1 : 0) + (used ? 1 : 0), 1) << "block " << block;
    if (idle) ++num_cached;
  }
  CHECK_EQ(num_cached, this->num_cached());
}

}  // namespace zipage
