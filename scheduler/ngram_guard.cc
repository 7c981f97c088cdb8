#include "scheduler/ngram_guard.h"

#include <glog/logging.h>
#include <xxhash.h>

namespace zipage {

NgramGuard::NgramGuard(int size, int limit)
    : size_(static_cast<size_t>(size)), limit_(static_cast<uint32_t>(limit)) {
  CHECK_GE(size, 1);
  CHECK_GE(limit, 2) << "every n-gram occurs once";
}

bool NgramGuard::Add(std::span<const TokenId> output) {
  CHECK_GE(output.size(), num_seen_) << "the output has become shorter";
  bool repeats = false;
  while (num_seen_ < output.size()) {
    ++num_seen_;
    if (num_seen_ < size_) continue;
    const std::span<const TokenId> ngram = output.subspan(num_seen_ - size_, size_);
    repeats = ++num_of_[XXH3_64bits(ngram.data(), ngram.size_bytes())] >= limit_;
  }
  return repeats;
}

}  // namespace zipage
