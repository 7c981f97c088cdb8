#pragma once
// The gated activation of the Llama MLP (SwiGLU; Shazeer, 2020).

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace zipage {

// out[t, i] = silu(gate_up[t, i]) * gate_up[t, n + i], silu(x) = x / (1 + exp(-x)), in fp32.
// Bytes: 3 * tokens * n * sizeof(out); flops: about 20 * tokens * n (the exponential is a
// polynomial). CHECKs the element type.
struct SiluMulParams {
  const void* gate_up;  // [tokens, 2 * n]
  void* out;            // [tokens, n]
  int64_t tokens;
  int64_t n;
  DType dtype;  // kFloat32 or kBFloat16
};

namespace cpu {
void SiluMul(const SiluMulParams& p);
}  // namespace cpu

namespace cuda {
// kUnimplemented for what it was not built for, kInternal if the launch fails.
absl::Status SiluMul(const SiluMulParams& p, Stream stream);
}  // namespace cuda
}  // namespace zipage
