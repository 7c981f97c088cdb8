#pragma once
// Turns the tokens of one sequence into text as they come. Scheduler thread; one per sequence.
// Invariant: everything Push and Flush returned, joined, is the text of all TokenBytes joined, with
// invalid UTF-8 replaced by U+FFFD.

#include <cstdint>
#include <string>

#include "scheduler/text/tokenizer.h"

namespace zipage {

class IncrementalDetokenizer {
 public:
  // `tokenizer` must outlive this.
  IncrementalDetokenizer(const Tokenizer* tokenizer, bool skip_special);

  // Text that is certain now: never half a character, U+FFFD for bytes that cannot become one.
  std::string Push(int32_t id);

  // The end: an unfinished character becomes U+FFFD. Push may not follow.
  std::string Flush();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string pending_;  // a beginning of a character, at most 3 bytes between calls
};

}  // namespace zipage
