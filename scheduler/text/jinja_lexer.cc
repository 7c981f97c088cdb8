#include "scheduler/text/jinja_lexer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/status.h"
#include "scheduler/text/jinja_text.h"
#include "scheduler/text/utf8.h"

namespace zipage::jinja {
namespace {

using Type = Token::Type;

bool IsDigit(char c) { return c >= '0' && c <= '9'; }
bool IsNameStart(char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; }

class Lexer {
 public:
  explicit Lexer(std::string_view source) : source_(NormalizeNewlines(source)) {}

  absl::StatusOr<std::vector<Token>> Run() {
    while (pos_ < source_.size()) ZIPAGE_RETURN_IF_ERROR(LexRoot());
    Add(Type::kEof, "");
    return std::move(tokens_);
  }

 private:
  // "\n" for every line break, and none at the end (keep_trailing_newline is off).
  static std::string NormalizeNewlines(std::string_view source) {
    std::string out;
    out.reserve(source.size());
    for (size_t i = 0; i < source.size(); ++i) {
      if (source[i] != '\r') {
        out += source[i];
        continue;
      }
      out += '\n';
      if (i + 1 < source.size() && source[i + 1] == '\n') ++i;
    }
    if (!out.empty() && out.back() == '\n') out.pop_back();
    return out;
  }

  std::string_view Rest() const { return std::string_view(source_).substr(pos_); }
  bool At(std::string_view text) const { return Rest().substr(0, text.size()) == text; }

  absl::Status Error(std::string_view message) const {
    return absl::InvalidArgumentError(
        absl::StrFormat("chat template, line %d: %s", line_, message));
  }

  void Advance(size_t n) {
    line_ += static_cast<int>(std::count(source_.begin() + static_cast<long>(pos_),
                                         source_.begin() + static_cast<long>(pos_ + n), '\n'));
    pos_ += n;
  }

  void Add(Type type, std::string value) { tokens_.push_back({type, std::move(value), line_}); }

  void SkipSpace() {
    while (pos_ < source_.size()) {
      Utf8Char c = DecodeUtf8(Rest());
      if (!IsPythonSpace(c.code_point)) break;
      Advance(c.size);
    }
  }

  // Takes the text up to `tag`, stripped as the tag's sign asks, and emits it.
  void EmitData(size_t tag, char sign, bool is_variable) {
    std::string_view text = std::string_view(source_).substr(pos_, tag - pos_);
    std::string_view kept = text;
    if (sign == '-') {
      kept = StripRight(text);
    } else if (sign != '+' && !is_variable) {
      size_t line_start = text.rfind('\n') + 1;  // 0 if there is none
      if ((line_start > 0 || line_starting_) && StripRight(text.substr(line_start)).empty()) {
        kept = text.substr(0, line_start);
      }
    }
    if (!kept.empty()) Add(Type::kData, std::string(kept));
    Advance(text.size());
    line_starting_ = false;
  }

  // Takes the end of a tag: `-` strips what follows, else a newline goes if `trim` and no `+`.
  void TakeEnd(std::string_view close, bool trim) {
    char sign = source_[pos_];
    size_t start = pos_;
    Advance(close.size() + (sign == '-' || sign == '+' ? 1 : 0));
    if (sign == '-') {
      SkipSpace();
    } else if (trim && sign != '+' && At("\n")) {
      Advance(1);
    }
    line_starting_ = pos_ > start && source_[pos_ - 1] == '\n';
  }

  absl::Status LexRoot() {
    size_t tag = pos_;
    while (true) {
      tag = source_.find('{', tag);
      if (tag == std::string::npos || tag + 1 >= source_.size()) {
        Add(Type::kData, std::string(Rest()));
        Advance(source_.size() - pos_);
        return absl::OkStatus();
      }
      char next = source_[tag + 1];
      if (next == '%' || next == '{' || next == '#') break;
      ++tag;
    }
    char kind = source_[tag + 1];
    char sign = tag + 2 < source_.size() ? source_[tag + 2] : ' ';
    if (sign != '-' && sign != '+') sign = ' ';
    EmitData(tag, sign, kind == '{');
    size_t tag_size = sign == ' ' ? 2 : 3;
    if (kind == '#') return LexComment(tag_size);
    if (kind == '%' && AtRawBegin(tag_size)) return LexRaw(tag_size);
    Add(kind == '%' ? Type::kBlockBegin : Type::kVariableBegin, "");
    Advance(tag_size);
    return LexTag(kind == '%' ? "%}" : "}}", kind == '%');
  }

