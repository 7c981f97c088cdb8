#pragma once
// Python's string functions on UTF-8: positions count characters, white space and case are
// Unicode's. Pure; any thread. Inputs are valid UTF-8.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace zipage::jinja {

// str.isspace: White_Space and U+001C..U+001F.
bool IsPythonSpace(char32_t c);

// str.isprintable of one character: what repr() shows as it is.
bool IsPrintable(char32_t c);

size_t NumChars(std::string_view text);
// Characters [begin, end) of `text`.
std::string_view CharRange(std::string_view text, size_t begin, size_t end);

std::string_view StripLeft(std::string_view text);
std::string_view StripRight(std::string_view text);
// str.strip and its sides; without `chars` white space goes.
std::string_view Strip(std::string_view text, const std::optional<std::string>& chars, bool left,
                       bool right);

// str.split and str.rsplit; no separator: at runs of white space. Negative `max_splits`: no limit.
// REQUIRES: *separator is not empty.
std::vector<std::string> SplitText(std::string_view text,
                                   const std::optional<std::string>& separator, int64_t max_splits,
                                   bool from_right);
std::vector<std::string> SplitLines(std::string_view text, bool keep_ends);

// str.replace; negative `count`: all.
std::string ReplaceText(std::string_view text, std::string_view from, std::string_view to,
                        int64_t count);

enum class CaseChange { kUpper, kLower, kTitle, kCapitalize };
// str.upper and so on; nothing if a character's case depends on context or changes its length.
std::optional<std::string> ChangeCase(std::string_view text, CaseChange change);

enum class CharClass { kDigit, kAlpha, kAlnum, kSpace, kUpper, kLower };
// str.isdigit and so on; nothing if there is a character beyond ASCII.
std::optional<bool> AllOfClass(std::string_view text, CharClass char_class);

// The inside of a Python string literal; false for an escape that Python refuses, and for \N.
bool UnescapePython(std::string_view body, std::string* out);

}  // namespace zipage::jinja
