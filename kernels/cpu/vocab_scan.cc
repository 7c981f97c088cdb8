#include "kernels/cpu/vocab_scan.h"

#include <algorithm>
#include <limits>

#include "kernels/cpu/simd.h"

namespace zipage::cpu {
namespace {

// Logits that are passed over together when none of them matters.
constexpr int64_t kBlock = 64;
constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();

// Adding it to a double in [0, 1] rounds that to a multiple of 2^-43, held in the low mantissa
// bits.
constexpr double kFixedPoint = 0x1p9;

template <int kLanes>
ZIPAGE_INLINE float MaxOfImpl(const float* logits, int64_t n) {
  Vec<kLanes> top[2] = {Broadcast<kLanes>(kMinusInfinity), Broadcast<kLanes>(kMinusInfinity)};
  constexpr int64_t kStep = kLanes;
  int64_t i = 0;
  for (; i + 2 * kStep <= n; i += 2 * kStep) {
    for (int v = 0; v < 2; ++v) {
      const Vec<kLanes> z = Load<kLanes>(logits + i + v * kStep);
      top[v] = z > top[v] ? z : top[v];
    }
  }
  float max = ReduceMax<kLanes>(top[0] > top[1] ? top[0] : top[1]);
  for (; i < n; ++i) max = logits[i] > max ? logits[i] : max;
  return max;
}

ZIPAGE_LEAF(float, MaxOf, (const float* logits, int64_t n), (logits, n))

template <int kLanes>
ZIPAGE_INLINE bool HasNanImpl(const float* logits, int64_t n) {
  VecI<kLanes> found = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec<kLanes> z = Load<kLanes>(logits + i);
    found |= z != z;
  }
  bool any = false;
  for (int lane = 0; lane < kLanes; ++lane) any |= found[lane] != 0;
  for (; i < n; ++i) any |= logits[i] != logits[i];
  return any;
}

ZIPAGE_LEAF(bool, HasNan, (const float* logits, int64_t n), (logits, n))

}  // namespace

Top FindTop(const float* logits, int64_t n) {
  // Blocks that fit the first-level cache, so that the logits come from memory once.
  constexpr int64_t kChunk = 4096;
  float max = kMinusInfinity;
  int64_t first_chunk = 0;
  for (int64_t begin = 0; begin < n; begin += kChunk) {
    const int64_t count = std::min(kChunk, n - begin);
    if (HasNan(logits + begin, count)) return {{}, false};
    const float chunk_max = MaxOf(logits + begin, count);
    if (chunk_max > max) {
      max = chunk_max;
      first_chunk = begin;
    }
  }
  if (max == kMinusInfinity || max == -kMinusInfinity) return {{}, false};
  int64_t token = first_chunk;
  while (logits[token] != max) ++token;
  return {{max, static_cast<int32_t>(token)}, true};
}

uint64_t Weight(float logit, float max, float temperature) {
  const float weight = Exp<float, int32_t>((logit - max) / temperature);
  return std::bit_cast<uint64_t>(static_cast<double>(weight) + kFixedPoint) -
         std::bit_cast<uint64_t>(kFixedPoint);
}

template <int kLanes>
ZIPAGE_INLINE uint64_t SumWeightsImpl(const float* logits, int64_t n, float max,
                                      float temperature) {
  using Doubles = typename VectorTypes<kLanes>::Double;
  using Words = typename VectorTypes<kLanes>::Unsigned64;
  const auto offset = std::bit_cast<uint64_t>(kFixedPoint);
  Words sums = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec<kLanes> weight = ExpVec<kLanes>((Load<kLanes>(logits + i) - max) / temperature);
    Vec<kLanes / 2> half[2];
    std::memcpy(half, &weight, sizeof(weight));
    for (int h = 0; h < 2; ++h) {
      const Doubles fixed = __builtin_convertvector(half[h], Doubles) + kFixedPoint;
      sums += std::bit_cast<Words>(fixed) - offset;
    }
  }
  uint64_t sum = 0;
  for (int lane = 0; lane < kLanes / 2; ++lane) sum += sums[lane];
  for (; i < n; ++i) sum += Weight(logits[i], max, temperature);
  return sum;
}

ZIPAGE_LEAF(uint64_t, SumWeights, (const float* logits, int64_t n, float max, float temperature),
            (logits, n, max, temperature))

void SelectTop(const float* logits, int64_t n, int64_t k, std::vector<Candidate>* out) {
  out->clear();
  k = std::min(k, n);
  if (k <= 0) return;
  // Tokens come by ascending id, so once k are held an equal of the least of them comes too late.
  float threshold = kMinusInfinity;
  bool full = false;
  const auto capacity = static_cast<size_t>(2 * k + kBlock);
  const auto keep_first = [&] {
    std::nth_element(out->begin(), out->begin() + (k - 1), out->end());
    out->resize(static_cast<size_t>(k));
    threshold = out->back().logit;
    full = true;
  };
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, n);
    if (full && !(MaxOf(logits + begin, end - begin) > threshold)) continue;
    for (int64_t i = begin; i < end; ++i) {
      if (!full || logits[i] > threshold) out->push_back({logits[i], static_cast<int32_t>(i)});
    }
    if (out->size() >= capacity) keep_first();
  }
  if (static_cast<int64_t>(out->size()) > k) keep_first();
}

void SelectAtLeast(const float* logits, int64_t n, float max, float temperature, float lowest,
                   std::vector<Candidate>* out) {
  out->clear();
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t end = std::min(begin + kBlock, n);
    if ((MaxOf(logits + begin, end - begin) - max) / temperature < lowest) continue;
    for (int64_t i = begin; i < end; ++i) {
      if ((logits[i] - max) / temperature >= lowest) {
        out->push_back({logits[i], static_cast<int32_t>(i)});
      }
    }
  }
}

}  // namespace zipage::cpu
