// From the scanned slices to one token: one CTA a row. All filters keep the first tokens in order,
// and a draw is the first token by id at which a running sum of weights exceeds a number; both are
// found digit by digit of a key, by sums over the 256 values of a digit. Sums are of integers, so
// nothing depends on the order in which threads add. Mostly a short list of candidates is searched;
// a whole row is first cut into bins of its values, since digits of so many would collide.

#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/reduce.cuh"
#include "kernels/cuda/device/sample.cuh"
#include "kernels/philox.h"

namespace zipage::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
constexpr int kDigitBits = 8;
constexpr int kDigits = 1 << kDigitBits;
// A sum is kept as limbs, for which shared memory has fast atomic additions: 2^20 tokens times a
// limb fit 32 bits, and four limbs hold a weight.
constexpr int kLimbBits = 12;
constexpr int kLimbs = 4;
// Tokens that the filters left, if few, are copied together.
constexpr int kMaxKept = 1024;
constexpr int kListBytes = kMaxCandidates * static_cast<int>(sizeof(uint64_t));

struct Histogram {
  uint32_t limbs[kLimbs][kDigits];
  int digit;        // found
  uint64_t before;  // sum over the digits before it
};

struct Workspace {
  Histogram histogram;
  uint64_t words[kWarps];
  int count;
  uint64_t kept[kMaxKept];
};

__device__ uint64_t SumOverCta(uint64_t value, Workspace* w) {
  value = SumOverLanes(value);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) w->words[threadIdx.x / kWarp] = value;
  __syncthreads();
  value = 0;
  for (int i = 0; i < kWarps; ++i) value += w->words[i];
  return value;
}

// Keys in shared or global memory.
struct KeyList {
  const uint64_t* keys;
  int count;
  template <typename Fn>
  __device__ void ForEach(Fn fn) const {
    for (int i = threadIdx.x; i < count; i += kThreads) fn(keys[i]);
  }
};

// The keys of a whole row of logits. `list`: room for kMaxCandidates keys in shared memory.
struct KeyRow {
  const float* logits;
  int64_t vocab;
  float max;
  float temperature;
  uint64_t* list;
  template <typename Fn>
  __device__ void ForEach(Fn fn) const {
    // Several loads are under way together: one thread's share of a row is some 300 logits.
    constexpr int kTogether = 8;
    for (int64_t first = threadIdx.x; first < vocab; first += kTogether * kThreads) {
      float z[kTogether];
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int64_t i = first + k * kThreads;
        z[k] = i < vocab ? logits[i] : 0.0F;
      }
#pragma unroll
      for (int k = 0; k < kTogether; ++k) {
        const int64_t i = first + k * kThreads;
        if (i < vocab) fn(Key(z[k], i));
      }
    }
  }
  // In which of kDigits bins a logit is; ascends in order.
  __device__ int BinOf(float z) const {
    return static_cast<int>(fminf((max - z) / temperature * 8.0F, kDigits - 1.0F));
  }
};

__device__ void AddToHistogram(Histogram* h, int digit, uint64_t value) {
#pragma unroll
  for (int l = 0; l < kLimbs; ++l) {
    const auto limb = static_cast<uint32_t>(value >> (l * kLimbBits)) & ((1U << kLimbBits) - 1);
    if (limb != 0) atomicAdd(&h->limbs[l][digit], limb);
  }
}

// Warp 0: finds the first digit at which reaches(sum up to it) holds; the last if none does.
template <typename Reaches>
__device__ void FindDigit(Histogram* h, uint64_t before, Reaches reaches) {
  constexpr int kOfLane = kDigits / kWarp;
  const int lane = threadIdx.x;
  uint64_t sums[kOfLane];
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    sums[i] = 0;
#pragma unroll
    for (int l = 0; l < kLimbs; ++l) {
      sums[i] += uint64_t{h->limbs[l][lane * kOfLane + i]} << (l * kLimbBits);
    }
    sum += sums[i];
  }
  uint64_t running = before + PrefixSumOverLanes(sum) - sum;
  const unsigned reached = __ballot_sync(kAllLanes, reaches(running + sum));
  const int first = reached != 0 ? __ffs(static_cast<int>(reached)) - 1 : kWarp - 1;
  if (lane != first) return;
  int i = 0;
  for (; i < kOfLane - 1 && !reaches(running + sums[i]); ++i) running += sums[i];
  h->digit = lane * kOfLane + i;
  h->before = running;
}

