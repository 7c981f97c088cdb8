#include "tests/scheduler/scheduler_world.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <set>
#include <utility>

namespace zipage {

fake::Rules RulesOf(const SchedulerOptions& options, const RequestOptions& request) {
  const CompressionOptions& compression = options.compression;
  fake::Rules rules = {.block_size = options.block_size,
                       .max_cache_blocks = compression.max_cache_blocks,
                       .window = compression.window,
                       .pin_prompt = compression.pin_prompt,
                       .compress_prefill = compression.compress_prefill,
                       .ngram_size = request.repetition_ngram_size,
                       .ngram_count = request.repetition_ngram_count};
  if (compression.max_cache_blocks > 0 && request.max_cache_blocks.has_value()) {
    rules.max_cache_blocks = *request.max_cache_blocks;
  }
  return rules;
}

int64_t MaxLength(const SchedulerOptions& options, int64_t num_prompt_tokens, int max_tokens,
                  const RequestOptions& request) {
  const int64_t length = std::min(num_prompt_tokens + max_tokens, options.max_model_len);
  const fake::Rules rules = RulesOf(options, request);
  const bool fits =
      rules.max_cache_blocks > 0 && rules.FirstBlocks(num_prompt_tokens) <= options.num_blocks;
  return fits ? length : std::min(length, options.num_blocks * options.block_size);
}

fake::Alone RunAlone(const SchedulerOptions& options, std::span<const TokenId> prompt,
                     const SamplingParams& sampling, int sample_index,
                     const RequestOptions& request) {
  const auto num_prompt_tokens = static_cast<int64_t>(prompt.size());
  return fake::RunAlone(prompt, MaxLength(options, num_prompt_tokens, sampling.max_tokens, request),
                        sampling, sample_index, RulesOf(options, request));
}

void Coverage::Add(const Coverage& other) {
  num_preempted_before_first += other.num_preempted_before_first;
  num_preempted_after_first += other.num_preempted_after_first;
  num_replays += other.num_replays;
  num_swaps += other.num_swaps;
  num_in_flight += other.num_in_flight;
  num_ordered_blocks += other.num_ordered_blocks;
}

World::World(const SchedulerOptions& options, int max_compression_delay, uint64_t delay_seed)
    : options(options),
      scheduler(options),
      max_compression_delay_(max_compression_delay),
      delay_seed_(delay_seed) {
  MakeWorker();
}

void World::MakeWorker() {
  if (worker != nullptr) coverage_.num_ordered_blocks += worker->num_ordered_blocks();
  worker = std::make_unique<FakeWorker>(
      FakeWorkerOptions{.max_num_seqs = options.max_num_seqs,
                        .max_num_batched_tokens = options.max_num_batched_tokens,
                        .block_size = options.block_size,
                        .num_blocks = options.num_blocks,
                        .num_query_slots = options.num_query_slots,
                        .num_host_blocks = options.num_host_blocks,
                        .window = options.compression.window,
                        .pin_prompt = options.compression.pin_prompt,
                        .max_compression_delay = max_compression_delay_,
                        .delay_seed = delay_seed_++});
}

Request* World::Submit(uint64_t id, std::vector<TokenId> prompt, SamplingParams sampling, int n,
                       uint64_t job_id, const RequestOptions& request) {
  auto made =
      std::make_unique<Request>(id, job_id, std::move(prompt), std::move(sampling), n, request);
  requests_.push_back(made.get());
  scheduler.Submit(std::move(made));
  return requests_.back();
}

bool World::Plan() {
  const std::map<const Sequence*, Before> before = Running();
  std::optional<StepPlan> plan = scheduler.Schedule();
  scheduler.CheckInvariants();
  CheckPreempted(before);
  CheckBlocks();
  if (!plan.has_value()) return false;
  plans.push_back(*plan);
  results.push_back(worker->Execute(*plan));
  return true;
}

std::vector<TokenEvent> World::Apply() {
  auto events = scheduler.Apply(results.front());
  EXPECT_TRUE(events.ok()) << events.status();
  results.pop_front();
  scheduler.CheckInvariants();
  return events.ok() ? *std::move(events) : std::vector<TokenEvent>();
}

void World::RunToEnd(size_t depth) {
  while (!::testing::Test::HasFailure()) {
    while (results.size() < depth && Plan()) {
    }
    if (results.empty()) return;
    Apply();
  }
}

void World::StartEpoch() {
  scheduler.StartEpoch();
  MakeWorker();
  results.clear();
  scheduler.CheckInvariants();
  EXPECT_EQ(scheduler.num_steps_in_flight(), 0);
  EXPECT_EQ(scheduler.stats().num_used_blocks, 0);
}

std::vector<std::unique_ptr<Request>> World::TakeFinished() {
  std::vector<std::unique_ptr<Request>> finished = scheduler.TakeFinished();
  for (const auto& request : finished) std::erase(requests_, request.get());
  return finished;
}

Coverage World::coverage() const {
  Coverage coverage = coverage_;
  coverage.num_ordered_blocks += worker->num_ordered_blocks();
  return coverage;
}

std::map<const Sequence*, World::Before> World::Running() const {
  std::map<const Sequence*, Before> running;
  for (const Request* request : requests_) {
    for (const Sequence& sequence : request->sequences) {
      if (!sequence.runs()) continue;
      running[&sequence] = {sequence.admission_order, sequence.num_computed,
                            sequence.num_compressions, sequence.last_compression,
                            sequence.guaranteed};
    }
  }
  return running;
}

void World::CheckPreempted(const std::map<const Sequence*, Before>& before) {
  // Victims are the newest: nobody stays who was admitted after one of them.
  uint64_t oldest_victim = UINT64_MAX;
  uint64_t newest_left = 0;
  for (const auto& [sequence, state] : before) {
    if (sequence->state == SequenceState::kWaiting) {
      oldest_victim = std::min(oldest_victim, state.admission_order);
    } else if (sequence->runs()) {
      newest_left = std::max(newest_left, state.admission_order);
    }
  }
  EXPECT_LT(newest_left, oldest_victim);
  EXPECT_TRUE(oldest_victim == UINT64_MAX || newest_left > 0) << "the last one is preempted";
  for (const auto& [sequence, state] : before) {
    if (sequence->state != SequenceState::kWaiting) continue;
    EXPECT_TRUE(!state.guaranteed || options.adaptive_budget)
        << "request " << sequence->request->id << " is guaranteed its blocks";
    if (sequence->num_in_flight > 0) ++coverage_.num_in_flight;
    if (sequence->swapped()) ++coverage_.num_swaps;
    if (options.compression.max_cache_blocks == 0) continue;
    const fake::Rules rules = RulesOf(options, sequence->request->options);
    const int64_t first = rules.FirstBlocks(sequence->num_prompt_tokens) * options.block_size;
    if (state.num_compressions == 0) {
      if (state.num_computed > first - options.block_size) ++coverage_.num_preempted_before_first;
      continue;
    }
    if (!sequence->swapped()) ++coverage_.num_replays;
    if (state.num_compressions == 1 &&
        state.num_computed < state.last_compression + options.block_size) {
      ++coverage_.num_preempted_after_first;
    }
  }
}

void World::CheckBlocks() const {
  std::set<BlockId> used;
  for (const Request* request : requests_) {
    for (const Sequence& sequence : request->sequences) {
      const std::vector<BlockId>& blocks = sequence.block_table.blocks;
      used.insert(blocks.begin(), blocks.end());
      const fake::Rules rules = RulesOf(options, request->options);
      if (rules.max_cache_blocks == 0 || options.adaptive_budget) continue;
      const int64_t most = sequence.num_compressions > 0
                               ? rules.max_cache_blocks + 1
                               : rules.FirstBlocks(sequence.num_prompt_tokens);
      EXPECT_LE(blocks.size(), static_cast<size_t>(most)) << "request " << request->id;
    }
  }
  const SchedulerStats stats = scheduler.stats();
  EXPECT_EQ(stats.num_used_blocks, static_cast<int64_t>(used.size()));
  EXPECT_EQ(stats.num_free_blocks + stats.num_cached_blocks + stats.num_used_blocks,
            options.num_blocks);
  EXPECT_LE(stats.num_used_query_slots, options.num_query_slots);
}

void World::ExpectAllAsAlone() const {
  for (const Request* request : requests_) {
    for (const Sequence& sequence : request->sequences) {
      const fake::Alone alone = RunAlone(options, request->prompt(), request->sampling,
                                         sequence.sample_index, request->options);
      ASSERT_TRUE(sequence.finished()) << "request " << request->id;
      EXPECT_EQ(std::vector<TokenId>(sequence.output().begin(), sequence.output().end()),
                alone.output)
          << "request " << request->id << " sample " << sequence.sample_index;
      EXPECT_EQ(sequence.num_compressions, alone.num_compressions) << "request " << request->id;
      EXPECT_EQ(sequence.peak_slots, alone.peak_slots) << "request " << request->id;
      EXPECT_EQ(sequence.kept_slots, alone.kept_slots) << "request " << request->id;
      EXPECT_EQ(sequence.prompt_tokens_kept, static_cast<float>(alone.prompt_tokens_kept))
          << "request " << request->id;
    }
  }
}

void World::ExpectEmpty() const {
  EXPECT_TRUE(scheduler.idle());
  EXPECT_TRUE(results.empty());
  const SchedulerStats stats = scheduler.stats();
  EXPECT_EQ(stats.num_used_blocks, 0);
  EXPECT_EQ(stats.num_free_blocks + stats.num_cached_blocks, stats.num_blocks);
  EXPECT_EQ(stats.num_running, 0);
  EXPECT_EQ(stats.num_waiting, 0);
  EXPECT_EQ(stats.num_swapped, 0);
  EXPECT_EQ(stats.num_used_query_slots, 0);
  EXPECT_EQ(worker->num_slots(), 0U) << "the releases were sent";
  EXPECT_EQ(worker->num_used_query_slots(), 0U);
  EXPECT_EQ(worker->num_used_host_blocks(), 0);
  EXPECT_EQ(worker->num_unreported(), 0U);
}

void RunUntil(World* world, const Sequence& sequence, int64_t num_computed) {
  while (sequence.num_computed < num_computed && !::testing::Test::HasFailure()) {
    ASSERT_TRUE(world->Plan());
    world->Apply();
  }
}

SamplingParams StopAt(const SchedulerOptions& options, const std::vector<TokenId>& prompt,
                      size_t last, const RequestOptions& request) {
  SamplingParams sampling = MaxTokens(60);
  for (;; ++sampling.seed) {
    const std::vector<TokenId> output = RunAlone(options, prompt, sampling, 0, request).output;
    if (std::ranges::find(output, output[last]) != output.begin() + static_cast<ptrdiff_t>(last)) {
      continue;
    }
    sampling.stop_token_ids = {output[last]};
    return sampling;
  }
}

void ForEachMode(const std::function<void(const SchedulerOptions&, size_t depth)>& check) {
  for (const bool async : {false, true}) {
    for (const bool pin_prompt : {false, true}) {
      for (const size_t depth : {1, 2, 5}) {
        SCOPED_TRACE(::testing::Message()
                     << "async " << async << " pin " << pin_prompt << " depth " << depth);
        SchedulerOptions options = CompressingOptions();
        options.compression.async = async;
        options.compression.pin_prompt = pin_prompt;
        check(options, depth);
        if (::testing::Test::HasFailure()) return;
      }
    }
  }
}

}  // namespace zipage
