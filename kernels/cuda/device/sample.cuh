#pragma once
// What the sampling kernels share: weights as integers, keys in the order of sampling, scratch.
// Files that include it are compiled without fused operations, like the CPU's.

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>

#include "kernels/device_sample.h"

namespace zipage::cuda {

// Logits that one CTA scans.
constexpr int64_t kSliceSize = 8192;
constexpr int kScanThreads = 256;
// Tokens of a row with a filter that are near the maximum, so that the filters need not look at
// all.
constexpr int kMaxCandidates = 8192;
// (z - max) / temperature of a candidate is at least this.
constexpr float kCandidateCut = -8.0F;

// exp(x) for x <= 0: the same operations as cpu::Exp.
__device__ inline float Exp(float x) {
  constexpr float kLowest = -87.3F;
  constexpr float kRound = 0x1.8p23F;
  const float clamped = x < kLowest ? kLowest : x;
  const float shifted = clamped * 1.44269504F + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375F) - n * -2.12194440e-4F;
  float poly = 1.9875691500e-4F;
  poly = poly * r + 1.3981999507e-3F;
  poly = poly * r + 8.3334519073e-3F;
  poly = poly * r + 4.1665795894e-2F;
  poly = poly * r + 1.6666665459e-1F;
  poly = poly * r + 5.0000001201e-1F;
  poly = poly * (r * r) + r + 1.0F;
  const float scale = __int_as_float((__float_as_int(shifted) + 127) << 23);
  return x < kLowest ? 0.0F : poly * scale;
}

// exp((z - max) / temperature) as a multiple of 2^-43, as cpu::Weight.
__device__ inline uint64_t Weight(float z, float max, float temperature) {
  constexpr double kFixedPoint = 0x1p9;
  const double fixed = static_cast<double>(Exp((z - max) / temperature)) + kFixedPoint;
  return static_cast<uint64_t>(__double_as_longlong(fixed) - __double_as_longlong(kFixedPoint));
}

// Keys that ascend in "order": higher logit first, lower id among equals. 52 bits: the logit's bits
// made to ascend, then 20 bits of id. REQUIRES: z is no NaN.
constexpr int kIdBits = 20;
constexpr int kKeyBits = 32 + kIdBits;
__device__ inline uint64_t Key(float z, int64_t id) {
  const uint32_t bits = __float_as_uint(z + 0.0F);  // -0 equals 0
  const uint32_t descending = (bits & 0x80000000U) != 0 ? bits : ~bits & 0x7FFFFFFFU;
  return uint64_t{descending} << kIdBits | static_cast<uint64_t>(id);
}
__device__ inline int32_t IdOf(uint64_t key) {
  return static_cast<int32_t>(key & ((1U << kIdBits) - 1));
}
__device__ inline float LogitOf(uint64_t key) {
  const auto descending = static_cast<uint32_t>(key >> kIdBits);
  return __uint_as_float((descending & 0x80000000U) != 0 ? descending : ~descending & 0x7FFFFFFFU);
}

// About a slice of kSliceSize logits.
struct SliceStats {
  uint64_t first;  // least key
  int32_t flags;   // kNotNumbers, kMinusInf
};

// The scratch memory of a call; arrays of slices are [num_rows, num_slices].
struct SampleScratch {
  SliceStats* untouched;     // of the logits as they came
  SliceStats* adjusted;      // after penalties and bans; the same array if there are none
  uint64_t* weight_sums;     // of the adjusted logits at the row's temperature
  uint64_t* untouched_sums;  // of the logits as they came at temperature 1
  uint64_t* candidates;      // [num_rows, kMaxCandidates] keys
  int32_t* num_candidates;   // [num_rows] may exceed kMaxCandidates
  float* saved;              // [num_seen + num_banned] untouched logits
  int num_slices;
};

__host__ __device__ inline int64_t NumSlices(int64_t vocab) {
  return (vocab + kSliceSize - 1) / kSliceSize;
}

// Whether a row takes its token from a part of the vocabulary only.
__device__ inline bool IsFiltered(const DeviceSampleRow& row) {
  return row.top_k > 0 || row.min_p_cut > -INFINITY || row.top_p < 1.0F;
}

// Steps of cuda::Sample; each launches one kernel.
absl::Status LaunchStats(const DeviceSampleParams& p, const SampleScratch& s, SliceStats* stats,
                         Stream stream);
absl::Status LaunchAdjust(const DeviceSampleParams& p, const SampleScratch& s, bool restores,
                          Stream stream);
// Weight sums of all slices and the candidates of filtered rows, or (untouched) weight sums at
// temperature 1 of rows with log-probabilities.
absl::Status LaunchWeights(const DeviceSampleParams& p, const SampleScratch& s, bool untouched,
                           Stream stream);
absl::Status LaunchDraw(const DeviceSampleParams& p, const SampleScratch& s, Stream stream);
absl::Status LaunchReport(const DeviceSampleParams& p, const SampleScratch& s, Stream stream);

}  // namespace zipage::cuda
