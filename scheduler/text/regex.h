#pragma once
// A tokenizer pattern: written for Oniguruma (what HuggingFace tokenizers uses), run by PCRE2. The
// only file that knows PCRE2. Immutable after Compile; any thread.
//
// Where the two engines give a construct another meaning, the pattern is rewritten (`\s` becomes
// the Unicode White_Space set) or refused by name (`^`, `$`, `\w`, `\b`, `\h`, nested sets, ...): a
// pattern that compiles splits text as Oniguruma would.

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

namespace zipage {

// Rewrites `pattern` for PCRE2. InvalidArgument names a construct that cannot be carried over.
absl::StatusOr<std::string> TranslateOnigurumaPattern(std::string_view pattern);

class Regex {
 public:
  // Scratch space of one thread for matching; made by NewScratch.
  class Scratch;
  struct ScratchDeleter {
    void operator()(Scratch* scratch) const;
  };
  using ScratchPtr = std::unique_ptr<Scratch, ScratchDeleter>;

  struct Match {
    bool found;
    size_t begin;
    size_t end;
  };

  // Compiles a pattern in Oniguruma's dialect.
  static absl::StatusOr<std::unique_ptr<Regex>> Compile(std::string_view pattern);
  ~Regex();
  Regex(const Regex&) = delete;
  Regex& operator=(const Regex&) = delete;

  ScratchPtr NewScratch() const;

  // First match at or after byte `start` of `text`, which is valid UTF-8; what stands before
  // `start` is seen by lookbehinds. ResourceExhausted if the pattern backtracks beyond all measure.
  absl::StatusOr<Match> Find(std::string_view text, size_t start, Scratch* scratch) const;

 private:
  struct Impl;
  explicit Regex(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zipage