  absl::Status LexComment(size_t tag_size) {
    Advance(tag_size);
    size_t end = source_.find("#}", pos_);
    if (end == std::string::npos) return Error("a comment is not closed; missing '#}'");
    if (end > pos_ && (source_[end - 1] == '-' || source_[end - 1] == '+')) --end;
    Advance(end - pos_);
    TakeEnd("#}", /*trim=*/true);
    return absl::OkStatus();
  }

  // Position after white space from `at` on.
  size_t AfterSpace(size_t at) const {
    while (at < source_.size()) {
      Utf8Char c = DecodeUtf8(std::string_view(source_).substr(at));
      if (!IsPythonSpace(c.code_point)) break;
      at += c.size;
    }
    return at;
  }

  bool AtRawBegin(size_t tag_size) const {
    size_t at = AfterSpace(pos_ + tag_size);
    if (source_.compare(at, 3, "raw") != 0) return false;
    at = AfterSpace(at + 3);
    return source_.compare(at, 2, "%}") == 0 || source_.compare(at, 3, "-%}") == 0;
  }

  absl::Status LexRaw(size_t tag_size) {
    Advance(tag_size);
    SkipSpace();
    Advance(3);
    SkipSpace();
    TakeEnd("%}", /*trim=*/false);
    for (size_t tag = pos_; (tag = source_.find("{%", tag)) != std::string::npos; tag += 2) {
      size_t at = tag + 2;
      char sign = at < source_.size() ? source_[at] : ' ';
      if (sign == '-' || sign == '+') ++at;
      at = AfterSpace(at);
      if (source_.compare(at, 6, "endraw") != 0) continue;
      at = AfterSpace(at + 6);
      bool closes = source_.compare(at, 2, "%}") == 0 || source_.compare(at, 3, "-%}") == 0 ||
                    source_.compare(at, 3, "+%}") == 0;
      if (!closes) continue;
      EmitData(tag, sign, false);
      Advance(at - pos_);
      TakeEnd("%}", /*trim=*/true);
      return absl::OkStatus();
    }
    return Error("'raw' is not closed; missing 'endraw'");
  }

  absl::Status LexTag(std::string_view close, bool is_block) {
    std::string open_brackets;
    while (true) {
      SkipSpace();
      if (pos_ >= source_.size()) {
        return Error(absl::StrFormat("the template ends inside a tag; missing '%s'", close));
      }
      if (open_brackets.empty() && AtEnd(close, is_block)) {
        Add(is_block ? Type::kBlockEnd : Type::kVariableEnd, "");
        TakeEnd(close, is_block);
        return absl::OkStatus();
      }
      char c = source_[pos_];
      if (IsDigit(c)) {
        ZIPAGE_RETURN_IF_ERROR(LexNumber());
      } else if (IsNameStart(c)) {
        size_t n = 1;
        while (pos_ + n < source_.size() &&
               (IsNameStart(source_[pos_ + n]) || IsDigit(source_[pos_ + n]))) {
          ++n;
        }
        Add(Type::kName, source_.substr(pos_, n));
        Advance(n);
      } else if (c == '"' || c == '\'') {
        ZIPAGE_RETURN_IF_ERROR(LexString(c));
      } else {
        ZIPAGE_RETURN_IF_ERROR(LexOperator(&open_brackets));
      }
    }
  }

  bool AtEnd(std::string_view close, bool is_block) const {
    if (At(close)) return true;
    std::string_view rest = Rest();
    bool signed_end = !rest.empty() && (rest[0] == '-' || (is_block && rest[0] == '+'));
    return signed_end && rest.substr(1, close.size()) == close;
  }

