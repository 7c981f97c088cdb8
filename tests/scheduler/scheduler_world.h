#pragma once
// A scheduler and a fake worker, joined as the engine joins them. After every step the scheduler's
// invariants are checked, and those of its own that a test can see from outside.

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <vector>

#include "scheduler/scheduler.h"
#include "tests/scheduler/fake_model.h"
#include "tests/scheduler/fake_worker.h"

namespace zipage {

inline std::vector<TokenId> Prompt(int num_tokens, TokenId first = 100) {
  std::vector<TokenId> tokens(num_tokens);
  for (int i = 0; i < num_tokens; ++i) tokens[i] = first + i;
  return tokens;
}

inline SamplingParams MaxTokens(int max_tokens) {
  SamplingParams sampling;
  sampling.max_tokens = max_tokens;
  return sampling;
}

inline SchedulerOptions SmallOptions() {
  return {.max_num_seqs = 8,
          .max_num_batched_tokens = 32,
          .block_size = 4,
          .num_blocks = 64,
          .max_model_len = 200,
          .compression = {}};
}

// The same, with budgets of 3 blocks and windows of 2 slots.
inline SchedulerOptions CompressingOptions() {
  SchedulerOptions options = SmallOptions();
  options.compression = {.max_cache_blocks = 3, .window = 2};
  options.num_query_slots = 8;
  return options;
}

inline RequestOptions BudgetOf(int max_cache_blocks) {
  RequestOptions options;
  options.max_cache_blocks = max_cache_blocks;
  return options;
}

// How a request with `request` is compressed under `options`.
fake::Rules RulesOf(const SchedulerOptions& options, const RequestOptions& request = {});
// The tokens at which a sequence of such a request ends, prompt included.
int64_t MaxLength(const SchedulerOptions& options, int64_t num_prompt_tokens, int max_tokens,
                  const RequestOptions& request = {});
// What a sample of it puts out alone.
fake::Alone RunAlone(const SchedulerOptions& options, std::span<const TokenId> prompt,
                     const SamplingParams& sampling, int sample_index = 0,
                     const RequestOptions& request = {});

// What happened to sequences in the steps so far.
struct Coverage {
  int64_t num_preempted_before_first = 0;  // Within a block before their first compression,
  int64_t num_preempted_after_first = 0;   // within a block after it.
  int64_t num_replays = 0;                 // Compressed ones that are computed again.
  int64_t num_swaps = 0;
  int64_t num_in_flight = 0;  // Preempted with samples in flight.
  int64_t num_ordered_blocks = 0;

  void Add(const Coverage& other);
};

class World {
 public:
  explicit World(const SchedulerOptions& options, int max_compression_delay = 0,
                 uint64_t delay_seed = 0);

  Request* Submit(uint64_t id, std::vector<TokenId> prompt, SamplingParams sampling, int n = 1,
                  uint64_t job_id = 1, const RequestOptions& request = {});
  // Plans a step and has it executed; false if there is none.
  bool Plan();
  std::vector<TokenEvent> Apply();
  // Runs ahead by `depth` until nothing is left to do.
  void RunToEnd(size_t depth);
  // The workers die, and others start.
  void StartEpoch();
  std::vector<std::unique_ptr<Request>> TakeFinished();

  // Every sequence has ended with what it puts out alone, and was compressed as often.
  void ExpectAllAsAlone() const;
  // Nothing is left in scheduler and worker.
  void ExpectEmpty() const;
  Coverage coverage() const;

  const SchedulerOptions options;
  Scheduler scheduler;
  std::unique_ptr<FakeWorker> worker;
  std::deque<StepResult> results;  // Of the steps in flight.
  std::vector<StepPlan> plans;     // All of them.

 private:
  // What a sequence was before a plan.
  struct Before {
    uint64_t admission_order = 0;
    int64_t num_computed = 0;
    int64_t num_compressions = 0;
    int64_t last_compression = 0;
    bool guaranteed = false;
  };
  std::map<const Sequence*, Before> Running() const;
  void CheckPreempted(const std::map<const Sequence*, Before>& before);
  void CheckBlocks() const;
  void MakeWorker();

  int max_compression_delay_;
  uint64_t delay_seed_;
  std::vector<Request*> requests_;  // That were not taken.
  Coverage coverage_;
};

// Runs steps one at a time until `sequence` has computed `num_computed` positions.
void RunUntil(World* world, const Sequence& sequence, int64_t num_computed);

// Sampling that ends at the stop token that is output[last], with a seed for which it is no earlier
// one.
SamplingParams StopAt(const SchedulerOptions& options, const std::vector<TokenId>& prompt,
                      size_t last, const RequestOptions& request = {});

// Calls check(options, depth) for async on and off, pin_prompt on and off, and depths of run-ahead,
// until something fails.
void ForEachMode(const std::function<void(const SchedulerOptions& options, size_t depth)>& check);

}  // namespace zipage
