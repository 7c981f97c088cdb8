#pragma once
// Sampling on the device (kernels/sample.h says what is computed): the host packs the rows of a
// step into flat arrays, the kernels leave a draw for each row and its most probable tokens, the
// host turns these into results. Tokens, and log-probabilities too, are those of cpu::Sample bit by
// bit: weights are summed as integers, and what is not exact is computed on the host.

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "kernels/sample.h"
#include "kernels/stream.h"

namespace zipage::cuda {

// A SampleRow with indices in place of pointers.
struct DeviceSampleRow {
  uint64_t seed;
  uint64_t position;
  uint32_t sample_index;
  float temperature;
  float top_p;
  float min_p_cut;  // log(min_p); -inf: off
  int32_t top_k;    // 0: off
  float repetition_penalty;
  float presence_penalty;
  float frequency_penalty;
  int32_t first_seen;  // of the packed `seen`; those without a penalty are not packed
  int32_t num_seen;
  int32_t first_banned;
  int32_t num_banned;  // all inside the vocabulary
  int32_t num_logprobs;
};

// The rows of one call as the kernels read them, and which kernels are needed.
struct SamplePlan {
  std::vector<DeviceSampleRow> rows;
  std::vector<SeenToken> seen;
  std::vector<int32_t> banned;
  bool draws = false;    // a row has a temperature
  bool reports = false;  // a row wants log-probabilities
  int32_t max_logprobs = 0;
};

// Packs the rows. CHECKs what cpu::Sample CHECKs.
SamplePlan PlanSample(const SampleRow* rows, int64_t num_rows, int64_t vocab);

// What the kernels found out about a row.
struct SampleDraw {
  static constexpr int32_t kNotNumbers = 1;  // a logit is NaN or +inf
  static constexpr int32_t kMinusInf = 2;    // a logit is -inf before bans
  static constexpr int32_t kNoToken = 4;     // none is left to sample
  int32_t flags;
  int32_t token;    // 0 with kNotNumbers or kNoToken
  float logit;      // of the token, untouched; with log-probabilities
  float max_logit;  // of the row, untouched; with log-probabilities
  // Sum over the row of exp(z - max_logit) in multiples of 2^-43; with log-probabilities.
  uint64_t weight_sum;
};

// All pointers are device memory. Bytes: num_rows * vocab * 4, read two to four times, but for the
// first mostly from the L2 cache. REQUIRES: 1 <= vocab <= 2^20.
struct DeviceSampleParams {
  float* logits;                // [num_rows, vocab], rows logits_stride apart; as sample.h says
  const DeviceSampleRow* rows;  // [num_rows]
  const SeenToken* seen;        // [num_seen]
  const int32_t* banned;        // [num_banned]
  SampleDraw* draws;            // [num_rows]
  int32_t* tokens;              // [num_rows] the draws' tokens
  // [num_rows, max_logprobs]: the first num_logprobs in no particular order, with their logits in
  // place of log-probabilities.
  SampleLogprob* top;
  void* scratch;  // [SampleScratchBytes], aligned to 16
  int64_t num_rows;
  int64_t vocab;
  int64_t logits_stride;
  int64_t num_seen;
  int64_t num_banned;
  int32_t max_logprobs;
  bool draws_any;  // SamplePlan's draws, reports
  bool reports_any;
};

size_t SampleScratchBytes(int64_t num_rows, int64_t vocab, int64_t num_seen, int64_t num_banned);

// kInternal if a launch fails. What is wrong with a row is in its draw's flags.
absl::Status Sample(const DeviceSampleParams& p, Stream stream);

// The result of a row, and its log-probabilities sorted in place, from copies in host memory.
// `top`: the row's num_logprobs (at most vocab) entries. REQUIRES: kNotNumbers and kNoToken are not
// set.
SampleResult FinishSample(const SampleDraw& draw, int32_t num_logprobs, int64_t vocab,
                          SampleLogprob* top);

}  // namespace zipage::cuda
