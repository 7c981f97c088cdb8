#include "worker/model_runner.h"

#include <algorithm>
#include <chrono>
#include <utility>

namespace zipage {
namespace {

template <typename T>
void Upload(const std::vector<T>& values, const DeviceMemory& memory, Backend* backend) {
  backend->CopyToDevice(memory.as(), values.data(), values.size() * sizeof(T));
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

absl::StatusOr<std::unique_ptr<ModelRunner>> ModelRunner::Create(const Config& config,
                                                                 Transformer transformer,
                                                                 KvPool pool,
                                                                 Collective* collective,
                                                                 Backend* backend) {
  const SequenceStates::Limits limits{.max_num_seqs = config.max_num_seqs,
                                      .block_size = pool.shape().block_size,
                                      .num_blocks = pool.num_blocks(),
                                      .vocab_size = transformer.config().vocab_size,
                                      .max_position = transformer.weights().max_position,
                                      .max_tokens = config.max_num_batched_tokens};
  std::unique_ptr<ModelRunner> runner(
      new ModelRunner(limits, std::move(transformer), std::move(pool), collective, backend));
  ZIPAGE_RETURN_IF_ERROR(runner->Allocate(limits));
  return runner;
}

ModelRunner::ModelRunner(const SequenceStates::Limits& limits, Transformer transformer, KvPool pool,
                         Collective* collective, Backend* backend)
    : transformer_(std::move(transformer)),
      pool_(std::move(pool)),
      collective_(collective),
      backend_(backend),
      states_(limits) {}

absl::Status ModelRunner::Allocate(const SequenceStates::Limits& limits) {
  const auto allocate = [this](int64_t count, size_t size, DeviceMemory* memory) {
    absl::StatusOr<DeviceMemory> allocated = backend_->Allocate(count * size, "step inputs");
    if (!allocated.ok()) return allocated.status();
    *memory = *std::move(allocated);
    return absl::OkStatus();
  };
  const int64_t seqs = limits.max_num_seqs;
  const int64_t max_blocks = (limits.max_position + limits.block_size - 1) / limits.block_size;
  ZIPAGE_RETURN_IF_ERROR(allocate(limits.max_tokens, sizeof(int32_t), &ids_));
  ZIPAGE_RETURN_IF_ERROR(allocate(limits.max_tokens, sizeof(int32_t), &positions_));
  ZIPAGE_RETURN_IF_ERROR(allocate(limits.max_tokens, sizeof(int64_t), &slot_mapping_));
  ZIPAGE_RETURN_IF_ERROR(allocate(seqs, sizeof(int32_t), &decode_slots_));
  ZIPAGE_RETURN_IF_ERROR(allocate(seqs + 1, sizeof(int32_t), &query_start_));
  ZIPAGE_RETURN_IF_ERROR(allocate(seqs, sizeof(int32_t), &context_len_));
  ZIPAGE_RETURN_IF_ERROR(allocate(seqs * max_blocks, sizeof(int32_t), &block_tables_));
  ZIPAGE_RETURN_IF_ERROR(allocate(seqs, sizeof(int32_t), &logit_rows_));
  ZIPAGE_RETURN_IF_ERROR(allocate(seqs, sizeof(int32_t), &device_sample_slots_));
  ZIPAGE_RETURN_IF_ERROR(allocate(seqs, sizeof(int32_t), &sampled_));
  return allocate(seqs, sizeof(int32_t), &last_tokens_);
}

absl::StatusOr<StepResult> ModelRunner::Run(const StepPlan& plan) {
  const auto start = std::chrono::steady_clock::now();
  StepResult result;
  result.rank = collective_->rank();
  result.step = plan.step;
  ZIPAGE_RETURN_IF_ERROR(states_.Apply(plan));
  if (!states_.rows().empty()) {
    ZIPAGE_RETURN_IF_ERROR(transformer_.Forward(MakeBatch(), pool_));
    ZIPAGE_RETURN_IF_ERROR(SampleAll(&result));
  }
  result.device_micros = std::chrono::duration_cast<std::chrono::microseconds>(
                             std::chrono::steady_clock::now() - start)
                             .count();
  return result;
}

void ModelRunner::AddRow(const StepRow& row) {
  const std::vector<BlockId>& table = states_.at(row.sequence_slot).block_table;
  const int64_t block_size = pool_.shape().block_size;
  for (int64_t i = 0; i < row.num_tokens; ++i) {
    const int64_t cached = row.first_cached + i;
    host_.positions.push_back(static_cast<int32_t>(row.first_position + i));
    host_.slot_mapping.push_back(table[cached / block_size] * block_size + cached % block_size);
  }
  if (row.tokens == nullptr) {
    host_.decode_slots.push_back(row.sequence_slot);
  } else {
    host_.chunk_ids.insert(host_.chunk_ids.end(), row.tokens, row.tokens + row.num_tokens);
  }
  host_.query_start.push_back(static_cast<int32_t>(host_.positions.size()));
  host_.context_len.push_back(static_cast<int32_t>(row.first_cached + row.num_tokens));
  if (row.samples) {
    host_.logit_rows.push_back(static_cast<int32_t>(host_.positions.size()) - 1);
    sample_slots_.push_back(row.sequence_slot);
  }
}

Batch ModelRunner::MakeBatch() {
  for (auto* values : {&host_.chunk_ids, &host_.decode_slots, &host_.positions, &host_.context_len,
                       &host_.logit_rows, &sample_slots_}) {
    values->clear();
  }
  host_.slot_mapping.clear();
  host_.query_start.assign(1, 0);
  int64_t max_blocks = 0;
  const int64_t block_size = pool_.shape().block_size;
  for (const StepRow& row : states_.rows()) {
    AddRow(row);
    max_blocks = std::max(max_blocks, (host_.context_len.back() + block_size - 1) / block_size);
  }
  host_.block_tables.assign(states_.rows().size() * max_blocks, 0);
  auto out = host_.block_tables.begin();
  for (const StepRow& row : states_.rows()) {
    const std::vector<BlockId>& table = states_.at(row.sequence_slot).block_table;
    std::copy_n(table.begin(), std::min<int64_t>(table.size(), max_blocks), out);
    out += max_blocks;
  }
  Upload(host_.decode_slots, decode_slots_, backend_);
  Upload(host_.positions, positions_, backend_);
  Upload(host_.slot_mapping, slot_mapping_, backend_);
  Upload(host_.query_start, query_start_, backend_);
  Upload(host_.context_len, context_len_, backend_);
  Upload(host_.block_tables, block_tables_, backend_);
  Upload(host_.logit_rows, logit_rows_, backend_);
  Upload(sample_slots_, device_sample_slots_, backend_);
  const auto num_decoding = static_cast<int64_t>(host_.decode_slots.size());
  backend_->GatherTokens(last_tokens_.as<int32_t>(), decode_slots_.as<int32_t>(),
                         ids_.as<int32_t>(), num_decoding);
  backend_->CopyToDevice(ids_.as<int32_t>() + num_decoding, host_.chunk_ids.data(),
                         host_.chunk_ids.size() * sizeof(int32_t));
  return {.ids = ids_.as<int32_t>(),
          .positions = positions_.as<int32_t>(),
          .slot_mapping = slot_mapping_.as<int64_t>(),
          .query_start = query_start_.as<int32_t>(),
          .context_len = context_len_.as<int32_t>(),
          .block_tables = block_tables_.as<int32_t>(),
          .logit_rows = logit_rows_.as<int32_t>(),
          .num_tokens = static_cast<int64_t>(host_.positions.size()),
          .num_seqs = static_cast<int>(states_.rows().size()),
          .max_blocks = static_cast<int>(max_blocks),
          .num_logit_rows = static_cast<int64_t>(host_.logit_rows.size())};
}

absl::Status ModelRunner::SampleAll(StepResult* result) {
  const auto num_samples = static_cast<int64_t>(sample_slots_.size());
  if (num_samples == 0) return absl::OkStatus();
  for (int64_t first = 0; first < num_samples; first += Transformer::kMaxLogitRows) {
    const int64_t count = std::min(num_samples - first, Transformer::kMaxLogitRows);
    ZIPAGE_ASSIGN_OR_RETURN(float* const logits, transformer_.Logits(first, count));
    if (logits != nullptr) ZIPAGE_RETURN_IF_ERROR(SampleSome(first, count, logits, result));
  }
  const size_t bytes = num_samples * sizeof(int32_t);
  ZIPAGE_RETURN_IF_ERROR(collective_->Broadcast(sampled_.as(), bytes));
  backend_->ScatterTokens(sampled_.as<int32_t>(), device_sample_slots_.as<int32_t>(),
                          last_tokens_.as<int32_t>(), num_samples);
  sampled_tokens_.resize(num_samples);
  backend_->CopyToHost(sampled_tokens_.data(), sampled_.as(), bytes);
  for (int64_t i = 0; i < num_samples; ++i) {
    states_.AppendOutput(sample_slots_[i], sampled_tokens_[i]);
  }
  return absl::OkStatus();
}

absl::Status ModelRunner::SampleSome(int64_t first, int64_t count, float* logits,
                                     StepResult* result) {
  const int64_t vocab = transformer_.config().vocab_size;
  int32_t max_logprobs = 0;
  sample_rows_.clear();
  for (int64_t i = first; i < first + count; ++i) {
    sample_rows_.push_back(MakeSampleRow(states_.at(sample_slots_[i])));
    max_logprobs = std::max(max_logprobs, sample_rows_.back().num_logprobs);
  }
  ZIPAGE_RETURN_IF_ERROR(backend_->Sample(logits, vocab, sample_rows_,
                                          sampled_.as<int32_t>() + first, &sample_output_));
  for (int64_t i = 0; i < count; ++i) {
    const SequenceSlot slot = sample_slots_[first + i];
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
