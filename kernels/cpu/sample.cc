#include "kernels/sample.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "glog/logging.h"
#include "kernels/cpu/vocab_scan.h"
#include "kernels/philox.h"

namespace zipage::cpu {
namespace {

// Logits of one draw's block; the drawn token is looked for in one block only.
constexpr int64_t kDrawBlock = 1024;
// (z - max) / temperature under which a weight rounds to 0.
constexpr float kNoWeight = -31.0F;

// Applies penalties and bans to a row of logits and takes them back when destroyed.
class AdjustedLogits {
 public:
  AdjustedLogits(float* logits, int64_t vocab, const SampleRow& row) : logits_(logits) {
    const bool penalized = row.repetition_penalty != 1.0F || row.presence_penalty != 0.0F ||
                           row.frequency_penalty != 0.0F;
    for (int32_t i = 0; penalized && i < row.num_seen; ++i) {
      const SeenToken& seen = row.seen[i];
      CHECK(seen.token >= 0 && seen.token < vocab) << "token " << seen.token << " of " << vocab;
      float z = logits[seen.token];
      z = z > 0 ? z / row.repetition_penalty : z * row.repetition_penalty;
      z -= row.frequency_penalty * static_cast<float>(seen.output_count);
      if (seen.output_count > 0) z -= row.presence_penalty;
      Set(seen.token, z);
    }
    for (int32_t i = 0; i < row.num_banned; ++i) {
      if (row.banned[i] >= 0 && row.banned[i] < vocab) Set(row.banned[i], -INFINITY);
    }
  }
  ~AdjustedLogits() {
    for (size_t i = old_.size(); i-- > 0;) logits_[old_[i].token] = old_[i].logit;
  }
  AdjustedLogits(const AdjustedLogits&) = delete;
  AdjustedLogits& operator=(const AdjustedLogits&) = delete;

 private:
  void Set(int32_t token, float value) {
    old_.push_back({logits_[token], token});
    logits_[token] = value;
  }

  float* logits_;
  std::vector<Candidate> old_;
};

// floor(u * total) for the row's uniform u in [0, 1).
uint64_t DrawBelow(uint64_t total, const SampleRow& row) {
  const std::array<uint32_t, 4> random =
      Philox4x32({static_cast<uint32_t>(row.position), static_cast<uint32_t>(row.position >> 32),
                  row.sample_index, 0},
                 {static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32)});
  const uint64_t u = (uint64_t{random[1]} << 32) | random[0];
  __extension__ using Wide = unsigned __int128;
  return static_cast<uint64_t>((static_cast<Wide>(u) * total) >> 64);
}

// The draw of steps 3 and 7 with nothing filtered out.
int32_t DrawFromAll(const float* logits, int64_t vocab, float max, const SampleRow& row) {
  std::vector<uint64_t> block_sums;
  uint64_t total = 0;
  for (int64_t begin = 0; begin < vocab; begin += kDrawBlock) {
    const int64_t count = std::min(kDrawBlock, vocab - begin);
    block_sums.push_back(SumWeights(logits + begin, count, max, row.temperature));
    total += block_sums.back();
  }
  uint64_t target = DrawBelow(total, row);
  size_t block = 0;
  while (target >= block_sums[block]) target -= block_sums[block++];
  for (int64_t i = static_cast<int64_t>(block) * kDrawBlock;; ++i) {
    const uint64_t weight = Weight(logits[i], max, row.temperature);
    if (target < weight) return static_cast<int32_t>(i);
    target -= weight;
  }
}

uint64_t SumOf(std::vector<Candidate>::const_iterator begin,
               std::vector<Candidate>::const_iterator end, float max, float temperature) {
  uint64_t sum = 0;
  for (auto it = begin; it != end; ++it) sum += Weight(it->logit, max, temperature);
  return sum;
}

bool Reaches(uint64_t sum, float top_p, uint64_t total) {
  return static_cast<double>(sum) >= static_cast<double>(top_p) * static_cast<double>(total);
}

// The last of the fewest candidates, taken in order, that reach top_p of total. Halves the range in
// question instead of sorting: linear time.
Candidate LastOfTopP(float top_p, uint64_t total, float max, float temperature,
                     std::vector<Candidate> candidates) {
  constexpr std::ptrdiff_t kSortBelow = 32;
  auto low = candidates.begin();
  auto high = candidates.end();
  uint64_t before = 0;  // weights in front of low
  while (high - low > kSortBelow) {
    const auto middle = low + (high - low) / 2;
    std::nth_element(low, middle, high);
    const uint64_t sum = SumOf(low, middle, max, temperature);
    if (Reaches(before + sum, top_p, total)) {
      high = middle;
    } else {
      before += sum;
      low = middle;
    }
  }
  std::sort(low, high);
  for (; low + 1 != high; ++low) {
    before += Weight(low->logit, max, temperature);
    if (Reaches(before, top_p, total)) break;
  }
  return *low;
}

// Steps 4 to 7 with at least one filter on. Candidates are by id throughout.
int32_t DrawFiltered(const float* logits, int64_t vocab, float max, const SampleRow& row) {
  std::vector<Candidate> candidates;
  const float temperature = row.temperature;
  const float min_p_cut = row.min_p > 0 ? std::log(row.min_p) : -INFINITY;
  uint64_t total = 0;
  const auto sum_candidates = [&] {
    return SumOf(candidates.begin(), candidates.end(), max, temperature);
  };
  if (row.top_k > 0 && row.top_k < vocab) {
    SelectTop(logits, vocab, row.top_k, &candidates);
    std::erase_if(candidates, [&](const Candidate& c) {
      return !((c.logit - max) / temperature >= min_p_cut);
    });
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.token < b.token; });
    total = sum_candidates();
  } else if (row.min_p > 0) {
    SelectAtLeast(logits, vocab, max, temperature, min_p_cut, &candidates);
    total = sum_candidates();
  } else {
    // Most of the mass sits close to the maximum; only a flat distribution needs the second pass.
    constexpr float kFirstTry = -8.0F;
    total = SumWeights(logits, vocab, max, temperature);
    SelectAtLeast(logits, vocab, max, temperature, kFirstTry, &candidates);
    if (!Reaches(sum_candidates(), row.top_p, total)) {
      SelectAtLeast(logits, vocab, max, temperature, kNoWeight, &candidates);
    }
  }
  if (row.top_p < 1.0F) {
    const Candidate last = LastOfTopP(row.top_p, total, max, temperature, candidates);
    std::erase_if(candidates, [&](const Candidate& c) { return last < c; });
  }
  uint64_t target = DrawBelow(sum_candidates(), row);
  for (const Candidate& c : candidates) {
    const uint64_t weight = Weight(c.logit, max, temperature);
    if (target < weight) return c.token;
    target -= weight;
  }
  LOG(FATAL) << "draw past the end";  // the target is below the sum
}

