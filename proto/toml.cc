#include "proto/toml.h"

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"

namespace zipage {
namespace {

void SkipSpace(std::string_view* s) {
  while (!s->empty() && (s->front() == ' ' || s->front() == '\t')) s->remove_prefix(1);
}

bool IsBareKeyChar(char c) { return absl::ascii_isalnum(c) || c == '_' || c == '-'; }

void AppendUtf8(uint32_t code, std::string* out) {
  const auto push = [out](uint32_t byte) { out->push_back(static_cast<char>(byte)); };
  if (code < 0x80) {
    push(code);
  } else if (code < 0x800) {
    push(0xC0 | (code >> 6));
    push(0x80 | (code & 0x3F));
  } else if (code < 0x10000) {
    push(0xE0 | (code >> 12));
    push(0x80 | ((code >> 6) & 0x3F));
    push(0x80 | (code & 0x3F));
  } else {
    push(0xF0 | (code >> 18));
    push(0x80 | ((code >> 12) & 0x3F));
    push(0x80 | ((code >> 6) & 0x3F));
    push(0x80 | (code & 0x3F));
  }
}

// Reads \uXXXX or \UXXXXXXXX from behind its letter.
absl::Status ReadCodePoint(size_t num_digits, std::string_view* s, std::string* out) {
  uint32_t code = 0;
  for (size_t i = 0; i < num_digits; ++i) {
    if (i >= s->size() || !absl::ascii_isxdigit((*s)[i])) {
      return absl::InvalidArgumentError(
          absl::StrFormat("a \\u escape needs %d hexadecimal digits", num_digits));
    }
    const char c = absl::ascii_tolower((*s)[i]);
    code = code * 16 + static_cast<uint32_t>(c <= '9' ? c - '0' : c - 'a' + 10);
  }
  if (code > 0x10FFFF || (code >= 0xD800 && code < 0xE000) || code == 0) {
    return absl::InvalidArgumentError(absl::StrFormat("U+%04X is no character", code));
  }
  s->remove_prefix(num_digits);
  AppendUtf8(code, out);
  return absl::OkStatus();
}

// Reads a "basic string" from behind its opening quote, closing quote included.
absl::Status ReadBasicString(std::string_view* s, std::string* out) {
  while (!s->empty()) {
    const char c = s->front();
    s->remove_prefix(1);
    if (c == '"') return absl::OkStatus();
    if (c != '\\') {
      out->push_back(c);
      continue;
    }
    if (s->empty()) break;
    const char escape = s->front();
    s->remove_prefix(1);
    switch (escape) {
      case '"':
      case '\\':
        out->push_back(escape);
        break;
      case 'b':
        out->push_back('\b');
        break;
      case 't':
        out->push_back('\t');
        break;
      case 'n':
        out->push_back('\n');
        break;
      case 'f':
        out->push_back('\f');
        break;
      case 'r':
        out->push_back('\r');
        break;
      case 'u':
        ZIPAGE_RETURN_IF_ERROR(ReadCodePoint(4, s, out));
        break;
      case 'U':
        ZIPAGE_RETURN_IF_ERROR(ReadCodePoint(8, s, out));
        break;
      default:
        return absl::InvalidArgumentError(
            absl::StrFormat("\\%c is no escape; write a backslash as \\\\ or use '…'", escape));
    }
  }
  return absl::InvalidArgumentError("the string has no closing quote on its line");
}

// Reads true, false or a number.
absl::Status ReadBareValue(std::string_view* s, std::string* out) {
  const size_t end = std::min(s->find_first_of(" \t#"), s->size());
  const std::string_view token = s->substr(0, end);
  s->remove_prefix(end);
  std::copy_if(token.begin(), token.end(), std::back_inserter(*out),
               [](char c) { return c != '_'; });
  double number = 0;
  if (*out == "true" || *out == "false" || absl::SimpleAtod(*out, &number)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "\"%s\" is neither a number nor true or false; put strings in quotes", token));
}

absl::Status ParseLine(std::string_view line, TomlEntry* entry) {
  if (line.front() == '[') {
    return absl::InvalidArgumentError("tables are not used here; write key = value");
  }
  const auto key_end = std::find_if_not(line.begin(), line.end(), IsBareKeyChar);
  entry->key = std::string(line.begin(), key_end);
  std::replace(entry->key.begin(), entry->key.end(), '-', '_');
  line.remove_prefix(entry->key.size());
  SkipSpace(&line);
  if (entry->key.empty() || line.empty() || line.front() != '=') {
    return absl::InvalidArgumentError("expected key = value");
  }
  line.remove_prefix(1);
  SkipSpace(&line);
  const char first = line.empty() ? '\0' : line.front();
  if (first == '"') {
    line.remove_prefix(1);
    ZIPAGE_RETURN_IF_ERROR(ReadBasicString(&line, &entry->value));
  } else if (first == '\'') {
    const size_t end = line.find('\'', 1);
    if (end == std::string_view::npos) {
      return absl::InvalidArgumentError("the string has no closing quote on its line");
    }
    entry->value = std::string(line.substr(1, end - 1));
    line.remove_prefix(end + 1);
  } else {
    ZIPAGE_RETURN_IF_ERROR(ReadBareValue(&line, &entry->value));
  }
  SkipSpace(&line);
  if (!line.empty() && line.front() != '#') {
    return absl::InvalidArgumentError(
        absl::StrFormat("nothing but a comment may follow the value of %s", entry->key));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::vector<TomlEntry>> ParseToml(std::string_view text) {
  std::vector<TomlEntry> entries;
  std::set<std::string> keys;
  if (text.substr(0, 3) == "\xEF\xBB\xBF") text.remove_prefix(3);
  for (int number = 1; !text.empty(); ++number) {
    const size_t end = std::min(text.find('\n'), text.size());
    std::string_view line = text.substr(0, end);
    text.remove_prefix(std::min(end + 1, text.size()));
    if (!line.empty() && line.back() == '\r') line.remove_suffix(1);
    SkipSpace(&line);
    if (line.empty() || line.front() == '#') continue;
    TomlEntry entry;
    entry.line = number;
    absl::Status status = ParseLine(line, &entry);
    if (status.ok() && !keys.insert(entry.key).second) {
      status = absl::InvalidArgumentError(absl::StrFormat("%s is given twice", entry.key));
    }
    if (!status.ok()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("line %d: %s", number, std::string(status.message())));
    }
    entries.push_back(std::move(entry));
  }
  return entries;
}

std::string TomlString(std::string_view value) {
  std::string out = "\"";
  for (const char c : value) {
    if (c == '"' || c == '\\') {
      out.push_back('\\');
      out.push_back(c);
    } else if (absl::ascii_iscntrl(c)) {
      out += absl::StrFormat("\\u%04X", static_cast<unsigned char>(c));
    } else {
      out.push_back(c);
    }
  }
  out.push_back('"');
  return out;
}

}  // namespace zipage
