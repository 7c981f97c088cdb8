#include "scheduler/text/regex.h"

#include <pcre2.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "proto/status.h"

namespace zipage {
namespace {

constexpr size_t kMaxPatternBytes = 64 << 10;
// A match that tries more than this is a runaway pattern, not a long text: the patterns in use take
// a few steps per byte.
constexpr uint32_t kMatchLimit = 200'000'000;
constexpr uint32_t kHeapLimitKib = 256 << 10;

// The inside of a character class with all Unicode White_Space.
constexpr std::string_view kWhiteSpaceSet =
    "\\t-\\r\\x{20}\\x{85}\\x{a0}\\x{1680}\\x{2000}-\\x{200a}\\x{2028}\\x{2029}\\x{202f}\\x{205f}"
    "\\x{3000}";

absl::Status Unsupported(std::string_view pattern, std::string_view construct) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "pattern '%s' uses '%s', which this tokenizer does not support", pattern, construct));
}

// Groups that mean the same in both engines.
bool IsKnownGroup(std::string_view rest) {
  for (std::string_view start : {"(?:", "(?=", "(?!", "(?<=", "(?<!", "(?>", "(?i:", "(?-i:"}) {
    if (rest.substr(0, start.size()) == start) return true;
  }
  return rest.substr(0, 2) != "(?" && rest.substr(0, 2) != "(*";
}

// Handles the escape at pattern[i]; returns its length, 0 if it is unsupported.
size_t TranslateEscape(std::string_view pattern, size_t i, bool in_class, std::string* out) {
  if (i + 1 >= pattern.size()) return 0;
  char c = pattern[i + 1];
  if (c == 's') {
    *out += in_class ? std::string(kWhiteSpaceSet) : "[" + std::string(kWhiteSpaceSet) + "]";
    return 2;
  }
  if (c == 'S') {
    if (in_class) return 0;
    *out += "[^" + std::string(kWhiteSpaceSet) + "]";
    return 2;
  }
  if (c == 'u') {  // \uHHHH
    if (i + 6 > pattern.size()) return 0;
    *out += "\\x{" + std::string(pattern.substr(i + 2, 4)) + "}";
    return 6;
  }
  bool alphanumeric = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
  if (alphanumeric && std::string_view("pPdDrntfxAz").find(c) == std::string_view::npos) return 0;
  *out += pattern.substr(i, 2);
  return 2;
}

}  // namespace

absl::StatusOr<std::string> TranslateOnigurumaPattern(std::string_view pattern) {
  if (pattern.size() > kMaxPatternBytes) {
    return absl::InvalidArgumentError(
        absl::StrFormat("a pattern has %d bytes; at most %d", pattern.size(), kMaxPatternBytes));
  }
  std::string out;
  bool in_class = false;
  size_t class_start = 0;
  for (size_t i = 0; i < pattern.size();) {
    char c = pattern[i];
    if (c == '\\') {
      size_t n = TranslateEscape(pattern, i, in_class, &out);
      if (n == 0) return Unsupported(pattern, pattern.substr(i, 2));
      i += n;
      continue;
    }
    if (in_class) {
      if (c == '[') return Unsupported(pattern, "[ inside a set");
      if (pattern.substr(i, 2) == "&&") return Unsupported(pattern, "&&");
      if (c == ']' && i > class_start) in_class = false;
    } else if (c == '[') {
      in_class = true;
      class_start = i + 1;
      if (pattern.substr(i, 2) == "[^") {
        out.push_back('[');
        ++i;
        ++class_start;
        c = '^';
      }
      if (pattern.substr(class_start, 1) == "]") return Unsupported(pattern, "[]");
    } else if (c == '(' && !IsKnownGroup(pattern.substr(i))) {
      return Unsupported(pattern, pattern.substr(i, 4));
    } else if (c == '^' || c == '$') {
      return Unsupported(pattern, pattern.substr(i, 1));
    }
    out.push_back(c);
    ++i;
  }
  return out;
}

struct Regex::Impl {
  std::string source;
  pcre2_code* code = nullptr;
  pcre2_match_context* match_context = nullptr;
  ~Impl() {
    pcre2_match_context_free(match_context);
    pcre2_code_free(code);
  }
};

class Regex::Scratch {
 public:
  explicit Scratch(const pcre2_code* code)
      : data(pcre2_match_data_create_from_pattern(code, nullptr)) {}
  ~Scratch() { pcre2_match_data_free(data); }
  pcre2_match_data* data;
};

void Regex::ScratchDeleter::operator()(Scratch* scratch) const { delete scratch; }

Regex::Regex(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Regex::~Regex() = default;

absl::StatusOr<std::unique_ptr<Regex>> Regex::Compile(std::string_view pattern) {
  ZIPAGE_ASSIGN_OR_RETURN(std::string translated, TranslateOnigurumaPattern(pattern));
  auto impl = std::make_unique<Impl>();
  impl->source = std::string(pattern);
  int error = 0;
  PCRE2_SIZE error_offset = 0;
  pcre2_compile_context* context = pcre2_compile_context_create(nullptr);
  pcre2_set_newline(context, PCRE2_NEWLINE_LF);
  impl->code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(translated.data()), translated.size(),
                             PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error, &error_offset,
                             context);
  pcre2_compile_context_free(context);
  if (impl->code == nullptr) {
    PCRE2_UCHAR message[128] = {};
    pcre2_get_error_message(error, message, sizeof(message));
    return absl::InvalidArgumentError(absl::StrFormat("pattern '%s' does not compile: %s", pattern,
                                                      reinterpret_cast<const char*>(message)));
  }
  // Without JIT support in the library the interpreter gives the same matches, slower.
  pcre2_jit_compile(impl->code, PCRE2_JIT_COMPLETE);
  impl->match_context = pcre2_match_context_create(nullptr);
  pcre2_set_match_limit(impl->match_context, kMatchLimit);
  pcre2_set_heap_limit(impl->match_context, kHeapLimitKib);
  return std::unique_ptr<Regex>(new Regex(std::move(impl)));
}

Regex::ScratchPtr Regex::NewScratch() const { return ScratchPtr(new Scratch(impl_->code)); }

absl::StatusOr<Regex::Match> Regex::Find(std::string_view text, size_t start,
                                         Scratch* scratch) const {
  auto subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  int rc = pcre2_match(impl_->code, subject, text.size(), start, PCRE2_NO_UTF_CHECK, scratch->data,
                       impl_->match_context);
  if (rc == PCRE2_ERROR_JIT_STACKLIMIT) {
    rc = pcre2_match(impl_->code, subject, text.size(), start, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                     scratch->data, impl_->match_context);
  }
  if (rc == PCRE2_ERROR_NOMATCH) return Match{false, 0, 0};
  if (rc < 0) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("the tokenizer's pattern '%s' gives up on a text of %d bytes (PCRE2 error "
                        "%d); shorten the text",
                        impl_->source, text.size(), rc));
  }
  const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(scratch->data);
  return Match{true, offsets[0], offsets[1]};
}

}  // namespace zipage
