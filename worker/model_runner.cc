#include "worker/model_runner.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "worker/memory_plan.h"

namespace zipage {
namespace {

using Clock = std::chrono::steady_clock;

uint64_t MicrosSince(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start).count();
}

SampleRow MakeSampleRow(const SequenceState& sequence) {
  const SamplingParams& p = sequence.sampling;
  SampleRow row{.temperature = p.temperature,
                .top_p = p.top_p,
                .top_k = p.top_k,
                .min_p = p.min_p,
                .repetition_penalty = p.repetition_penalty,
                .presence_penalty = p.presence_penalty,
                .frequency_penalty = p.frequency_penalty,
                .seen = sequence.seen.data(),
                .num_seen = static_cast<int32_t>(sequence.seen.size()),
                .seed = p.seed,
                .sample_index = sequence.sample_index,
                .position = static_cast<uint64_t>(sequence.num_output),
                .num_logprobs = p.num_logprobs};
  if (sequence.num_output < p.min_tokens) {
    row.banned = p.stop_token_ids.data();
    row.num_banned = static_cast<int32_t>(p.stop_token_ids.size());
  }
  return row;
}

}  // namespace

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Create(
    const Config& config, Transformer transformer, KvPool pool, int64_t num_query_slots,
    Collective* collective, Backend* backend) {
  const SequenceStates::Limits limits{.max_num_seqs = config.max_num_seqs,
                                      .block_size = pool.shape().block_size,
                                      .num_blocks = pool.num_blocks(),
                                      .num_host_blocks = NumHostBlocks(config, pool.shape()),
                                      .num_query_slots = num_query_slots,
                                      .window = config.query_cache_len,
                                      .sink_len = config.use_attention_sink ? config.sink_len : 0,
                                      .vocab_size = transformer.config().vocab_size,
                                      .max_position = transformer.weights().max_position,
                                      .max_tokens = config.max_num_batched_tokens};
  ZIPAGE_ASSIGN_OR_RETURN(StepBatch batch, StepBatch::Create(limits, backend));
  std::unique_ptr<ModelRunner> runner(new ModelRunner(
      limits, std::move(transformer), std::move(pool), std::move(batch), collective, backend));
  ZIPAGE_ASSIGN_OR_RETURN(runner->sampled_,
                          backend->Allocate(limits.max_num_seqs * sizeof(int32_t), "step outputs"));
  if (num_query_slots > 0) ZIPAGE_RETURN_IF_ERROR(runner->MakeCompressor(config, limits));
  runner->swap_space_ = std::make_unique<SwapSpace>(limits.max_num_seqs, &runner->pool_,
                                                    runner->query_windows(), backend);
  return runner;
}

ModelRunner::ModelRunner(const SequenceStates::Limits& limits, Transformer transformer, KvPool pool,
                         StepBatch batch, Collective* collective, Backend* backend)
    : transformer_(std::move(transformer)),
      pool_(std::move(pool)),
      collective_(collective),
      backend_(backend),
      states_(limits),
      batch_(std::move(batch)) {}

absl::Status ModelRunner::MakeCompressor(const Config& config,
                                         const SequenceStates::Limits& limits) {
  const ModelShard& shard = transformer_.weights().shard;
  const QueryWindowShape windows =
      MakeQueryWindowShape(config, transformer_.config(), shard, transformer_.weights().dtype);
  ZIPAGE_ASSIGN_OR_RETURN(
      compressor_,
      Compressor::Create(config, MakeCompressorLimits(config, limits.max_position), &pool_, windows,
                         limits.num_query_slots, static_cast<int>(shard.kv_heads.begin),
                         collective_, backend_));
  return absl::OkStatus();
}

absl::StatusOr<StepResult> ModelRunner::Run(const StepPlan& plan, const LogitsSink& sink) {
  const Clock::time_point start = Clock::now();
  StepResult result;
  result.rank = collective_->rank();
  result.step = plan.step;
  ZIPAGE_RETURN_IF_ERROR(states_.Apply(plan));
  ZIPAGE_RETURN_IF_ERROR(RunSwaps(plan));
  if (!states_.compressions().empty()) ZIPAGE_RETURN_IF_ERROR(RunCompressions(&result));
  if (!states_.rows().empty()) {
    const Batch batch = batch_.Build(states_, /*all_logits=*/sink != nullptr);
    ZIPAGE_RETURN_IF_ERROR(transformer_.Forward(batch, pool_, query_windows()));
    if (sink != nullptr) ZIPAGE_RETURN_IF_ERROR(Observe(sink));
    ZIPAGE_RETURN_IF_ERROR(SampleAll(&result));
  }
  result.device_micros = MicrosSince(start);
  return result;
}

