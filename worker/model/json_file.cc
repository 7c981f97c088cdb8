#include "worker/model/json_file.h"

#include <cmath>
#include <fstream>
#include <set>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace zipage {
namespace {

constexpr int kMaxDepth = 32;

// Deepest nesting of brackets outside strings. Run before parsing: a document tree of deep nesting
// takes hundreds of times its text.
int Depth(const std::string& text) {
  int depth = 0;
  int deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (in_string) {
      if (c == '\\') {
        ++i;
      } else if (c == '"') {
        in_string = false;
      }
    } else if (c == '"') {
      in_string = true;
    } else if (c == '{' || c == '[') {
      deepest = std::max(deepest, ++depth);
    } else if (c == '}' || c == ']') {
      --depth;
    }
  }
  return deepest;
}

absl::StatusOr<std::string> ReadSmallFile(const std::string& path, size_t max_bytes) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path, ": no such file, or not readable"));
  std::string text;
  std::vector<char> buffer(1 << 16);
  do {
    file.read(buffer.data(), static_cast<std::streamsize>(buffer.size()));
    text.append(buffer.data(), static_cast<size_t>(file.gcount()));
    if (text.size() > max_bytes) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: more than %d bytes; such a file has a few thousand", path, max_bytes));
    }
  } while (file);
  if (file.bad()) return absl::DataLossError(absl::StrCat(path, ": reading failed"));
  return text;
}

}  // namespace

absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path, size_t max_bytes) {
  ZIPAGE_ASSIGN_OR_RETURN(const std::string text, ReadSmallFile(path, max_bytes));
  if (Depth(text) > kMaxDepth) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: nested deeper than %d levels", path, kMaxDepth));
  }
  std::vector<std::set<std::string>> names;  // one set per open object
  std::string twice;
  const auto watch = [&](int, nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    if (event == Event::object_start) names.emplace_back();
    if (event == Event::object_end) names.pop_back();
    if (event == Event::key && !names.back().insert(parsed.get<std::string>()).second) {
      twice = parsed.get<std::string>();
    }
    return true;
  };
  nlohmann::json json;
  try {
    json = nlohmann::json::parse(text, watch);
  } catch (const nlohmann::json::exception& e) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: not JSON: %s", path, e.what()));
  }
  if (!json.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: holds %s; a JSON object is needed", path, Abbreviated(json)));
  }
  if (!twice.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: the name %s occurs twice", path, Abbreviated(twice)));
  }
  return json;
}

std::string Abbreviated(const nlohmann::json& value) {
  constexpr size_t kMaxBytes = 80;
  if (value.is_structured() && value.size() > 20) {
    return absl::StrFormat("%s of %d", value.is_array() ? "an array" : "an object", value.size());
  }
  std::string text =
      value.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kMaxBytes) text = text.substr(0, kMaxBytes) + "...";
  return text;
}

bool JsonFields::Has(const char* name) const {
  const auto it = object_.find(name);
  return it != object_.end() && !it->is_null();
}

absl::Status JsonFields::Require(const char* name) const {
  if (Has(name)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s: %s is missing", where_, name));
}

absl::Status JsonFields::WrongType(const char* name, const char* wanted) const {
  return absl::InvalidArgumentError(absl::StrFormat("%s: %s is %s; it must be %s", where_, name,
                                                    Abbreviated(object_.at(name)), wanted));
}

absl::Status JsonFields::ReadInt(const char* name, int64_t low, int64_t high, int64_t* out) const {
  if (!Has(name)) return absl::OkStatus();
  const nlohmann::json& value = object_.at(name);
  const std::string wanted = absl::StrFormat("an integer from %d to %d", low, high);
  // Integers written as 4096.0 count; anything beyond the range fails before the conversion.
  if (!value.is_number()) return WrongType(name, wanted.c_str());
  const double approximate = value.get<double>();
  if (!(approximate >= static_cast<double>(low) && approximate <= static_cast<double>(high)) ||
      approximate != std::floor(approximate)) {
    return WrongType(name, wanted.c_str());
  }
  *out = value.get<int64_t>();
  return absl::OkStatus();
}

absl::Status JsonFields::ReadInt(const char* name, int low, int high, int* out) const {
  int64_t value = *out;
  ZIPAGE_RETURN_IF_ERROR(ReadInt(name, int64_t{low}, int64_t{high}, &value));
  *out = static_cast<int>(value);
  return absl::OkStatus();
}

absl::Status JsonFields::ReadNumber(const char* name, double low, double high, double* out) const {
  if (!Has(name)) return absl::OkStatus();
  const nlohmann::json& value = object_.at(name);
  const double number = value.is_number() ? value.get<double>() : std::nan("");
  if (!(number >= low && number <= high)) {
    return WrongType(name, absl::StrFormat("a number from %g to %g", low, high).c_str());
  }
  *out = number;
  return absl::OkStatus();
}

absl::Status JsonFields::ReadBool(const char* name, bool* out) const {
  if (!Has(name)) return absl::OkStatus();
  const nlohmann::json& value = object_.at(name);
  if (!value.is_boolean()) return WrongType(name, "true or false");
  *out = value.get<bool>();
  return absl::OkStatus();
}

absl::Status JsonFields::ReadString(const char* name, std::string* out) const {
  if (!Has(name)) return absl::OkStatus();
  const nlohmann::json& value = object_.at(name);
  if (!value.is_string()) return WrongType(name, "a string");
  *out = value.get<std::string>();
  return absl::OkStatus();
}

}  // namespace zipage
