#include "scheduler/text/pre_tokenizer.h"

#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/status.h"
#include "scheduler/text/utf8.h"

namespace zipage {
namespace {

// GPT-2's pattern, which ByteLevel applies when use_regex is set.
constexpr std::string_view kGpt2Pattern =
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+";
constexpr int kMaxDepth = 8;
constexpr size_t kMaxStages = 64;

absl::Status Invalid(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("pre_tokenizer: %s", what));
}

// A boolean member; `fallback` if it is absent.
absl::StatusOr<bool> BoolMember(const nlohmann::json& node, const char* name, bool fallback) {
  auto it = node.find(name);
  if (it == node.end()) return fallback;
  if (!it->is_boolean()) return Invalid(absl::StrFormat("'%s' is not a boolean", name));
  return it->get<bool>();
}

std::string EscapeLiteral(std::string_view literal) {
  std::string out;
  for (char c : literal) {
    bool plain = static_cast<uint8_t>(c) >= 0x80 || (c >= '0' && c <= '9') ||
                 (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_';
    if (!plain) out.push_back('\\');
    out.push_back(c);
  }
  return out;
}

}  // namespace

// Joins neighbouring stretches of text as a Split behavior asks, then passes them on.
class PreTokenizer::PieceMerger {
 public:
  PieceMerger(Behavior behavior, std::string_view text, Sink sink)
      : behavior_(behavior), text_(text), sink_(sink) {}

  // Stretches arrive in order without gaps. False: the sink wants no more.
  bool Add(size_t begin, size_t end, bool is_match) {
    switch (behavior_) {
      case Behavior::kRemoved:
        return is_match || Emit(begin, end);
      case Behavior::kIsolated:
        return Emit(begin, end);
      case Behavior::kContiguous:
        if (pending_ && pending_->is_match == is_match) return Extend(end);
        break;
      case Behavior::kMergedWithPrevious:
        if (pending_ && is_match && !previous_is_match_) {
          previous_is_match_ = true;
          return Extend(end);
        }
        break;
      case Behavior::kMergedWithNext:
        if (pending_ && pending_->is_match && !is_match) {
          pending_->is_match = false;
          return Extend(end);
        }
        break;
    }
    previous_is_match_ = is_match;
    if (!Finish()) return false;
    pending_ = Pending{begin, end, is_match};
    return true;
  }

  bool Finish() {
    if (!pending_) return true;
    Pending last = *std::exchange(pending_, std::nullopt);
    return Emit(last.begin, last.end);
  }

 private:
  struct Pending {
    size_t begin;
    size_t end;
    bool is_match;
  };

  bool Emit(size_t begin, size_t end) {
    return begin == end || sink_(text_.substr(begin, end - begin));
  }
  bool Extend(size_t end) {
    pending_->end = end;
    return true;
  }

