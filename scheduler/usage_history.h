#pragma once
// How many sequences ran and how much of the KV pool was used over the time the engine was busy, in
// at most kMaxParts equal parts: constant memory however long it runs. When all parts are full,
// neighbours are merged and parts last twice as long from then on. Time in which no step runs does
// not count. Scheduler thread only.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace zipage {

class UsageHistory {
 public:
  static constexpr size_t kMaxParts = 64;

  // Parts last `part_micros` at first. REQUIRES: at least 1.
  explicit UsageHistory(uint64_t part_micros = 1000);

  // A step of `micros` during which `running` sequences ran and `block_share` of the blocks, in
  // [0, 1], were used.
  void Add(uint64_t micros, double running, double block_share);

  // Means over time of each part, oldest first; the newest part may be shorter than the others.
  std::vector<float> running() const { return Means(&Part::running); }
  std::vector<float> block_share() const { return Means(&Part::block_share); }
  double part_seconds() const { return static_cast<double>(part_micros_) * 1e-6; }

 private:
  struct Part {
    uint64_t micros = 0;
    double running = 0;      // Times microseconds.
    double block_share = 0;  // Likewise.
  };
  void MergePairs();
  std::vector<float> Means(double Part::*sum) const;

  uint64_t part_micros_;
  std::vector<Part> parts_;  // All full but the last.
};

}  // namespace zipage
