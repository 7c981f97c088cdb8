#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/vector.cuh"
#include "kernels/round.h"

namespace zipage::cuda {
namespace {

constexpr int kThreads = 256;

template <int kVec>
__global__ void __launch_bounds__(kThreads)
    RoundKernel(const float* in, __nv_bfloat16* out, int64_t count) {
  const int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) * kVec;
  if (i >= count) return;
  float values[kVec];
  LoadFloats<kVec>(in + i, values);
  StoreFloats<kVec>(out + i, values);
}

}  // namespace

absl::Status RoundToBFloat16(const float* in, BFloat16* out, int64_t count, Stream stream) {
  if (count == 0) return absl::OkStatus();
  constexpr int kVec = kVectorOf<float>;
  auto* const to = reinterpret_cast<__nv_bfloat16*>(out);
  if (count % kVec == 0 && IsAligned(in, 16) && IsAligned(out, 8)) {
    const auto ctas = static_cast<unsigned>(CeilDiv(count, int64_t{kThreads} * kVec));
    RoundKernel<kVec><<<ctas, kThreads, 0, stream>>>(in, to, count);
  } else {
    const auto ctas = static_cast<unsigned>(CeilDiv(count, int64_t{kThreads}));
    RoundKernel<1><<<ctas, kThreads, 0, stream>>>(in, to, count);
  }
  return LaunchStatus("RoundToBFloat16");
}

}  // namespace zipage::cuda
