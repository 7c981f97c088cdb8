#include "scheduler/prefix_cache.h"

#include <glog/logging.h>
#include <xxhash.h>

#include <algorithm>

namespace zipage {

uint64_t Xxh3BlockHash(uint64_t parent, std::span<const TokenId> tokens) {
  return XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), parent);
}

PrefixCache::PrefixCache(int64_t num_blocks, BlockHash hash)
    : hash_(hash), contents_(num_blocks), blocks_(num_blocks) {
  // A content has a block that holds it, and a block holds one, so there are enough ids.
  free_contents_.reserve(num_blocks);
  for (int64_t id = num_blocks; id-- > 0;) free_contents_.push_back(static_cast<ContentId>(id));
}

uint64_t PrefixCache::HashOf(std::optional<ContentId> parent, uint64_t salt,
                             std::span<const TokenId> tokens) const {
  return hash_(parent.has_value() ? contents_[*parent].hash : salt, tokens);
}

std::optional<ContentId> PrefixCache::FindHashed(uint64_t hash, std::optional<ContentId> parent,
                                                 uint64_t salt,
                                                 std::span<const TokenId> tokens) const {
  const auto [begin, end] = by_hash_.equal_range(hash);
  for (auto it = begin; it != end; ++it) {
    const Content& content = contents_[it->second];
    if (content.parent == parent && content.salt == salt &&
        std::ranges::equal(content.tokens, tokens)) {
      return it->second;
    }
  }
  return std::nullopt;
}

std::optional<ContentId> PrefixCache::Find(std::optional<ContentId> parent, uint64_t salt,
                                           std::span<const TokenId> tokens) const {
  return FindHashed(HashOf(parent, salt, tokens), parent, salt, tokens);
}

BlockId PrefixCache::BlockOf(ContentId id) const {
  const Content& content = contents_[id];
  CHECK(!content.holders.empty()) << "content " << id << " was forgotten";
  const BlockId first = content.holders[0];
  return first == content.idle_holder && content.holders.size() > 1 ? content.holders[1] : first;
}

ContentId PrefixCache::Hold(std::optional<ContentId> parent, uint64_t salt,
                            std::span<const TokenId> tokens, BlockId block) {
  CHECK(!Holds(block)) << "block " << block << " holds a content already";
  const uint64_t hash = HashOf(parent, salt, tokens);
  std::optional<ContentId> id = FindHashed(hash, parent, salt, tokens);
  if (!id.has_value()) {
    id = free_contents_.back();
    free_contents_.pop_back();
    Content& content = contents_[*id];
    content.hash = hash;
    content.salt = salt;
    content.parent = parent;
    content.tokens.assign(tokens.begin(), tokens.end());
    if (parent.has_value()) ++contents_[*parent].num_children;
    by_hash_.emplace(hash, *id);
  }
  std::vector<BlockId>& holders = contents_[*id].holders;
  blocks_[block].content = id;
  blocks_[block].holder_index = static_cast<int32_t>(holders.size());
  holders.push_back(block);
  return *id;
}

void PrefixCache::Use(BlockId block) {
  CHECK(IsIdle(block)) << "block " << block;
  idle_.erase(*blocks_[block].idle);
  blocks_[block].idle.reset();
  contents_[*blocks_[block].content].idle_holder.reset();
}

bool PrefixCache::KeepIdle(BlockId block) {
  CHECK(Holds(block) && !IsIdle(block)) << "block " << block;
  Content& content = contents_[*blocks_[block].content];
  if (content.holders.size() > 1) {
    // The idle one counts as used now: blocks of the content's children were until just before.
    if (content.idle_holder.has_value()) {
      idle_.splice(idle_.end(), idle_, *blocks_[*content.idle_holder].idle);
    }
    Forget(block);
    return false;
  }
  content.idle_holder = block;
  blocks_[block].idle = idle_.insert(idle_.end(), block);
  return true;
}

BlockId PrefixCache::Reclaim() {
  CHECK(!idle_.empty());
  const BlockId block = idle_.front();
  Use(block);
  Forget(block);
  return block;
}

void PrefixCache::Forget(BlockId block) {
  const ContentId id = *blocks_[block].content;
  Content& content = contents_[id];
  const int32_t index = blocks_[block].holder_index;
  content.holders[index] = content.holders.back();
  blocks_[content.holders[index]].holder_index = index;
  content.holders.pop_back();
  blocks_[block].content.reset();
  if (!content.holders.empty()) return;

  CHECK_EQ(content.num_children, 0) << "content " << id << " is forgotten before its children";
  if (content.parent.has_value()) --contents_[*content.parent].num_children;
  const auto [begin, end] = by_hash_.equal_range(content.hash);
  by_hash_.erase(std::find_if(begin, end, [id](const auto& entry) { return entry.second == id; }));
  free_contents_.push_back(id);
}

void PrefixCache::CheckInvariants() const {
  std::vector<int32_t> num_children(contents_.size());
  size_t num_live = 0;
  for (size_t id = 0; id < contents_.size(); ++id) {
    const Content& content = contents_[id];
    if (content.holders.empty()) continue;
    ++num_live;
    size_t num_idle = 0;
    for (size_t i = 0; i < content.holders.size(); ++i) {
      const Block& block = blocks_[content.holders[i]];
      CHECK_EQ(block.content.value(), static_cast<ContentId>(id));
      CHECK_EQ(block.holder_index, static_cast<int32_t>(i));
      if (block.idle.has_value()) {
        ++num_idle;
        CHECK_EQ(content.idle_holder.value(), content.holders[i]);
      }
    }
    CHECK_EQ(num_idle, content.idle_holder.has_value() ? 1U : 0U) << "content " << id;
    if (content.parent.has_value()) {
      CHECK(!contents_[*content.parent].holders.empty()) << "parent of content " << id;
      ++num_children[*content.parent];
    }
  }
  CHECK_EQ(by_hash_.size(), num_live);
  CHECK_EQ(free_contents_.size() + num_live, contents_.size());
  for (size_t id = 0; id < contents_.size(); ++id) {
    if (!contents_[id].holders.empty()) CHECK_EQ(contents_[id].num_children, num_children[id]);
  }
  std::vector<bool> seen(contents_.size());
  for (const BlockId block : idle_) {
    const ContentId id = blocks_[block].content.value();
    CHECK(*blocks_[block].idle.value() == block);
    const std::optional<ContentId> parent = contents_[id].parent;
    CHECK(!parent.has_value() || !seen[*parent] || contents_[*parent].holders.size() > 1)
        << "block " << block << " outlives its parent";
    seen[id] = true;
  }
}

}  // namespace zipage
