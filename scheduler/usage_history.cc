#include "scheduler/usage_history.h"

#include <glog/logging.h>

#include <algorithm>

namespace zipage {

UsageHistory::UsageHistory(uint64_t part_micros) : part_micros_(part_micros) {
  CHECK_GE(part_micros, 1U);
}

void UsageHistory::Add(uint64_t micros, double running, double block_share) {
  while (micros > 0) {
    if (parts_.empty() || parts_.back().micros == part_micros_) {
      if (parts_.size() == kMaxParts) MergePairs();
      parts_.emplace_back();
    }
    Part& part = parts_.back();
    const uint64_t taken = std::min(micros, part_micros_ - part.micros);
    part.micros += taken;
    part.running += running * static_cast<double>(taken);
    part.block_share += block_share * static_cast<double>(taken);
    micros -= taken;
  }
}

void UsageHistory::MergePairs() {
  static_assert(kMaxParts % 2 == 0);
  for (size_t i = 0; i < kMaxParts / 2; ++i) {
    const Part& a = parts_[2 * i];
    const Part& b = parts_[2 * i + 1];
    parts_[i] = {a.micros + b.micros, a.running + b.running, a.block_share + b.block_share};
  }
  parts_.resize(kMaxParts / 2);
  part_micros_ *= 2;
}

std::vector<float> UsageHistory::Means(double Part::*sum) const {
  std::vector<float> means;
  means.reserve(parts_.size());
  for (const Part& part : parts_) {
    means.push_back(static_cast<float>(part.*sum / static_cast<double>(part.micros)));
  }
  return means;
}

}  // namespace zipage
