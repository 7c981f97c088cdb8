#include "tests/worker/ranks.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <limits>

#include "glog/logging.h"
#include "worker/comm/shared_memory.h"
#include "worker/comm/single.h"
#include "worker/memory_plan.h"
#include "worker/model/checkpoint.h"
#include "worker/model/model_config.h"

namespace zipage {

Ranks::Ranks(const Config& config) : config_(config), ranks_(config.tp) {
  std::shared_ptr<SharedMemory> memory;
  if (config.tp > 1) {
    auto mapped = SharedMemory::Anonymous(size_t{4} << 20);
    CHECK(mapped.ok()) << mapped.status();
    memory = *std::move(mapped);
  }
  for (int r = 0; r < config.tp; ++r) {
    if (config.tp == 1) {
      ranks_[r].collective = std::make_unique<SingleCollective>();
    } else {
      auto collective =
          MakeSharedMemoryCollective(memory, r, config.tp, std::chrono::milliseconds(60'000));
      CHECK(collective.ok()) << collective.status();
      ranks_[r].collective = *std::move(collective);
    }
    threads_.emplace_back([this, r] { Loop(r); });
  }
  ForEach([this](int rank) { Load(rank); });
  Poison();
}

Ranks::~Ranks() {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    stops_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void Ranks::Loop(int rank) {
  uint64_t seen = 0;
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stops_ || generation_ != seen; });
    if (stops_) return;
    seen = generation_;
    const std::function<void(int)>* task = task_;
    lock.unlock();
    (*task)(rank);
    lock.lock();
    if (--num_running_ == 0) done_.notify_all();
  }
}

void Ranks::ForEach(const std::function<void(int)>& fn) {
  std::unique_lock<std::mutex> lock(mutex_);
  task_ = &fn;
  num_running_ = static_cast<int>(ranks_.size());
  ++generation_;
  wake_.notify_all();
  done_.wait(lock, [this] { return num_running_ == 0; });
}

void Ranks::Load(int r) {
  Rank& rank = ranks_[r];
  const int threads = config_.cpu_threads > 0 ? config_.cpu_threads : config_.tp == 1 ? 2 : 1;
  rank.backend = std::make_unique<CpuBackend>(threads);
  auto model = LoadModelConfig(config_.model);
  CHECK(model.ok()) << model.status();
  auto checkpoint = OpenCheckpoint(config_.model, *model);
  CHECK(checkpoint.ok()) << checkpoint.status();
  const DType dtype = config_.dtype == "bfloat16" ? DType::kBFloat16 : DType::kFloat32;
  auto weights = LoadWeights(*model, *checkpoint, r, config_.tp, dtype, model->max_position,
                             rank.backend.get());
  CHECK(weights.ok()) << weights.status();
  const KvShape shape = MakeKvShape(config_, *model, weights->shard, dtype);
  auto transformer =
      Transformer::Create(*model, *std::move(weights), config_.max_num_batched_tokens,
                          rank.collective.get(), rank.backend.get());
  CHECK(transformer.ok()) << transformer.status();
  rank.transformer = std::make_unique<Transformer>(*std::move(transformer));
  auto pool = KvPool::Create(shape, config_.num_kvcache_blocks, rank.backend.get());
  CHECK(pool.ok()) << pool.status();
  rank.first_keys = static_cast<float*>(pool->key(0));
  rank.pool = std::make_unique<KvPool>(*std::move(pool));
}

void Ranks::Poison() {
  for (Rank& rank : ranks_) {
    const KvShape& shape = rank.pool->shape();
    const size_t bytes = rank.pool->num_blocks() * shape.block_bytes();
    std::fill_n(static_cast<uint8_t*>(rank.pool->key(0)), bytes, uint8_t{0xFF});  // NaN
  }
}

int64_t Ranks::num_query_slots() const {
  return ResolveCompression(config_).compression_policy == "none" ? 0 : config_.max_num_seqs;
}

void Ranks::StartRunners() {
  ForEach([this](int r) {
    Rank& rank = ranks_[r];
    auto runner = ModelRunner::Create(config_, std::move(*rank.transformer), std::move(*rank.pool),
                                      num_query_slots(), rank.collective.get(), rank.backend.get());
    CHECK(runner.ok()) << runner.status();
    rank.runner = *std::move(runner);
  });
  for (QuerySlot slot = 0; slot < num_query_slots(); ++slot) PoisonQuerySlot(slot);
}

void Ranks::PoisonBlocks(const std::vector<BlockId>& blocks) {
  for (Rank& rank : ranks_) {
    const KvPool& pool = rank.runner->pool();
    const auto poison = [](void* plane, BlockId block, size_t bytes) {
      if (bytes > 0) std::memset(static_cast<uint8_t*>(plane) + block * bytes, 0xFF, bytes);
    };
    for (int layer = 0; layer < pool.shape().num_layers; ++layer) {
      for (BlockId block : blocks) {
        poison(pool.key(layer), block, pool.shape().plane_bytes());
        poison(pool.value(layer), block, pool.shape().plane_bytes());
        poison(pool.stored_scores(layer), block, pool.shape().score_bytes());
      }
    }
  }
}

void Ranks::PoisonQuerySlot(QuerySlot query_slot) {
  for (Rank& rank : ranks_) {
    const QueryWindows* windows = rank.runner->query_windows();
    if (windows == nullptr) continue;
    const size_t bytes = windows->shape().plane_bytes();
    for (int layer = 0; layer < windows->shape().num_layers; ++layer) {
      std::memset(static_cast<uint8_t*>(windows->layer(layer)) + query_slot * bytes, 0xFF, bytes);
    }
  }
}

absl::StatusOr<StepResult> Ranks::Run(const StepPlan& plan) {
  std::vector<absl::StatusOr<StepResult>> results(ranks_.size(), absl::UnknownError(""));
  ForEach([&](int r) { results[r] = ranks_[r].runner->Run(plan); });
  for (size_t r = 1; r < results.size(); ++r) {
    CHECK_EQ(results[r].ok(), results[0].ok()) << results[r].status();
    if (results[r].ok()) {
      CHECK_EQ(results[r]->step, plan.step);
      CHECK(results[r]->sampled.empty());
      CHECK(results[r]->finished_compressions.empty());
    }
  }
  return std::move(results[0]);
}

}  // namespace zipage
