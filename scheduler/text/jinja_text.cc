#include "scheduler/text/jinja_text.h"

#include <utf8proc.h>

#include <algorithm>

#include "scheduler/text/utf8.h"

namespace zipage::jinja {
namespace {

utf8proc_category_t Category(char32_t c) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(c));
}

bool IsCased(char32_t c) {
  utf8proc_category_t category = Category(c);
  return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL ||
         category == UTF8PROC_CATEGORY_LT;
}

// Characters with more than one character, or a context, in SpecialCasing.txt.
bool HasSpecialCase(char32_t c, bool to_upper) {
  if (!to_upper) return c == 0x130 || c == 0x3A3;
  return c == 0xDF || c == 0x149 || c == 0x1F0 || c == 0x390 || c == 0x3B0 || c == 0x587 ||
         (c >= 0x1E96 && c <= 0x1E9A) || (c >= 0x1F50 && c <= 0x1FFC) ||
         (c >= 0xFB00 && c <= 0xFB17);
}

bool IsLineBreak(char32_t c) {
  return (c >= 0x0A && c <= 0x0D) || (c >= 0x1C && c <= 0x1E) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

int HexValue(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

// `count` hexadecimal digits at body[*i]; false if there are fewer.
bool TakeHex(std::string_view body, size_t* i, size_t count, char32_t* value) {
  if (*i + count > body.size()) return false;
  *value = 0;
  for (size_t end = *i + count; *i < end; ++*i) {
    int digit = HexValue(body[*i]);
    if (digit < 0) return false;
    *value = *value * 16 + static_cast<char32_t>(digit);
  }
  return true;
}

}  // namespace

bool IsPythonSpace(char32_t c) { return IsWhiteSpace(c) || (c >= 0x1C && c <= 0x1F); }

bool IsPrintable(char32_t c) {
  switch (Category(c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    case UTF8PROC_CATEGORY_ZS:
      return c == ' ';
    default:
      return true;
  }
}

size_t NumChars(std::string_view text) {
  return static_cast<size_t>(std::count_if(
      text.begin(), text.end(), [](char c) { return (static_cast<uint8_t>(c) & 0xC0) != 0x80; }));
}

std::string_view CharRange(std::string_view text, size_t begin, size_t end) {
  if (end <= begin) return {};
  size_t i = 0;
  size_t at = 0;
  auto skip_to = [&](size_t target) {
    for (; i < target && at < text.size(); ++i) at += DecodeUtf8(text.substr(at)).size;
    return at;
  };
  size_t from = skip_to(begin);
  return text.substr(from, skip_to(end) - from);
}

std::string_view StripLeft(std::string_view text) { return Strip(text, std::nullopt, true, false); }
std::string_view StripRight(std::string_view text) {
  return Strip(text, std::nullopt, false, true);
}

std::string_view Strip(std::string_view text, const std::optional<std::string>& chars, bool left,
                       bool right) {
  auto strips = [&](std::string_view character) {
    if (!chars) return IsPythonSpace(DecodeUtf8(character).code_point);
    return chars->find(character) != std::string::npos;
  };
  while (left && !text.empty()) {
    size_t size = DecodeUtf8(text).size;
    if (!strips(text.substr(0, size))) break;
    text.remove_prefix(size);
  }
  while (right && !text.empty()) {
    size_t start = 0;
    CodePointBefore(text, text.size(), &start);
    if (!strips(text.substr(start))) break;
    text.remove_suffix(text.size() - start);
  }
  return text;
}

std::vector<std::string> SplitText(std::string_view text,
                                   const std::optional<std::string>& separator, int64_t max_splits,
                                   bool from_right) {
  std::vector<std::string> parts;
  auto more = [&] { return max_splits < 0 || static_cast<int64_t>(parts.size()) < max_splits; };
  if (separator) {
    while (more()) {
      size_t at = from_right ? text.rfind(*separator) : text.find(*separator);
      if (at == std::string_view::npos) break;
      parts.emplace_back(from_right ? text.substr(at + separator->size()) : text.substr(0, at));
      text = from_right ? text.substr(0, at) : text.substr(at + separator->size());
    }
    parts.emplace_back(text);
  } else {
    while (true) {
      text = from_right ? StripRight(text) : StripLeft(text);
      if (text.empty()) break;
      size_t at = from_right ? text.size() : 0;
      bool take_rest = !more();
      while (!take_rest && at != (from_right ? 0 : text.size())) {
        size_t start = at;
        char32_t c =
            from_right ? CodePointBefore(text, at, &start) : DecodeUtf8(text.substr(at)).code_point;
        if (IsPythonSpace(c)) break;
        at = from_right ? start : at + DecodeUtf8(text.substr(at)).size;
      }
      if (take_rest) {
        parts.emplace_back(text);
        break;
      }
      parts.emplace_back(from_right ? text.substr(at) : text.substr(0, at));
      text = from_right ? text.substr(0, at) : text.substr(at);
    }
  }
  if (from_right) std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string> SplitLines(std::string_view text, bool keep_ends) {
  std::vector<std::string> lines;
  size_t start = 0;
  for (size_t i = 0; i < text.size();) {
    Utf8Char c = DecodeUtf8(text.substr(i));
    size_t end = i + c.size;
    if (!IsLineBreak(c.code_point)) {
      i = end;
      continue;
    }
    if (c.code_point == '\r' && end < text.size() && text[end] == '\n') ++end;
    lines.emplace_back(text.substr(start, (keep_ends ? end : i) - start));
    start = i = end;
  }
  if (start < text.size()) lines.emplace_back(text.substr(start));
  return lines;
}

std::string ReplaceText(std::string_view text, std::string_view from, std::string_view to,
                        int64_t count) {
  std::string out;
  if (from.empty()) {  // Python puts `to` around every character
    for (size_t i = 0; i <= text.size() && count != 0; --count) {
      out += to;
      size_t size = i < text.size() ? DecodeUtf8(text.substr(i)).size : 1;
      if (i < text.size()) out += text.substr(i, size);
      i += size;
      if (count == 1 && i < text.size()) out += text.substr(i);
    }
    return count == 0 && out.empty() ? std::string(text) : out;
  }
  while (count != 0) {
    size_t at = text.find(from);
    if (at == std::string_view::npos) break;
    out += text.substr(0, at);
    out += to;
    text.remove_prefix(at + from.size());
    --count;
  }
  out += text;
  return out;
}

std::optional<std::string> ChangeCase(std::string_view text, CaseChange change) {
  std::string out;
  bool at_word_start = true;
  for (size_t i = 0; i < text.size();) {
    Utf8Char c = DecodeUtf8(text.substr(i));
    bool first = change == CaseChange::kTitle ? at_word_start : i == 0;
    bool raise = change == CaseChange::kUpper || (change != CaseChange::kLower && first);
    if (HasSpecialCase(c.code_point, raise)) return std::nullopt;
    auto p = static_cast<utf8proc_int32_t>(c.code_point);
    utf8proc_int32_t mapped = !raise                         ? utf8proc_tolower(p)
                              : change == CaseChange::kUpper ? utf8proc_toupper(p)
                                                             : utf8proc_totitle(p);
    AppendUtf8(static_cast<char32_t>(mapped), &out);
    at_word_start = !IsCased(c.code_point);
    i += c.size;
  }
  return out;
}

std::optional<bool> AllOfClass(std::string_view text, CharClass char_class) {
  bool any = false;
  for (char c : text) {
    if (static_cast<uint8_t>(c) >= 0x80) return std::nullopt;
  }
  for (char c : text) {
    bool digit = c >= '0' && c <= '9';
    bool upper = c >= 'A' && c <= 'Z';
    bool lower = c >= 'a' && c <= 'z';
    switch (char_class) {
      case CharClass::kDigit:
        if (!digit) return false;
        break;
      case CharClass::kAlpha:
        if (!upper && !lower) return false;
        break;
      case CharClass::kAlnum:
        if (!upper && !lower && !digit) return false;
        break;
      case CharClass::kSpace:
        if (!IsPythonSpace(static_cast<char32_t>(c))) return false;
        break;
      case CharClass::kUpper:
      case CharClass::kLower:
        if (char_class == CharClass::kUpper ? lower : upper) return false;
        if (!upper && !lower) continue;  // without case: it does not count
        break;
    }
    any = true;
  }
  return any;
}

bool UnescapePython(std::string_view body, std::string* out) {
  static constexpr std::string_view kLetters = "\\'\"abfnrtv";
  static constexpr std::string_view kValues = "\\'\"\a\b\f\n\r\t\v";
  for (size_t i = 0; i < body.size();) {
    if (body[i] != '\\') {
      *out += body[i++];
      continue;
    }
    if (i + 1 >= body.size()) return false;
    char c = body[i + 1];
    i += 2;
    char32_t value = 0;
    size_t letter = kLetters.find(c);
    if (letter != std::string_view::npos) {
      *out += kValues[letter];
    } else if (c == '\n') {
      // a line continued
    } else if (c == 'x' || c == 'u' || c == 'U') {
      if (!TakeHex(body, &i, c == 'x' ? 2 : c == 'u' ? 4 : 8, &value)) return false;
      if (value > 0x10FFFF || (value >= 0xD800 && value <= 0xDFFF)) return false;
      AppendUtf8(value, out);
    } else if (c >= '0' && c <= '7') {
      --i;
      for (int n = 0; n < 3 && i < body.size() && body[i] >= '0' && body[i] <= '7'; ++n, ++i) {
        value = value * 8 + static_cast<char32_t>(body[i] - '0');
      }
      AppendUtf8(value, out);
    } else if (c == 'N') {
      return false;
    } else {  // Python keeps the backslash of an escape it does not know
      *out += '\\';
      *out += c;
    }
  }
  return true;
}

}  // namespace zipage::jinja