// Fills in log-probabilities of a sampled token. `max` is the largest of the untouched logits.
void Report(const float* logits, int64_t vocab, float max, int32_t num_top, SampleResult* sampled,
            SampleLogprob* top) {
  const auto sum = static_cast<double>(SumWeights(logits, vocab, max, 1.0F));
  const double log_sum = max + std::log(sum / static_cast<double>(kUnitWeight));
  const float own = logits[sampled->token];
  sampled->logprob = static_cast<float>(own - log_sum);
  if (num_top <= 0) return;
  std::vector<Candidate> candidates;
  SelectTop(logits, vocab, num_top, &candidates);
  std::sort(candidates.begin(), candidates.end());
  for (size_t i = 0; i < candidates.size(); ++i) {
    top[i] = {candidates[i].token, static_cast<float>(candidates[i].logit - log_sum)};
  }
}

// False if the row cannot be sampled.
bool SampleOne(float* logits, int64_t vocab, const SampleRow& row, SampleResult* sampled,
               SampleLogprob* top) {
  *sampled = {};
  const Top untouched = FindTop(logits, vocab);
  if (!untouched.valid) return false;
  {
    const AdjustedLogits adjusted(logits, vocab, row);
    const Top best = row.num_seen == 0 && row.num_banned == 0 ? untouched : FindTop(logits, vocab);
    if (!best.valid) return false;
    const bool filtered = (row.top_k > 0 && row.top_k < vocab) || row.min_p > 0 || row.top_p < 1.0F;
    sampled->token = row.temperature == 0 ? best.first.token
                     : filtered           ? DrawFiltered(logits, vocab, best.first.logit, row)
                                          : DrawFromAll(logits, vocab, best.first.logit, row);
  }
  if (row.num_logprobs >= 0) {
    Report(logits, vocab, untouched.first.logit, row.num_logprobs, sampled, top);
  }
  return true;
}

void CheckRow(const SampleParams& p, const SampleRow& row) {
  CHECK(row.temperature >= 0 && std::isfinite(row.temperature)) << row.temperature;
  CHECK(row.top_p > 0 && row.top_p <= 1) << row.top_p;
  CHECK(row.top_k >= 0) << row.top_k;
  CHECK(row.min_p >= 0 && row.min_p <= 1) << row.min_p;
  CHECK(row.repetition_penalty > 0) << row.repetition_penalty;
  CHECK(row.num_logprobs <= 0 || (p.top_logprobs != nullptr && row.num_logprobs <= p.max_logprobs))
      << row.num_logprobs << " log-probabilities, room for " << p.max_logprobs;
}

}  // namespace

absl::Status Sample(const SampleParams& p) {
  CHECK(p.vocab > 0 && p.vocab <= (1 << 20)) << p.vocab;
  for (int64_t r = 0; r < p.num_rows; ++r) CheckRow(p, p.rows[r]);
  std::atomic<int64_t> first_bad = p.num_rows;
#pragma omp parallel for schedule(dynamic, 1) if (p.num_rows > 1)
  for (int64_t r = 0; r < p.num_rows; ++r) {
    SampleLogprob* top = p.top_logprobs != nullptr ? p.top_logprobs + r * p.max_logprobs : nullptr;
    if (SampleOne(p.logits + r * p.logits_stride, p.vocab, p.rows[r], p.sampled + r, top)) continue;
    int64_t seen = first_bad.load();
    while (r < seen && !first_bad.compare_exchange_weak(seen, r)) {
    }
  }
  if (first_bad == p.num_rows) return absl::OkStatus();
  return absl::InternalError(absl::StrFormat(
      "row %d of %d has no token to sample: a logit is NaN or infinite, or all are banned",
      first_bad.load(), p.num_rows));
}

}  // namespace zipage::cpu
