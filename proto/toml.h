#pragma once
// The part of TOML that a list of options needs: `key = value` lines and comments. Values are
// strings
// ("…" with escapes, '…' without), numbers and booleans. Tables, arrays, dates, dotted keys and
// multi-line strings are errors.
//   model = "/models/Qwen3-4B"   # a comment
//   max_num_batched_tokens = 8_192

#include <string>
#include <string_view>
#include <vector>

#include "proto/status.h"

namespace zipage {

struct TomlEntry {
  std::string key;    // Dashes as underscores.
  std::string value;  // Of a string its characters; of anything else the text, without underscores.
  int line = 0;       // From 1.
};

// Errors name the line. A key given twice is an error.
absl::StatusOr<std::vector<TomlEntry>> ParseToml(std::string_view text);

// `value` as a TOML string with its quotes, on one line.
std::string TomlString(std::string_view value);

}  // namespace zipage
