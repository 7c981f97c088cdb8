#include <algorithm>
#include <cmath>
#include <limits>

#include "glog/logging.h"
#include "kernels/cuda/device/launch.cuh"
#include "kernels/cuda/device/sample.cuh"

namespace zipage::cuda {
namespace {

// Cuts `memory` into the arrays of a call's scratch; with a null pointer only counts the bytes.
class ScratchLayout {
 public:
  explicit ScratchLayout(void* memory) : memory_(static_cast<char*>(memory)) {}
  template <typename T>
  T* Take(int64_t count) {
    T* const taken = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + bytes_);
    bytes_ += (static_cast<size_t>(count) * sizeof(T) + 15) / 16 * 16;
    return taken;
  }
  size_t bytes() const { return bytes_; }

 private:
  char* memory_;
  size_t bytes_ = 0;
};

SampleScratch Arrange(ScratchLayout* layout, int64_t num_rows, int64_t vocab, int64_t num_seen,
                      int64_t num_banned) {
  const int64_t slices = NumSlices(vocab) * num_rows;
  SampleScratch s = {};
  s.num_slices = static_cast<int>(NumSlices(vocab));
  s.untouched = layout->Take<SliceStats>(slices);
  s.adjusted = layout->Take<SliceStats>(slices);
  s.weight_sums = layout->Take<uint64_t>(slices);
  s.untouched_sums = layout->Take<uint64_t>(slices);
  s.num_candidates = layout->Take<int32_t>(num_rows);
  s.candidates = layout->Take<uint64_t>(num_rows * kMaxCandidates);
  s.saved = layout->Take<float>(num_seen + num_banned);
  return s;
}

void CheckRow(const SampleRow& row) {
  CHECK(row.temperature >= 0 && std::isfinite(row.temperature)) << row.temperature;
  CHECK(row.top_p > 0 && row.top_p <= 1) << row.top_p;
  CHECK(row.top_k >= 0) << row.top_k;
  CHECK(row.min_p >= 0 && row.min_p <= 1) << row.min_p;
  CHECK(row.repetition_penalty > 0) << row.repetition_penalty;
}

absl::Status RunKernels(const DeviceSampleParams& p, SampleScratch s, Stream stream) {
  absl::Status status = LaunchStats(p, s, s.untouched, stream);
  if (status.ok() && p.reports_any) status = LaunchWeights(p, s, /*untouched=*/true, stream);
  const bool adjusts = p.num_seen > 0 || p.num_banned > 0;
  if (adjusts) {
    if (status.ok()) status = LaunchAdjust(p, s, /*restores=*/false, stream);
    if (status.ok()) status = LaunchStats(p, s, s.adjusted, stream);
  } else {
    s.adjusted = s.untouched;
  }
  if (status.ok() && p.draws_any) status = LaunchWeights(p, s, /*untouched=*/false, stream);
  if (status.ok()) status = LaunchDraw(p, s, stream);
  if (status.ok() && adjusts) status = LaunchAdjust(p, s, /*restores=*/true, stream);
  if (status.ok() && p.reports_any) status = LaunchReport(p, s, stream);
  return status;
}

}  // namespace

SamplePlan PlanSample(const SampleRow* rows, int64_t num_rows, int64_t vocab) {
  SamplePlan plan;
  for (int64_t r = 0; r < num_rows; ++r) {
    const SampleRow& row = rows[r];
    CheckRow(row);
    DeviceSampleRow& to = plan.rows.emplace_back();
    to.seed = row.seed;
    to.position = row.position;
    to.sample_index = row.sample_index;
    to.temperature = row.temperature;
    to.top_p = row.top_p;
    to.min_p_cut = row.min_p > 0 ? std::log(row.min_p) : -std::numeric_limits<float>::infinity();
    to.top_k = row.top_k < vocab ? row.top_k : 0;
    to.repetition_penalty = row.repetition_penalty;
    to.presence_penalty = row.presence_penalty;
    to.frequency_penalty = row.frequency_penalty;
    to.num_logprobs = static_cast<int32_t>(std::min<int64_t>(row.num_logprobs, vocab));
    to.first_seen = static_cast<int32_t>(plan.seen.size());
    if (row.repetition_penalty != 1.0F || row.presence_penalty != 0.0F ||
        row.frequency_penalty != 0.0F) {
      for (int32_t i = 0; i < row.num_seen; ++i) {
        CHECK(row.seen[i].token >= 0 && row.seen[i].token < vocab)
            << "token " << row.seen[i].token << " of " << vocab;
        plan.seen.push_back(row.seen[i]);
      }
    }
    to.num_seen = static_cast<int32_t>(plan.seen.size()) - to.first_seen;
    to.first_banned = static_cast<int32_t>(plan.banned.size());
    for (int32_t i = 0; i < row.num_banned; ++i) {
      if (row.banned[i] >= 0 && row.banned[i] < vocab) plan.banned.push_back(row.banned[i]);
    }
    to.num_banned = static_cast<int32_t>(plan.banned.size()) - to.first_banned;
    plan.draws |= row.temperature > 0;
    plan.reports |= row.num_logprobs >= 0;
    plan.max_logprobs = std::max(plan.max_logprobs, to.num_logprobs);
  }
  return plan;
}

size_t SampleScratchBytes(int64_t num_rows, int64_t vocab, int64_t num_seen, int64_t num_banned) {
  ScratchLayout layout(nullptr);
  Arrange(&layout, num_rows, vocab, num_seen, num_banned);
  return layout.bytes();
}

absl::Status Sample(const DeviceSampleParams& p, Stream stream) {
  CHECK(p.vocab > 0 && p.vocab <= (1 << kIdBits)) << p.vocab;
  if (p.num_rows == 0) return absl::OkStatus();
  ScratchLayout layout(p.scratch);
  const SampleScratch s = Arrange(&layout, p.num_rows, p.vocab, p.num_seen, p.num_banned);
  const cudaError_t error =
      cudaMemsetAsync(s.num_candidates, 0, p.num_rows * sizeof(int32_t), stream);
  if (error != cudaSuccess) {
    return absl::InternalError(
        absl::StrCat("cannot clear sampling scratch: ", cudaGetErrorString(error)));
  }
  return RunKernels(p, s, stream);
}

SampleResult FinishSample(const SampleDraw& draw, int32_t num_logprobs, int64_t vocab,
                          SampleLogprob* top) {
  SampleResult result = {draw.token, 0};
  if (num_logprobs < 0) return result;
  constexpr uint64_t kUnitWeight = uint64_t{1} << 43;
  const auto sum = static_cast<double>(draw.weight_sum);
  const double log_sum = draw.max_logit + std::log(sum / static_cast<double>(kUnitWeight));
  result.logprob = static_cast<float>(draw.logit - log_sum);
  SampleLogprob* const end = top + std::min<int64_t>(num_logprobs, vocab);
  std::sort(top, end, [](const SampleLogprob& a, const SampleLogprob& b) {
    return a.logprob > b.logprob || (a.logprob == b.logprob && a.token < b.token);
  });
  for (SampleLogprob* t = top; t != end; ++t) {
    t->logprob = static_cast<float>(t->logprob - log_sum);
  }
  return result;
}

}  // namespace zipage::cuda
