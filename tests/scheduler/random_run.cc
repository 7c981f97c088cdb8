#include "tests/scheduler/random_run.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <memory>
#include <utility>

namespace zipage {

void RunCounts::Add(const RunCounts& other) {
  num_checked += other.num_checked;
  cached_tokens += other.cached_tokens;
  num_preemptions += other.num_preemptions;
  num_compressions += other.num_compressions;
  num_suspensions += other.num_suspensions;
  num_swaps_out += other.num_swaps_out;
  num_epochs += other.num_epochs;
  num_cut += other.num_cut;
  num_repeated += other.num_repeated;
  peak_running = std::max(peak_running, other.peak_running);
  coverage.Add(other.coverage);
}

RandomRun::RandomRun(const Workload& workload, int seed)
    : workload_(workload),
      rng_(seed),
      world_(workload.options, workload.max_compression_delay, static_cast<uint64_t>(seed)) {}

RunCounts RandomRun::Run() {
  for (int i = 0; i < workload_.num_operations && !::testing::Test::HasFailure(); ++i) {
    Operate();
    TakeFinished();
  }
  Drain();
  if (!::testing::Test::HasFailure()) world_.ExpectEmpty();
  const SchedulerStats stats = world_.scheduler.stats();
  counts_.cached_tokens = stats.cached_tokens;
  counts_.num_preemptions = stats.num_preemptions;
  counts_.num_compressions = stats.num_compressions;
  counts_.num_suspensions = stats.num_suspensions;
  counts_.num_swaps_out = stats.num_swaps_out;
  counts_.peak_running = stats.peak_running;
  counts_.coverage = world_.coverage();
  return counts_;
}

void RandomRun::Drain() {
  // Every request ends in a number of steps that follows from the tokens still to be computed: the
  // oldest is never preempted, so at worst they run one after the other, a token a step, each as
  // long as a compression takes to be reported.
  int64_t max_steps = 100;
  for (const auto& [id, open] : open_) {
    for (const Sequence& sequence : open.request->sequences) {
      max_steps += sequence.max_length * (2 + workload_.max_compression_delay) + 10;
    }
  }
  for (int64_t steps = 0; !::testing::Test::HasFailure(); ++steps) {
    ASSERT_LT(steps, max_steps) << open_.size() << " requests do not end";
    while (world_.results.size() < workload_.depth && world_.Plan()) {
    }
    if (world_.results.empty()) break;
    Apply();
    TakeFinished();
  }
  ASSERT_TRUE(open_.empty() || ::testing::Test::HasFailure()) << "nothing runs, requests wait";
}

bool RandomRun::Chance(double probability) {
  return std::uniform_real_distribution<>(0, 1)(rng_) < probability;
}

void RandomRun::Operate() {
  const int kind = Below(10);
  if (kind < 2) {
    if (static_cast<int>(open_.size()) < workload_.max_open) Submit();
  } else if (kind < 6) {
    if (world_.results.size() < workload_.depth) world_.Plan();
  } else if (!world_.results.empty()) {
    Apply();
  }
  if (Chance(workload_.cancel_probability)) CutOne();
  if (Chance(workload_.epoch_probability)) {
    world_.StartEpoch();
    ++counts_.num_epochs;
  }
}

// A prompt that fits, alone.
bool Fits(const SchedulerOptions& options, int64_t num_prompt_tokens,
          const RequestOptions& request) {
  return MaxLength(options, num_prompt_tokens, 1, request) == num_prompt_tokens + 1;
}

std::vector<TokenId> RandomRun::MakePrompt(const RequestOptions& request) {
  const SchedulerOptions& options = workload_.options;
  // One of a few shared beginnings, then tokens of its own; at times whole blocks or about so, or
  // as long as can be.
  std::vector<TokenId> prompt =
      Prompt(Below(5 * options.block_size), 1000 + 100 * static_cast<TokenId>(Below(3)));
  for (int i = Below(3 * options.block_size); i >= 0; --i) prompt.push_back(Below(4));
  const int kind = Below(12);
  if (kind == 0) prompt.resize(options.max_model_len - Below(3), 7);
  if (kind == 1) prompt.resize(options.num_blocks * options.block_size + 1 - Below(3), 7);
  if (kind > 1 && kind <= 4) {
    prompt.resize((1 + Below(8)) * options.block_size - 1 + Below(3), 8);
  }
  for (;;) {
    const auto length = static_cast<int64_t>(prompt.size());
    const bool fits = Fits(options, length, request);
    EXPECT_EQ(world_.scheduler.CheckFits(length, request).ok(), fits) << length << " tokens";
    if (fits && length <= workload_.max_prompt) return prompt;
    prompt.pop_back();
  }
}

RequestOptions RandomRun::MakeRequestOptions() {
  RequestOptions options;
  if (workload_.max_budget > 0 && Below(3) != 0) {
    options.max_cache_blocks = 1 + Below(workload_.max_budget);
  }
  if (Below(20) == 0) {
    options.repetition_ngram_size = 1 + Below(2);
    options.repetition_ngram_count = 2 + Below(2);
  }
  return options;
}

void RandomRun::Submit() {
  const SchedulerOptions& options = workload_.options;
  const RequestOptions request = MakeRequestOptions();
  std::vector<TokenId> prompt = MakePrompt(request);
  SamplingParams sampling;
  sampling.seed = rng_();
  sampling.max_tokens = 1 + Below(Chance(workload_.long_probability) ? 300 : 30);
  sampling.min_tokens = Below(5);
  if (Below(2) == 0) sampling.stop_token_ids = {3, 17, 30};
  const int n = Below(3) == 0 ? 1 + Below(5) : 1;
  const uint64_t id = ++num_submitted_;
  Open& open = open_[id];
  for (int i = 0; i < n; ++i) {
    open.alone.push_back(RunAlone(options, prompt, sampling, i, request));
  }
  open.heard.resize(n);
  open.request = world_.Submit(id, std::move(prompt), sampling, n, 1 + Below(3), request);
}

void RandomRun::CutOne() {
  if (open_.empty()) return;
  auto it = open_.begin();
  std::advance(it, Below(static_cast<int>(open_.size())));
  if (Below(10) == 0) {
    const uint64_t job_id = it->second.request->job_id;
    for (auto& [id, open] : open_) open.cut |= open.request->job_id == job_id;
    world_.scheduler.CancelJob(job_id);
  } else {
    it->second.cut = true;
    Sequence& sequence = it->second.request->sequences[0];
    if (!sequence.finished()) {
      world_.scheduler.FinishSequence(&sequence, FinishReason::kStopString);
      EXPECT_EQ(sequence.finish_reason, FinishReason::kStopString);
    }
  }
  world_.scheduler.CheckInvariants();
}

void RandomRun::Apply() {
  std::ranges::shuffle(world_.results.front().sampled, rng_);
  for (const TokenEvent& event : world_.Apply()) {
    const uint64_t id = event.sequence->request->id;
    open_.at(id).heard[event.sequence->sample_index].push_back(event.token);
  }
}

void RandomRun::TakeFinished() {
  for (const std::unique_ptr<Request>& request : world_.TakeFinished()) {
    const Open& open = open_.at(request->id);
    counts_.num_cut += open.cut ? 1 : 0;
    for (const Sequence& sequence : request->sequences) {
      SCOPED_TRACE(::testing::Message()
                   << "request " << request->id << " sample " << sequence.sample_index << " prompt "
                   << sequence.num_prompt_tokens << " preempted " << sequence.num_preemptions);
      CheckSequence(sequence, open);
      ++counts_.num_checked;
    }
    open_.erase(request->id);
  }
}

void RandomRun::CheckSequence(const Sequence& sequence, const Open& open) {
  const std::vector<TokenId> output(sequence.output().begin(), sequence.output().end());
  ASSERT_EQ(output, open.heard[sequence.sample_index]);
  const FinishReason reason = sequence.finish_reason.value();
  const std::vector<TokenId>& stops = sequence.request->sampling.stop_token_ids;
  if (workload_.options.adaptive_budget) {
    // When it is compressed, and so its tokens, depends on the load; its length does not.
    ASSERT_LE(static_cast<int64_t>(sequence.tokens.size()), sequence.max_length);
    if (open.cut) return;
    ASSERT_EQ(reason == FinishReason::kStopToken, std::ranges::count(stops, output.back()) > 0);
    if (reason == FinishReason::kLength) {
      ASSERT_EQ(static_cast<int64_t>(sequence.tokens.size()), sequence.max_length);
    }
    return;
  }
  const fake::Alone& alone = open.alone[sequence.sample_index];
  ASSERT_LE(output.size(), alone.output.size());
  ASSERT_TRUE(std::equal(output.begin(), output.end(), alone.output.begin()));
  ASSERT_LE(sequence.num_compressions, alone.num_compressions);
  ASSERT_LE(sequence.peak_slots, alone.peak_slots);
  if (open.cut) return;
  ASSERT_EQ(output.size(), alone.output.size());
  ASSERT_EQ(sequence.num_compressions, alone.num_compressions);
  ASSERT_EQ(sequence.peak_slots, alone.peak_slots);
  ASSERT_EQ(sequence.kept_slots, alone.kept_slots);
  ASSERT_EQ(sequence.prompt_tokens_kept, static_cast<float>(alone.prompt_tokens_kept));
  if (std::ranges::count(stops, output.back()) > 0) {
    ASSERT_EQ(reason, FinishReason::kStopToken);
  } else if (alone.repeats) {
    ASSERT_EQ(reason, FinishReason::kRepetition);
    ++counts_.num_repeated;
  } else {
    ASSERT_EQ(reason, FinishReason::kLength);
  }
}

RunCounts RunWorkload(const Workload& workload, int num_seeds) {
  RunCounts counts;
  for (int seed = 0; seed < num_seeds && !::testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    counts.Add(RandomRun(workload, seed).Run());
  }
  EXPECT_GT(counts.num_checked, 100);
  return counts;
}

}  // namespace zipage