  absl::Status LexOperator(std::string* open_brackets) {
    for (std::string_view op : {"//", "**", "==", "!=", ">=", "<="}) {
      if (!At(op)) continue;
      Add(Type::kOperator, std::string(op));
      Advance(op.size());
      return absl::OkStatus();
    }
    char c = source_[pos_];
    if (std::string_view("+-/*%~[](){}><=.:|,;").find(c) == std::string_view::npos) {
      return Error(absl::StrFormat("unexpected character at '%s'",
                                   std::string(Rest().substr(0, DecodeUtf8(Rest()).size))));
    }
    if (c == '(' || c == '[' || c == '{') {
      *open_brackets += c == '(' ? ')' : c == '[' ? ']' : '}';
    } else if (c == ')' || c == ']' || c == '}') {
      if (open_brackets->empty() || open_brackets->back() != c) {
        return Error(absl::StrFormat("unexpected '%c'", c));
      }
      open_brackets->pop_back();
    }
    Add(Type::kOperator, std::string(1, c));
    Advance(1);
    return absl::OkStatus();
  }

  // Digits with single underscores between them, from `at` on.
  size_t SkipDigits(size_t at) const {
    while (at < source_.size() &&
           (IsDigit(source_[at]) ||
            (source_[at] == '_' && at + 1 < source_.size() && IsDigit(source_[at + 1])))) {
      ++at;
    }
    return at;
  }

  absl::Status LexNumber() {
    size_t end = SkipDigits(pos_);
    bool is_float = false;
    bool after_dot = pos_ > 0 && source_[pos_ - 1] == '.';  // "x.0.1" is two subscripts
    if (!after_dot && end + 1 < source_.size() && source_[end] == '.' &&
        IsDigit(source_[end + 1])) {
      is_float = true;
      end = SkipDigits(end + 1);
    }
    if (!after_dot && end < source_.size() && (source_[end] == 'e' || source_[end] == 'E')) {
      size_t at = end + 1;
      if (at < source_.size() && (source_[at] == '+' || source_[at] == '-')) ++at;
      if (at < source_.size() && IsDigit(source_[at])) {
        is_float = true;
        end = SkipDigits(at);
      }
    }
    if (end < source_.size() && IsNameStart(source_[end])) {
      return Error("a number runs into a name (0x, 0o and 0b are not supported)");
    }
    std::string digits = source_.substr(pos_, end - pos_);
    digits.erase(std::remove(digits.begin(), digits.end(), '_'), digits.end());
    if (!is_float && digits.size() > 1 && digits[0] == '0' &&
        digits.find_first_not_of('0') != std::string::npos) {
      return Error("a number begins with 0");
    }
    Add(is_float ? Type::kFloat : Type::kInteger, std::move(digits));
    Advance(end - pos_);
    return absl::OkStatus();
  }

  absl::Status LexString(char quote) {
    size_t end = pos_ + 1;
    while (end < source_.size() && source_[end] != quote) end += source_[end] == '\\' ? 2 : 1;
    if (end >= source_.size()) return Error("a string is not closed");
    std::string value;
    std::string_view body = std::string_view(source_).substr(pos_ + 1, end - pos_ - 1);
    if (!UnescapePython(body, &value)) return Error("a string has a bad or unsupported escape");
    Add(Type::kString, std::move(value));
    Advance(end + 1 - pos_);
    return absl::OkStatus();
  }

  std::string source_;
  size_t pos_ = 0;
  int line_ = 1;
  bool line_starting_ = true;  // nothing but stripped tags since the line began
  std::vector<Token> tokens_;
};

}  // namespace

absl::StatusOr<std::vector<Token>> Tokenize(std::string_view source) {
  if (!IsValidUtf8(source)) return absl::InvalidArgumentError("chat template: not UTF-8");
  return Lexer(source).Run();
}

}  // namespace zipage::jinja
