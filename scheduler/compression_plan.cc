#include "scheduler/compression_plan.h"

#include <algorithm>

namespace zipage {

int64_t CompressionPlan::FirstPoint(int64_t num_prompt_tokens,
                                    const RequestOptions& request) const {
  const int64_t prompt_blocks = options_.compress_prefill ? 0 : NumBlocksFor(num_prompt_tokens);
  return std::max(Budget(request) + 1, prompt_blocks) * block_size_;
}

bool CompressionPlan::MayCompress(const Sequence& sequence) const {
  // The last token of a sequence is never computed.
  return enabled() && sequence.max_length - 1 > FirstPoint(sequence);
}

bool CompressionPlan::IsDue(const Sequence& sequence) const {
  if (!enabled()) return false;
  const auto num_blocks = static_cast<int64_t>(sequence.block_table.blocks.size());
  return sequence.num_slots == num_blocks * block_size_ && num_blocks > Budget(sequence) &&
         (options_.compress_prefill || sequence.num_computed >= sequence.num_prompt_tokens);
}

bool CompressionPlan::RunsWithoutQuerySlot(const Sequence& sequence) const {
  return RunsWithoutQuerySlot(sequence, sequence.num_computed + 1) &&
         sequence.num_compressions == 0;
}

bool CompressionPlan::RunsWithoutQuerySlot(const Sequence& sequence, int64_t num_positions) const {
  return !MayCompress(sequence) || num_positions <= FirstPoint(sequence) - options_.window;
}

int64_t CompressionPlan::MaxBlocks(const Sequence& sequence) const {
  if (!MayCompress(sequence)) return NumBlocksFor(sequence.max_length - 1);
  if (sequence.num_compressions > 0) return Budget(sequence) + 1;
  return FirstPoint(sequence) / block_size_;
}

int64_t CompressionPlan::NumPinned(const Sequence& sequence) const {
  if (!options_.pin_prompt) return 0;
  const int64_t kept = Budget(sequence) * block_size_;
  return std::min({sequence.num_prompt_tokens, kept / 2, kept - options_.window});
}

}  // namespace zipage
