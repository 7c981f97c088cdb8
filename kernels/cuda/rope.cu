#include <algorithm>
#include <bit>

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/vector.cuh"
#include "kernels/rope.h"

namespace zipage::cuda {
namespace {

constexpr int kThreads = 128;

// 1 / sqrt(mean(x^2) + eps) over a head, for the kLanes lanes that share it.
template <int kVec, int kLanes, typename T>
__device__ float NormFactor(const T* x, int head_dim, int lane, float eps) {
  float sum = 0;
  for (int i = lane * kVec; i < head_dim; i += kLanes * kVec) {
    float v[kVec];
    LoadFloats<kVec>(x + i, v);
#pragma unroll
    for (int k = 0; k < kVec; ++k) sum += v[k] * v[k];
  }
  sum = SumOverLanes<kLanes>(sum);
  return 1.0F / sqrtf(sum / static_cast<float>(head_dim) + eps);
}

// kLanes lanes share a head of a token: queries rotate in place, keys into the cache, values are
// copied. Lanes past the last head help with the last one's sum and write nothing.
template <typename T, int kVec, int kLanes>
__global__ void __launch_bounds__(kThreads) RopeAndCacheKernel(RopeAndCacheParams p) {
  const int heads = p.q_heads + 2 * p.kv_heads;
  const int64_t d = p.head_dim;
  const int64_t t = blockIdx.x;
  const int head = blockIdx.y * (kThreads / kLanes) + threadIdx.x / kLanes;
  const int lane = threadIdx.x % kLanes;
  const bool writes = head < heads;
  const int h = writes ? head : heads - 1;
  const int64_t slot = p.slot_mapping[t];
  const int64_t position = p.positions[t];
  if (position < 0 || position >= p.max_position || slot < 0 || slot >= p.num_slots) __trap();
  T* row = static_cast<T*>(p.qkv) + t * heads * d;
  T* x = row + h * d;
  if (h >= p.q_heads + p.kv_heads) {
    const int kv_head = h - p.q_heads - p.kv_heads;
    T* value = static_cast<T*>(p.value_cache) + (slot * p.kv_heads + kv_head) * d;
    for (int i = lane * kVec; writes && i < d; i += kLanes * kVec) {
      float v[kVec];
      LoadFloats<kVec>(x + i, v);
      StoreFloats<kVec>(value + i, v);
    }
  }
  // No early return above: all lanes of a warp take part in the sums.
  const bool is_query = h < p.q_heads;
  const bool rotates = writes && h < p.q_heads + p.kv_heads;
  T* out = is_query ? x : static_cast<T*>(p.key_cache) + (slot * p.kv_heads + (h - p.q_heads)) * d;
  const float* weight = is_query ? p.q_norm_weight : p.k_norm_weight;
  const float* table = p.rope_table + position * d;
  const bool norms = p.q_norm_weight != nullptr || p.k_norm_weight != nullptr;
  const float factor = norms ? NormFactor<kVec, kLanes>(x, p.head_dim, lane, p.norm_eps) : 1.0F;
  const int half = p.head_dim / 2;
  for (int i = lane * kVec; rotates && i < half; i += kLanes * kVec) {
    float a[kVec], b[kVec], rotated_a[kVec], rotated_b[kVec];
    LoadFloats<kVec>(x + i, a);
    LoadFloats<kVec>(x + half + i, b);
#pragma unroll
    for (int k = 0; k < kVec; ++k) {
      if (weight != nullptr) {
        a[k] = a[k] * factor * weight[i + k];
        b[k] = b[k] * factor * weight[half + i + k];
      }
      const float cos = table[i + k];
      const float sin = table[half + i + k];
      rotated_a[k] = a[k] * cos - b[k] * sin;
      rotated_b[k] = b[k] * cos + a[k] * sin;
    }
    StoreFloats<kVec>(out + i, rotated_a);
    StoreFloats<kVec>(out + half + i, rotated_b);
  }
}

template <typename T, int kVec, int kLanes>
absl::Status Launch(const RopeAndCacheParams& p, Stream stream) {
  const dim3 grid(p.tokens, CeilDiv(p.q_heads + 2 * p.kv_heads, kThreads / kLanes));
  RopeAndCacheKernel<T, kVec, kLanes><<<grid, kThreads, 0, stream>>>(p);
  return LaunchStatus("RopeAndCache");
}

}  // namespace

absl::Status RopeAndCache(const RopeAndCacheParams& p, Stream stream) {
  if (p.tokens == 0) return absl::OkStatus();
  if (p.head_dim % 2 != 0) {
    return absl::UnimplementedError(
        absl::StrCat("RopeAndCache: head_dim is ", p.head_dim, "; it must be even"));
  }
  return DispatchActivation("RopeAndCache", p.dtype, [&](auto* element) {
    using T = std::remove_pointer_t<decltype(element)>;
    constexpr int kVec = kVectorOf<T>;
    const bool vectors = p.head_dim % (2 * kVec) == 0 && IsAligned(p.qkv, 16) &&
                         IsAligned(p.key_cache, 16) && IsAligned(p.value_cache, 16);
    if (!vectors) return Launch<T, 1, 32>(p, stream);
    const int half_vectors = p.head_dim / (2 * kVec);
    if (half_vectors <= 4) return Launch<T, kVec, 4>(p, stream);
    if (half_vectors <= 8) return Launch<T, kVec, 8>(p, stream);
    return Launch<T, kVec, 16>(p, stream);
  });
}

}  // namespace zipage::cuda
