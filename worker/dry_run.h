#pragma once
// What an engine with these options would make of the memory, told without loading weights.

#include <string>

#include "proto/config.h"
#include "proto/status.h"
#include "worker/backend.h"

namespace zipage {

// Several lines for people: the memory of rank 0 (which holds most), how many sequences run at once
// with and without compression, and from which output length on compression is faster. Only the
// headers of the safetensors files are read; config.json alone will do. Errors are those of
// OpenModel and PlanMemory.
absl::StatusOr<std::string> DryRun(const Config& config, const Backend& backend);

}  // namespace zipage
