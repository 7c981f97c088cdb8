#pragma once
// Turns the rows of a step into the batch that the transformer runs: arrays built in host memory,
// then copied to the device. Owns both and, on the device, every slot's last token: a decoding
// sequence's next input never passes through the host. Worker thread only.

#include <cstddef>
#include <cstdint>
#include <vector>

#include "proto/messages.h"
#include "proto/status.h"
#include "worker/backend.h"
#include "worker/model/transformer.h"
#include "worker/sequence_state.h"

namespace zipage {

// A token whose logits the last batch asks for.
struct LogitRow {
  SequenceSlot sequence_slot = 0;
  int64_t position = 0;
};

class StepBatch {
 public:
  static absl::StatusOr<StepBatch> Create(const SequenceStates::Limits& limits, Backend* backend);
  // Bytes of device memory.
  static size_t Bytes(const SequenceStates::Limits& limits);

  // The batch of the states' rows; valid until the next Build. Logits are wanted of the tokens that
  // are sampled from and, with all_logits, after these of all others.
  Batch Build(const SequenceStates& states, bool all_logits);

  // Of the last batch: the slots that sample, in the order of the logit rows (device: the same).
  const std::vector<SequenceSlot>& sample_slots() const { return sample_slots_; }
  const int32_t* device_sample_slots() const { return device_sample_slots_.as<int32_t>(); }
  const std::vector<LogitRow>& logit_rows() const { return logit_rows_; }
  // Device, [max_num_seqs]: the last token of every slot that decodes.
  int32_t* last_tokens() const { return last_tokens_.as<int32_t>(); }

 private:
  // A device array and its size.
  struct Array {
    DeviceMemory StepBatch::*memory;
    size_t bytes;
  };

  StepBatch(const SequenceStates::Limits& limits, Backend* backend)
      : limits_(limits), backend_(backend) {}

  static std::vector<Array> Arrays(const SequenceStates::Limits& limits);
  void AddRow(const StepRow& row, const std::vector<BlockId>& table, bool all_logits);
  void AddTables(const SequenceStates& states);
  void Upload();

  SequenceStates::Limits limits_;
  Backend* backend_;

  // In host memory; kept for their capacity.
  struct HostArrays {
    std::vector<int32_t> chunk_ids;     // of all chunks; decoding slots' ids are on the device
    std::vector<int32_t> decode_slots;  // their rows come first
    std::vector<int32_t> positions;
    std::vector<int64_t> slot_mapping;
    std::vector<int32_t> query_start;
    std::vector<int32_t> context_len;
    std::vector<int32_t> block_tables;
    std::vector<int32_t> logit_rows;
    std::vector<int32_t> query_tokens;
    std::vector<int64_t> window_rows;
  } host_;
  int64_t max_blocks_ = 0;
  std::vector<SequenceSlot> sample_slots_;
  std::vector<LogitRow> logit_rows_;
  // Tokens whose logits are wanted besides the sampled ones', until they are put after those.
  std::vector<int32_t> other_rows_;
  std::vector<LogitRow> other_logit_rows_;

  // Device copies of the above.
  DeviceMemory ids_;
  DeviceMemory decode_slots_;
  DeviceMemory positions_;
  DeviceMemory slot_mapping_;
  DeviceMemory query_start_;
  DeviceMemory context_len_;
  DeviceMemory block_tables_;
  DeviceMemory device_logit_rows_;
  DeviceMemory query_tokens_;
  DeviceMemory window_rows_;
  DeviceMemory device_sample_slots_;
  DeviceMemory last_tokens_;
};

}  // namespace zipage
