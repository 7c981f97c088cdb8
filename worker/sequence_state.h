#pragma once
// What a rank knows about every sequence slot, kept up to date by the deltas of the step plans:
// block table, cached slots, position, tokens still to prefill, query slot, sampling state. The
// last token itself stays on the device (ModelRunner). Every value of a plan is checked against
// this state: a mismatch is kInternal and names step, slot and both values. After an error the
// state is of no use. Worker thread only. Invariants of a used slot:
//   1. its block table covers its cached slots, unless it is swapped: then it has no table and no
//      query slot;
//   2. it decodes if and only if all its tokens are cached and one was sampled;
//   3. it runs in a step if and only if it is neither paused nor swapped;
//   4. its query slot is no other's.

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_cat.h"
#include "proto/messages.h"
#include "proto/status.h"
#include "worker/backend.h"

namespace zipage {

struct SequenceState {
  bool used = false;
  bool decodes = false;
  bool paused = false;   // sits out until a plan resumes it
  bool swapped = false;  // its blocks are in host memory: sits out until they come back
  std::vector<BlockId> block_table;
  // Slots of the block table that hold keys and values. A compression lowers it; positions go on.
  int64_t num_cached = 0;
  int64_t position = 0;  // of the next token
  int64_t num_prompt_tokens = 0;
  int64_t num_output = 0;         // tokens sampled so far: the position of the next draw
  uint32_t num_compressions = 0;  // of what its blocks hold
  int64_t num_compressed = 0;     // positions cached before the last compression
  std::optional<QuerySlot> query_slot;
  int64_t window_start = 0;  // slots from here on have left their queries in the query slot
  // window_start of the query window that lies in host memory.
  std::optional<int64_t> host_window_start;
  int64_t num_host_blocks = 0;
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
  // Queries of tokens [first_query, num_tokens) go to rows window_row, window_row + 1, … of the
  // query-window pool: those in the window of the last block that the tokens reach. An earlier
  // block's window is never needed again.
  int64_t first_query = 0;
  int64_t window_row = 0;
};

// A compression of the last applied plan, and what was known about the sequence before it.
struct CompressionWork {
  SequenceSlot sequence_slot = 0;
  QuerySlot query_slot = 0;
  std::vector<BlockId> source_table;  // full
  std::vector<BlockId> target_table;  // its last block stays empty
  int64_t num_pinned = 0;
  uint32_t round = 0;            // compressions before this one
  int64_t new_prompt_slots = 0;  // slots of prompt tokens that came since the last one
  uint64_t seed = 0;
  uint32_t sample_index = 0;
};

// A swap of the last applied plan.
struct SwapWork {
  SequenceSlot sequence_slot = 0;
  bool to_host = false;
  std::vector<BlockId> blocks;          // of the device
  std::optional<QuerySlot> query_slot;  // whose window is copied too
};

class SequenceStates {
 public:
  struct Limits {
    int max_num_seqs = 0;
    int block_size = 0;
    int64_t num_blocks = 0;
    int64_t num_host_blocks = 0;  // of all swapped sequences together
    int64_t num_query_slots = 0;  // 0: nothing can be compressed
    int window = 0;               // w of DESIGN 5, at most block_size
    int sink_len = 0;             // leading slots that every compression keeps
    int64_t vocab_size = 0;
    int64_t max_position = 0;  // positions are below
    int64_t max_tokens = 0;    // rows of a step
  };

  explicit SequenceStates(const Limits& limits);

  // Applies the deltas in the order of StepPlan, then moves every slot that runs forward: the state
  // is that of the end of the step, compressions included.
  absl::Status Apply(const StepPlan& plan);
  // What the last applied plan asks for; valid until the next Apply. To be done in this order:
  // swaps in their order, compressions, then all rows together (decoding slots in ascending order,
  // then chunks in the order of the plan).
  const std::vector<SwapWork>& swaps() const { return swaps_; }
  const std::vector<CompressionWork>& compressions() const { return compressions_; }
  const std::vector<StepRow>& rows() const { return rows_; }

  const SequenceState& at(SequenceSlot slot) const { return sequences_[slot]; }
  // Counts a token that was sampled for the slot. REQUIRES: it samples in the last applied plan.
  void AppendOutput(SequenceSlot slot, TokenId token);

 private:
  // sequence_state.cc
  absl::Status ApplyDeltas(const StepPlan& plan);
  absl::Status Release(SequenceSlot slot);
  absl::Status Add(const NewSequence& added);
  absl::Status AppendBlock(const AppendedBlock& appended);
  absl::Status RunDecoding(const StepPlan& plan);
  absl::Status RunChunk(const PrefillChunk& chunk);
  absl::Status Run(SequenceSlot slot, int64_t num_tokens, StepRow* row);
  absl::Status CheckUsed(SequenceSlot slot, const char* what) const;
  absl::Status CheckBlock(SequenceSlot slot, BlockId block) const;
  // sequence_moves.cc
  absl::Status GrantQuerySlot(const QuerySlotGrant& grant);
  void ReturnQuerySlot(SequenceState* sequence);
  absl::Status SwapToHost(const Swap& swap);
  absl::Status SwapToDevice(const Swap& swap);
  absl::Status CheckGrantsOfSwapped(const StepPlan& plan) const;
  absl::Status Compress(const Compression& compression);
  absl::Status CheckTables(const Compression& compression) const;
  absl::Status CheckKept(const Compression& compression) const;
  absl::Status Pause(SequenceSlot slot);
  absl::Status Resume(SequenceSlot slot);
  // kInternal with the step before the message.
  template <typename... Args>
  absl::Status Mismatch(const Args&... args) const {
    return absl::InternalError(absl::StrCat("step ", step_, ": ", args...));
  }

  Limits limits_;
  uint64_t step_ = 0;
  std::vector<SequenceState> sequences_;                        // [max_num_seqs]
  std::vector<std::optional<SequenceSlot>> query_slot_owners_;  // [num_query_slots]
  int64_t num_host_blocks_ = 0;                                 // in use
  std::vector<SwapWork> swaps_;
  std::vector<CompressionWork> compressions_;
  std::vector<StepRow> rows_;
  int64_t num_rows_tokens_ = 0;
  std::vector<std::vector<TokenId>> prefilled_;  // tokens that rows_ may still point to
};

}  // namespace zipage
