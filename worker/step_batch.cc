#include "worker/step_batch.h"

#include <algorithm>

namespace zipage {
namespace {

template <typename T>
void CopyUp(const std::vector<T>& values, const DeviceMemory& memory, Backend* backend) {
  backend->CopyToDevice(memory.as(), values.data(), values.size() * sizeof(T));
}

}  // namespace

std::vector<StepBatch::Array> StepBatch::Arrays(const SequenceStates::Limits& limits) {
  const size_t seqs = limits.max_num_seqs;
  const size_t tokens = limits.max_tokens;
  const size_t max_blocks = (limits.max_position + limits.block_size - 1) / limits.block_size;
  return {{&StepBatch::ids_, tokens * sizeof(int32_t)},
          {&StepBatch::decode_slots_, seqs * sizeof(int32_t)},
          {&StepBatch::positions_, tokens * sizeof(int32_t)},
          {&StepBatch::slot_mapping_, tokens * sizeof(int64_t)},
          {&StepBatch::query_start_, (seqs + 1) * sizeof(int32_t)},
          {&StepBatch::context_len_, seqs * sizeof(int32_t)},
          {&StepBatch::block_tables_, seqs * max_blocks * sizeof(int32_t)},
          {&StepBatch::device_logit_rows_, tokens * sizeof(int32_t)},
          {&StepBatch::query_tokens_, tokens * sizeof(int32_t)},
          {&StepBatch::window_rows_, tokens * sizeof(int64_t)},
          {&StepBatch::device_sample_slots_, seqs * sizeof(int32_t)},
          {&StepBatch::last_tokens_, seqs * sizeof(int32_t)}};
}

size_t StepBatch::Bytes(const SequenceStates::Limits& limits) {
  size_t bytes = 0;
  for (const Array& array : Arrays(limits)) bytes += array.bytes;
  return bytes;
}

absl::StatusOr<StepBatch> StepBatch::Create(const SequenceStates::Limits& limits,
                                            Backend* backend) {
  StepBatch batch(limits, backend);
  for (const Array& array : Arrays(limits)) {
    ZIPAGE_ASSIGN_OR_RETURN(batch.*array.memory, backend->Allocate(array.bytes, "step inputs"));
  }
  return batch;
}

Batch StepBatch::Build(const SequenceStates& states, bool all_logits) {
  for (auto* values : {&host_.chunk_ids, &host_.decode_slots, &host_.positions, &host_.context_len,
                       &host_.logit_rows, &host_.query_tokens, &sample_slots_, &other_rows_}) {
    values->clear();
  }
  host_.slot_mapping.clear();
  host_.window_rows.clear();
  logit_rows_.clear();
  other_logit_rows_.clear();
  host_.query_start.assign(1, 0);
  for (const StepRow& row : states.rows()) {
    AddRow(row, states.at(row.sequence_slot).block_table, all_logits);
  }
  host_.logit_rows.insert(host_.logit_rows.end(), other_rows_.begin(), other_rows_.end());
  logit_rows_.insert(logit_rows_.end(), other_logit_rows_.begin(), other_logit_rows_.end());
  AddTables(states);
  Upload();
  return {.ids = ids_.as<int32_t>(),
          .positions = positions_.as<int32_t>(),
          .slot_mapping = slot_mapping_.as<int64_t>(),
          .query_start = query_start_.as<int32_t>(),
          .context_len = context_len_.as<int32_t>(),
          .block_tables = block_tables_.as<int32_t>(),
          .logit_rows = device_logit_rows_.as<int32_t>(),
          .query_tokens = query_tokens_.as<int32_t>(),
          .window_rows = window_rows_.as<int64_t>(),
          .num_tokens = static_cast<int64_t>(host_.positions.size()),
          .num_seqs = static_cast<int>(states.rows().size()),
          .max_blocks = static_cast<int>(max_blocks_),
          .num_logit_rows = static_cast<int64_t>(host_.logit_rows.size()),
          .num_queries = static_cast<int64_t>(host_.query_tokens.size())};
}

void StepBatch::AddRow(const StepRow& row, const std::vector<BlockId>& table, bool all_logits) {
  const int64_t block_size = limits_.block_size;
  for (int64_t i = 0; i < row.num_tokens; ++i) {
    const int64_t cached = row.first_cached + i;
    const auto token = static_cast<int32_t>(host_.positions.size());
    const LogitRow logit_row = {row.sequence_slot, row.first_position + i};
    host_.positions.push_back(static_cast<int32_t>(logit_row.position));
    host_.slot_mapping.push_back(table[cached / block_size] * block_size + cached % block_size);
    if (i >= row.first_query) {
      host_.query_tokens.push_back(token);
      host_.window_rows.push_back(row.window_row + i - row.first_query);
    }
    if (row.samples && i + 1 == row.num_tokens) {
      host_.logit_rows.push_back(token);
      logit_rows_.push_back(logit_row);
      sample_slots_.push_back(row.sequence_slot);
    } else if (all_logits) {
      other_rows_.push_back(token);
      other_logit_rows_.push_back(logit_row);
    }
  }
  if (row.tokens == nullptr) {
    host_.decode_slots.push_back(row.sequence_slot);
  } else {
    host_.chunk_ids.insert(host_.chunk_ids.end(), row.tokens, row.tokens + row.num_tokens);
  }
  host_.query_start.push_back(static_cast<int32_t>(host_.positions.size()));
  host_.context_len.push_back(static_cast<int32_t>(row.first_cached + row.num_tokens));
}

void StepBatch::AddTables(const SequenceStates& states) {
  max_blocks_ = 0;
  for (const int32_t length : host_.context_len) {
    max_blocks_ =
        std::max(max_blocks_, (int64_t{length} + limits_.block_size - 1) / limits_.block_size);
  }
  host_.block_tables.assign(states.rows().size() * max_blocks_, 0);
  auto out = host_.block_tables.begin();
  for (const StepRow& row : states.rows()) {
    const std::vector<BlockId>& table = states.at(row.sequence_slot).block_table;
    std::copy_n(table.begin(), std::min(static_cast<int64_t>(table.size()), max_blocks_), out);
    out += max_blocks_;
  }
}

void StepBatch::Upload() {
  CopyUp(host_.decode_slots, decode_slots_, backend_);
  CopyUp(host_.positions, positions_, backend_);
  CopyUp(host_.slot_mapping, slot_mapping_, backend_);
  CopyUp(host_.query_start, query_start_, backend_);
  CopyUp(host_.context_len, context_len_, backend_);
  CopyUp(host_.block_tables, block_tables_, backend_);
  CopyUp(host_.logit_rows, device_logit_rows_, backend_);
  CopyUp(host_.query_tokens, query_tokens_, backend_);
  CopyUp(host_.window_rows, window_rows_, backend_);
  CopyUp(sample_slots_, device_sample_slots_, backend_);
  const auto num_decoding = static_cast<int64_t>(host_.decode_slots.size());
  backend_->GatherTokens(last_tokens_.as<int32_t>(), decode_slots_.as<int32_t>(),
                         ids_.as<int32_t>(), num_decoding);
  backend_->CopyToDevice(ids_.as<int32_t>() + num_decoding, host_.chunk_ids.data(),
                         host_.chunk_ids.size() * sizeof(int32_t));
}

}  // namespace zipage
