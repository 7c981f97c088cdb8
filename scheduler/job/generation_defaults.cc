#include "scheduler/job/generation_defaults.h"

#include <limits>
#include <nlohmann/json.hpp>

#include "absl/strings/str_format.h"
#include "scheduler/job/field_reader.h"
#include "scheduler/text/model_files.h"

namespace zipage {
namespace {

// Reads temperature, top_p, … from `file`; false and an error for one that is out of range.
bool ReadDefaults(nlohmann::ordered_json* file, GenerationDefaults* defaults, RequestError* error) {
  for (auto& [name, value] : file->items()) {
    if (value.is_null()) continue;
    const Field field{name, &value, error};
    if (name == "temperature") {
      if (!field.ReadFloat(0, 100, &defaults->temperature.emplace())) return false;
    } else if (name == "top_p") {
      if (!field.ReadPositiveFloat(1, &defaults->top_p.emplace())) return false;
    } else if (name == "top_k") {
      int32_t top_k = 0;
      if (!field.ReadInt32(-1, std::numeric_limits<int32_t>::max(), &top_k)) return false;
      defaults->top_k = top_k > 0 ? top_k : 0;
    } else if (name == "min_p") {
      if (!field.ReadFloat(0, 1, &defaults->min_p.emplace())) return false;
    } else if (name == "repetition_penalty") {
      if (!field.ReadFloat(0.01F, 100, &defaults->repetition_penalty.emplace())) return false;
    }
  }
  return true;
}

}  // namespace

absl::StatusOr<GenerationDefaults> ReadGenerationDefaults(const std::string& model_dir) {
  const std::string path = model_dir + "/generation_config.json";
  ZIPAGE_ASSIGN_OR_RETURN(nlohmann::ordered_json file, ReadConfigFile(path));
  GenerationDefaults defaults;
  RequestError error;
  if (ReadDefaults(&file, &defaults, &error)) return defaults;
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %s, or run with --generation_config none", path, error.message));
}

}  // namespace zipage