__device__ void ClearHistogram(Histogram* h) {
  __syncthreads();
  for (int i = threadIdx.x; i < kLimbs * kDigits; i += kThreads) h->limbs[0][i] = 0;
  __syncthreads();
}

// The least key of `source` at which reaches(`before` + sum of value(key) over it and all lesser
// ones) holds, all ones if none does. `of`: the part of an element that is its key here, of at most
// num_bits bits. All threads call and get it.
template <typename Source, typename Of, typename Value, typename Reaches>
__device__ uint64_t FindKey(const Source& source, int num_bits, Of of, uint64_t before, Value value,
                            Reaches reaches, Workspace* w) {
  Histogram* h = &w->histogram;
  uint64_t prefix = 0;
  int shift = (num_bits + kDigitBits - 1) / kDigitBits * kDigitBits;
  while (shift > 0) {
    shift -= kDigitBits;
    ClearHistogram(h);
    source.ForEach([&](uint64_t element) {
      const uint64_t key = of(element);
      if (key >> shift >> kDigitBits != prefix) return;
      AddToHistogram(h, static_cast<int>(key >> shift) & (kDigits - 1), value(element));
    });
    __syncthreads();
    if (threadIdx.x < kWarp) FindDigit(h, before, reaches);
    __syncthreads();
    prefix = prefix << kDigitBits | static_cast<uint64_t>(h->digit);
    before = h->before;
  }
  return prefix;
}

// FindKey in the order of sampling.
template <typename Value, typename Reaches>
__device__ uint64_t FindInOrder(const KeyList& list, Value value, Reaches reaches, Workspace* w,
                                uint64_t before = 0) {
  return FindKey(
      list, kKeyBits, [](uint64_t key) { return key; }, before, value, reaches, w);
}

// The same for a row: first the bin, then the key among those of the bin.
template <typename Value, typename Reaches>
__device__ uint64_t FindInOrder(const KeyRow& row, Value value, Reaches reaches, Workspace* w) {
  Histogram* h = &w->histogram;
  ClearHistogram(h);
  row.ForEach([&](uint64_t key) { AddToHistogram(h, row.BinOf(LogitOf(key)), value(key)); });
  __syncthreads();
  if (threadIdx.x < kWarp) FindDigit(h, 0, reaches);
  if (threadIdx.x == 0) w->count = 0;
  __syncthreads();
  const int bin = h->digit;
  const uint64_t before = h->before;
  row.ForEach([&](uint64_t key) {
    if (row.BinOf(LogitOf(key)) != bin) return;
    const int at = atomicAdd(&w->count, 1);
    if (at < kMaxCandidates) row.list[at] = key;
  });
  __syncthreads();
  if (w->count <= kMaxCandidates) {
    return FindInOrder(KeyList{row.list, w->count}, value, reaches, w, before);
  }
  // Many equal or nearly equal logits.
  return FindKey(
      row, kKeyBits, [](uint64_t key) { return key; }, before,
      [&](uint64_t key) { return row.BinOf(LogitOf(key)) == bin ? value(key) : 0; }, reaches, w);
}

// The last of the first `count` in order.
template <typename Source>
__device__ uint64_t FindByCount(const Source& source, uint64_t count, Workspace* w) {
  return FindInOrder(
      source, [](uint64_t) { return uint64_t{1}; }, [=](uint64_t sum) { return sum >= count; }, w);
}

// The first token in the order of ids at which the running sum of value(key) exceeds target.
template <typename Value>
__device__ int32_t FindById(const KeyList& list, Value value, uint64_t target, Workspace* w) {
  return static_cast<int32_t>(FindKey(
      list, kIdBits, [](uint64_t key) { return static_cast<uint64_t>(IdOf(key)); }, 0, value,
      [=](uint64_t sum) { return sum > target; }, w));
}

// The same for a row: the stretch of a warp, of a thread, then the token.
template <typename Value>
__device__ int32_t FindById(const KeyRow& row, Value value, uint64_t target, Workspace* w) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t of_warp = (row.vocab + kWarps - 1) / kWarps;
  const auto value_at = [&](int64_t i) { return value(Key(row.logits[i], i)); };
  uint64_t sum = 0;
