#include "scheduler/text/utf8.h"

#include <utf8proc.h>

#include <algorithm>
#include <vector>

namespace zipage {
namespace {

constexpr char32_t kReplacement = 0xFFFD;

// Length and the allowed range of the second byte, by the first byte (Unicode, table 3-7).
struct LeadByte {
  int size;
  uint8_t second_min;
  uint8_t second_max;
};

LeadByte ClassifyLead(uint8_t b) {
  if (b < 0x80) return {1, 0, 0};
  if (b < 0xC2) return {0, 0, 0};
  if (b < 0xE0) return {2, 0x80, 0xBF};
  if (b == 0xE0) return {3, 0xA0, 0xBF};
  if (b == 0xED) return {3, 0x80, 0x9F};
  if (b < 0xF0) return {3, 0x80, 0xBF};
  if (b == 0xF0) return {4, 0x90, 0xBF};
  if (b < 0xF4) return {4, 0x80, 0xBF};
  if (b == 0xF4) return {4, 0x80, 0x8F};
  return {0, 0, 0};
}

// Starters that never compose with what stands before them and do not change under NFC.
bool IsNfcInert(char32_t c) {
  return c < 0x300 || (c >= 0x3400 && c <= 0x9FFF) || (c >= 0x3041 && c <= 0x3098);
}

// Decomposes, orders marks, composes. utf8proc's own ordering is quadratic in the length of a run
// of marks, so runs are sorted here.
void AppendNfcOfRun(std::u32string_view run, std::string* out) {
  std::vector<utf8proc_int32_t> buffer;
  buffer.reserve(run.size() + run.size() / 2);
  for (char32_t c : run) {
    utf8proc_int32_t parts[32];
    int last_boundclass = 0;
    utf8proc_ssize_t n = utf8proc_decompose_char(
        static_cast<utf8proc_int32_t>(c), parts, 32,
        static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE), &last_boundclass);
    if (n < 0 || n > 32) {
      buffer.push_back(static_cast<utf8proc_int32_t>(c));
    } else {
      buffer.insert(buffer.end(), parts, parts + n);
    }
  }
  auto mark_class = [](utf8proc_int32_t c) { return utf8proc_get_property(c)->combining_class; };
  for (size_t i = 0; i < buffer.size();) {
    size_t j = i;
    while (j < buffer.size() && mark_class(buffer[j]) != 0) ++j;
    if (j - i > 1) {
      std::stable_sort(buffer.begin() + i, buffer.begin() + j,
                       [&](auto a, auto b) { return mark_class(a) < mark_class(b); });
    }
    i = j + 1;
  }
  utf8proc_ssize_t n =
      utf8proc_normalize_utf32(buffer.data(), static_cast<utf8proc_ssize_t>(buffer.size()),
                               static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  for (utf8proc_ssize_t i = 0; i < n; ++i) AppendUtf8(static_cast<char32_t>(buffer[i]), out);
}

}  // namespace

Utf8Char DecodeUtf8(std::string_view bytes) {
  uint8_t first = static_cast<uint8_t>(bytes[0]);
  LeadByte lead = ClassifyLead(first);
  if (lead.size == 1) return {Utf8Char::Kind::kValid, first, 1};
  if (lead.size == 0) return {Utf8Char::Kind::kInvalid, kReplacement, 1};
  char32_t code_point = first & (0xFF >> (lead.size + 1));
  for (int i = 1; i < lead.size; ++i) {
    size_t at = static_cast<size_t>(i);
    if (at >= bytes.size()) return {Utf8Char::Kind::kIncomplete, kReplacement, at};
    uint8_t b = static_cast<uint8_t>(bytes[at]);
    uint8_t low = i == 1 ? lead.second_min : 0x80;
    uint8_t high = i == 1 ? lead.second_max : 0xBF;
    if (b < low || b > high) return {Utf8Char::Kind::kInvalid, kReplacement, at};
    code_point = (code_point << 6) | (b & 0x3F);
  }
  return {Utf8Char::Kind::kValid, code_point, static_cast<size_t>(lead.size)};
}

void AppendUtf8(char32_t c, std::string* out) {
  if (c > 0x10FFFF || (c >= 0xD800 && c <= 0xDFFF)) c = kReplacement;
  if (c < 0x80) {
    out->push_back(static_cast<char>(c));
  } else if (c < 0x800) {
    out->push_back(static_cast<char>(0xC0 | (c >> 6)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else if (c < 0x10000) {
    out->push_back(static_cast<char>(0xE0 | (c >> 12)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  } else {
    out->push_back(static_cast<char>(0xF0 | (c >> 18)));
    out->push_back(static_cast<char>(0x80 | ((c >> 12) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | ((c >> 6) & 0x3F)));
    out->push_back(static_cast<char>(0x80 | (c & 0x3F)));
  }
}

bool IsValidUtf8(std::string_view bytes) {
  size_t i = 0;
  while (i < bytes.size()) {
    if (static_cast<uint8_t>(bytes[i]) < 0x80) {
      ++i;
      continue;
    }
    Utf8Char c = DecodeUtf8(bytes.substr(i));
    if (c.kind != Utf8Char::Kind::kValid) return false;
    i += c.size;
  }
  return true;
}

size_t AppendLossyUtf8(std::string_view bytes, bool is_final, std::string* out) {
  size_t i = 0;
  size_t copied = 0;  // everything before it has been appended
  while (i < bytes.size()) {
    Utf8Char c = DecodeUtf8(bytes.substr(i));
    if (c.kind != Utf8Char::Kind::kValid) {
      out->append(bytes.substr(copied, i - copied));
      if (c.kind == Utf8Char::Kind::kIncomplete && !is_final) return i;
      AppendUtf8(kReplacement, out);
      copied = i + c.size;
    }
    i += c.size;
  }
  out->append(bytes.substr(copied));
  return bytes.size();
}

std::string NormalizeNfc(std::string_view text) {
  std::string out;
  out.reserve(text.size());
  std::u32string run;  // what may still change: begins with a starter unless at the text's start
  bool plain = true;   // the run is one inert character
  auto flush = [&] {
    if (run.empty()) return;
    if (plain) {
      AppendUtf8(run[0], &out);
    } else {
      AppendNfcOfRun(run, &out);
    }
    run.clear();
  };
  for (size_t i = 0; i < text.size();) {
    size_t ascii_end = i;
    while (ascii_end < text.size() && static_cast<uint8_t>(text[ascii_end]) < 0x80) ++ascii_end;
    if (ascii_end > i) {  // the last one may still take a mark
      flush();
      out.append(text.substr(i, ascii_end - i - 1));
      run.push_back(static_cast<char32_t>(text[ascii_end - 1]));
      plain = true;
      i = ascii_end;
      continue;
    }
    Utf8Char c = DecodeUtf8(text.substr(i));
    if (IsNfcInert(c.code_point)) {
      flush();
      plain = true;
    } else {
      plain = false;
    }
    run.push_back(c.code_point);
    i += c.size;
  }
  flush();
  return out;
}

bool IsWhiteSpace(char32_t c) {
  return (c >= 0x09 && c <= 0x0D) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
         c == 0x3000;
}

bool IsWordChar(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

char32_t CodePointBefore(std::string_view text, size_t end, size_t* start) {
  size_t i = end - 1;
  while (i > 0 && end - i < 4 && (static_cast<uint8_t>(text[i]) & 0xC0) == 0x80) --i;
  *start = i;
  return DecodeUtf8(text.substr(i, end - i)).code_point;
}

}  // namespace zipage
