#include "tests/worker/driver.h"

#include <algorithm>
#include <utility>

#include "glog/logging.h"

namespace zipage {

Driver::Driver(Ranks* ranks, uint32_t seed) : ranks_(ranks), random_(seed) {
  for (int64_t i = 0; i < ranks->config().num_kvcache_blocks; ++i) {
    free_blocks_.push_back(static_cast<BlockId>(i));
  }
  for (int i = 0; i < ranks->config().max_num_seqs; ++i) free_slots_.push_back(i);
  for (int64_t i = 0; i < ranks->num_query_slots(); ++i) {
    free_query_slots_.push_back(static_cast<QuerySlot>(i));
  }
  std::shuffle(free_blocks_.begin(), free_blocks_.end(), random_);
  std::shuffle(free_slots_.begin(), free_slots_.end(), random_);
  std::shuffle(free_query_slots_.begin(), free_query_slots_.end(), random_);
}

BlockId Driver::TakeBlock() {
  CHECK(!free_blocks_.empty());
  const BlockId block = free_blocks_.back();
  free_blocks_.pop_back();
  return block;
}

bool Driver::IsShared(BlockId block) const {
  return std::any_of(running_.begin(), running_.end(), [block](const TestRequest* request) {
    const std::vector<BlockId>& prefix = request->prefix;
    return std::find(prefix.begin(), prefix.end(), block) != prefix.end();
  });
}

void Driver::GiveBlocks(const std::vector<BlockId>& blocks) {
  for (BlockId block : blocks) {
    if (IsShared(block)) continue;
    free_blocks_.insert(free_blocks_.begin(), block);
    given_blocks_.push_back(block);
  }
}

void Driver::GrantQuerySlot(TestRequest* request, StepPlan* plan) {
  CHECK(!free_query_slots_.empty());
  request->query_slot = free_query_slots_.back();
  free_query_slots_.pop_back();
  plan->query_slots.push_back({request->slot, *request->query_slot});
}

void Driver::ReturnQuerySlot(TestRequest* request) {
  if (!request->query_slot.has_value()) return;
  free_query_slots_.insert(free_query_slots_.begin(), *request->query_slot);
  given_query_slots_.push_back(*request->query_slot);
  request->query_slot.reset();
}

void Driver::Add(TestRequest* request) {
  CHECK(!free_slots_.empty());
  request->slot = free_slots_.back();
  free_slots_.pop_back();
  request->table = request->prefix;
  request->num_cached =
      static_cast<int64_t>(request->prefix.size()) * ranks_->config().kvcache_block_size;
  request->position = request->num_cached;
  request->num_compressions = 0;
  request->num_paused_steps = 0;
  request->num_host_blocks = 0;
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
  if (request->budget > 0 && !request->late_query_slot) GrantQuerySlot(request, &plan_);
}

void Driver::Release(TestRequest* request) {
  plan_.released.push_back(request->slot);
  free_slots_.insert(free_slots_.begin(), request->slot);
  GiveBlocks(request->table);
  request->table.clear();
  ReturnQuerySlot(request);
  running_.erase(std::find(running_.begin(), running_.end(), request));
}

void Driver::SwapOut(TestRequest* request) {
  CHECK(request->prefix.empty());
  plan_.swaps.push_back({request->slot, true, request->table});
  request->num_host_blocks = static_cast<int64_t>(request->table.size());
  request->num_paused_steps = 0;
  GiveBlocks(request->table);
  request->table.clear();
  ReturnQuerySlot(request);
}

void Driver::SwapIn(TestRequest* request) {
  for (; request->num_host_blocks > 0; --request->num_host_blocks) {
    request->table.push_back(TakeBlock());
  }
  plan_.swaps.push_back({request->slot, false, request->table});
  if (request->budget > 0) GrantQuerySlot(request, &plan_);
}

int64_t Driver::NextPoint(const TestRequest& request) const {
  const Config& config = ranks_->config();
  const int64_t block_size = config.kvcache_block_size;
  const bool first = request.num_compressions == 0 && !config.compress_prefill;
  const auto prompt = static_cast<int64_t>(request.prompt.size());
  const int64_t prompt_blocks = first ? (prompt + block_size - 1) / block_size : 0;
  return std::max(request.budget + 1, prompt_blocks) * block_size;
}

bool Driver::IsDue(const TestRequest& request) const {
  return request.budget > 0 && request.num_cached == NextPoint(request);
}

void Driver::Compress(TestRequest* request, StepPlan* plan) {
  const Config& config = ranks_->config();
  const int64_t kept = request->budget * config.kvcache_block_size;
  Compression compression;
  compression.sequence_slot = request->slot;
  compression.source_table = request->table;
  if (ResolveCompression(config).pin_prompt == "on") {
    compression.num_pinned = std::min(
        {static_cast<int64_t>(request->prompt.size()), kept / 2, kept - config.query_cache_len});
  }
  std::vector<BlockId> table;
  for (int64_t i = 0; i <= request->budget; ++i) {
    const bool pinned = i < compression.num_pinned / config.kvcache_block_size;
    const bool in_place = pinned || (!IsShared(request->table[i]) && random_() % 2 == 0);
    table.push_back(in_place ? request->table[i] : TakeBlock());
  }
  compression.target_table = table;
  std::vector<BlockId> given;
  for (BlockId block : request->table) {
    if (std::find(table.begin(), table.end(), block) == table.end()) given.push_back(block);
  }
  GiveBlocks(given);
  request->table = table;
  request->num_cached = kept;
  ++request->num_compressions;
  plan->compressions.push_back(compression);
  if (!request->pauses) return;
  plan->paused.push_back(request->slot);
  request->num_paused_steps = 1 + static_cast<int64_t>(random_() % 3);
}

void Driver::Grow(TestRequest* request, int64_t num_tokens, StepPlan* plan) {
  const int64_t block_size = ranks_->config().kvcache_block_size;
  request->num_cached += num_tokens;
  request->position += num_tokens;
  while (static_cast<int64_t>(request->table.size()) * block_size < request->num_cached) {
    request->table.push_back(TakeBlock());
    plan->appended_blocks.push_back({request->slot, request->table.back()});
  }
}

void Driver::RunNext(TestRequest* request, StepPlan* plan) {
  int64_t num_tokens = 1;
  bool samples = true;
  if (!request->decodes) {
    const auto length = static_cast<int64_t>(request->prompt.size() + request->output.size());
    num_tokens = std::min(request->chunk_size, length - request->position);
    if (request->budget > 0) {
      num_tokens = std::min(num_tokens, NextPoint(*request) - request->num_cached);
    }
    samples = request->position + num_tokens == length;
  }
  if (request->budget > 0 && !request->query_slot.has_value() &&
      request->num_cached + num_tokens > NextPoint(*request) - ranks_->config().query_cache_len) {
    GrantQuerySlot(request, plan);
  }
  if (request->decodes) {
    ++plan->num_decoding;
  } else {
    plan->chunks.push_back({request->slot, static_cast<int32_t>(request->position),
                            static_cast<int32_t>(num_tokens), samples});
    request->decodes = samples;
  }
  Grow(request, num_tokens, plan);
}

void Driver::Step() {
  StepPlan plan;
  std::swap(plan, plan_);
  plan.step += 1;
  plan_.step = plan.step;
  for (TestRequest* request : running_) {
    if (request->num_host_blocks > 0) continue;
    if (request->num_paused_steps > 0) {
      if (--request->num_paused_steps > 0) continue;
      plan.resumed.push_back(request->slot);
    } else if (IsDue(*request)) {
      Compress(request, &plan);
      if (request->num_paused_steps > 0) continue;
    }
    RunNext(request, &plan);
  }
  auto result = ranks_->Run(plan);
  CHECK(result.ok()) << result.status();
  CHECK_EQ(result->step, plan.step);
  CHECK_EQ(result->finished_compressions.size(), plan.compressions.size());
  Apply(*result);
  PoisonWhatIsFree();
}

void Driver::Apply(const StepResult& result) {
  const auto request_of = [this](SequenceSlot slot) -> TestRequest* {
    for (TestRequest* request : running_) {
      if (request->slot == slot) return request;
    }
    LOG(FATAL) << "slot " << slot << " does not run";
  };
  for (const SampledToken& sampled : result.sampled) {
    TestRequest* request = request_of(sampled.sequence_slot);
    request->output.push_back(sampled.token);
    request->samples.push_back(sampled);
  }
  for (SequenceSlot slot : result.corrupted) request_of(slot)->corrupted = true;
  for (const FinishedCompression& finished : result.finished_compressions) {
    request_of(finished.sequence_slot)->prompt_tokens_kept.push_back(finished.prompt_tokens_kept);
  }
}

void Driver::PoisonWhatIsFree() {
  const auto is_free = [](const auto& free, auto id) {
    return std::find(free.begin(), free.end(), id) != free.end();
  };
  std::vector<BlockId> blocks;
  for (BlockId block : given_blocks_) {
    if (is_free(free_blocks_, block)) blocks.push_back(block);
  }
  ranks_->PoisonBlocks(blocks);
  for (QuerySlot slot : given_query_slots_) {
    if (is_free(free_query_slots_, slot)) ranks_->PoisonQuerySlot(slot);
  }
  given_blocks_.clear();
  given_query_slots_.clear();
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
