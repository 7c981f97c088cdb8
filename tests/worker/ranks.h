#pragma once
// Tensor-parallel ranks as threads of the test.

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "proto/config.h"
#include "proto/messages.h"
#include "worker/comm/collective.h"
#include "worker/cpu_backend.h"
#include "worker/kv_pool.h"
#include "worker/model_runner.h"

namespace zipage {

// One thread per rank, each with a backend, a collective and a model. Pools and query windows are
// full of NaN. Every sequence slot could have a query slot, unless the policy is none.
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
  // Fills every pool with NaN; once the runners run, these blocks and query slots alone.
  void Poison();
  void PoisonBlocks(const std::vector<BlockId>& blocks);
  void PoisonQuerySlot(QuerySlot query_slot);
  absl::StatusOr<StepResult> Run(const StepPlan& plan);

  Rank& rank(int r) { return ranks_[r]; }
  const Config& config() const { return config_; }
  int64_t num_query_slots() const;

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

}  // namespace zipage
