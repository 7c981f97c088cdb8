#pragma once
// UTF-8 as the text room needs it: strict decoding, lossy repair as Rust's from_utf8_lossy does it,
// canonical composition, white space. Pure functions, any thread; every input may be hostile.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace zipage {

// One decoding step at the start of a string.
struct Utf8Char {
  enum class Kind { kValid, kInvalid, kIncomplete };
  Kind kind;
  char32_t code_point;  // U+FFFD unless valid
  // Bytes it takes: of the character, or of the maximal started sequence that one U+FFFD replaces.
  size_t size;
};

// Decodes the first character of `bytes`. kIncomplete means that all of `bytes` is a proper
// beginning of a character: more bytes may still complete it. REQUIRES: `bytes` is not empty.
Utf8Char DecodeUtf8(std::string_view bytes);

// Appends `code_point` in UTF-8. A surrogate or a value above U+10FFFF becomes U+FFFD.
void AppendUtf8(char32_t code_point, std::string* out);

bool IsValidUtf8(std::string_view bytes);

// Appends `bytes` with every invalid sequence replaced by U+FFFD. With `is_final` false an
// incomplete character at the end is left alone. Returns the number of bytes consumed.
size_t AppendLossyUtf8(std::string_view bytes, bool is_final, std::string* out);

// Normalization form C. Linear but for sorting runs of combining marks. `text` is valid UTF-8.
std::string NormalizeNfc(std::string_view text);

// Unicode White_Space: what `\s` means in tokenizer patterns. U+001C..U+001F are not in it.
bool IsWhiteSpace(char32_t c);

// Word characters of `\w` in tokenizer libraries: letters, marks, decimal digits, connectors.
bool IsWordChar(char32_t c);

// The code point that ends at byte `end` of valid UTF-8, and where it starts. REQUIRES: end > 0.
char32_t CodePointBefore(std::string_view text, size_t end, size_t* start);

}  // namespace zipage
