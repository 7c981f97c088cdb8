#include "scheduler/text/added_tokens.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_format.h"
#include "proto/status.h"
#include "scheduler/text/bpe.h"
#include "scheduler/text/utf8.h"

namespace zipage {
namespace {

constexpr size_t kMaxContentBytes = 1024;
constexpr size_t kMaxTokens = 100'000;

absl::Status Invalid(std::string_view what) {
  return absl::InvalidArgumentError(absl::StrFormat("added_tokens: %s", what));
}

bool StartsWithWordChar(std::string_view text) {
  return !text.empty() && IsWordChar(DecodeUtf8(text).code_point);
}

bool EndsWithWordChar(std::string_view text) {
  size_t start = 0;
  return !text.empty() && IsWordChar(CodePointBefore(text, text.size(), &start));
}

absl::StatusOr<AddedToken> ParseOne(const nlohmann::json& node) {
  if (!node.is_object()) return Invalid("an entry is no object");
  AddedToken token;
  auto id = node.find("id");
  if (id == node.end() || !id->is_number_integer() || id->get<int64_t>() < 0 ||
      id->get<int64_t>() > Bpe::kMaxTokenId) {
    return Invalid(absl::StrFormat("an entry needs an 'id' from 0 to %d", Bpe::kMaxTokenId));
  }
  token.id = id->get<int32_t>();
  auto content = node.find("content");
  if (content == node.end() || !content->is_string()) {
    return Invalid(absl::StrFormat("token %d has no 'content'", token.id));
  }
  token.content = content->get<std::string>();
  if (token.content.empty() || token.content.size() > kMaxContentBytes) {
    return Invalid(absl::StrFormat("token %d has %d bytes; give 1 to %d", token.id,
                                   token.content.size(), kMaxContentBytes));
  }
  for (auto [name, member] :
       {std::pair{"special", &AddedToken::special}, std::pair{"lstrip", &AddedToken::lstrip},
        std::pair{"rstrip", &AddedToken::rstrip},
        std::pair{"single_word", &AddedToken::single_word},
        std::pair{"normalized", &AddedToken::normalized}}) {
    auto it = node.find(name);
    if (it == node.end()) continue;
    if (!it->is_boolean())
      return Invalid(absl::StrFormat("token %d: '%s' is no boolean", token.id, name));
    token.*member = it->get<bool>();
  }
  return token;
}

}  // namespace

void AddedTokens::Trie::Add(std::string_view pattern, int32_t token) {
  int32_t node = 0;
  for (size_t i = 0; i < pattern.size(); ++i) {
    uint8_t byte = static_cast<uint8_t>(pattern[i]);
    int32_t& child = i == 0 ? root[byte] : next[(static_cast<uint64_t>(node) << 8) | byte];
    if (child == 0) {
      child = static_cast<int32_t>(token_at.size());
      token_at.push_back(-1);
    }
    node = child;
  }
  token_at[static_cast<size_t>(node)] = token;
}

int32_t AddedTokens::Trie::LongestMatch(std::string_view text, size_t* length) const {
  int32_t node = root[static_cast<uint8_t>(text[0])];
  int32_t best = -1;
  for (size_t i = 1; node != 0; ++i) {
    if (token_at[static_cast<size_t>(node)] >= 0) {
      best = token_at[static_cast<size_t>(node)];
      *length = i;
    }
    if (i == text.size()) break;
    auto it = next.find((static_cast<uint64_t>(node) << 8) | static_cast<uint8_t>(text[i]));
    node = it == next.end() ? 0 : it->second;
  }
  return best;
}

absl::StatusOr<AddedTokens> AddedTokens::Parse(
    const nlohmann::json& list, absl::FunctionRef<std::string(std::string_view)> normalize) {
  AddedTokens result;
  if (list.is_null()) return result;
  if (!list.is_array()) return Invalid("not a list");
  if (list.size() > kMaxTokens) {
    return Invalid(absl::StrFormat("%d entries; at most %d", list.size(), kMaxTokens));
  }
  absl::flat_hash_set<int32_t> ids;
  for (const nlohmann::json& node : list) {
    ZIPAGE_ASSIGN_OR_RETURN(AddedToken token, ParseOne(node));
    size_t index = result.tokens_.size();
    if (!ids.insert(token.id).second) {
      return Invalid(absl::StrFormat("two tokens have id %d", token.id));
    }
    if (!result.by_content_.emplace(token.content, index).second) {
      return Invalid(absl::StrFormat("'%s' is there twice", token.content));
    }
    // From here on a normalized token is its normalized text: that is what it decodes to.
    if (token.normalized) token.content = normalize(token.content);
    (token.normalized ? result.normalized_ : result.raw_)
        .Add(token.content, static_cast<int32_t>(index));
    result.tokens_.push_back(std::move(token));
  }
  return result;
}

void AddedTokens::MarkSpecial(std::string_view content, int32_t id) {
  auto it = by_content_.find(ToAbsl(content));
  if (it != by_content_.end()) {
    tokens_[it->second].special = true;
    return;
  }
  size_t index = tokens_.size();
  by_content_.emplace(content, index);
  raw_.Add(content, static_cast<int32_t>(index));
  AddedToken token;
  token.id = id;
  token.content = std::string(content);
  token.special = true;
  tokens_.push_back(std::move(token));
}

bool AddedTokens::Split(std::string_view text, bool normalized, Sink sink) const {
  const Trie& trie = normalized ? normalized_ : raw_;
  size_t covered = 0;
  for (size_t i = 0; i < text.size();) {
    size_t length = 0;
    int32_t index = trie.root[static_cast<uint8_t>(text[i])] == 0
                        ? -1
                        : trie.LongestMatch(text.substr(i), &length);
    if (index < 0) {
      ++i;
      continue;
    }
    const AddedToken& token = tokens_[static_cast<size_t>(index)];
    size_t begin = i;
    size_t end = i + length;
    i = end;
    if (token.single_word &&
        (EndsWithWordChar(text.substr(0, begin)) || StartsWithWordChar(text.substr(end)))) {
      continue;
    }
    if (token.lstrip) {
      size_t start = 0;
      while (begin > covered && IsWhiteSpace(CodePointBefore(text, begin, &start))) begin = start;
    }
    // White space that the token before has taken is not taken twice.
    begin = std::max(begin, covered);
    while (token.rstrip && end < text.size()) {
      Utf8Char c = DecodeUtf8(text.substr(end));
      if (!IsWhiteSpace(c.code_point)) break;
      end += c.size;
    }
    if (covered < begin && !sink(text.substr(covered, begin - covered), nullptr)) return false;
    if (!sink(text.substr(begin, end > begin ? end - begin : 0), &token)) return false;
    covered = std::max(covered, end);
  }
  return covered >= text.size() || sink(text.substr(covered), nullptr);
}

const AddedToken* AddedTokens::Find(std::string_view content) const {
  auto it = by_content_.find(ToAbsl(content));
  return it == by_content_.end() ? nullptr : &tokens_[it->second];
}

}  // namespace zipage
