#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/vector.cuh"
#include "kernels/silu_mul.h"

namespace zipage::cuda {
namespace {

constexpr int kThreads = 256;

// CTA: (kThreads * kVec elements, token).
template <typename T, int kVec>
__global__ void __launch_bounds__(kThreads) SiluMulKernel(SiluMulParams p) {
  const int64_t t = blockIdx.x;
  const int64_t i = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kVec;
  if (i >= p.n) return;
  const T* row = static_cast<const T*>(p.gate_up) + t * 2 * p.n;
  float gate[kVec];
  float up[kVec];
  LoadFloats<kVec>(row + i, gate);
  LoadFloats<kVec>(row + p.n + i, up);
#pragma unroll
  for (int k = 0; k < kVec; ++k) {
    // Below -88, where exp would overflow, silu is 0 to within 1e-36. NaN passes through.
    const float clamped = gate[k] < -88.0F ? -88.0F : gate[k];
    gate[k] = clamped / (1.0F + expf(-clamped)) * up[k];
  }
  StoreFloats<kVec>(static_cast<T*>(p.out) + t * p.n + i, gate);
}

}  // namespace

absl::Status SiluMul(const SiluMulParams& p, Stream stream) {
  if (p.tokens == 0) return absl::OkStatus();
  return DispatchActivation("SiluMul", p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kVec = kVectorOf<T>;
    const bool vectors = p.n % kVec == 0 && IsAligned(p.gate_up, 16) && IsAligned(p.out, 16);
    const dim3 grid(p.tokens, CeilDiv(p.n, int64_t{kThreads} * (vectors ? kVec : 1)));
    if (vectors) {
      SiluMulKernel<T, kVec><<<grid, kThreads, 0, stream>>>(p);
    } else {
      SiluMulKernel<T, 1><<<grid, kThreads, 0, stream>>>(p);
    }
    return LaunchStatus("SiluMul");
  });
}

}  // namespace zipage::cuda
