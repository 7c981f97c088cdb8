#include "kernels/compare_logits.h"

#include <algorithm>
#include <cmath>

#include "glog/logging.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/vocab_scan.h"

namespace zipage::cpu {
namespace {

// Logits that are summed in float32 before the sum goes to a double.
constexpr int64_t kPiece = 1024;

// With f and o the logits less their row's maximum.
struct Sums {
  double full = 0;      // of exp(f)
  double other = 0;     // of exp(o)
  double weighted = 0;  // of exp(f) * (f - o)
};

template <int kLanes>
ZIPAGE_INLINE Sums SumPieceImpl(const float* full, const float* other, int64_t n, float full_max,
                                float other_max) {
  Vec<kLanes> full_sum = {};
  Vec<kLanes> other_sum = {};
  Vec<kLanes> weighted_sum = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec<kLanes> f = Load<kLanes>(full + i) - full_max;
    const Vec<kLanes> o = Load<kLanes>(other + i) - other_max;
    const Vec<kLanes> weight = ExpVec<kLanes>(f);
    full_sum += weight;
    other_sum += ExpVec<kLanes>(o);
    weighted_sum += weight * (f - o);
  }
  Sums sums = {ReduceSum<kLanes>(full_sum), ReduceSum<kLanes>(other_sum),
               ReduceSum<kLanes>(weighted_sum)};
  for (; i < n; ++i) {
    const float f = full[i] - full_max;
    const float o = other[i] - other_max;
    const float weight = Exp<float, int32_t>(f);
    sums.full += weight;
    sums.other += Exp<float, int32_t>(o);
    sums.weighted += weight * (f - o);
  }
  return sums;
}

ZIPAGE_LEAF(Sums, SumPiece,
            (const float* full, const float* other, int64_t n, float full_max, float other_max),
            (full, other, n, full_max, other_max))

LogitComparison CompareRow(const float* full, const float* other, int64_t vocab, int32_t target) {
  const Top full_top = FindTop(full, vocab);
  const Top other_top = FindTop(other, vocab);
  if (!full_top.valid || !other_top.valid) return {};
  const float full_max = full_top.first.logit;
  const float other_max = other_top.first.logit;
  Sums sums;
  for (int64_t begin = 0; begin < vocab; begin += kPiece) {
    const int64_t count = std::min(kPiece, vocab - begin);
    const Sums piece = SumPiece(full + begin, other + begin, count, full_max, other_max);
    sums.full += piece.full;
    sums.other += piece.other;
    sums.weighted += piece.weighted;
  }
  const double full_log = std::log(sums.full);
  const double other_log = std::log(sums.other);
  const double divergence = sums.weighted / sums.full - full_log + other_log;
  // A logit of minus infinity shows here.
  if (!std::isfinite(divergence)) return {};
  return {.valid = true,
          .full_argmax = full_top.first.token,
          .other_argmax = other_top.first.token,
          .divergence = std::max(divergence, 0.0),
          .full_logprob = double{full[target]} - full_max - full_log,
          .other_logprob = double{other[target]} - other_max - other_log};
}

}  // namespace

void CompareLogits(const CompareLogitsParams& p) {
  CHECK_GE(p.vocab, 1);
  for (int64_t r = 0; r < p.num_rows; ++r) {
    CHECK(p.target[r] >= 0 && p.target[r] < p.vocab)
        << "target " << p.target[r] << " of row " << r << ", the vocabulary has " << p.vocab;
  }
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < p.num_rows; ++r) {
    p.out[r] = CompareRow(p.full + r * p.vocab, p.other + r * p.vocab, p.vocab, p.target[r]);
  }
}

}  // namespace zipage::cpu
