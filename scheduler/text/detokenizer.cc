#include "scheduler/text/detokenizer.h"

#include "scheduler/text/utf8.h"

namespace zipage {

IncrementalDetokenizer::IncrementalDetokenizer(const Tokenizer* tokenizer, bool skip_special)
    : tokenizer_(tokenizer), skip_special_(skip_special) {}

std::string IncrementalDetokenizer::Push(int32_t id) {
  std::string text;
  if (skip_special_ && tokenizer_->IsSpecial(id)) return text;
  pending_ += tokenizer_->TokenBytes(id);
  pending_.erase(0, AppendLossyUtf8(pending_, /*is_final=*/false, &text));
  return text;
}

std::string IncrementalDetokenizer::Flush() {
  std::string text;
  AppendLossyUtf8(pending_, /*is_final=*/true, &text);
  pending_.clear();
  return text;
}

}  // namespace zipage
