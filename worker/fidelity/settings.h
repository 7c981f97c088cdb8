#pragma once
// The settings that zipage-fidelity compares: the options of the command line, each with its own
// changes. Host code.

#include <string>

#include "proto/config.h"
#include "proto/status.h"

namespace zipage {

struct FidelitySetting {
  std::string name;
  Config config;  // ResolveCompression was applied
};

// The setting of "NAME:key=value,key=value" on top of `base`: every key is an option of the
// engine, its value what the flag takes (true or false for switches); "NAME" alone is the base
// itself. kInvalidArgument, with the setting's name, for what is no such text, an unknown option, a
// value that Validate refuses, or an option that all settings share because they share one load of
// the weights.
absl::StatusOr<FidelitySetting> ParseSetting(const std::string& text, const Config& base);

// OK if a replay does what an engine with these options does: one rank, compression at fixed
// points.
absl::Status CheckReplayable(const Config& config);

}  // namespace zipage
