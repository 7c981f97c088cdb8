#pragma once
// What a rank knows about every sequence slot, kept up to date by the deltas of the step plans:
// block table, cached length, position, tokens still to prefill, sampling state. The last token
// itself stays on the device (ModelRunner). Every value of a plan is checked against this state: a
// mismatch is kInternal and names step, slot and both values. After an error the state is of no
// use. Worker thread only. Invariants of a used slot:
//   1. its block table covers its cached length;
//   2. it decodes if and only if all its tokens are cached and one was sampled.

#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/messages.h"
#include "proto/status.h"
#include "worker/backend.h"

namespace zipage {

struct SequenceState {
  bool used = false;
  bool decodes = false;
  std::vector<BlockId> block_table;
  int64_t num_cached = 0;       // slots of the block table that hold keys and values
  int64_t position = 0;         // of the next token; num_cached until a compression packs the slots
  int64_t num_output = 0;       // tokens sampled so far: the position of the next draw
  std::vector<TokenId> tokens;  // prompt and output so far; empty once all are cached
  uint32_t sample_index = 0;
  SamplingParams sampling;
  // Distinct tokens of prompt and output, and where each is in `seen`; only with a penalty.
  std::vector<SeenToken> seen;
  absl::flat_hash_map<TokenId, int32_t> seen_index;
};

// Consecutive tokens of one sequence that run in a step.
struct StepRow {
  SequenceSlot sequence_slot = 0;
  int64_t first_cached = 0;  // slot of its block table where the first token goes
  int64_t first_position = 0;
  int64_t num_tokens = 0;
  const TokenId* tokens = nullptr;  // [num_tokens]; null if it decodes: the last token sampled
  bool samples = false;             // after its last token
};

class SequenceStates {
 public:
  struct Limits {
    int max_num_seqs = 0;
    int block_size = 0;
    int64_t num_blocks = 0;
    int64_t vocab_size = 0;
    int64_t max_position = 0;  // positions are below
    int64_t max_tokens = 0;    // rows of a step
  };

  explicit SequenceStates(const Limits& limits);

  // Applies releases, new sequences and blocks, then moves every slot that runs forward: the state
  // is that of the end of the step. kUnimplemented for compressions and swaps.
  absl::Status Apply(const StepPlan& plan);
  // What the last applied plan runs: decoding slots in ascending order, then chunks in the order of
  // the plan. Valid until the next Apply.
  const std::vector<StepRow>& rows() const { return rows_; }

  const SequenceState& at(SequenceSlot slot) const { return sequences_[slot]; }
  // Counts a token that was sampled for the slot. REQUIRES: it samples in the last applied plan.
  void AppendOutput(SequenceSlot slot, TokenId token);

 private:
  absl::Status Release(SequenceSlot slot);
  absl::Status Add(const NewSequence& added);
  absl::Status AppendBlock(const AppendedBlock& appended);
  absl::Status RunDecoding(const StepPlan& plan);
  absl::Status RunChunk(const PrefillChunk& chunk);
  absl::Status Run(SequenceSlot slot, int64_t num_tokens, StepRow* row);
  absl::Status CheckUsed(SequenceSlot slot, const char* what) const;
  absl::Status CheckBlock(SequenceSlot slot, BlockId block) const;
  // kInternal with the step before the message.
  template <typename... Args>
  absl::Status Mismatch(const Args&... args) const;

  Limits limits_;
  uint64_t step_ = 0;
  std::vector<SequenceState> sequences_;  // [max_num_seqs]
  std::vector<StepRow> rows_;
  int64_t num_rows_tokens_ = 0;
  std::vector<std::vector<TokenId>> prefilled_;  // tokens that rows_ may still point to
};

}  // namespace zipage
