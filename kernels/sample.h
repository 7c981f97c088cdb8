#pragma once
// From logits to a token: penalties, filters, one draw, log-probabilities.

#include <cstdint>

#include "absl/status/status.h"

namespace zipage {

// A token that occurs in a sequence's prompt or output.
struct SeenToken {
  int32_t token;         // in [0, vocab)
  int32_t output_count;  // occurrences in the output; 0: in the prompt only
};

// Everything that one row's token depends on besides its logits. See SampleParams for the meaning.
struct SampleRow {
  float temperature = 1.0F;         // >= 0; 0 is greedy
  float top_p = 1.0F;               // (0, 1]
  int32_t top_k = 0;                // 0: off
  float min_p = 0.0F;               // [0, 1]
  float repetition_penalty = 1.0F;  // > 0
  float presence_penalty = 0.0F;
  float frequency_penalty = 0.0F;
  const SeenToken* seen = nullptr;  // [num_seen], distinct tokens; needed only with a penalty
  int32_t num_seen = 0;
  const int32_t* banned = nullptr;  // [num_banned]; ids outside [0, vocab) are ignored
  int32_t num_banned = 0;
  uint64_t seed = 0;
  uint32_t sample_index = 0;  // which of the request's n samples
  uint64_t position = 0;      // output position of the token, from 0
  int32_t num_logprobs = -1;  // most probable tokens to report; -1: no log-probabilities at all
};

struct SampleLogprob {
  int32_t token;
  float logprob;
};

struct SampleResult {
  int32_t token;
  float logprob;  // from the untouched logits at temperature 1; valid with num_logprobs >= 0
};

// For every row r, with z the row's logits and "order" meaning higher z first, lower id among
// equals:
//   1. penalties, for each token of `seen`: z = z > 0 ? z / repetition : z * repetition; then
//      z -= frequency * output_count, and z -= presence if output_count > 0
//   2. z = -inf for the banned
//   3. temperature 0: the first in order. Otherwise y = (z - max z) / temperature and keep
//   4. min_p: tokens with y >= log(min_p)
//   5. top_k: of these the first top_k in order (so exactly top_k, ties resolved by id)
//   6. top_p: of these, in order, the fewest whose weights sum to at least top_p times the sum of
//   all;
//      at least one. The weight of a token is exp(y) rounded to a multiple of 2^-43.
//   7. the first token in id order whose running sum of weights exceeds u * (sum of weights kept),
//   u in
//      [0, 1) the first 64 bits of Philox4x32(counter = {position, sample_index, 0}, key = seed).
// Weights are summed as integers, so the result is exact: independent of summation order, of
// threads, of the other rows, and of the instruction set (exp is a fixed sequence of unfused fp32
// operations). Log-probabilities are log_softmax of the logits before step 1; the reported ones are
// the first num_logprobs in order. Bytes: vocab * 4, read two to three times from cache per row;
// nothing is sorted but what is kept. The logits are changed during the call and hold their old
// values afterwards. kInternal, naming the row, if a logit is NaN or +inf or no token is left.
// CHECKs the sizes and the parameters' ranges.
struct SampleParams {
  float* logits;          // [num_rows, vocab], rows logits_stride apart
  const SampleRow* rows;  // [num_rows]
  SampleResult* sampled;  // [num_rows]
  // [num_rows, max_logprobs], filled up to min(num_logprobs, vocab); may be null if no row asks for
  // any
  SampleLogprob* top_logprobs;
  int64_t num_rows;
  int64_t vocab;  // up to 2^20
  int64_t logits_stride;
  int32_t max_logprobs;  // >= every row's num_logprobs
};

namespace cpu {
absl::Status Sample(const SampleParams& p);
}  // namespace cpu

namespace reference {
// The steps above as loops over a fully sorted vocabulary; for tests. Same parameters, same result.
absl::Status Sample(const SampleParams& p);
}  // namespace reference
}  // namespace zipage
