#pragma once
// What the attention kernels share: where slots are, how a sequence is cut, online softmax.

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "kernels/cuda/device/mma.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/paged_attention.h"

namespace zipage::cuda {

constexpr float kLog2E = 1.44269504F;

// A sequence that decodes is cut into at most kMaxSegments segments of SegmentSlots slots: a
// function of its own length, so that the batch does not change its result.
constexpr int kMinSegmentSlots = 512;
constexpr int kMaxSegments = 16;
__host__ __device__ constexpr int64_t SegmentSlots(int64_t context_len) {
  int64_t slots = kMinSegmentSlots;
  while (slots * kMaxSegments < context_len) slots *= 2;
  return slots;
}

// Most segments that a sequence of the batch can have.
inline int MaxSegments(const PagedAttentionParams& p) {
  const int64_t slots = int64_t{p.max_blocks} * p.block_size;
  return static_cast<int>(
      std::min<int64_t>(kMaxSegments, (slots + kMinSegmentSlots - 1) / kMinSegmentSlots));
}

// Row of the caches, [num_blocks * block_size, …], in which slot j of a block table lies.
// block_shift: log2 of block_size, or -1 if it is no power of two.
__device__ inline int64_t CacheRow(const int32_t* table, int j, int block_size, int block_shift) {
  const int block = block_shift >= 0 ? j >> block_shift : j / block_size;
  return int64_t{__ldg(table + block)} * block_size + (j - block * block_size);
}

// The log2 for CacheRow.
inline int BlockShift(int block_size) {
  if ((block_size & (block_size - 1)) != 0) return -1;
  int shift = 0;
  while ((1 << shift) < block_size) ++shift;
  return shift;
}

// exp2(x - max) where max may be -inf, which stands for nothing seen yet.
__device__ inline float ExpBelow(float x, float max) {
  return max == -INFINITY ? 0 : exp2f(x - max);
}

// Rows of shared memory hold kHeadDim elements and 16 bytes of padding, so that the eight rows of a
// matrix that is loaded lie in different banks.
template <int kHeadDim>
constexpr int kRowBytes = 2 * kHeadDim + 16;

// Kernel families; each launcher takes what the public function takes.
bool HasTensorCoreKernel(const PagedAttentionParams& p);
absl::Status LaunchDecode(const PagedAttentionParams& p, const PagedAttentionScratch& scratch,
                          Stream stream);
absl::Status LaunchPrefill(const PagedAttentionParams& p, Stream stream);
absl::Status LaunchPlainAttention(const PagedAttentionParams& p, Stream stream);

}  // namespace zipage::cuda
