#pragma once
// A model's chat template: a conversation to the text of a prompt, rendered as transformers'
// apply_chat_template does it (Jinja 3.1, sandboxed, trim_blocks, lstrip_blocks, loop controls, its
// own tojson, raise_exception, strftime_now, {% generation %}). Immutable; any thread.
//
// A construct outside the supported subset is an error that names it and its line, at Parse where
// it can be seen there, else at Render; never another text. Hostile templates and conversations end
// in an error after bounded work: nesting, output (64 MiB), and steps are limited.
//
// The text has the special tokens in it, BOS included: encode it with add_special_tokens = false.

#include <memory>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace zipage {

class ChatTemplate {
 public:
  // InvalidArgument for wrong syntax, Unimplemented for what is not supported.
  static absl::StatusOr<ChatTemplate> Parse(std::string_view source);

  // Renders `messages` (a list of {"role", "content", ...}). `extra` is an object of further
  // variables: tools, documents, enable_thinking, and Tokenizer::special_tokens(). Without them
  // `tools` and `documents` are none, anything else is undefined.
  // InvalidArgument also carries what the template itself raises (raise_exception).
  absl::StatusOr<std::string> Render(const nlohmann::ordered_json& messages,
                                     const nlohmann::ordered_json& extra,
                                     bool add_generation_prompt) const;

 private:
  struct Parsed;
  explicit ChatTemplate(std::shared_ptr<const Parsed> parsed);
  std::shared_ptr<const Parsed> parsed_;
};

}  // namespace zipage
