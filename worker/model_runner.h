#pragma once
// Executes step plans: plan → batch → forward → sample. Owns the model, the KV pool, the sequence
// states and, on the device, every slot's last token: a decoding sequence's next input never passes
// through the host. Rank 0 samples; the others receive its tokens. Worker thread only.

#include <cstdint>
#include <memory>
#include <vector>

#include "proto/config.h"
#include "proto/messages.h"
#include "proto/status.h"
#include "worker/backend.h"
#include "worker/comm/collective.h"
#include "worker/kv_pool.h"
#include "worker/model/transformer.h"
#include "worker/sequence_state.h"

namespace zipage {

class ModelRunner {
 public:
  // REQUIRES: transformer was made for max_num_batched_tokens. kResourceExhausted if memory is
  // short.
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(const Config& config,
                                                             Transformer transformer, KvPool pool,
                                                             Collective* collective,
                                                             Backend* backend);

  // Runs one plan to its end. Only rank 0's result holds tokens. After an error the runner is of no
  // use: kInternal for a plan that contradicts the state, kUnimplemented for compressions and
  // swaps, or what the backend or a collective reports.
  absl::StatusOr<StepResult> Run(const StepPlan& plan);

 private:
  ModelRunner(const SequenceStates::Limits& limits, Transformer transformer, KvPool pool,
              Collective* collective, Backend* backend);

  absl::Status Allocate(const SequenceStates::Limits& limits);
  // Fills the host arrays from the states' rows, copies them to the device.
  Batch MakeBatch();
  void AddRow(const StepRow& row);
  // Samples for sample_slots_ and hands the tokens to every rank's device and states.
  absl::Status SampleAll(StepResult* result);
  // Rank 0: samples entries [first, first + count) of sample_slots_ from their logits.
  absl::Status SampleSome(int64_t first, int64_t count, float* logits, StepResult* result);

  Transformer transformer_;
  KvPool pool_;
  Collective* collective_;
  Backend* backend_;
  SequenceStates states_;

  // The batch under construction, in host memory; kept for its capacity.
  struct HostBatch {
    std::vector<int32_t> chunk_ids;     // of all chunks; decoding slots' ids are on the device
    std::vector<int32_t> decode_slots;  // their rows come first
    std::vector<int32_t> positions;
    std::vector<int64_t> slot_mapping;
    std::vector<int32_t> query_start;
    std::vector<int32_t> context_len;
    std::vector<int32_t> block_tables;
    std::vector<int32_t> logit_rows;
  } host_;
  std::vector<SequenceSlot> sample_slots_;  // slot of each of logit_rows
  std::vector<TokenId> sampled_tokens_;     // of sample_slots_
  std::vector<SampleRow> sample_rows_;
  SampleOutput sample_output_;

  // Device copies of the above.
  DeviceMemory ids_;
  DeviceMemory decode_slots_;
  DeviceMemory positions_;
  DeviceMemory slot_mapping_;
  DeviceMemory query_start_;
  DeviceMemory context_len_;
  DeviceMemory block_tables_;
  DeviceMemory logit_rows_;
  DeviceMemory device_sample_slots_;
  DeviceMemory sampled_;      // [max_num_seqs] tokens of sample_slots_
  DeviceMemory last_tokens_;  // [max_num_seqs] last token of every slot that decodes
};

}  // namespace zipage
