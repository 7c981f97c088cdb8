#pragma once
// Sums and maxima over a warp or a CTA, in an order that depends on the number of threads only.

#include <cstdint>

namespace zipage::cuda {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFU;

// Over groups of kLanes neighbouring lanes; every lane gets the result.
template <int kLanes = kWarp>
__device__ float SumOverLanes(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

template <int kLanes = kWarp>
__device__ float MaxOverLanes(float value) {
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, offset));
  }
  return value;
}

// Over the CTA; every thread gets the result. scratch: [32] shared, free again after the next
// barrier. REQUIRES: whole warps, all threads call.
__device__ inline float SumOverCta(float value, float* scratch) {
  value = SumOverLanes(value);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = value;
  __syncthreads();
  const unsigned lane = threadIdx.x % kWarp;
  return SumOverLanes(lane < blockDim.x / kWarp ? scratch[lane] : 0.0F);
}

__device__ inline uint64_t SumOverLanes(uint64_t value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

__device__ inline uint64_t MinOverLanes(uint64_t value) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    const uint64_t other = __shfl_xor_sync(kAllLanes, value, offset);
    value = other < value ? other : value;
  }
  return value;
}

// Sum over this and all lower lanes.
__device__ inline uint64_t PrefixSumOverLanes(uint64_t value) {
  const unsigned lane = threadIdx.x % kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const uint64_t below = __shfl_up_sync(kAllLanes, value, offset);
    if (lane >= offset) value += below;
  }
  return value;
}

}  // namespace zipage::cuda
