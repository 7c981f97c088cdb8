#pragma once
// The one way external text becomes JSON in this room: depth, number of values and of keys are
// checked before anything is built, NUL bytes and broken UTF-8 are refused, and errors are one
// printable line. Pure functions; no exception of the JSON library leaves.

#include <cstddef>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "proto/status.h"

namespace zipage {

// Objects and arrays open at once.
inline constexpr int kMaxJsonDepth = 64;
// Values of one text: more than the tokens of any context, about 64 MiB once built.
inline constexpr size_t kMaxJsonValues = size_t{2} << 20;
// Keys of one object: finding one is a linear search in ordered_json.
inline constexpr size_t kMaxJsonKeys = 4096;

// kInvalidArgument with what is wrong and where, such as "is not JSON: column 7: …".
absl::StatusOr<nlohmann::ordered_json> ParseBoundedJson(std::string_view text);

// The outermost "custom_id" (or, without one, "id") of a JSON object, even if the text breaks off
// or breaks a limit after it. An integer "id" counts too.
std::optional<std::string> FindCustomId(std::string_view text);

// `text` as part of a one-line message: valid UTF-8, control characters and line breaks as spaces,
// cut with "…" after about `max_bytes`.
std::string Printable(std::string_view text, size_t max_bytes);

// A value for a message: short ones as JSON text, long ones by their kind ("an array of 12").
std::string DescribeJson(const nlohmann::ordered_json& value);

}  // namespace zipage
