#pragma once
// Tokens to tree, with Jinja's grammar (3.1). A construct that the interpreter does not run
// (include, import, block, call, recursive loops, *args, ...) is an Unimplemented error that names
// it and its line. Pure.

#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "scheduler/text/jinja_ast.h"
#include "scheduler/text/jinja_lexer.h"

namespace zipage::jinja {

absl::StatusOr<Body> Parse(const std::vector<Token>& tokens);

// Whether filters and tests of these names exist; the parser refuses others.
bool IsKnownFilter(std::string_view name);
bool IsKnownTest(std::string_view name);

}  // namespace zipage::jinja
