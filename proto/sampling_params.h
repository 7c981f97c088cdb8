#pragma once
// Sampling parameters of one request, as the job line gives them and the worker applies them
// (DESIGN 6).

#include <cstdint>
#include <vector>

namespace zipage {

struct SamplingParams {
  // 0 is greedy: the highest logit after penalties, the lowest token id among equals.
  float temperature = 1.0F;
  // Probability mass kept, in (0, 1]; 1 keeps all.
  float top_p = 1.0F;
  // Number of highest logits kept; 0 keeps all.
  int32_t top_k = 0;
  // Tokens below min_p times the highest probability are dropped, in [0, 1]; 0 drops none.
  float min_p = 0.0F;
  // Over 1 lowers logits of tokens seen in the prompt or output: divided if positive, multiplied if
  // negative (Keskar et al., 2019). 1 is off.
  float repetition_penalty = 1.0F;
  // Subtracted once for every token already in the output, in [-2, 2].
  float presence_penalty = 0.0F;
  // Subtracted times the number of occurrences in the output, in [-2, 2].
  float frequency_penalty = 0.0F;
  // Key of the counter-based generator; with the sample index and output position it fixes the
  // draw.
  uint64_t seed = 0;
  // Tokens to generate at most, end of sequence included; at least 1.
  int32_t max_tokens = 1;
  // Stop tokens and end-of-sequence ids are not sampled before this many tokens.
  int32_t min_tokens = 0;
  // Ids that end the sequence and stay out of its text (end-of-sequence ids unless ignore_eos, and
  // stop_token_ids). Sorted, without repeats.
  std::vector<int32_t> stop_token_ids;
  // Log-probabilities to report per token besides the sampled one's own; -1 reports none.
  int32_t num_logprobs = -1;

  bool operator==(const SamplingParams&) const = default;
};

}  // namespace zipage
