#pragma once
// Executes step plans: swaps, compressions, then plan → batch → forward → sample. Owns the model,
// the KV pool, the query windows, swapped sequences and the sequence states. Rank 0 samples; the
// others receive its tokens. Worker thread only.

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "proto/config.h"
#include "proto/messages.h"
#include "proto/status.h"
#include "worker/backend.h"
#include "worker/comm/collective.h"
#include "worker/compressor.h"
#include "worker/kv_pool.h"
#include "worker/model/transformer.h"
#include "worker/sequence_state.h"
#include "worker/step_batch.h"
#include "worker/swap_space.h"

namespace zipage {

// Takes the logits that follow the token at `position` of a slot: [vocab_size] float32 in host
// memory, valid during the call.
using LogitsSink = std::function<void(SequenceSlot slot, int64_t position, const float* logits)>;

class ModelRunner {
 public:
  // num_query_slots: sequences that may be compressed at a time; 0 with policy none.
  // kResourceExhausted if memory is short. REQUIRES: transformer was made for
  // max_num_batched_tokens; pool has MakeKvShape's shape.
  static absl::StatusOr<std::unique_ptr<ModelRunner>> Create(const Config& config,
                                                             Transformer transformer, KvPool pool,
                                                             int64_t num_query_slots,
                                                             Collective* collective,
                                                             Backend* backend);

  // Runs one plan to its end, compressions included, whether or not their slots are paused. Only
  // rank 0's result holds more than rank, step and times. With a sink, rank 0 hands it the logits
  // of every token that ran, the sampled ones' first; every rank must get one, or none. After an
  // error the runner is of no use: kInternal for a plan that contradicts the state, or what the
  // backend or a collective reports.
  absl::StatusOr<StepResult> Run(const StepPlan& plan, const LogitsSink& sink = nullptr);

  const KvPool& pool() const { return pool_; }
  // Null if no queries are kept.
  const QueryWindows* query_windows() const {
    const bool kept = compressor_ != nullptr && compressor_->windows().shape().window > 0;
    return kept ? &compressor_->windows() : nullptr;
  }

 private:
  ModelRunner(const SequenceStates::Limits& limits, Transformer transformer, KvPool pool,
              StepBatch batch, Collective* collective, Backend* backend);

  absl::Status MakeCompressor(const Config& config, const SequenceStates::Limits& limits);
  absl::Status RunSwaps(const StepPlan& plan);
  absl::Status RunCompressions(StepResult* result);
  absl::Status Observe(const LogitsSink& sink);
  // Samples for the batch's sample_slots and hands the tokens to every rank's device and states.
  absl::Status SampleAll(StepResult* result);
  // Rank 0: samples entries [first, first + count) of sample_slots from their logits.
  absl::Status SampleSome(int64_t first, int64_t count, float* logits, StepResult* result);

  Transformer transformer_;
  KvPool pool_;
  Collective* collective_;
  Backend* backend_;
  SequenceStates states_;
  StepBatch batch_;
  std::unique_ptr<Compressor> compressor_;  // null without compression
  std::unique_ptr<SwapSpace> swap_space_;

  std::vector<TokenId> sampled_tokens_;  // of the batch's sample_slots
  std::vector<SampleRow> sample_rows_;
  SampleOutput sample_output_;
  std::vector<float> sink_logits_;
  DeviceMemory sampled_;  // [max_num_seqs] tokens of the batch's sample_slots
};

}  // namespace zipage
