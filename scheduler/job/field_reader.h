#pragma once
// Typed reading of one member of a request with its range, and the wording of what is wrong. Pure.

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "scheduler/job/request_parser.h"

namespace zipage {

// A member under its full name ("messages[2].content"). Every Read… returns false and fills `error`
// if the value is not what is asked for, and leaves the target alone then.
struct Field {
  std::string name;
  nlohmann::ordered_json* value = nullptr;
  RequestError* error = nullptr;

  // "NAME is VALUE; CURE". Always false.
  bool Refuse(std::string_view cure) const;
  // "NAME WHAT". Always false.
  bool Fail(std::string_view what) const;

  // The field of one element or member of this one.
  Field At(size_t index) const;
  Field At(const std::string& key) const;

  bool ReadBool(bool* target) const;
  // Accepts 3 and 3.0, not 3.5, "3" or true.
  bool ReadInt(int64_t low, int64_t high, int64_t* target) const;
  bool ReadInt32(int32_t low, int32_t high, int32_t* target) const;
  // A number in [low, high], rounded to float.
  bool ReadFloat(float low, float high, float* target) const;
  // A number in (0, high], above 0 after rounding to float too.
  bool ReadPositiveFloat(float high, float* target) const;
  // At most `max_bytes` bytes, not empty.
  bool ReadName(size_t max_bytes, std::string* target) const;
  bool ReadTokenIds(std::vector<int32_t>* target) const;
};

}  // namespace zipage
