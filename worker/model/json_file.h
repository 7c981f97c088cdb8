#pragma once
// Small JSON files of a model folder, read without trust: bounded size and depth, no name twice,
// and typed access whose errors name file, field and value.

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "nlohmann/json.hpp"
#include "proto/status.h"

namespace zipage {

// The JSON object in a file of at most `max_bytes`, nested at most 32 deep. kNotFound, or kDataLoss
// if it cannot be read; kInvalidArgument if it is too large, not JSON, or holds a name twice.
absl::StatusOr<nlohmann::json> ReadJsonObject(const std::string& path, size_t max_bytes);

// JSON text of a value, cut to fit a message.
std::string Abbreviated(const nlohmann::json& value);

// Reads members of one JSON object. Each Read leaves `*out` alone if the member is absent or null,
// and returns kInvalidArgument if it has the wrong type or lies outside [low, high].
class JsonFields {
 public:
  // `where` begins every message: the file, and the object's name in it. `object` must outlive
  // this.
  JsonFields(const nlohmann::json& object, std::string where)
      : object_(object), where_(std::move(where)) {}

  bool Has(const char* name) const;  // present and not null
  absl::Status Require(const char* name) const;
  absl::Status ReadInt(const char* name, int64_t low, int64_t high, int64_t* out) const;
  absl::Status ReadInt(const char* name, int low, int high, int* out) const;
  absl::Status ReadNumber(const char* name, double low, double high, double* out) const;
  absl::Status ReadBool(const char* name, bool* out) const;
  absl::Status ReadString(const char* name, std::string* out) const;

  const nlohmann::json& object() const { return object_; }
  const std::string& where() const { return where_; }

 private:
  absl::Status WrongType(const char* name, const char* wanted) const;

  const nlohmann::json& object_;
  std::string where_;
};

}  // namespace zipage
