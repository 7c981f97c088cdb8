#pragma once
// Knows the content of full KV blocks: a trie of contents (salt, then `block_size` tokens a level)
// and the blocks that hold each of them. Decides which idle block (one without users) is reclaimed
// first. Reference counts are BlockManager's, its only user. Scheduler thread only.
//
// A content is found by a chain of XXH3-64 (parent's hash, tokens) and is the one asked for only if
// its tokens and its parent (at the root: its salt) are equal, so a hash collision costs a
// comparison and never gives a wrong block. Invariants (CheckInvariants):
//   1. a content lives exactly as long as a block holds it, and at most one of its blocks is idle;
//   2. a content's parent lives; idle blocks are ordered so that a child's comes before its
//      parent's, unless a block in use holds the parent too.
//      This holds because tables hold whole chains from the root, and release them last block
//      first.

#include <cstdint>
#include <list>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "proto/messages.h"

namespace zipage {

// A content known to the cache; reused once it is forgotten.
using ContentId = int32_t;

// Hash of a block's tokens, chained: `parent` is the hash of the block before, the salt for the
// first.
using BlockHash = uint64_t (*)(uint64_t parent, std::span<const TokenId> tokens);
uint64_t Xxh3BlockHash(uint64_t parent, std::span<const TokenId> tokens);

class PrefixCache {
 public:
  PrefixCache(int64_t num_blocks, BlockHash hash);

  // The content `tokens` (one full block) after `parent`; without a parent, at the start of a
  // sequence of `salt`. Empty if no block holds it.
  std::optional<ContentId> Find(std::optional<ContentId> parent, uint64_t salt,
                                std::span<const TokenId> tokens) const;
  // A block that holds the content; one in use if there is one.
  BlockId BlockOf(ContentId content) const;

  // `block` now holds this content, which need not be new. REQUIRES: the block is in use and holds
  // none.
  ContentId Hold(std::optional<ContentId> parent, uint64_t salt, std::span<const TokenId> tokens,
                 BlockId block);
  bool Holds(BlockId block) const { return blocks_[block].content.has_value(); }
  bool IsIdle(BlockId block) const { return blocks_[block].idle.has_value(); }
  // REQUIRES: Holds(block).
  ContentId ContentOf(BlockId block) const { return *blocks_[block].content; }

  // The block got its first user. REQUIRES: IsIdle(block).
  void Use(BlockId block);
  // The block, which holds a content, lost its last user. True if it is kept, idle, as the most
  // recently used; false if another block holds the same content: this one is forgotten.
  bool KeepIdle(BlockId block);
  // Forgets the least recently used idle block and returns it. REQUIRES: num_idle() > 0.
  BlockId Reclaim();
  // The block, which is in use, no longer holds its content; the last one to do so ends the
  // content. REQUIRES: another block holds the content, or no block holds a child of it.
  void Forget(BlockId block);

  int64_t num_idle() const { return static_cast<int64_t>(idle_.size()); }

  void CheckInvariants() const;

 private:
  struct Content {
    uint64_t hash = 0;
    uint64_t salt = 0;
    std::optional<ContentId> parent;
    std::vector<TokenId> tokens;
    std::vector<BlockId> holders;  // Empty: the id is free.
    std::optional<BlockId> idle_holder;
    int32_t num_children = 0;
  };
  struct Block {
    std::optional<ContentId> content;
    int32_t holder_index = 0;                          // In the content's holders.
    std::optional<std::list<BlockId>::iterator> idle;  // In idle_.
  };

  uint64_t HashOf(std::optional<ContentId> parent, uint64_t salt,
                  std::span<const TokenId> tokens) const;
  std::optional<ContentId> FindHashed(uint64_t hash, std::optional<ContentId> parent, uint64_t salt,
                                      std::span<const TokenId> tokens) const;
  BlockHash hash_;
  std::vector<Content> contents_;
  std::vector<ContentId> free_contents_;
  std::unordered_multimap<uint64_t, ContentId> by_hash_;
  std::vector<Block> blocks_;
  std::list<BlockId> idle_;  // Least recently used first.
};

}  // namespace zipage
