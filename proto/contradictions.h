#pragma once
// What no option alone can tell: whether options fit together.

#include "proto/config.h"
#include "proto/status.h"

namespace zipage {

// kInvalidArgument, naming options, values and cure, at the first contradiction. REQUIRES: every
// option is in its own range.
absl::Status CheckContradictions(const Config& config);

}  // namespace zipage
