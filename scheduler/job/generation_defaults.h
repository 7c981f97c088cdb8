#pragma once
// Sampling defaults that a model's authors ship in generation_config.json. As in vLLM these are
// temperature, top_p, top_k, min_p and repetition_penalty; do_sample and everything else is ignored
// (max_new_tokens too: a default meant for demos would cut long reasoning short).

#include <cstdint>
#include <optional>
#include <string>

#include "proto/status.h"

namespace zipage {

struct GenerationDefaults {
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<int32_t> top_k;  // 0 is off
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
};

// Reads `model_dir`/generation_config.json; a missing file gives no defaults. Errors:
// kInvalidArgument naming file, field, value and range.
absl::StatusOr<GenerationDefaults> ReadGenerationDefaults(const std::string& model_dir);

}  // namespace zipage
