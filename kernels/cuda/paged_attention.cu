#include "kernels/cuda/device/attention.cuh"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/vector.cuh"
#include "kernels/paged_attention.h"

namespace zipage::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kMaxHeadDim = 256;
constexpr int kOfLane = kMaxHeadDim / kWarp;

// The sequence whose tokens hold `token`.
__device__ int SequenceOf(const PagedAttentionParams& p, int token) {
  int low = 0;
  int high = p.num_seqs - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (p.query_start[middle] <= token) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

// One warp a row, slot after slot, all in fp32: for float32 and head dimensions that are rare.
template <typename T>
__global__ void __launch_bounds__(kWarps* kWarp)
    PlainAttentionKernel(PagedAttentionParams p, int block_shift) {
  const int64_t row = int64_t{blockIdx.x} * kWarps + threadIdx.x / kWarp;
  if (row >= p.num_tokens * p.q_heads) return;
  const auto token = static_cast<int>(row / p.q_heads);
  const auto head = static_cast<int>(row % p.q_heads);
  const int lane = threadIdx.x % kWarp;
  const int seq = SequenceOf(p, token);
  const int visible = p.context_len[seq] - (p.query_start[seq + 1] - 1 - token);
  const int32_t* table = p.block_tables + int64_t{seq} * p.max_blocks;
  const int64_t d = p.head_dim;
  const int64_t kv_head = head / (p.q_heads / p.kv_heads);
  const T* q = static_cast<const T*>(p.q) + token * p.q_stride + head * d;
  float query[kOfLane], out[kOfLane];
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) {
    const int i = k * kWarp + lane;
    query[k] = i < d ? ToFloat32(q[i]) * p.scale * kLog2E : 0;
    out[k] = 0;
  }
  float max = -INFINITY;
  float sum = 0;
  for (int j = 0; j < visible; ++j) {
    const int64_t at = (CacheRow(table, j, p.block_size, block_shift) * p.kv_heads + kv_head) * d;
    const T* key = static_cast<const T*>(p.key_cache) + at;
    const T* value = static_cast<const T*>(p.value_cache) + at;
    float score = 0;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      const int i = k * kWarp + lane;
      if (i < d) score += query[k] * ToFloat32(key[i]);
    }
    score = SumOverLanes(score);
    const float new_max = fmaxf(max, score);
    const float rescale = ExpBelow(max, new_max);
    const float weight = exp2f(score - new_max);
    sum = sum * rescale + weight;
    max = new_max;
#pragma unroll
    for (int k = 0; k < kOfLane; ++k) {
      const int i = k * kWarp + lane;
      if (i < d) out[k] = out[k] * rescale + weight * ToFloat32(value[i]);
    }
  }
  T* to = static_cast<T*>(p.out) + row * d;
#pragma unroll
  for (int k = 0; k < kOfLane; ++k) {
    const int i = k * kWarp + lane;
    if (i < d) to[i] = FromFloat32<T>(out[k] / sum);
  }
}

}  // namespace

absl::Status LaunchPlainAttention(const PagedAttentionParams& p, Stream stream) {
  if (p.head_dim > kMaxHeadDim) {
    return absl::UnimplementedError(absl::StrCat("PagedAttention on CUDA: head_dim is ", p.head_dim,
                                                 "; at most ", kMaxHeadDim));
  }
  return DispatchActivation("PagedAttention", p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    const auto ctas = static_cast<unsigned>(CeilDiv(p.num_tokens * p.q_heads, int64_t{kWarps}));
    PlainAttentionKernel<T><<<ctas, kWarps * kWarp, 0, stream>>>(p, BlockShift(p.block_size));
    return LaunchStatus("PagedAttention");
  });
}

bool HasTensorCoreKernel(const PagedAttentionParams& p) {
  const bool has_dim =
      p.head_dim == 64 || p.head_dim == 96 || p.head_dim == 128 || p.head_dim == 256;
  return p.dtype == DType::kBFloat16 && has_dim && p.q_stride % 8 == 0 && IsAligned(p.q, 16) &&
         IsAligned(p.key_cache, 16) && IsAligned(p.value_cache, 16) && IsAligned(p.out, 16);
}

int64_t NumPartials(const PagedAttentionParams& p) {
  return int64_t{p.num_seqs} * MaxSegments(p) * p.q_heads * (p.head_dim + 2);
}

absl::Status PagedAttention(const PagedAttentionParams& p, const PagedAttentionScratch& scratch,
                            Stream stream) {
  if (p.num_seqs == 0) return absl::OkStatus();
  if (p.num_tokens < p.num_seqs || p.kv_heads < 1 || p.q_heads % p.kv_heads != 0) {
    return absl::InternalError(absl::StrCat("PagedAttention: ", p.num_tokens, " tokens of ",
                                            p.num_seqs, " sequences, ", p.q_heads, " heads of ",
                                            p.kv_heads));
  }
  if (!HasTensorCoreKernel(p)) return LaunchPlainAttention(p, stream);
  // Which of the sequences decode is known on the device only; each kernel skips the others.
  if (absl::Status status = LaunchDecode(p, scratch, stream); !status.ok()) return status;
  if (p.num_tokens == p.num_seqs) return absl::OkStatus();
  return LaunchPrefill(p, stream);
}

}  // namespace zipage::cuda
