// The passes of sampling over the vocabulary: one CTA a slice of a row.

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/sample.cuh"

namespace zipage::cuda {
namespace {

constexpr int kOfThread = kSliceSize / kScanThreads;
constexpr int kAdjustThreads = 256;

// This thread's logits of the slice, at id_of(i); missing ones are left as they are.
__device__ int64_t IdOf(int64_t slice, int i) {
  return slice * kSliceSize + int64_t{i} * kScanThreads + threadIdx.x;
}

__global__ void __launch_bounds__(kScanThreads)
    StatsKernel(DeviceSampleParams p, SampleScratch s, SliceStats* stats) {
  __shared__ uint64_t firsts[kScanThreads / kWarp];
  const int64_t row = blockIdx.y;
  const float* logits = p.logits + row * p.logits_stride;
  uint64_t first = ~uint64_t{0};
  int flags = 0;
  constexpr int kTogether = 8;  // loads under way
#pragma unroll 1
  for (int begin = 0; begin < kOfThread; begin += kTogether) {
    float z[kTogether];
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int64_t id = IdOf(blockIdx.x, begin + k);
      z[k] = id < p.vocab ? logits[id] : 0.0F;
    }
#pragma unroll
    for (int k = 0; k < kTogether; ++k) {
      const int64_t id = IdOf(blockIdx.x, begin + k);
      if (id >= p.vocab) continue;
      if (!(z[k] < INFINITY)) flags |= SampleDraw::kNotNumbers;
      if (z[k] == -INFINITY) flags |= SampleDraw::kMinusInf;
      const uint64_t key = Key(z[k], id);
      first = key < first ? key : first;
    }
  }
  first = MinOverLanes(first);
  if (threadIdx.x % kWarp == 0) firsts[threadIdx.x / kWarp] = first;
  const int not_numbers = __syncthreads_or(flags & SampleDraw::kNotNumbers);
  const int minus_inf = __syncthreads_or(flags & SampleDraw::kMinusInf);
  if (threadIdx.x != 0) return;
  for (int w = 1; w < kScanThreads / kWarp; ++w) first = firsts[w] < first ? firsts[w] : first;
  stats[row * s.num_slices + blockIdx.x] = {first,
                                            (not_numbers != 0 ? SampleDraw::kNotNumbers : 0) |
                                                (minus_inf != 0 ? SampleDraw::kMinusInf : 0)};
}

// Penalties, then bans; or back. A banned token may also be seen, or banned twice: all old values
// are read before the first is overwritten.
__global__ void __launch_bounds__(kAdjustThreads)
    AdjustKernel(DeviceSampleParams p, SampleScratch s, bool restores) {
  const DeviceSampleRow row = p.rows[blockIdx.x];
  float* logits = p.logits + blockIdx.x * p.logits_stride;
  const SeenToken* seen = p.seen + row.first_seen;
  const int32_t* banned = p.banned + row.first_banned;
  float* saved_seen = s.saved + row.first_seen;
  float* saved_banned = s.saved + p.num_seen + row.first_banned;
  if (restores) {
    for (int i = threadIdx.x; i < row.num_banned; i += kAdjustThreads) {
      logits[banned[i]] = saved_banned[i];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < row.num_seen; i += kAdjustThreads) {
      logits[seen[i].token] = saved_seen[i];
    }
    return;
  }
  for (int i = threadIdx.x; i < row.num_seen; i += kAdjustThreads) {
    float z = logits[seen[i].token];
    saved_seen[i] = z;
    z = z > 0 ? z / row.repetition_penalty : z * row.repetition_penalty;
    z -= row.frequency_penalty * static_cast<float>(seen[i].output_count);
    if (seen[i].output_count > 0) z -= row.presence_penalty;
    logits[seen[i].token] = z;
  }
  __syncthreads();
  for (int i = threadIdx.x; i < row.num_banned; i += kAdjustThreads) {
    saved_banned[i] = logits[banned[i]];
  }
  __syncthreads();
  for (int i = threadIdx.x; i < row.num_banned; i += kAdjustThreads) {
    logits[banned[i]] = -INFINITY;
  }
}

// The largest logit of the row.
__device__ float MaxLogit(const SliceStats* stats, int num_slices) {
  __shared__ uint64_t firsts[kScanThreads / kWarp];
  uint64_t first = ~uint64_t{0};
  for (int i = threadIdx.x; i < num_slices; i += kScanThreads) {
    first = stats[i].first < first ? stats[i].first : first;
  }
  first = MinOverLanes(first);
  if (threadIdx.x % kWarp == 0) firsts[threadIdx.x / kWarp] = first;
  __syncthreads();
  for (int w = 0; w < kScanThreads / kWarp; ++w) first = firsts[w] < first ? firsts[w] : first;
  return LogitOf(first);
}

__global__ void __launch_bounds__(kScanThreads)
    WeightsKernel(DeviceSampleParams p, SampleScratch s, bool untouched) {
  __shared__ uint64_t sums[kScanThreads / kWarp];
  __shared__ int count;
  __shared__ int base;
  const int64_t r = blockIdx.y;
  const DeviceSampleRow& row = p.rows[r];
  const float temperature = untouched ? 1.0F : row.temperature;
  if (untouched ? row.num_logprobs < 0 : temperature == 0.0F) return;
  if (threadIdx.x == 0) count = 0;
  const float max =
      MaxLogit((untouched ? s.untouched : s.adjusted) + r * s.num_slices, s.num_slices);
  const bool gathers = !untouched && IsFiltered(row);
  const float* logits = p.logits + r * p.logits_stride;
  float z[kOfThread];
  uint64_t sum = 0;
  int num_candidates = 0;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    const int64_t id = IdOf(blockIdx.x, i);
    z[i] = id < p.vocab ? logits[id] : -INFINITY;
  }
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    sum += Weight(z[i], max, temperature);
    num_candidates += (z[i] - max) / temperature >= kCandidateCut ? 1 : 0;
  }
  sum = SumOverLanes(sum);
  if (threadIdx.x % kWarp == 0) sums[threadIdx.x / kWarp] = sum;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kScanThreads / kWarp; ++w) sum += sums[w];
    (untouched ? s.untouched_sums : s.weight_sums)[r * s.num_slices + blockIdx.x] = sum;
  }
  if (!gathers) return;
  int at = num_candidates > 0 ? atomicAdd(&count, num_candidates) : 0;
  __syncthreads();
  if (threadIdx.x == 0) base = atomicAdd(s.num_candidates + r, count);
  __syncthreads();
  if (base + count > kMaxCandidates) return;
  uint64_t* candidates = s.candidates + r * kMaxCandidates + base;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    if ((z[i] - max) / temperature >= kCandidateCut) {
      candidates[at++] = Key(z[i], IdOf(blockIdx.x, i));
    }
  }
}

dim3 ScanGrid(const DeviceSampleParams& p, const SampleScratch& s) {
  return dim3(s.num_slices, p.num_rows);
}

}  // namespace

absl::Status LaunchStats(const DeviceSampleParams& p, const SampleScratch& s, SliceStats* stats,
                         Stream stream) {
  StatsKernel<<<ScanGrid(p, s), kScanThreads, 0, stream>>>(p, s, stats);
  return LaunchStatus("SampleStats");
}

absl::Status LaunchAdjust(const DeviceSampleParams& p, const SampleScratch& s, bool restores,
                          Stream stream) {
  const auto rows = static_cast<unsigned>(p.num_rows);
  AdjustKernel<<<rows, kAdjustThreads, 0, stream>>>(p, s, restores);
  return LaunchStatus("SampleAdjust");
}

absl::Status LaunchWeights(const DeviceSampleParams& p, const SampleScratch& s, bool untouched,
                           Stream stream) {
  WeightsKernel<<<ScanGrid(p, s), kScanThreads, 0, stream>>>(p, s, untouched);
  return LaunchStatus("SampleWeights");
}

}  // namespace zipage::cuda
