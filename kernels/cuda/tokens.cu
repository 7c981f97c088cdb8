#include "kernels/cuda/device/launch.cuh"
#include "kernels/tokens.h"

namespace zipage::cuda {
namespace {

constexpr int kThreads = 256;

template <bool kScatter>
__global__ void __launch_bounds__(kThreads)
    MoveTokensKernel(const int32_t* in, const int32_t* index, int32_t* out, int64_t count) {
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= count) return;
  if (kScatter) {
    out[index[i]] = in[i];
  } else {
    out[i] = in[index[i]];
  }
}

template <bool kScatter>
absl::Status Launch(const int32_t* in, const int32_t* index, int32_t* out, int64_t count,
                    Stream stream) {
  if (count == 0) return absl::OkStatus();
  const auto ctas = static_cast<unsigned>(CeilDiv(count, int64_t{kThreads}));
  MoveTokensKernel<kScatter><<<ctas, kThreads, 0, stream>>>(in, index, out, count);
  return LaunchStatus(kScatter ? "ScatterTokens" : "GatherTokens");
}

}  // namespace

absl::Status GatherTokens(const int32_t* in, const int32_t* index, int32_t* out, int64_t count,
                          Stream stream) {
  return Launch<false>(in, index, out, count, stream);
}

absl::Status ScatterTokens(const int32_t* in, const int32_t* index, int32_t* out, int64_t count,
                           Stream stream) {
  return Launch<true>(in, index, out, count, stream);
}

}  // namespace zipage::cuda
