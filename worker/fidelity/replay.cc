#include "worker/fidelity/replay.h"

#include <algorithm>
#include <utility>

#include "glog/logging.h"
#include "worker/memory_plan.h"

namespace zipage {
namespace {

int64_t CeilDivide(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace

CompressionPoints::CompressionPoints(const Config& config)
    : block_size_(config.kvcache_block_size),
      budget_(config.compression_policy == "none" ? 0 : config.max_cache_blocks_per_seq),
      window_(config.query_cache_len),
      pin_prompt_(config.pin_prompt == "on"),
      compress_prefill_(config.compress_prefill) {
  CHECK_NE(config.compression_policy, "auto");
}

int64_t CompressionPoints::Next(const FidelityCase& one, int64_t position) const {
  const int64_t end = one.num_computed();
  if (budget_ == 0) return end;
  const int64_t prompt_blocks =
      compress_prefill_ ? 0 : CeilDivide(static_cast<int64_t>(one.prompt.size()), block_size_);
  const int64_t first = std::max(budget_ + 1, prompt_blocks) * block_size_;
  const int64_t next = std::max(first, CeilDivide(position, block_size_) * block_size_);
  return std::min(next, end);
}

int64_t CompressionPoints::MaxBlocks(const FidelityCase& one) const {
  return CeilDivide(Next(one, 0), block_size_);
}

int64_t CompressionPoints::NumPinned(const FidelityCase& one) const {
  if (!pin_prompt_) return 0;
  const int64_t kept = budget_ * block_size_;
  return std::min({static_cast<int64_t>(one.prompt.size()), kept / 2, kept - window_});
}

absl::StatusOr<std::unique_ptr<Replay>> Replay::Create(Config config, const Limits& limits,
                                                       Transformer* transformer,
                                                       Collective* collective, Backend* backend) {
  const CompressionPoints points(config);
  int64_t max_computed = 0;
  int64_t max_blocks = 0;
  for (const FidelityCase& one : *limits.cases) {
    max_computed = std::max(max_computed, one.num_computed());
    max_blocks = std::max(max_blocks, points.MaxBlocks(one));
  }
  config.max_num_seqs = limits.num_slots;
  const Weights& weights = transformer->weights();
  const KvShape shape = MakeKvShape(config, transformer->config(), weights.shard, weights.dtype);
  const bool compresses = points.budget() > 0;
  const SequenceStates::Limits state_limits{
      .max_num_seqs = limits.num_slots,
      .block_size = config.kvcache_block_size,
      .num_blocks = limits.num_slots * max_blocks,
      .num_query_slots = compresses ? limits.num_slots : 0,
      .window = config.query_cache_len,
      .sink_len = config.use_attention_sink ? config.sink_len : 0,
      .vocab_size = transformer->config().vocab_size,
      .max_position = max_computed,
      .max_tokens = limits.max_step_tokens};
  ZIPAGE_ASSIGN_OR_RETURN(KvPool pool, KvPool::Create(shape, state_limits.num_blocks, backend));
  ZIPAGE_ASSIGN_OR_RETURN(StepBatch batch, StepBatch::Create(state_limits, backend));
  std::unique_ptr<Replay> replay(
      new Replay(config, state_limits, std::move(pool), std::move(batch), transformer, backend));
  if (!compresses) return replay;
  ZIPAGE_ASSIGN_OR_RETURN(
      replay->compressor_,
      Compressor::Create(
          config, {.max_num_seqs = limits.num_slots, .max_table_blocks = max_blocks},
          &replay->pool_,
          MakeQueryWindowShape(config, transformer->config(), weights.shard, weights.dtype),
          state_limits.num_query_slots, static_cast<int>(weights.shard.kv_heads.begin), collective,
          backend));
  return replay;
}

Replay::Replay(const Config& config, const SequenceStates::Limits& limits, KvPool pool,
               StepBatch batch, Transformer* transformer, Backend* backend)
    : config_(config),
      points_(config),
      blocks_per_slot_(limits.num_blocks / limits.max_num_seqs),
      pool_(std::move(pool)),
      states_(limits),
      batch_(std::move(batch)),
      transformer_(transformer),
      backend_(backend),
      slots_(limits.max_num_seqs) {}

const QueryWindows* Replay::query_windows() const {
  const bool kept = compressor_ != nullptr && compressor_->windows().shape().window > 0;
  return kept ? &compressor_->windows() : nullptr;
}

void Replay::Begin(SequenceSlot slot, const FidelityCase& one) {
  Slot& state = slots_[slot];
  state.one = &one;
  state.is_new = true;
  state.num_compressions = 0;
  state.prompt_kept = 0;
}

absl::Status Replay::Step(const std::vector<ReplayChunk>& chunks, bool all_logits) {
  StepPlan plan;
  plan.step = ++step_;
  // A sequence that has ended would decode.
  for (SequenceSlot slot = 0; slot < static_cast<SequenceSlot>(slots_.size()); ++slot) {
    Slot& state = slots_[slot];
    const bool ended = state.in_use && (state.is_new || states_.at(slot).decodes);
    if (!ended) continue;
    plan.released.push_back(slot);
    state.in_use = false;
  }
  for (const ReplayChunk& chunk : chunks) AddToPlan(chunk, &plan);
  ZIPAGE_RETURN_IF_ERROR(states_.Apply(plan));
  ZIPAGE_RETURN_IF_ERROR(Compress());
  const Batch batch = batch_.Build(states_, all_logits);
  return transformer_->Forward(batch, pool_, query_windows());
}

void Replay::AddToPlan(const ReplayChunk& chunk, StepPlan* plan) {
  Slot& state = slots_[chunk.slot];
  const FidelityCase& one = *state.one;
  const int64_t end = chunk.start + chunk.num_tokens;
  CHECK_LE(end, points_.Next(one, chunk.start + 1))
      << "chunk from " << chunk.start << " of " << one.id;
  if (state.is_new) {
    AddSequence(chunk.slot, plan);
  } else if (points_.Next(one, chunk.start) == chunk.start) {
    AddCompression(chunk.slot, plan);
  }
  plan->chunks.push_back({.sequence_slot = chunk.slot,
                          .start = static_cast<int32_t>(chunk.start),
                          .num_tokens = static_cast<int32_t>(chunk.num_tokens),
                          .samples = end == one.num_computed()});
}

void Replay::AddSequence(SequenceSlot slot, StepPlan* plan) {
  Slot& state = slots_[slot];
  const FidelityCase& one = *state.one;
  state.is_new = false;
  state.in_use = true;
  state.block_table.clear();
  for (int64_t i = 0; i < points_.MaxBlocks(one); ++i) {
    state.block_table.push_back(static_cast<BlockId>(slot * blocks_per_slot_ + i));
  }
  NewSequence& sequence = plan->new_sequences.emplace_back();
  sequence.sequence_slot = slot;
  sequence.tokens = one.prompt;
  sequence.tokens.insert(sequence.tokens.end(), one.output.begin(), one.output.end() - 1);
  sequence.num_prompt_tokens = static_cast<uint32_t>(one.prompt.size());
  sequence.block_table = state.block_table;
  sequence.sampling.seed = one.seed;
  if (compressor_ != nullptr) {
    plan->query_slots.push_back({.sequence_slot = slot, .query_slot = QuerySlot{slot}});
  }
}

void Replay::AddCompression(SequenceSlot slot, StepPlan* plan) {
  Slot& state = slots_[slot];
  Compression& compression = plan->compressions.emplace_back();
  compression.sequence_slot = slot;
  compression.source_table = state.block_table;
  state.block_table.resize(points_.budget() + 1);
  compression.target_table = state.block_table;
  compression.num_pinned = static_cast<uint32_t>(points_.NumPinned(*state.one));
  ++state.num_compressions;
}

absl::Status Replay::Compress() {
  if (states_.compressions().empty()) return absl::OkStatus();
  ZIPAGE_ASSIGN_OR_RETURN(const std::vector<FinishedCompression> finished,
                          compressor_->Compress(states_.compressions()));
  for (const FinishedCompression& one : finished) {
    slots_[one.sequence_slot].prompt_kept = one.prompt_tokens_kept;
  }
  return absl::OkStatus();
}

}  // namespace zipage
