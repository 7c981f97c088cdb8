#pragma once
// Known token sequences through the model under one compression setting: the same sequence states,
// batches, forward pass and compressor as the engine's, on plans made here. A sequence is computed
// in chunks and compressed where the scheduler would compress it (DESIGN 4, 5), as when an engine
// recomputes a preempted sequence. Owns the setting's KV pool; the transformer is shared by the
// replays of all settings. One thread.

#include <cstdint>
#include <memory>
#include <vector>

#include "proto/config.h"
#include "proto/messages.h"
#include "proto/status.h"
#include "worker/backend.h"
#include "worker/comm/collective.h"
#include "worker/compressor.h"
#include "worker/fidelity/cases.h"
#include "worker/kv_pool.h"
#include "worker/model/transformer.h"
#include "worker/sequence_state.h"
#include "worker/step_batch.h"

namespace zipage {

// Where a setting compresses a sequence, in positions computed before.
class CompressionPoints {
 public:
  // The full cache has none: policy none. REQUIRES: ResolveCompression was applied.
  explicit CompressionPoints(const Config& config);

  // The first position at or after `position` before which a case is compressed, or its end if it
  // has none.
  int64_t Next(const FidelityCase& one, int64_t position) const;
  // Blocks of the longest table the case has.
  int64_t MaxBlocks(const FidelityCase& one) const;
  // Leading slots that a compression keeps whatever their score.
  int64_t NumPinned(const FidelityCase& one) const;
  // Full blocks that are kept.
  int64_t budget() const { return budget_; }

 private:
  int64_t block_size_;
  int64_t budget_;  // 0: the full cache
  int64_t window_;
  bool pin_prompt_;
  bool compress_prefill_;
};

// Tokens of a sequence slot that run in a step.
struct ReplayChunk {
  SequenceSlot slot = 0;
  int64_t start = 0;
  int64_t num_tokens = 0;
};

class Replay {
 public:
  struct Limits {
    int num_slots = 0;
    int64_t max_step_tokens = 0;
    // Of all cases; sequence slots have as many blocks as the longest table takes.
    const std::vector<FidelityCase>* cases = nullptr;
  };

  // kResourceExhausted if memory is short. REQUIRES: ResolveCompression was applied to config; the
  // transformer takes max_step_tokens.
  static absl::StatusOr<std::unique_ptr<Replay>> Create(Config config, const Limits& limits,
                                                        Transformer* transformer,
                                                        Collective* collective, Backend* backend);

  const CompressionPoints& points() const { return points_; }

  // Puts a case, which must outlive its stay, into a slot. Whatever was there ends.
  void Begin(SequenceSlot slot, const FidelityCase& one);
  // Runs the chunks, at most max_step_tokens tokens, and before them the compressions that are due
  // at their starts. A chunk must not go beyond its case's next compression point. Leaves the
  // logits of all tokens (all_logits) or of the last computed ones of cases for Logits.
  absl::Status Step(const std::vector<ReplayChunk>& chunks, bool all_logits);
  // Whose logits the last step left, in their order.
  const std::vector<LogitRow>& logit_rows() const { return batch_.logit_rows(); }
  // Entries [first, first + count) of them: host or device as of the backend, [count, vocab_size]
  // float32, valid until the next call. REQUIRES: count <= Transformer::kMaxLogitRows.
  absl::StatusOr<float*> Logits(int64_t first, int64_t count) {
    return transformer_->Logits(first, count);
  }

  // Of the case in the slot.
  int64_t num_compressions(SequenceSlot slot) const { return slots_[slot].num_compressions; }
  double prompt_kept(SequenceSlot slot) const { return slots_[slot].prompt_kept; }

 private:
  struct Slot {
    const FidelityCase* one = nullptr;
    bool is_new = false;  // not yet in a plan
    bool in_use = false;  // SequenceStates holds a sequence
    std::vector<BlockId> block_table;
    int64_t num_compressions = 0;
    double prompt_kept = 0;  // by the last compression, mean over layers and heads
  };

  Replay(const Config& config, const SequenceStates::Limits& limits, KvPool pool, StepBatch batch,
         Transformer* transformer, Backend* backend);

  void AddToPlan(const ReplayChunk& chunk, StepPlan* plan);
  void AddSequence(SequenceSlot slot, StepPlan* plan);
  void AddCompression(SequenceSlot slot, StepPlan* plan);
  absl::Status Compress();
  const QueryWindows* query_windows() const;

  const Config config_;
  const CompressionPoints points_;
  const int64_t blocks_per_slot_;
  KvPool pool_;
  SequenceStates states_;
  StepBatch batch_;
  std::unique_ptr<Compressor> compressor_;  // null with the full cache
  Transformer* transformer_;
  Backend* backend_;
  uint64_t step_ = 0;
  std::vector<Slot> slots_;
};

}  // namespace zipage
