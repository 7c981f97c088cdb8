#include "tests/worker/ranks.h"

#include <algorithm>
#include <chrono>
#include <limits>

#include "glog/logging.h"
#include "worker/comm/shared_memory.h"
#include "worker/comm/single.h"
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
  rank.backend = std::make_unique<CpuBackend>(config_.tp == 1 ? 2 : 1);
  auto model = LoadModelConfig(config_.model);
  CHECK(model.ok()) << model.status();
  auto checkpoint = OpenCheckpoint(config_.model, *model);
  CHECK(checkpoint.ok()) << checkpoint.status();
  const DType dtype = config_.dtype == "bfloat16" ? DType::kBFloat16 : DType::kFloat32;
  auto weights = LoadWeights(*model, *checkpoint, r, config_.tp, dtype, model->max_position,
                             rank.backend.get());
  CHECK(weights.ok()) << weights.status();
  const KvShape shape{.num_layers = model->num_layers,
                      .block_size = config_.kvcache_block_size,
                      .kv_heads = static_cast<int>(weights->shard.kv_heads.size()),
                      .head_dim = model->head_dim,
                      .dtype = dtype};
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

void Ranks::StartRunners() {
  ForEach([this](int r) {
    Rank& rank = ranks_[r];
    auto runner = ModelRunner::Create(config_, std::move(*rank.transformer), std::move(*rank.pool),
                                      rank.collective.get(), rank.backend.get());
    CHECK(runner.ok()) << runner.status();
    rank.runner = *std::move(runner);
  });
}

absl::StatusOr<StepResult> Ranks::Run(const StepPlan& plan) {
  std::vector<absl::StatusOr<StepResult>> results(ranks_.size(), absl::UnknownError(""));
  ForEach([&](int r) { results[r] = ranks_[r].runner->Run(plan); });
  for (size_t r = 1; r < results.size(); ++r) {
    CHECK_EQ(results[r].ok(), results[0].ok()) << results[r].status();
    if (results[r].ok()) {
      CHECK_EQ(results[r]->step, plan.step);
      CHECK(results[r]->sampled.empty());
    }
  }
  return std::move(results[0]);
}

Driver::Driver(Ranks* ranks, uint32_t seed) : ranks_(ranks), random_(seed) {
  for (int64_t i = 0; i < ranks->config().num_kvcache_blocks; ++i) {
    free_blocks_.push_back(static_cast<BlockId>(i));
  }
  for (int i = 0; i < ranks->config().max_num_seqs; ++i) free_slots_.push_back(i);
  std::shuffle(free_blocks_.begin(), free_blocks_.end(), random_);
  std::shuffle(free_slots_.begin(), free_slots_.end(), random_);
}

void Driver::Add(TestRequest* request) {
  CHECK(!free_slots_.empty());
  request->slot = free_slots_.back();
  free_slots_.pop_back();
  request->table = request->prefix;
  request->num_cached =
      static_cast<int64_t>(request->prefix.size()) * ranks_->config().kvcache_block_size;
  request->decodes = false;
  NewSequence added;
  added.sequence_slot = request->slot;
  added.tokens = request->prompt;
  added.tokens.insert(added.tokens.end(), request->output.begin(), request->output.end());
  added.num_prompt_tokens = request->prompt.size();
  added.num_cached_tokens = request->num_cached;
  added.block_table = request->table;
  added.sample_index = request->sample_index;
  added.sampling = request->sampling;
  plan_.new_sequences.push_back(added);
  running_.push_back(request);
}

void Driver::Release(TestRequest* request) {
  plan_.released.push_back(request->slot);
  free_slots_.insert(free_slots_.begin(), request->slot);
  free_blocks_.insert(free_blocks_.begin(), request->table.begin() + request->prefix.size(),
                      request->table.end());
  running_.erase(std::find(running_.begin(), running_.end(), request));
}

void Driver::Grow(TestRequest* request, int64_t num_cached, StepPlan* plan) {
  const int64_t block_size = ranks_->config().kvcache_block_size;
  while (static_cast<int64_t>(request->table.size()) * block_size < num_cached) {
    CHECK(!free_blocks_.empty());
    request->table.push_back(free_blocks_.back());
    free_blocks_.pop_back();
    plan->appended_blocks.push_back({request->slot, request->table.back()});
  }
  request->num_cached = num_cached;
}

void Driver::Step() {
  StepPlan plan;
  std::swap(plan, plan_);
  plan.step += 1;
  plan_.step = plan.step;
  std::vector<TestRequest*> start_to_decode;
  for (TestRequest* request : running_) {
    if (request->decodes) {
      ++plan.num_decoding;
      Grow(request, request->num_cached + 1, &plan);
      continue;
    }
    const auto num_tokens = static_cast<int64_t>(request->prompt.size() + request->output.size());
    const int64_t chunk = std::min(request->chunk_size, num_tokens - request->num_cached);
    const bool samples = request->num_cached + chunk == num_tokens;
    plan.chunks.push_back({request->slot, static_cast<int32_t>(request->num_cached),
                           static_cast<int32_t>(chunk), samples});
    Grow(request, request->num_cached + chunk, &plan);
    if (samples) start_to_decode.push_back(request);
  }
  for (TestRequest* request : start_to_decode) request->decodes = true;
  auto result = ranks_->Run(plan);
  CHECK(result.ok()) << result.status();
  CHECK_EQ(result->step, plan.step);
  for (const SampledToken& sampled : result->sampled) {
    for (TestRequest* request : running_) {
      if (request->slot != sampled.sequence_slot) continue;
      request->output.push_back(sampled.token);
      request->samples.push_back(sampled);
    }
  }
  for (SequenceSlot slot : result->corrupted) {
    for (TestRequest* request : running_) {
      if (request->slot == slot) request->corrupted = true;
    }
  }
}

void Driver::RunToEnd() {
  while (!running_.empty()) {
    Step();
    for (TestRequest* request : std::vector<TestRequest*>(running_)) {
      if (static_cast<int32_t>(request->output.size()) >= request->sampling.max_tokens ||
          request->corrupted) {
        Release(request);
      }
    }
  }
}

}  // namespace zipage
