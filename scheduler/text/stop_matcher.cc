#include "scheduler/text/stop_matcher.h"

#include <utility>

namespace zipage {

StopSet::StopSet(const std::vector<std::string>& stops) : nodes_(1) {
  std::vector<std::pair<int32_t, char>> edge_to(1);  // parent and byte of every node
  for (size_t i = 0; i < stops.size(); ++i) {
    sizes_.push_back(stops[i].size());
    int32_t state = 0;
    for (char byte : stops[i]) {
      int32_t child = Child(state, byte);
      if (child < 0) {
        child = static_cast<int32_t>(nodes_.size());
        children_[(static_cast<uint64_t>(state) << 8) | static_cast<uint8_t>(byte)] = child;
        Node node;
        node.depth = nodes_[static_cast<size_t>(state)].depth + 1;
        nodes_.push_back(node);
        edge_to.emplace_back(state, byte);
      }
      state = child;
    }
    Node& last = nodes_[static_cast<size_t>(state)];
    if (state != 0 && last.match < 0) last.match = static_cast<int32_t>(i);
  }
  // Breadth first, so that shorter suffixes are done before longer ones.
  std::vector<std::vector<int32_t>> by_depth;
  for (size_t i = 1; i < nodes_.size(); ++i) {
    if (by_depth.size() < nodes_[i].depth) by_depth.resize(nodes_[i].depth);
    by_depth[nodes_[i].depth - 1].push_back(static_cast<int32_t>(i));
  }
  for (const std::vector<int32_t>& level : by_depth) {
    for (int32_t state : level) {
      auto [parent, byte] = edge_to[static_cast<size_t>(state)];
      Node& node = nodes_[static_cast<size_t>(state)];
      if (parent != 0) node.fail = Advance(nodes_[static_cast<size_t>(parent)].fail, byte);
      if (node.match < 0) node.match = nodes_[static_cast<size_t>(node.fail)].match;
    }
  }
}

int32_t StopSet::Child(int32_t state, char byte) const {
  auto it = children_.find((static_cast<uint64_t>(state) << 8) | static_cast<uint8_t>(byte));
  return it == children_.end() ? -1 : it->second;
}

int32_t StopSet::Advance(int32_t state, char byte) const {
  while (true) {
    int32_t child = Child(state, byte);
    if (child >= 0) return child;
    if (state == 0) return 0;
    state = nodes_[static_cast<size_t>(state)].fail;
  }
}

StopMatcher::StopMatcher(std::shared_ptr<const StopSet> stops, bool include_stop)
    : stops_(std::move(stops)), include_stop_(include_stop) {}

StopMatcher::Result StopMatcher::Push(std::string_view piece) {
  if (done_) return {};
  if (stops_->empty()) return {std::string(piece), std::nullopt};
  size_t end = held_.size();
  held_ += piece;
  while (end < held_.size()) {
    state_ = stops_->Advance(state_, held_[end]);
    ++end;
    int32_t match = stops_->Match(state_);
    if (match >= 0) {
      size_t begin = end - stops_->StopSize(match);
      if (!found_ || begin < found_->begin) {
        found_ = Found{begin, end, static_cast<size_t>(match)};
      }
    }
    // Everything that may still match begins `depth` bytes back or later.
    if (found_ && end - stops_->Depth(state_) >= found_->begin) return Finish(*found_);
  }
  size_t keep_from = end - stops_->Depth(state_);
  if (found_) {  // something that begins before it may still match
    found_->begin -= keep_from;
    found_->end -= keep_from;
  }
  Result result{held_.substr(0, keep_from), std::nullopt};
  held_.erase(0, keep_from);
  return result;
}

StopMatcher::Result StopMatcher::Flush() {
  if (done_) return {};
  if (found_) return Finish(*found_);
  done_ = true;
  return {std::exchange(held_, std::string()), std::nullopt};
}

StopMatcher::Result StopMatcher::Finish(const Found& found) {
  done_ = true;
  Result result{held_.substr(0, include_stop_ ? found.end : found.begin), found.stop};
  held_.clear();
  return result;
}

}  // namespace zipage
