#pragma once
// Cuts a template into tokens with the whitespace rules of trim_blocks and lstrip_blocks, which is
// how chat templates are rendered: a newline after a block or comment is dropped, and so is white
// space between the start of a line and one; `-` strips all, `+` keeps. Pure.

#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace zipage::jinja {

struct Token {
  enum class Type {
    kData,           // text outside of tags; value: the text
    kBlockBegin,     // {%
    kBlockEnd,       // %}
    kVariableBegin,  // {{
    kVariableEnd,    // }}
    kName,
    kString,   // value: unescaped
    kInteger,  // value: digits, a 0x, 0o or 0b before them
    kFloat,
    kOperator,
    kEof,
  };
  Type type;
  std::string value;
  int line;

  bool Is(Type t, std::string_view v) const { return type == t && value == v; }
  bool IsName(std::string_view v) const { return Is(Type::kName, v); }
  bool IsOperator(std::string_view v) const { return Is(Type::kOperator, v); }
};

// The tokens, a kEof last. InvalidArgument or Unimplemented, naming the line.
absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source);

}  // namespace zipage::jinja
