#pragma once
// Random workloads for the scheduler: whatever is batched, shared, compressed, swapped, preempted,
// cancelled or restarted, every request ends with the tokens it would have alone, and nothing
// leaks.

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "tests/scheduler/scheduler_world.h"

namespace zipage {

struct Workload {
  SchedulerOptions options;
  size_t depth = 2;  // Steps in flight at most.
  int num_operations = 3000;
  double cancel_probability = 0.02;
  double epoch_probability = 0;  // That the workers die.
  int max_budget = 0;            // Requests ask for budgets of 1 to so many blocks; 0: they do not.
  int max_compression_delay = 0;   // Of FakeWorkerOptions.
  int max_prompt = 1000;           // Tokens.
  double long_probability = 0.25;  // That an output may have 300 tokens, not 30.
  int max_open = 40;               // Requests at a time.
};

// What happened in a run, or in several.
struct RunCounts {
  int64_t num_checked = 0;  // Sequences.
  int64_t cached_tokens = 0;
  int64_t num_preemptions = 0;
  int64_t num_compressions = 0;
  int64_t num_suspensions = 0;
  int64_t num_swaps_out = 0;
  int64_t num_epochs = 0;
  int64_t num_cut = 0;       // Requests that were cancelled, or stopped by the engine.
  int64_t num_repeated = 0;  // Sequences that the degeneration guard ended.
  int64_t peak_running = 0;
  Coverage coverage;

  void Add(const RunCounts& other);
};

// Drives a World with random operations and checks every end against the request run alone.
class RandomRun {
 public:
  RandomRun(const Workload& workload, int seed);
  RunCounts Run();

 private:
  struct Open {
    Request* request = nullptr;
    std::vector<fake::Alone> alone;           // Of every sample.
    std::vector<std::vector<TokenId>> heard;  // From events.
    bool cut = false;                         // Cancelled, or stopped by the engine.
  };

  bool Chance(double probability);
  int Below(int n) { return static_cast<int>(rng_() % n); }
  void Operate();
  std::vector<TokenId> MakePrompt(const RequestOptions& request);
  RequestOptions MakeRequestOptions();
  void Submit();
  void CutOne();
  void Apply();
  void TakeFinished();
  void CheckSequence(const Sequence& sequence, const Open& open);
  void Drain();

  Workload workload_;
  std::mt19937 rng_;
  World world_;
  std::map<uint64_t, Open> open_;
  uint64_t num_submitted_ = 0;
  RunCounts counts_;
};

// Several seeds of a workload; stops at the first that fails.
RunCounts RunWorkload(const Workload& workload, int num_seeds = 6);

}  // namespace zipage