  Behavior behavior_;
  std::string_view text_;
  Sink sink_;
  std::optional<Pending> pending_;
  bool previous_is_match_ = false;
};

absl::StatusOr<std::unique_ptr<PreTokenizer>> PreTokenizer::Parse(const nlohmann::json& node) {
  std::unique_ptr<PreTokenizer> result(new PreTokenizer);
  ZIPAGE_RETURN_IF_ERROR(result->AddStages(node, 0));
  if (!result->has_byte_level_) {
    return Invalid("there is no ByteLevel; only byte-level BPE tokenizers are supported");
  }
  return result;
}

absl::Status PreTokenizer::AddStages(const nlohmann::json& node, int depth) {
  if (depth > kMaxDepth || stages_.size() > kMaxStages) return Invalid("nested too deeply");
  if (!node.is_object() || !node.contains("type") || !node["type"].is_string()) {
    return Invalid("expected an object with a 'type'");
  }
  const std::string& type = node["type"].get_ref<const std::string&>();
  if (type == "Sequence") {
    auto it = node.find("pretokenizers");
    if (it == node.end() || !it->is_array()) return Invalid("Sequence without 'pretokenizers'");
    for (const nlohmann::json& child : *it) ZIPAGE_RETURN_IF_ERROR(AddStages(child, depth + 1));
    return absl::OkStatus();
  }
  if (has_byte_level_) {
    return Invalid(absl::StrFormat("'%s' after ByteLevel is not supported", type));
  }
  if (type == "Split") return AddSplit(node);
  if (type == "Digits") {
    ZIPAGE_ASSIGN_OR_RETURN(bool individual, BoolMember(node, "individual_digits", false));
    return AddRegex("\\p{N}", individual ? Behavior::kIsolated : Behavior::kContiguous, false);
  }
  if (type == "ByteLevel") {
    has_byte_level_ = true;
    ZIPAGE_ASSIGN_OR_RETURN(bool add_prefix_space, BoolMember(node, "add_prefix_space", true));
    ZIPAGE_ASSIGN_OR_RETURN(bool use_regex, BoolMember(node, "use_regex", true));
    if (add_prefix_space) stages_.emplace_back();
    return use_regex ? AddRegex(kGpt2Pattern, Behavior::kIsolated, false) : absl::OkStatus();
  }
  return Invalid(absl::StrFormat("type '%s' is not supported", type));
}

absl::Status PreTokenizer::AddSplit(const nlohmann::json& node) {
  auto pattern = node.find("pattern");
  if (pattern == node.end() || !pattern->is_object() || pattern->size() != 1 ||
      !pattern->begin()->is_string()) {
    return Invalid("Split needs a 'pattern' of {\"Regex\": ...} or {\"String\": ...}");
  }
  const std::string& text = pattern->begin()->get_ref<const std::string&>();
  if (text.empty()) return Invalid("Split with an empty pattern");
  const std::string& kind = pattern->begin().key();
  if (kind != "Regex" && kind != "String") {
    return Invalid(absl::StrFormat("Split pattern of kind '%s' is not supported", kind));
  }
  auto behavior = node.find("behavior");
  if (behavior == node.end() || !behavior->is_string()) return Invalid("Split needs a 'behavior'");
  static constexpr std::pair<std::string_view, Behavior> kBehaviors[] = {
      {"Removed", Behavior::kRemoved},
      {"Isolated", Behavior::kIsolated},
      {"MergedWithPrevious", Behavior::kMergedWithPrevious},
      {"MergedWithNext", Behavior::kMergedWithNext},
      {"Contiguous", Behavior::kContiguous}};
  ZIPAGE_ASSIGN_OR_RETURN(bool invert, BoolMember(node, "invert", false));
  for (const auto& [name, value] : kBehaviors) {
    if (behavior->get_ref<const std::string&>() == name) {
      return AddRegex(kind == "Regex" ? text : EscapeLiteral(text), value, invert);
    }
  }
  return Invalid(absl::StrFormat("Split behavior '%s' is not supported",
                                 behavior->get_ref<const std::string&>()));
}

absl::Status PreTokenizer::AddRegex(std::string_view pattern, Behavior behavior, bool invert) {
  auto regex = Regex::Compile(pattern);
  if (!regex.ok()) return Invalid(std::string(regex.status().message()));
  Stage stage;
  stage.regex = *std::move(regex);
  stage.behavior = behavior;
  stage.invert = invert;
  stages_.push_back(std::move(stage));
  return absl::OkStatus();
}

absl::Status PreTokenizer::Split(std::string_view text, Sink sink) const {
  bool stopped = false;
  return RunStage(0, text, sink, &stopped);
}

absl::Status PreTokenizer::RunStage(size_t index, std::string_view text, Sink sink,
                                    bool* stopped) const {
  if (index == stages_.size()) {
    if (!text.empty() && !sink(text)) *stopped = true;
    return absl::OkStatus();
  }
  const Stage& stage = stages_[index];
  if (stage.regex == nullptr) {
    if (text.empty() || text[0] == ' ') return RunStage(index + 1, text, sink, stopped);
    std::string prefixed = " ";
    prefixed.append(text);
    return RunStage(index + 1, prefixed, sink, stopped);
  }
  absl::Status inner;
  ZIPAGE_RETURN_IF_ERROR(SplitByRegex(stage, text, [&](std::string_view piece) {
    inner = RunStage(index + 1, piece, sink, stopped);
    return inner.ok() && !*stopped;
  }));
  return inner;
}

absl::Status PreTokenizer::SplitByRegex(const Stage& stage, std::string_view text,
                                        Sink sink) const {
  Regex::ScratchPtr scratch = stage.regex->NewScratch();
  PieceMerger merger(stage.behavior, text, sink);
  size_t covered = 0;  // end of the last match
  size_t search = 0;
  std::optional<size_t> last_match_end;
  while (search <= text.size()) {
    ZIPAGE_ASSIGN_OR_RETURN(Regex::Match match, stage.regex->Find(text, search, scratch.get()));
    if (!match.found) break;
    if (match.begin == match.end && last_match_end == match.end) {
      // An empty match right after the last one: one character on, so that the search ends.
      search += search < text.size() ? DecodeUtf8(text.substr(search)).size : 1;
      continue;
    }
    if (covered < match.begin && !merger.Add(covered, match.begin, stage.invert)) {
      return absl::OkStatus();
    }
    if (!merger.Add(match.begin, match.end, !stage.invert)) return absl::OkStatus();
    covered = search = match.end;
    last_match_end = match.end;
  }
  if (covered < text.size() && !merger.Add(covered, text.size(), stage.invert)) {
    return absl::OkStatus();
  }
  merger.Finish();
  return absl::OkStatus();
}

}  // namespace zipage
