#pragma once
// How close a setting stays to the full cache: sums over predicted tokens, in total, after the
// first compression of their case, and by their place in the output. Values, no device.

#include <cstdint>
#include <vector>

#include "kernels/compare_logits.h"
#include "proto/messages.h"

namespace zipage {

// Over some predicted tokens. Means of nothing are NaN.
struct FidelitySums {
  int64_t positions = 0;
  int64_t agreed = 0;          // the most probable token is the full cache's
  int64_t full_predicted = 0;  // the full cache's most probable token is the one in the text
  int64_t predicted = 0;       // the same of the setting
  double divergence = 0;       // KL(full || setting), nats
  double full_logprob = 0;     // of the tokens in the text
  double logprob = 0;

  void Add(const LogitComparison& compared, TokenId target);
  double agreement() const { return Mean(static_cast<double>(agreed)); }
  double full_accuracy() const { return Mean(static_cast<double>(full_predicted)); }
  double accuracy() const { return Mean(static_cast<double>(predicted)); }
  double mean_divergence() const { return Mean(divergence); }
  double full_perplexity() const;
  double perplexity() const;

 private:
  double Mean(double sum) const;
};

// Over probes: cases whose last tokens are to be recalled.
struct RecallSums {
  int64_t probes = 0;
  int64_t full_recalled = 0;  // all tokens to recall are the full cache's most probable ones
  int64_t recalled = 0;       // the same of the setting
  FidelitySums tokens;        // to be recalled
};

// A case in progress under one setting.
struct FidelityProgress {
  int64_t num_output = 0;
  int64_t recall_tokens = 0;  // the last ones of the output
  int64_t num_predicted = 0;
  bool full_recalls = true;
  bool recalls = true;
};

// Of one setting. Cases may be interleaved.
class FidelityStatistics {
 public:
  // bucket_width: output tokens, at least 1.
  explicit FidelityStatistics(int64_t bucket_width);

  // The next predicted token of a case, `target` in its text. `compressed`: the case was compressed
  // before. REQUIRES: compared.valid; the case has another token.
  void Add(const LogitComparison& compared, TokenId target, bool compressed,
           FidelityProgress* progress);
  // A case has ended. prompt_kept: slots of the num_prompt tokens of its prompt that its last
  // compression kept, on average over layers and heads; ignored if there was none.
  void AddCase(int64_t num_compressions, double prompt_kept, int64_t num_prompt);

  const FidelitySums& all() const { return all_; }
  const FidelitySums& after_compression() const { return after_compression_; }
  // Entry i is of output tokens [i * bucket_width, (i + 1) * bucket_width).
  const std::vector<FidelitySums>& buckets() const { return buckets_; }
  int64_t bucket_width() const { return bucket_width_; }
  const RecallSums& recall() const { return recall_; }
  int64_t num_cases() const { return num_cases_; }
  int64_t num_compressed_cases() const { return num_compressed_; }
  int64_t num_compressions() const { return num_compressions_; }
  // Mean share of the prompt that a compressed case has at its end; NaN if none was compressed.
  double prompt_kept() const;

 private:
  int64_t bucket_width_;
  FidelitySums all_;
  FidelitySums after_compression_;
  std::vector<FidelitySums> buckets_;
  RecallSums recall_;
  int64_t num_cases_ = 0;
  int64_t num_compressed_ = 0;
  int64_t num_compressions_ = 0;
  double prompt_kept_ = 0;  // sum of shares
};

}  // namespace zipage
