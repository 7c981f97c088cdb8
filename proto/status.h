#pragma once
// Status macros and string helpers that Debian's Abseil (20220623) lacks.

#include <string_view>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

// Returns from the enclosing function if `expr` is an error.
#define ZIPAGE_RETURN_IF_ERROR(expr)                                  \
  do {                                                                \
    if (::absl::Status zipage_status = (expr); !zipage_status.ok()) { \
      return zipage_status;                                           \
    }                                                                 \
  } while (false)

// NOLINTBEGIN(bugprone-macro-parentheses): `lhs` may be a declaration.
#define ZIPAGE_CONCAT_INNER(a, b) a##b
#define ZIPAGE_CONCAT(a, b) ZIPAGE_CONCAT_INNER(a, b)

// Evaluates `expr` (a StatusOr), returns its error or moves its value into `lhs`.
#define ZIPAGE_ASSIGN_OR_RETURN(lhs, expr) \
  ZIPAGE_ASSIGN_OR_RETURN_INNER(ZIPAGE_CONCAT(zipage_statusor_, __LINE__), lhs, expr)
#define ZIPAGE_ASSIGN_OR_RETURN_INNER(statusor, lhs, expr) \
  auto statusor = (expr);                                  \
  if (!statusor.ok()) return std::move(statusor).status(); \
  lhs = *std::move(statusor)
// NOLINTEND(bugprone-macro-parentheses)

namespace zipage {

// Debian builds Abseil so that absl::string_view is a type of its own; this crosses over.
inline absl::string_view ToAbsl(std::string_view s) { return {s.data(), s.size()}; }

}  // namespace zipage
