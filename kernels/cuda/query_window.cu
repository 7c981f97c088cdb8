#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/vector.cuh"
#include "kernels/query_window.h"

namespace zipage::cuda {
namespace {

constexpr int kThreads = 256;

// CTA: (a kept query, kThreads words of its row). Rows are copied as words of any type.
template <typename Word>
__global__ void __launch_bounds__(kThreads)
    StoreQueriesKernel(StoreQueriesParams p, int64_t row_words, int64_t stride_words) {
  const int64_t i = blockIdx.x;
  const int64_t w = int64_t{blockIdx.y} * kThreads + threadIdx.x;
  const int64_t to = p.window_row[i];
  if (to < 0 || to >= p.num_rows) __trap();  // kernels/query_window.h
  if (w >= row_words) return;
  static_cast<Word*>(p.window)[to * row_words + w] =
      static_cast<const Word*>(p.q)[p.token[i] * stride_words + w];
}

template <typename Word>
absl::Status Launch(const StoreQueriesParams& p, int64_t row_bytes, Stream stream) {
  constexpr int64_t kBytes = sizeof(Word);
  const int64_t words = row_bytes / kBytes;
  const dim3 grid(p.count, CeilDiv(words, int64_t{kThreads}));
  StoreQueriesKernel<Word><<<grid, kThreads, 0, stream>>>(
      p, words, p.q_stride * static_cast<int64_t>(DTypeSize(p.dtype)) / kBytes);
  return LaunchStatus("StoreQueries");
}

}  // namespace

absl::Status StoreQueries(const StoreQueriesParams& p, Stream stream) {
  if (p.count == 0) return absl::OkStatus();
  const auto element = static_cast<int64_t>(DTypeSize(p.dtype));
  const int64_t row_bytes = int64_t{p.q_heads} * p.head_dim * element;
  const bool vectors = row_bytes % 16 == 0 && p.q_stride * element % 16 == 0 &&
                       IsAligned(p.q, 16) && IsAligned(p.window, 16);
  if (vectors) return Launch<uint4>(p, row_bytes, stream);
  return element == 4 ? Launch<uint32_t>(p, row_bytes, stream)
                      : Launch<uint16_t>(p, row_bytes, stream);
}

}  // namespace zipage::cuda