#pragma unroll 8
  for (int64_t i = warp * of_warp + threadIdx.x % kWarp; i < min((warp + 1) * of_warp, row.vocab);
       i += kWarp) {
    sum += value_at(i);
  }
  sum = SumOverLanes(sum);
  __syncthreads();
  if (threadIdx.x % kWarp == 0) w->words[warp] = sum;
  __syncthreads();
  int stretch = 0;
  while (stretch < kWarps - 1 && target >= w->words[stretch]) target -= w->words[stretch++];
  __syncthreads();
  const int64_t of_thread = (of_warp + kThreads - 1) / kThreads;
  const int64_t end = min((stretch + 1) * of_warp, row.vocab);
  const int64_t begin = stretch * of_warp + threadIdx.x * of_thread;
  sum = 0;
  for (int64_t i = begin; i < min(begin + of_thread, end); ++i) sum += value_at(i);
  const uint64_t up_to = PrefixSumOverLanes(sum);
  if (threadIdx.x % kWarp == kWarp - 1) w->words[warp] = up_to;
  __syncthreads();
  uint64_t running = up_to - sum;
  for (int i = 0; i < warp; ++i) running += w->words[i];
  if (running <= target && target < running + sum) {
    int64_t i = begin;
    while (target >= running + value_at(i)) running += value_at(i++);
    w->count = static_cast<int>(i);
  }
  __syncthreads();
  return w->count;
}

// Copies the elements that keep(element) into w->kept; returns their number, or kMaxKept + 1 if
// there are more.
template <typename Source, typename Keep>
__device__ int Gather(const Source& source, Keep keep, Workspace* w) {
  __syncthreads();
  if (threadIdx.x == 0) w->count = 0;
  __syncthreads();
  source.ForEach([&](uint64_t element) {
    if (!keep(element)) return;
    const int at = atomicAdd(&w->count, 1);
    if (at < kMaxKept) w->kept[at] = element;
  });
  __syncthreads();
  return min(w->count, kMaxKept + 1);
}

// floor(u * total) for the row's uniform u in [0, 1).
__device__ uint64_t DrawBelow(uint64_t total, const DeviceSampleRow& row) {
  const std::array<uint32_t, 4> random =
      Philox4x32({static_cast<uint32_t>(row.position), static_cast<uint32_t>(row.position >> 32),
                  row.sample_index, 0},
                 {static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32)});
  return __umul64hi((uint64_t{random[1]} << 32) | random[0], total);
}

__device__ bool ReachesTopP(uint64_t sum, float top_p, uint64_t total) {
  return static_cast<double>(sum) >= static_cast<double>(top_p) * static_cast<double>(total);
}

// What the filters ask of an element: it comes at or before `last`, and its logit is not under
// min_p.
struct Filter {
  uint64_t last;
  float max;
  float temperature;
  float min_p_cut;
  __device__ bool Keeps(uint64_t key) const {
    return key <= last && (LogitOf(key) - max) / temperature >= min_p_cut;
  }
  __device__ uint64_t WeightOf(uint64_t key) const {
    return Keeps(key) ? Weight(LogitOf(key), max, temperature) : 0;
  }
};

// top_p of what the filter keeps, then the draw. top_p_total: what top_p is a share of; 0: what the
// filter keeps.
template <typename Source>
__device__ int32_t DrawFrom(const Source& source, const DeviceSampleRow& row, Filter filter,
                            uint64_t top_p_total, Workspace* w) {
  const auto kept_sum = [&] {
    uint64_t sum = 0;
    source.ForEach([&](uint64_t key) { sum += filter.WeightOf(key); });
    return SumOverCta(sum, w);
  };
  uint64_t sum = kept_sum();
  const auto weight_of = [&](uint64_t key) { return filter.WeightOf(key); };
  if (row.top_p < 1.0F) {
    const uint64_t total = top_p_total != 0 ? top_p_total : sum;
    const uint64_t last = FindInOrder(
        source, weight_of, [&](uint64_t up_to) { return ReachesTopP(up_to, row.top_p, total); }, w);
    filter.last = last < filter.last ? last : filter.last;
    sum = kept_sum();
  }
  return FindById(source, weight_of, DrawBelow(sum, row), w);
}

// Steps 4 to 7 over `source`, which holds all that the filters can keep.
template <typename Source>
__device__ int32_t DrawFiltered(const Source& source, const DeviceSampleRow& row, float max,
                                uint64_t top_p_total, Workspace* w) {
  Filter filter = {~uint64_t{0}, max, row.temperature, row.min_p_cut};
  if (row.top_k == 0) return DrawFrom(source, row, filter, top_p_total, w);
  filter.last = FindByCount(source, static_cast<uint64_t>(row.top_k), w);
  if (row.top_k > kMaxKept) return DrawFrom(source, row, filter, 0, w);
  const int count = Gather(
      source, [&](uint64_t key) { return filter.Keeps(key); }, w);
  return DrawFrom(KeyList{w->kept, count}, row, filter, 0, w);
}

