#pragma once
// Cuts text into the pieces that BPE works on, as tokenizer.json's "pre_tokenizer" says: Split,
// Digits and ByteLevel, alone or in a Sequence that ends in its one ByteLevel. Anything else there
// is a named error. Immutable after Parse; any thread.
//
//   {"type": "Sequence", "pretokenizers": [
//      {"type": "Split", "pattern": {"Regex": "\\p{N}|..."}, "behavior": "Isolated", "invert":
//      false},
//      {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]}
//   "it's 42" -> "it", "'s", " ", "4", "2"      (bytes, not ByteLevel's printable stand-ins)

#include <memory>
#include <string_view>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "scheduler/text/regex.h"

namespace zipage {

class PreTokenizer {
 public:
  // Takes one piece; false ends the splitting.
  using Sink = absl::FunctionRef<bool(std::string_view)>;

  static absl::StatusOr<std::unique_ptr<PreTokenizer>> Parse(const nlohmann::json& node);

  // Hands the pieces of `text` (valid UTF-8) to `sink` in order; their concatenation is the text,
  // apart from removed matches and added prefix spaces. Lazy: matches beyond the last piece taken
  // are not looked for.
  absl::Status Split(std::string_view text, Sink sink) const;

 private:
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  struct Stage {
    std::unique_ptr<Regex> regex;  // null: the stage only adds a prefix space
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
  };
  class PieceMerger;

  PreTokenizer() = default;
  absl::Status AddStages(const nlohmann::json& node, int depth);
  absl::Status AddSplit(const nlohmann::json& node);
  absl::Status AddRegex(std::string_view pattern, Behavior behavior, bool invert);
  absl::Status RunStage(size_t index, std::string_view text, Sink sink, bool* stopped) const;
  absl::Status SplitByRegex(const Stage& stage, std::string_view text, Sink sink) const;

  std::vector<Stage> stages_;
  bool has_byte_level_ = false;
};

}  // namespace zipage
