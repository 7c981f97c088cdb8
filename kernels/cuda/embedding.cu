#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/vector.cuh"
#include "kernels/embedding.h"

namespace zipage::cuda {
namespace {

constexpr int kThreads = 256;

// CTA: (token, kThreads * kVec elements).
template <typename Src, typename Dst, int kVec>
__global__ void __launch_bounds__(kThreads) EmbeddingKernel(EmbeddingParams p) {
  const int64_t t = blockIdx.x;
  const int64_t i = (int64_t{blockIdx.y} * kThreads + threadIdx.x) * kVec;
  if (i >= p.hidden) return;
  const int64_t row = p.ids[t] - p.first_row;
  float values[kVec] = {};
  if (row >= 0 && row < p.num_rows) {
    LoadFloats<kVec>(static_cast<const Src*>(p.table) + row * p.hidden + i, values);
  }
  StoreFloats<kVec>(static_cast<Dst*>(p.out) + t * p.hidden + i, values);
}

template <typename Src, typename Dst>
absl::Status Launch(const EmbeddingParams& p, Stream stream) {
  // The wider of the two types moves 16 bytes at a time.
  constexpr int kVec = sizeof(Src) > sizeof(Dst) ? kVectorOf<Src> : kVectorOf<Dst>;
  const bool vectors =
      p.hidden % kVec == 0 && IsAligned(p.table, sizeof(Src) * kVec) && IsAligned(p.out, 16);
  const int64_t per_cta = int64_t{kThreads} * (vectors ? kVec : 1);
  const dim3 grid(p.tokens, CeilDiv(p.hidden, per_cta));
  if (vectors) {
    EmbeddingKernel<Src, Dst, kVec><<<grid, kThreads, 0, stream>>>(p);
  } else {
    EmbeddingKernel<Src, Dst, 1><<<grid, kThreads, 0, stream>>>(p);
  }
  return LaunchStatus("Embedding");
}

}  // namespace

absl::Status Embedding(const EmbeddingParams& p, Stream stream) {
  if (p.tokens == 0) return absl::OkStatus();
  return DispatchActivation("Embedding", p.out_dtype, [&](auto* dst) {
    using Dst = std::remove_pointer_t<decltype(dst)>;
    switch (p.table_dtype) {
      case DType::kFloat32:
        return Launch<float, Dst>(p, stream);
      case DType::kBFloat16:
        return Launch<__nv_bfloat16, Dst>(p, stream);
      case DType::kFloat16:
        return Launch<__half, Dst>(p, stream);
    }
    return UnsupportedDType("Embedding", p.table_dtype);
  });
}

}  // namespace zipage::cuda