// Every warp does the following by itself.
__device__ uint64_t SumOfSlices(const uint64_t* sums, int num_slices) {
  uint64_t sum = 0;
  for (int i = threadIdx.x % kWarp; i < num_slices; i += kWarp) sum += sums[i];
  return SumOverLanes(sum);
}

// The slice in which a running sum exceeds *target, which is then counted from its beginning.
__device__ int FindSlice(const uint64_t* sums, int num_slices, uint64_t* target) {
  const int lane = threadIdx.x % kWarp;
  for (int first = 0;; first += kWarp) {
    const uint64_t own = first + lane < num_slices ? sums[first + lane] : 0;
    const uint64_t up_to = PrefixSumOverLanes(own);
    const unsigned reached = __ballot_sync(kAllLanes, up_to > *target);
    if (reached != 0) {
      const int at = __ffs(static_cast<int>(reached)) - 1;
      *target -= __shfl_sync(kAllLanes, up_to - own, at);
      return first + at;
    }
    *target -= __shfl_sync(kAllLanes, up_to, kWarp - 1);
  }
}

// The draw with nothing filtered out: the slice, then the token in it.
__device__ int32_t DrawFromAll(const float* logits, int64_t vocab, const uint64_t* slice_sums,
                               int num_slices, float max, const DeviceSampleRow& row,
                               Workspace* w) {
  uint64_t target = DrawBelow(SumOfSlices(slice_sums, num_slices), row);
  const int slice = FindSlice(slice_sums, num_slices, &target);
  constexpr int kOfThread = static_cast<int>(kSliceSize / kThreads);
  const int64_t begin = slice * kSliceSize + int64_t{threadIdx.x} * kOfThread;
  uint64_t weights[kOfThread];
  uint64_t sum = 0;
#pragma unroll
  for (int i = 0; i < kOfThread; ++i) {
    weights[i] = begin + i < vocab ? Weight(logits[begin + i], max, row.temperature) : 0;
    sum += weights[i];
  }
  const int warp = threadIdx.x / kWarp;
  const uint64_t up_to = PrefixSumOverLanes(sum);
  if (threadIdx.x % kWarp == kWarp - 1) w->words[warp] = up_to;
  __syncthreads();
  uint64_t running = up_to - sum;
  for (int i = 0; i < warp; ++i) running += w->words[i];
  if (running <= target && target < running + sum) {
    int i = 0;
    while (target >= running + weights[i]) running += weights[i++];
    w->count = static_cast<int>(begin) + i;
  }
  __syncthreads();
  return w->count;
}

// Whether the candidates hold all that the filters can keep.
__device__ bool CandidatesSuffice(const DeviceSampleRow& row, int count, uint64_t candidate_sum,
                                  uint64_t total) {
  if (row.min_p_cut >= kCandidateCut) return true;
  if (row.top_k > 0) return count >= row.top_k;
  return row.min_p_cut == -INFINITY && ReachesTopP(candidate_sum, row.top_p, total);
}

__device__ int32_t DrawWithFilters(const DeviceSampleParams& p, const SampleScratch& s,
                                   const DeviceSampleRow& row, float max, uint64_t* candidates,
                                   Workspace* w) {
  const int64_t r = blockIdx.x;
  const int count = s.num_candidates[r];
  const KeyRow all = {p.logits + r * p.logits_stride, p.vocab, max, row.temperature, candidates};
  // With top_p alone the share is of the whole row.
  const bool only_top_p = row.top_k == 0 && row.min_p_cut == -INFINITY;
  const uint64_t total =
      only_top_p ? SumOfSlices(s.weight_sums + r * s.num_slices, s.num_slices) : 0;
  if (count > kMaxCandidates) return DrawFiltered(all, row, max, total, w);
  uint64_t sum = 0;
  for (int i = threadIdx.x; i < count; i += kThreads) {
    candidates[i] = s.candidates[r * kMaxCandidates + i];
    sum += Weight(LogitOf(candidates[i]), max, row.temperature);
  }
  sum = SumOverCta(sum, w);
  if (!CandidatesSuffice(row, count, sum, total)) return DrawFiltered(all, row, max, total, w);
  return DrawFiltered(KeyList{candidates, count}, row, max, total, w);
}

