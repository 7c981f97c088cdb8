#include <algorithm>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/vector.cuh"
#include "kernels/rms_norm.h"

namespace zipage::cuda {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxVectors = 4;  // of one thread, held in registers

// One CTA a row. The row stays in registers between its two uses: memory is read once.
template <typename T, int kVec, int kVectors>
__global__ void __launch_bounds__(kMaxThreads) RmsNormKernel(RmsNormParams p) {
  __shared__ float scratch[kWarp];
  const int64_t r = blockIdx.x;
  const int64_t source = p.row_index != nullptr ? p.row_index[r] : r;
  const T* x = static_cast<const T*>(p.x) + source * p.hidden;
  T* residual = p.residual != nullptr ? static_cast<T*>(p.residual) + source * p.hidden : nullptr;
  float h[kVectors][kVec];
  float sum_squares = 0;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = (int64_t{v} * blockDim.x + threadIdx.x) * kVec;
    if (i >= p.hidden) break;
    LoadFloats<kVec>(x + i, h[v]);
    if (residual != nullptr) {
      float old[kVec];
      LoadFloats<kVec>(residual + i, old);
#pragma unroll
      for (int k = 0; k < kVec; ++k) h[v][k] = ToFloat32(FromFloat32<T>(h[v][k] + old[k]));
      StoreFloats<kVec>(residual + i, h[v]);
    }
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum_squares += h[v][k] * h[v][k];
  }
  sum_squares = SumOverCta(sum_squares, scratch);
  const float factor = 1.0F / sqrtf(sum_squares / static_cast<float>(p.hidden) + p.eps);
  T* out = static_cast<T*>(p.out) + r * p.hidden;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const int64_t i = (int64_t{v} * blockDim.x + threadIdx.x) * kVec;
    if (i >= p.hidden) break;
#pragma unroll
    for (int k = 0; k < kVec; ++k) h[v][k] *= factor * p.weight[i + k];
    StoreFloats<kVec>(out + i, h[v]);
  }
}

template <typename T, int kVec>
absl::Status Launch(const RmsNormParams& p, Stream stream) {
  const int64_t vectors = CeilDiv(p.hidden, kVec);
  const auto threads =
      static_cast<int>(std::min<int64_t>(kMaxThreads, CeilDiv(vectors, kWarp) * kWarp));
  const int64_t of_thread = CeilDiv(vectors, threads);
  const auto rows = static_cast<unsigned>(p.rows);
  if (of_thread == 1) {
    RmsNormKernel<T, kVec, 1><<<rows, threads, 0, stream>>>(p);
  } else if (of_thread <= kMaxVectors) {
    RmsNormKernel<T, kVec, kMaxVectors><<<rows, threads, 0, stream>>>(p);
  } else {
    return absl::UnimplementedError(absl::StrCat("RmsNorm on CUDA: hidden is ", p.hidden,
                                                 "; at most ", kMaxVectors * kMaxThreads * kVec));
  }
  return LaunchStatus("RmsNorm");
}

}  // namespace

absl::Status RmsNorm(const RmsNormParams& p, Stream stream) {
  if (p.rows == 0) return absl::OkStatus();
  return DispatchActivation("RmsNorm", p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const bool vectors = p.hidden % kVectorOf<T> == 0 && IsAligned(p.x, 16) &&
                         IsAligned(p.out, 16) &&
                         (p.residual == nullptr || IsAligned(p.residual, 16));
    return vectors ? Launch<T, kVectorOf<T>>(p, stream) : Launch<T, 1>(p, stream);
  });
}

}  // namespace zipage::cuda
