#pragma once
// What two rows of logits say about the same next token: how far the second distribution is from
// the first.
//   p = softmax(full), q = softmax(other);  divergence = sum over t of p[t] log(p[t] / q[t])
// which is the Kullback-Leibler divergence KL(p || q) in nats, and the log-probabilities of one
// target token. Equal rows have divergence exactly 0. The most probable token is, as in sampling,
// that with the lowest id among equals. Reads every logit twice, the second time from the cache if
// a row fits there.

#include <cstdint>

namespace zipage {

struct LogitComparison {
  bool valid = false;  // false if a logit is no finite number: all else is 0 then
  int32_t full_argmax = 0;
  int32_t other_argmax = 0;
  double divergence = 0;     // nats, not below 0
  double full_logprob = 0;   // log p[target]
  double other_logprob = 0;  // log q[target]
};

struct CompareLogitsParams {
  const float* full = nullptr;      // [num_rows, vocab]
  const float* other = nullptr;     // [num_rows, vocab]
  const int32_t* target = nullptr;  // [num_rows] in [0, vocab)
  LogitComparison* out = nullptr;   // [num_rows]
  int64_t num_rows = 0;
  int64_t vocab = 0;
};

namespace cpu {
// Rows are shared among the OpenMP threads.
void CompareLogits(const CompareLogitsParams& p);
}  // namespace cpu

}  // namespace zipage
