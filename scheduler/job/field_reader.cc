#include "scheduler/job/field_reader.h"

#include <cmath>
#include <limits>
#include <utility>

#include "absl/strings/str_format.h"
#include "scheduler/job/bounded_json.h"

namespace zipage {

bool Field::Refuse(std::string_view cure) const {
  return Fail(absl::StrFormat("is %s; %s", DescribeJson(*value), cure));
}

bool Field::Fail(std::string_view what) const {
  error->field = Printable(name, 100);
  error->message = absl::StrFormat("%s %s", error->field, what);
  return false;
}

Field Field::At(size_t index) const {
  return {absl::StrFormat("%s[%d]", name, index), &(*value)[index], error};
}

Field Field::At(const std::string& key) const {
  return {absl::StrFormat("%s.%s", name, key), &(*value)[key], error};
}

bool Field::ReadBool(bool* target) const {
  if (!value->is_boolean()) return Refuse("give true or false");
  *target = value->get<bool>();
  return true;
}

bool Field::ReadInt(int64_t low, int64_t high, int64_t* target) const {
  // Integers beyond this are not exact as doubles, so 1e17 is no integer.
  constexpr double kMaxExact = 9007199254740992.0;
  int64_t number = 0;
  bool fits = false;
  if (value->is_number_unsigned()) {
    const auto wide = value->get<uint64_t>();
    fits = wide <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max());
    number = static_cast<int64_t>(wide);
  } else if (value->is_number_integer()) {
    fits = true;
    number = value->get<int64_t>();
  } else if (value->is_number_float()) {
    const auto wide = value->get<double>();
    fits = std::abs(wide) <= kMaxExact && wide == std::floor(wide);
    number = fits ? static_cast<int64_t>(wide) : 0;
  }
  if (!fits || number < low || number > high) {
    return Refuse(absl::StrFormat("give an integer from %d to %d", low, high));
  }
  *target = number;
  return true;
}

bool Field::ReadInt32(int32_t low, int32_t high, int32_t* target) const {
  int64_t number = 0;
  if (!ReadInt(low, high, &number)) return false;
  *target = static_cast<int32_t>(number);
  return true;
}

bool Field::ReadFloat(float low, float high, float* target) const {
  if (value->is_number()) {
    const auto wide = value->get<double>();
    if (wide >= static_cast<double>(low) && wide <= static_cast<double>(high)) {
      *target = static_cast<float>(wide);
      return true;
    }
  }
  return Refuse(absl::StrFormat("give a number from %g to %g", low, high));
}

bool Field::ReadPositiveFloat(float high, float* target) const {
  if (value->is_number()) {
    const auto wide = value->get<double>();
    if (static_cast<float>(wide) > 0 && wide <= static_cast<double>(high)) {
      *target = static_cast<float>(wide);
      return true;
    }
  }
  return Refuse(absl::StrFormat("give a number above 0, at most %g", high));
}

bool Field::ReadName(size_t max_bytes, std::string* target) const {
  if (!value->is_string()) return Refuse("give a string");
  const std::string& text = value->get_ref<const std::string&>();
  if (text.empty()) return Fail(absl::StrFormat("is empty; give 1 to %d bytes", max_bytes));
  if (text.size() > max_bytes) {
    return Fail(absl::StrFormat("is %d bytes long; give 1 to %d", text.size(), max_bytes));
  }
  *target = text;
  return true;
}

bool Field::ReadTokenIds(std::vector<int32_t>* target) const {
  if (!value->is_array()) return Refuse("give an array of token ids");
  std::vector<int32_t> ids;
  ids.reserve(value->size());
  for (nlohmann::ordered_json& element : *value) {
    int32_t id = 0;
    // The name with its index is only made for an error: a prompt may have a million ids.
    if (!Field{name, &element, error}.ReadInt32(0, std::numeric_limits<int32_t>::max(), &id)) {
      return At(ids.size()).ReadInt32(0, std::numeric_limits<int32_t>::max(), &id);
    }
    ids.push_back(id);
  }
  *target = std::move(ids);
  return true;
}

}  // namespace zipage
