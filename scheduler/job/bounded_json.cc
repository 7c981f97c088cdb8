#include "scheduler/job/bounded_json.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "scheduler/text/utf8.h"

namespace zipage {
namespace {

using Json = nlohmann::ordered_json;

// Walks a text without building it. Stops at the first broken limit or syntax error.
class Guard {
 public:
  bool null() { return Value(); }
  bool boolean(bool /*value*/) { return Value(); }
  bool number_integer(int64_t value) { return Integer(absl::StrFormat("%d", value)); }
  bool number_unsigned(uint64_t value) { return Integer(absl::StrFormat("%u", value)); }
  bool number_float(double /*value*/, const std::string& /*text*/) { return Value(); }
  bool binary(Json::binary_t& /*value*/) { return Value(); }
  bool string(std::string& value) {
    if (keys_.size() == 1 && at_custom_id_) custom_id_ = value;
    if (keys_.size() == 1 && at_id_) id_ = value;
    return Value();
  }
  bool start_object(size_t /*size*/) { return Open(); }
  bool start_array(size_t /*size*/) { return Open(); }
  bool end_object() { return Close(); }
  bool end_array() { return Close(); }
  bool key(std::string& name) {
    if (++keys_.back() > kMaxJsonKeys) {
      error_ = absl::StrFormat("has an object of more than %d keys", kMaxJsonKeys);
      return false;
    }
    at_custom_id_ = keys_.size() == 1 && name == "custom_id";
    at_id_ = keys_.size() == 1 && name == "id";
    return true;
  }
  bool parse_error(size_t column, const std::string& /*token*/, const Json::exception& e) {
    // "[json.exception.parse_error.101] parse error at line 1, column 5: syntax error while …"
    std::string_view what = e.what();
    if (const size_t bracket = what.find("] "); bracket != what.npos)
      what.remove_prefix(bracket + 2);
    if (what.starts_with("parse error at")) {
      if (const size_t colon = what.find(": "); colon != what.npos) what.remove_prefix(colon + 2);
    }
    error_ = absl::StrFormat("is not JSON: column %d: %s", column, Printable(what, 200));
    return false;
  }

  const std::string& error() const { return error_; }
  std::optional<std::string> custom_id() const { return custom_id_.has_value() ? custom_id_ : id_; }

 private:
  bool Integer(std::string text) {
    if (keys_.size() == 1 && at_id_) id_ = std::move(text);
    return Value();
  }
  bool Value() {
    at_custom_id_ = at_id_ = false;
    if (++num_values_ <= kMaxJsonValues) return true;
    error_ = absl::StrFormat("has more than %d values", kMaxJsonValues);
    return false;
  }
  bool Open() {
    if (!Value()) return false;
    keys_.push_back(0);
    if (keys_.size() <= kMaxJsonDepth) return true;
    error_ = absl::StrFormat("nests deeper than %d levels", kMaxJsonDepth);
    return false;
  }
  bool Close() {
    keys_.pop_back();
    return true;
  }

  std::vector<size_t> keys_;  // per open object or array, its keys so far
  size_t num_values_ = 0;
  bool at_custom_id_ = false;
  bool at_id_ = false;
  std::optional<std::string> custom_id_;
  std::optional<std::string> id_;
  std::string error_;
};

}  // namespace

absl::StatusOr<Json> ParseBoundedJson(std::string_view text) {
  // The library takes a NUL byte for the end of its input.
  if (const size_t nul = text.find('\0'); nul != std::string_view::npos) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "has a NUL byte at column %d; write it as \\u0000 inside a string", nul + 1));
  }
  Guard guard;
  if (!Json::sax_parse(text, &guard)) return absl::InvalidArgumentError(guard.error());
  Json value = Json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (value.is_discarded()) return absl::InvalidArgumentError("is not JSON");
  return value;
}

std::optional<std::string> FindCustomId(std::string_view text) {
  Guard guard;
  Json::sax_parse(text, &guard);
  return guard.custom_id();
}

std::string Printable(std::string_view text, size_t max_bytes) {
  std::string printable;
  while (!text.empty()) {
    const Utf8Char c = DecodeUtf8(text);
    if (printable.size() >= max_bytes) return printable + "…";
    const bool is_control = c.code_point < 0x20 || (c.code_point >= 0x7F && c.code_point < 0xA0) ||
                            c.code_point == 0x2028 || c.code_point == 0x2029;
    AppendUtf8(is_control ? U' ' : c.code_point, &printable);
    text.remove_prefix(c.size);
  }
  return printable;
}

std::string DescribeJson(const Json& value) {
  constexpr size_t kMaxBytes = 60;
  if (value.is_array()) return absl::StrFormat("an array of %d", value.size());
  if (value.is_object()) return absl::StrFormat("an object of %d keys", value.size());
  if (value.is_string()) {
    const std::string& text = value.get_ref<const std::string&>();
    return absl::StrFormat("\"%s\"", Printable(text, kMaxBytes));
  }
  return value.dump();
}

}  // namespace zipage
