#pragma once
// Tensor-parallel ranks as threads of the test, and a driver that plays the scheduler for them.

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "proto/config.h"
#include "proto/messages.h"
#include "worker/comm/collective.h"
#include "worker/cpu_backend.h"
#include "worker/kv_pool.h"
#include "worker/model_runner.h"

namespace zipage {

// One thread per rank, each with a backend, a collective and a model. The pools are full of NaN.
class Ranks {
 public:
  struct Rank {
    std::unique_ptr<Collective> collective;
    std::unique_ptr<CpuBackend> backend;
    std::unique_ptr<Transformer> transformer;  // until StartRunners
    std::unique_ptr<KvPool> pool;              // until StartRunners
    std::unique_ptr<ModelRunner> runner;       // from StartRunners on
    float* first_keys = nullptr;               // of layer 0, for tests that spoil them
  };

  // config: model, tp, dtype, num_kvcache_blocks and so on.
  explicit Ranks(const Config& config);
  ~Ranks();

  // Runs fn(rank) on every rank's thread and waits for all.
  void ForEach(const std::function<void(int rank)>& fn);
  void StartRunners();
  // Fills every pool with NaN.
  void Poison();
  absl::StatusOr<StepResult> Run(const StepPlan& plan);

  Rank& rank(int r) { return ranks_[r]; }
  const Config& config() const { return config_; }

 private:
  void Load(int rank);
  void Loop(int rank);

  Config config_;
  std::vector<Rank> ranks_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::condition_variable done_;
  const std::function<void(int)>* task_ = nullptr;
  uint64_t generation_ = 0;
  int num_running_ = 0;
  bool stops_ = false;
  std::vector<std::thread> threads_;
};

// A request of a test.
struct TestRequest {
  std::vector<TokenId> prompt;
  SamplingParams sampling;
  uint32_t sample_index = 0;
  int64_t chunk_size = 1 << 20;  // of prefill
  std::vector<TokenId> output;   // so far
  std::vector<BlockId> prefix;   // blocks that hold the first tokens already
  // Set by the driver.
  SequenceSlot slot = -1;
  std::vector<BlockId> table;
  int64_t num_cached = 0;
  bool decodes = false;
  bool corrupted = false;
  std::vector<SampledToken> samples;
};

// Plays the scheduler without a budget: every added request runs in every step. Block ids are drawn
// at random. Blocks of released requests, but for their prefix, are free again.
class Driver {
 public:
  Driver(Ranks* ranks, uint32_t seed);

  void Add(TestRequest* request);
  void Release(TestRequest* request);
  // One step; appends to the requests' outputs.
  void Step();
  // Steps until every added request has max_tokens outputs, each released when it has.
  void RunToEnd();

 private:
  void Grow(TestRequest* request, int64_t num_cached, StepPlan* plan);

  Ranks* ranks_;
  std::vector<BlockId> free_blocks_;
  std::vector<SequenceSlot> free_slots_;
  std::vector<TestRequest*> running_;
  StepPlan plan_;  // the next one, under construction
  std::mt19937 random_;
};

}  // namespace zipage
