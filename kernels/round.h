#pragma once
// Float32 sums back to the type of activations.

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace zipage::cuda {

// out[i] = in[i] rounded to nearest, ties to even, i < count. Bytes: 6 * count.
absl::Status RoundToBFloat16(const float* in, BFloat16* out, int64_t count, Stream stream);

}  // namespace zipage::cuda
