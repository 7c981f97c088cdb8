#pragma once
// Who is compressed, when, and what of it is kept whatever its score (DESIGN 4, 5). Rules over a
// sequence's own numbers, without state: a sequence is compressed at the same points whatever runs
// beside it and however often it is preempted (unless its budget is adaptive, which is the
// scheduler's business).
//
// With b the block size, N the budget in blocks and P the prompt's length: a sequence is due when
// its last block is full, its table has N + 1 blocks or more, and the prompt is computed (with
// compress_prefill before that too). So first at max(N + 1, ceil(P / b)) blocks, then each time N +
// 1 blocks are full again.

#include <cstdint>

#include "scheduler/request.h"

namespace zipage {

struct CompressionOptions {
  // Full blocks a sequence keeps; a request may ask for another number. 0: the full cache.
  int max_cache_blocks = 0;
  int window = 0;           // Newest slots, always kept; at most a block.
  bool pin_prompt = false;  // Keep the prompt, up to half the budget.
  bool compress_prefill = false;
  bool async = false;  // A compressing sequence sits out while the others go on.
};

class CompressionPlan {
 public:
  CompressionPlan(const CompressionOptions& options, int block_size)
      : options_(options), block_size_(block_size) {}

  bool enabled() const { return options_.max_cache_blocks > 0; }
  bool async() const { return options_.async; }
  // N of a request's sequences. REQUIRES: enabled().
  int64_t Budget(const RequestOptions& request) const {
    return request.max_cache_blocks.value_or(options_.max_cache_blocks);
  }
  int64_t Budget(const Sequence& sequence) const { return Budget(sequence.request->options); }

  // Slots at which a sequence is compressed for the first time, if it gets that far.
  int64_t FirstPoint(int64_t num_prompt_tokens, const RequestOptions& request) const;
  int64_t FirstPoint(const Sequence& sequence) const {
    return FirstPoint(sequence.num_prompt_tokens, sequence.request->options);
  }
  // Whether it is compressed before it ends by length, unless something else ends it.
  bool MayCompress(const Sequence& sequence) const;
  // Whether it must be compressed before it computes another position.
  bool IsDue(const Sequence& sequence) const;
  // Whether it may run its next position without a query slot: its query window has not begun.
  bool RunsWithoutQuerySlot(const Sequence& sequence) const;
  // The same for computing its first `num_positions` positions in one go.
  bool RunsWithoutQuerySlot(const Sequence& sequence, int64_t num_positions) const;

  // Most blocks its table will have from now on.
  int64_t MaxBlocks(const Sequence& sequence) const;
  // Leading slots that its next compression keeps whatever their score.
  int64_t NumPinned(const Sequence& sequence) const;

 private:
  int64_t NumBlocksFor(int64_t slots) const { return (slots + block_size_ - 1) / block_size_; }

  CompressionOptions options_;
  int block_size_;
};

}  // namespace zipage