absl::Status ModelRunner::RunSwaps(const StepPlan& plan) {
  for (SequenceSlot slot : plan.released) swap_space_->Release(slot);
  for (const SwapWork& work : states_.swaps()) {
    ZIPAGE_RETURN_IF_ERROR(swap_space_->Run(work));
  }
  return absl::OkStatus();
}

absl::Status ModelRunner::RunCompressions(StepResult* result) {
  const Clock::time_point start = Clock::now();
  ZIPAGE_ASSIGN_OR_RETURN(std::vector<FinishedCompression> finished,
                          compressor_->Compress(states_.compressions()));
  if (collective_->rank() == 0) result->finished_compressions = std::move(finished);
  result->compression_micros = MicrosSince(start);
  return absl::OkStatus();
}

absl::Status ModelRunner::Observe(const LogitsSink& sink) {
  const int64_t vocab = transformer_.config().vocab_size;
  const std::vector<LogitRow>& rows = batch_.logit_rows();
  const auto num_rows = static_cast<int64_t>(rows.size());
  for (int64_t first = 0; first < num_rows; first += Transformer::kMaxLogitRows) {
    const int64_t count = std::min(num_rows - first, Transformer::kMaxLogitRows);
    ZIPAGE_ASSIGN_OR_RETURN(float* const logits, transformer_.Logits(first, count));
    if (logits == nullptr) continue;
    sink_logits_.resize(count * vocab);
    backend_->CopyToHost(sink_logits_.data(), logits, count * vocab * sizeof(float));
    for (int64_t i = 0; i < count; ++i) {
      sink(rows[first + i].sequence_slot, rows[first + i].position,
           sink_logits_.data() + i * vocab);
    }
  }
  return absl::OkStatus();
}

absl::Status ModelRunner::SampleAll(StepResult* result) {
  const auto num_samples = static_cast<int64_t>(batch_.sample_slots().size());
  if (num_samples == 0) return absl::OkStatus();
  for (int64_t first = 0; first < num_samples; first += Transformer::kMaxLogitRows) {
    const int64_t count = std::min(num_samples - first, Transformer::kMaxLogitRows);
    ZIPAGE_ASSIGN_OR_RETURN(float* const logits, transformer_.Logits(first, count));
    if (logits != nullptr) ZIPAGE_RETURN_IF_ERROR(SampleSome(first, count, logits, result));
  }
  const size_t bytes = num_samples * sizeof(int32_t);
  ZIPAGE_RETURN_IF_ERROR(collective_->Broadcast(sampled_.as(), bytes));
  backend_->ScatterTokens(sampled_.as<int32_t>(), batch_.device_sample_slots(),
                          batch_.last_tokens(), num_samples);
  sampled_tokens_.resize(num_samples);
  backend_->CopyToHost(sampled_tokens_.data(), sampled_.as(), bytes);
  for (int64_t i = 0; i < num_samples; ++i) {
    states_.AppendOutput(batch_.sample_slots()[i], sampled_tokens_[i]);
  }
  return absl::OkStatus();
}

absl::Status ModelRunner::SampleSome(int64_t first, int64_t count, float* logits,
                                     StepResult* result) {
  const int64_t vocab = transformer_.config().vocab_size;
  int32_t max_logprobs = 0;
  sample_rows_.clear();
  for (int64_t i = first; i < first + count; ++i) {
    sample_rows_.push_back(MakeSampleRow(states_.at(batch_.sample_slots()[i])));
    max_logprobs = std::max(max_logprobs, sample_rows_.back().num_logprobs);
  }
  ZIPAGE_RETURN_IF_ERROR(backend_->Sample(logits, vocab, sample_rows_,
                                          sampled_.as<int32_t>() + first, &sample_output_));
  for (int64_t i = 0; i < count; ++i) {
    const SequenceSlot slot = batch_.sample_slots()[first + i];
    if (sample_output_.corrupted[i] != 0) {
      result->corrupted.push_back(slot);
      continue;
    }
    const SampleResult& sampled = sample_output_.results[i];
    SampledToken& token = result->sampled.emplace_back();
    token.sequence_slot = slot;
    token.token = sampled.token;
    const int32_t num_logprobs = sample_rows_[i].num_logprobs;
    if (num_logprobs < 0) continue;
    token.logprobs.push_back({sampled.token, sampled.logprob});
    for (int64_t k = 0; k < std::min<int64_t>(num_logprobs, vocab); ++k) {
      const SampleLogprob& top = sample_output_.logprobs[i * max_logprobs + k];
      token.logprobs.push_back({top.token, top.logprob});
    }
  }
  return absl::OkStatus();
}

}  // namespace zipage
