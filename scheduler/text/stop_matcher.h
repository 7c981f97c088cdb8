#pragma once
// Finds stop strings in text that arrives in pieces. Text is held back only while it can still be
// the beginning of a stop string. Scheduler thread; one matcher per sequence, a set may be shared.
//
// The earliest match wins: the leftmost, of those the one that ends first. Example, stops "\n\n"
// and "END", pieces "a\n", "b E", "NDx":  -> "a", "\nb ", and then "END" is found with text "".

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace zipage {

// The stop strings of a request as an Aho-Corasick automaton. Immutable; any thread.
class StopSet {
 public:
  // Empty strings never match.
  explicit StopSet(const std::vector<std::string>& stops);

  // The state after one more byte; amortized constant time.
  int32_t Advance(int32_t state, char byte) const;
  // Length of the longest beginning of a stop string that ends here.
  size_t Depth(int32_t state) const { return nodes_[static_cast<size_t>(state)].depth; }
  // Index of the longest stop string that ends here; -1 if none does.
  int32_t Match(int32_t state) const { return nodes_[static_cast<size_t>(state)].match; }
  size_t StopSize(int32_t stop) const { return sizes_[static_cast<size_t>(stop)]; }
  bool empty() const { return nodes_.size() == 1; }

 private:
  struct Node {
    size_t depth = 0;
    int32_t fail = 0;
    int32_t match = -1;
  };
  int32_t Child(int32_t state, char byte) const;  // -1: none

  std::vector<Node> nodes_;
  absl::flat_hash_map<uint64_t, int32_t> children_;  // state << 8 | byte
  std::vector<size_t> sizes_;
};

class StopMatcher {
 public:
  struct Result {
    std::string text;            // certain to be before any stop string (or to include it)
    std::optional<size_t> stop;  // index of the stop string that was found; the text ends here
  };

  // With `include_stop` the stop string found is part of the text, else it is left out.
  StopMatcher(std::shared_ptr<const StopSet> stops, bool include_stop);

  // Takes the next piece. After a match it and Flush return nothing more.
  Result Push(std::string_view piece);

  // The end of the text: what was held back, or a match that waited for an earlier one.
  Result Flush();

 private:
  struct Found {
    size_t begin;  // in held_
    size_t end;
    size_t stop;
  };
  Result Finish(const Found& found);

  std::shared_ptr<const StopSet> stops_;
  bool include_stop_;
  bool done_ = false;
  int32_t state_ = 0;
  std::string held_;            // not handed out yet
  std::optional<Found> found_;  // the best so far, while an earlier one is possible
};

}  // namespace zipage
