#pragma once
// Passes over one row of logits, vectorized. A token's weight is exp((z - max z) / temperature) as
// an integer multiple of 2^-43, so that sums are exact in any order. Compiled without fused
// operations.

#include <cstdint>
#include <vector>

namespace zipage::cpu {

// Weight of the most probable token; 2^20 of them still fit 64 bits.
constexpr uint64_t kUnitWeight = uint64_t{1} << 43;

// A token in "order": higher logit first, lower id among equals.
struct Candidate {
  float logit;
  int32_t token;
};
inline bool operator<(const Candidate& a, const Candidate& b) {
  return a.logit > b.logit || (a.logit == b.logit && a.token < b.token);
}

// The first token in order, or valid = false if a logit is NaN or +inf, or all are -inf.
struct Top {
  Candidate first;
  bool valid;
};
Top FindTop(const float* logits, int64_t n);

// The weight of one logit, and the sum over n of them.
uint64_t Weight(float logit, float max, float temperature);
uint64_t SumWeights(const float* logits, int64_t n, float max, float temperature);

// The first min(k, n) tokens in order, themselves in no particular order.
void SelectTop(const float* logits, int64_t n, int64_t k, std::vector<Candidate>* out);

// The tokens with (logit - max) / temperature >= lowest, by id.
void SelectAtLeast(const float* logits, int64_t n, float max, float temperature, float lowest,
                   std::vector<Candidate>* out);

}  // namespace zipage::cpu