// First key and flags of a row. Every warp does it by itself.
__device__ SliceStats RowStats(const SliceStats* stats, int num_slices) {
  SliceStats all = {~uint64_t{0}, 0};
  for (int i = threadIdx.x % kWarp; i < num_slices; i += kWarp) {
    all.first = stats[i].first < all.first ? stats[i].first : all.first;
    all.flags |= stats[i].flags;
  }
  all.first = MinOverLanes(all.first);
  all.flags = __reduce_or_sync(kAllLanes, static_cast<unsigned>(all.flags));
  return all;
}

__global__ void __launch_bounds__(kThreads) DrawKernel(DeviceSampleParams p, SampleScratch s) {
  extern __shared__ __align__(16) uint64_t candidates[];  // [kMaxCandidates]
  __shared__ Workspace workspace;
  const int64_t r = blockIdx.x;
  const DeviceSampleRow row = p.rows[r];
  const SliceStats untouched = RowStats(s.untouched + r * s.num_slices, s.num_slices);
  const SliceStats stats = RowStats(s.adjusted + r * s.num_slices, s.num_slices);
  const float max = LogitOf(stats.first);
  SampleDraw draw = {untouched.flags, 0, 0, LogitOf(untouched.first), 0};
  draw.flags |= stats.flags & SampleDraw::kNotNumbers;
  if (max == -INFINITY) draw.flags |= SampleDraw::kNoToken;
  if ((draw.flags & (SampleDraw::kNotNumbers | SampleDraw::kNoToken)) == 0) {
    if (row.temperature == 0.0F) {
      draw.token = IdOf(stats.first);
    } else if (IsFiltered(row)) {
      draw.token = DrawWithFilters(p, s, row, max, candidates, &workspace);
    } else {
      draw.token =
          DrawFromAll(p.logits + r * p.logits_stride, p.vocab, s.weight_sums + r * s.num_slices,
                      s.num_slices, max, row, &workspace);
    }
  }
  if (threadIdx.x != 0) return;
  p.draws[r] = draw;
  p.tokens[r] = draw.token;
}

// Log-probabilities' raw material, from the untouched logits.
__global__ void __launch_bounds__(kThreads) ReportKernel(DeviceSampleParams p, SampleScratch s) {
  extern __shared__ __align__(16) uint64_t list[];  // [kMaxCandidates]
  __shared__ Workspace workspace;
  const int64_t r = blockIdx.x;
  const DeviceSampleRow row = p.rows[r];
  SampleDraw* draw = p.draws + r;
  if (row.num_logprobs < 0 ||
      (draw->flags & (SampleDraw::kNotNumbers | SampleDraw::kNoToken)) != 0) {
    return;
  }
  const float* logits = p.logits + r * p.logits_stride;
  const uint64_t sum = SumOfSlices(s.untouched_sums + r * s.num_slices, s.num_slices);
  if (threadIdx.x == 0) {
    draw->weight_sum = sum;
    draw->logit = logits[draw->token];
  }
  if (row.num_logprobs == 0) return;
  const KeyRow all = {logits, p.vocab, draw->max_logit, 1.0F, list};
  const uint64_t last = FindByCount(all, static_cast<uint64_t>(row.num_logprobs), &workspace);
  if (threadIdx.x == 0) workspace.count = 0;
  __syncthreads();
  all.ForEach([&](uint64_t key) {
    if (key > last) return;
    const int at = atomicAdd(&workspace.count, 1);
    p.top[r * p.max_logprobs + at] = {IdOf(key), LogitOf(key)};
  });
}

}  // namespace

absl::Status LaunchDraw(const DeviceSampleParams& p, const SampleScratch& s, Stream stream) {
  if (absl::Status status = AllowSharedMemory(DrawKernel, kListBytes, "SampleDraw"); !status.ok()) {
    return status;
  }
  DrawKernel<<<static_cast<unsigned>(p.num_rows), kThreads, kListBytes, stream>>>(p, s);
  return LaunchStatus("SampleDraw");
}

absl::Status LaunchReport(const DeviceSampleParams& p, const SampleScratch& s, Stream stream) {
  if (absl::Status status = AllowSharedMemory(ReportKernel, kListBytes, "SampleReport");
      !status.ok()) {
    return status;
  }
  ReportKernel<<<static_cast<unsigned>(p.num_rows), kThreads, kListBytes, stream>>>(p, s);
  return LaunchStatus("SampleReport");
}

}  // namespace zipage::cuda
