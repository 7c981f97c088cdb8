#include "scheduler/text/chat_template.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "proto/status.h"
#include "scheduler/text/jinja_interpreter.h"
#include "scheduler/text/jinja_lexer.h"
#include "scheduler/text/jinja_parser.h"

namespace zipage {
namespace {

constexpr size_t kMaxSourceBytes = 1 << 20;

}  // namespace

struct ChatTemplate::Parsed {
  jinja::Body body;
};

ChatTemplate::ChatTemplate(std::shared_ptr<const Parsed> parsed) : parsed_(std::move(parsed)) {}

absl::StatusOr<ChatTemplate> ChatTemplate::Parse(std::string_view source) {
  if (source.size() > kMaxSourceBytes) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "chat template: %d bytes; at most %d are supported", source.size(), kMaxSourceBytes));
  }
  auto parsed = std::make_shared<Parsed>();
  ZIPAGE_ASSIGN_OR_RETURN(std::vector<jinja::Token> tokens, jinja::Tokenize(source));
  ZIPAGE_ASSIGN_OR_RETURN(parsed->body, jinja::Parse(tokens));
  return ChatTemplate(std::move(parsed));
}

absl::StatusOr<std::string> ChatTemplate::Render(const nlohmann::ordered_json& messages,
                                                 const nlohmann::ordered_json& extra,
                                                 bool add_generation_prompt) const {
  jinja::Runtime rt;
  std::string text;
  jinja::Interpreter interpreter(&rt, &text);
  interpreter.SetVariable("tools", jinja::Value::MakeNone());
  interpreter.SetVariable("documents", jinja::Value::MakeNone());
  if (extra.is_object()) {
    for (auto it = extra.begin(); it != extra.end(); ++it) {
      interpreter.SetVariable(it.key(), jinja::FromJson(&rt, it.value()));
    }
  }
  interpreter.SetVariable("messages", jinja::FromJson(&rt, messages));
  interpreter.SetVariable("add_generation_prompt", jinja::Value(add_generation_prompt));
  interpreter.Run(parsed_->body);
  ZIPAGE_RETURN_IF_ERROR(rt.status());
  return text;
}

}  // namespace zipage
