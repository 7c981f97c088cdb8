#pragma once
// Owns every KV block: which are free, cached (idle, but their content may be asked for again) or
// used, and by how many block tables. Scheduler thread only. Invariants (CheckInvariants; tests
// call it after every step):
//   1. a block is in exactly one of {free, cached, used};
//   2. its reference count is the number of block tables that name it;
//   3. a block that several tables name is full once the steps planned so far are done, and nothing
//      writes to it any more.
// A table is a value: whoever holds one hands it to Append, Publish and Release, and to nothing
// else.

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "proto/messages.h"
#include "scheduler/prefix_cache.h"

namespace zipage {

// The blocks of one sequence, by position: position p is in blocks[p / block_size].
struct BlockTable {
  std::vector<BlockId> blocks;
  int64_t num_published = 0;         // Leading full blocks whose content the prefix cache knows.
  std::optional<ContentId> content;  // Of the last of them.
  bool packed = false;               // Compressed: what follows them is never published.
};

// Leading blocks of a token sequence that exist already. Valid until the block manager changes.
struct PrefixMatch {
  std::vector<BlockId> blocks;
  std::optional<ContentId> content;  // Of the last of them.
  int64_t num_idle = 0;              // Blocks among them that have no user now.
};

class BlockManager {
 public:
  BlockManager(int64_t num_blocks, int block_size, BlockHash hash = &Xxh3BlockHash);

  int block_size() const { return block_size_; }
  int64_t num_blocks() const { return static_cast<int64_t>(ref_counts_.size()); }
  int64_t num_free() const { return static_cast<int64_t>(free_.size()); }
  int64_t num_cached() const { return cache_.num_idle(); }
  int64_t num_used() const { return num_blocks() - num_available(); }
  // Used blocks that Retire may make available.
  int64_t num_retiring() const { return static_cast<int64_t>(retiring_.size()); }
  // Blocks that can be handed out: free ones, then cached ones, least recently used first.
  int64_t num_available() const { return num_free() + num_cached(); }
  // Blocks that hold `num_tokens` positions.
  int64_t NumBlocksFor(int64_t num_tokens) const {
    return (num_tokens + block_size_ - 1) / block_size_;
  }

  // The longest run of leading full blocks of `tokens` that exists under `salt`; it leaves at least
  // one token to be computed. Tokens under different salts share nothing.
  PrefixMatch Match(std::span<const TokenId> tokens, uint64_t salt) const;
  // How many available blocks a table of `num_blocks` blocks takes if it begins with `match`.
  int64_t NumTaken(const PrefixMatch& match, int64_t num_blocks) const {
    return num_blocks - static_cast<int64_t>(match.blocks.size()) + match.num_idle;
  }
  // A table of `num_blocks` blocks that begins with `match`. REQUIRES: NumTaken() <=
  // num_available().
  BlockTable Take(const PrefixMatch& match, int64_t num_blocks);
  // Adds one block at the end of the table and returns it. REQUIRES: num_available() > 0.
  BlockId Append(BlockTable* table);

  // Lets later matches find the table's full blocks among its first `num_tokens` positions, which
  // hold `tokens[0..num_tokens)`, written by a step that is planned already. Nothing for a packed
  // table.
  void Publish(std::span<const TokenId> tokens, int64_t num_tokens, uint64_t salt,
               BlockTable* table);

  // How many available blocks Pack takes at least: blocks of the new table that others name too.
  int64_t NumTakenByPack(const BlockTable& table, int64_t num_pinned, int64_t num_blocks) const;
  // Makes the table one of `num_blocks` blocks that a compression may write, but for the leading
  // `num_pinned`, which stay as they are: blocks that only this table needs keep their place, for
  // those that others or the prefix cache need there are new ones. What it named before and names
  // no more stays used until Retire: the compression still reads it. A block that only the prefix
  // cache needs is forgotten there if no block is available. REQUIRES: num_pinned <= num_blocks <=
  // blocks of the table, NumTakenByPack() <= num_available().
  void Pack(int64_t num_pinned, int64_t num_blocks, BlockTable* table);

  // Drops the references that Pack left. To be called between plans: blocks that a plan's
  // compressions read are given to nobody in that plan.
  void Retire();

  // Drops one reference of each block and empties the table. REQUIRES: every block is used.
  void Release(BlockTable* table);

  // `tables`: every table there is. O(blocks + tables). REQUIRES: nothing retires.
  void CheckInvariants(std::span<const BlockTable* const> tables) const;

 private:
  BlockId Allocate();
  void DropReference(BlockId block);

  int block_size_;
  std::vector<int32_t> ref_counts_;
  std::vector<BlockId> free_;
  std::vector<BlockId> retiring_;  // One entry for each reference.
  PrefixCache cache_;
};

}  // namespace zipage
