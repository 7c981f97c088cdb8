#pragma once
// Notices that a sequence has begun to repeat itself: the last `size` tokens of its output have
// occurred in it `limit` times. Occurrences may overlap, so a loop of any period is found, one
// shorter than the n-gram too. Scheduler thread only.
//
// Example, size 2 and limit 3: in 1 2 5 1 2 1 2 the n-gram 1 2 occurs for the third time at the
// end; in 7 7 7 7 the n-gram 7 7 does.
//
// N-grams are told apart by a 64-bit hash of their tokens: among a million of them, two different
// ones pass for the same with a probability below 1e-7. Takes about 25 bytes per token of output.

#include <cstddef>
#include <cstdint>
#include <span>

#include "absl/container/flat_hash_map.h"
#include "proto/messages.h"

namespace zipage {

class NgramGuard {
 public:
  // REQUIRES: size >= 1, limit >= 2.
  NgramGuard(int size, int limit);

  // Counts the n-grams that end behind what was counted before. True if the last one has occurred
  // `limit` times by now, and at every further token of its loop. `output` is all output of the
  // sequence. REQUIRES: it begins with the output of the last call.
  bool Add(std::span<const TokenId> output);

 private:
  size_t size_;
  uint32_t limit_;
  size_t num_seen_ = 0;                             // Tokens of output.
  absl::flat_hash_map<uint64_t, uint32_t> num_of_;  // Occurrences by hash.
};

}  // namespace zipage
