#pragma once
// Moves token ids between the order of a step's rows and that of the sequence slots, on the device:
// no sampled token travels through the host to become the next input.

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/stream.h"

namespace zipage::cuda {

// out[i] = in[index[i]], i < count. Bytes: 12 * count.
absl::Status GatherTokens(const int32_t* in, const int32_t* index, int32_t* out, int64_t count,
                          Stream stream);
// out[index[i]] = in[i], no index twice. Bytes: 12 * count.
absl::Status ScatterTokens(const int32_t* in, const int32_t* index, int32_t* out, int64_t count,
                           Stream stream);

}  // namespace zipage::cuda
