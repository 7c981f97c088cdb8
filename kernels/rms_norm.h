#pragma once
// Residual addition fused with root-mean-square normalization (Zhang and Sennrich, 2019).

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace zipage {

// With s = row_index[r] (r if row_index is null):
//   h = residual[s, :] + x[s, :], and residual[s, :] = h     (h = x[s, :] without a residual)
//   out[r, :] = h / sqrt(mean(h^2) + eps) * weight
// All arithmetic is fp32; h is rounded to the residual's type before it is normalized. A row's
// result does not depend on the other rows. `out` may be x when row_index is null. Bytes: rows *
// hidden * sizeof(x) * 4 with a residual, * 2 without; flops: 4 * rows * hidden. CHECKs the element
// type.
struct RmsNormParams {
  const void* x;             // [*, hidden]
  void* residual;            // [*, hidden], updated in place; null: none
  const int32_t* row_index;  // [rows], no row twice; null: rows 0 to rows - 1
  const float* weight;       // [hidden]
  void* out;                 // [rows, hidden]
  int64_t rows;
  int64_t hidden;
  float eps;
  DType dtype;  // of x, residual and out: kFloat32 or kBFloat16
};

namespace cpu {
void RmsNorm(const RmsNormParams& p);
}  // namespace cpu

namespace cuda {
// kUnimplemented for what it was not built for, kInternal if the launch fails.
absl::Status RmsNorm(const RmsNormParams& p, Stream stream);
}  // namespace cuda
}  // namespace zipage
