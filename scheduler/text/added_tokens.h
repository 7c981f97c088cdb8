#pragma once
// Tokens that are found in the text before anything else happens to it: special ones such as
// <|im_end|> and others that were added to a vocabulary. Immutable after Create; any thread.

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace zipage {

struct AddedToken {
  int32_t id = 0;
  std::string content;
  bool special = false;      // left out of decoded text when special tokens are skipped
  bool lstrip = false;       // takes the white space before it
  bool rstrip = false;       // takes the white space after it
  bool single_word = false;  // only where no word character touches it
  bool normalized = false;   // looked for in the normalized text, not in the raw one
};

class AddedTokens {
 public:
  // A stretch of text (`token` null), or one token that was found in it.
  using Sink = absl::FunctionRef<bool(std::string_view text, const AddedToken* token)>;

  // Parses tokenizer.json's "added_tokens". `normalize` says how a normalized token is looked for.
  static absl::StatusOr<AddedTokens> Parse(
      const nlohmann::json& list, absl::FunctionRef<std::string(std::string_view)> normalize);

  // Makes a token special that tokenizer_config.json names so; `id` is its id in the vocabulary and
  // only used if it is not among the added tokens yet.
  void MarkSpecial(std::string_view content, int32_t id);

  // Cuts `text` at the tokens whose `normalized` is the one given: leftmost first, longest of
  // those, without overlap. Hands stretches and tokens to `sink` in order until it returns false;
  // returns false if it did.
  bool Split(std::string_view text, bool normalized, Sink sink) const;

  const AddedToken* Find(std::string_view content) const;
  const std::vector<AddedToken>& tokens() const { return tokens_; }

 private:
  // All patterns of one kind, byte by byte.
  struct Trie {
    std::array<int32_t, 256> root;                // node after the first byte; 0: none
    absl::flat_hash_map<uint64_t, int32_t> next;  // node << 8 | byte -> node
    std::vector<int32_t> token_at;                // index of the token that ends at a node; -1
    Trie() : token_at(1, -1) { root.fill(0); }
    void Add(std::string_view pattern, int32_t token);
    // Longest pattern at the start of `text`: its token, -1 if there is none, and its length.
    int32_t LongestMatch(std::string_view text, size_t* length) const;
  };

  std::vector<AddedToken> tokens_;
  absl::flat_hash_map<std::string, size_t> by_content_;
  Trie raw_;
  Trie normalized_;
};

}  // namespace zipage
