#include "worker/fidelity/statistics.h"

#include <cmath>
#include <limits>

#include "glog/logging.h"

namespace zipage {

void FidelitySums::Add(const LogitComparison& compared, TokenId target) {
  ++positions;
  if (compared.other_argmax == compared.full_argmax) ++agreed;
  if (compared.full_argmax == target) ++full_predicted;
  if (compared.other_argmax == target) ++predicted;
  divergence += compared.divergence;
  full_logprob += compared.full_logprob;
  logprob += compared.other_logprob;
}

double FidelitySums::Mean(double sum) const {
  if (positions == 0) return std::numeric_limits<double>::quiet_NaN();
  return sum / static_cast<double>(positions);
}

double FidelitySums::full_perplexity() const { return std::exp(-Mean(full_logprob)); }
double FidelitySums::perplexity() const { return std::exp(-Mean(logprob)); }

FidelityStatistics::FidelityStatistics(int64_t bucket_width) : bucket_width_(bucket_width) {
  CHECK_GE(bucket_width, 1);
}

void FidelityStatistics::Add(const LogitComparison& compared, TokenId target, bool compressed,
                             FidelityProgress* progress) {
  CHECK(compared.valid);
  const int64_t index = progress->num_predicted++;
  CHECK_LT(index, progress->num_output);
  all_.Add(compared, target);
  if (compressed) after_compression_.Add(compared, target);
  const auto bucket = static_cast<size_t>(index / bucket_width_);
  if (bucket >= buckets_.size()) buckets_.resize(bucket + 1);
  buckets_[bucket].Add(compared, target);
  if (index < progress->num_output - progress->recall_tokens) return;
  recall_.tokens.Add(compared, target);
  progress->full_recalls &= compared.full_argmax == target;
  progress->recalls &= compared.other_argmax == target;
  if (index + 1 < progress->num_output) return;
  ++recall_.probes;
  if (progress->full_recalls) ++recall_.full_recalled;
  if (progress->recalls) ++recall_.recalled;
}

void FidelityStatistics::AddCase(int64_t num_compressions, double prompt_kept, int64_t num_prompt) {
  ++num_cases_;
  if (num_compressions == 0) return;
  ++num_compressed_;
  num_compressions_ += num_compressions;
  prompt_kept_ += prompt_kept / static_cast<double>(num_prompt);
}

double FidelityStatistics::prompt_kept() const {
  if (num_compressed_ == 0) return std::numeric_limits<double>::quiet_NaN();
  return prompt_kept_ / static_cast<double>(num_compressed_);
}

}  // namespace zipage
