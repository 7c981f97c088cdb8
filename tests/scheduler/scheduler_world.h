#pragma once
// A scheduler and a fake worker, joined as the engine joins them; invariants are checked after
// every step.

#include <gtest/gtest.h>

#include <deque>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "scheduler/scheduler.h"
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

inline FakeWorkerOptions WorkerOptions(const SchedulerOptions& options) {
  return {.max_num_seqs = options.max_num_seqs,
          .max_num_batched_tokens = options.max_num_batched_tokens,
          .block_size = options.block_size,
          .num_blocks = options.num_blocks};
}

// Scheduler and worker, joined as the engine joins them.
class World {
 public:
  explicit World(const SchedulerOptions& options)
      : options_(options), scheduler(options), worker(WorkerOptions(options)) {}

  Request* Submit(uint64_t id, std::vector<TokenId> prompt, SamplingParams sampling, int n = 1,
                  uint64_t job_id = 1) {
    auto request = std::make_unique<Request>(id, job_id, std::move(prompt), sampling, n);
    Request* pointer = request.get();
    scheduler.Submit(std::move(request));
    return pointer;
  }
  // Plans a step and has it executed; false if there is none.
  bool Plan() {
    std::optional<StepPlan> plan = scheduler.Schedule();
    scheduler.CheckInvariants();
    if (!plan.has_value()) return false;
    plans.push_back(*plan);
    results.push_back(worker.Execute(*plan));
    return true;
  }
  std::vector<TokenEvent> Apply() {
    auto events = scheduler.Apply(results.front());
    EXPECT_TRUE(events.ok()) << events.status();
    results.pop_front();
    scheduler.CheckInvariants();
    return events.ok() ? *std::move(events) : std::vector<TokenEvent>();
  }
  // Runs ahead by `depth` until nothing is left to do.
  void RunToEnd(size_t depth) {
    for (;;) {
      while (results.size() < depth && Plan()) {
      }
      if (results.empty()) return;
      Apply();
    }
  }

  SchedulerOptions options_;
  Scheduler scheduler;
  FakeWorker worker;
  std::deque<StepResult> results;  // Of the steps in flight.
  std::vector<StepPlan> plans;     // All of them.
};

inline SchedulerOptions SmallOptions() {
  return {.max_num_seqs = 8,
          .max_num_batched_tokens = 32,
          .block_size = 4,
          .num_blocks = 64,
          .max_model_len = 200};
}

}  // namespace zipage
