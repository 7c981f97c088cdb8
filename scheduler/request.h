#pragma once
// A request (one line of a job) and its sequences (one for each of its n samples). Plain state,
// changed by the scheduler alone; the engine reads it. Scheduler thread only.

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "proto/messages.h"
#include "scheduler/block_manager.h"

namespace zipage {

enum class SequenceState {
  kWaiting,     // In its job's queue: never admitted, or preempted. Holds no block and no slot.
  kPrefilling,  // Holds a sequence slot and blocks; not all of its tokens have been planned.
  kDecoding,    // Holds a sequence slot and blocks; gets a token in every step.
  kDraining,    // Its last token is planned; slot and blocks are given back, results are still due.
  kFinished,
};

enum class FinishReason {
  kStopToken,   // An id of SamplingParams::stop_token_ids, which is the last of `tokens`.
  kStopString,  // Found by the engine in the text.
  kLength,      // max_tokens, max_model_len, or the size of the KV pool.
  kCancelled,
  kCorrupted,  // The worker's logits were not numbers.
};

// OpenAI's finish_reason: "stop" or "length"; "cancelled" and "corrupted" are errors, named for
// them.
std::string_view FinishReasonName(FinishReason reason);

struct Request;

struct Sequence {
  Request* request = nullptr;
  int32_t sample_index = 0;
  SequenceState state = SequenceState::kWaiting;
  std::optional<FinishReason> finish_reason;  // Set when finished.

  std::vector<TokenId> tokens;  // Prompt, then output as far as results have come.
  int64_t num_prompt_tokens = 0;
  int64_t max_length = 0;     // The sequence ends at this many tokens.
  int64_t num_in_flight = 0;  // Planned samples whose results have not come.
  // Positions whose keys and values are in its blocks once every planned step is done.
  int64_t num_computed = 0;
  BlockTable block_table;
  std::optional<SequenceSlot> sequence_slot;

  uint64_t arrival = 0;          // Order of submission over all jobs.
  uint64_t admission_order = 0;  // From 1, new with every admission; 0 before the first.
  uint64_t cache_salt = 0;       // Sequences share blocks with those of equal salt.
  int64_t num_recomputable = 0;  // Positions that were computed before the last preemption.

  int64_t num_preemptions = 0;
  // For the usage record: prompt tokens that were prefix hits at the first admission.
  int64_t num_cached_tokens = 0;

  bool finished() const { return state == SequenceState::kFinished; }
  // Output so far; a stop token is the last of it, and no part of the text.
  std::span<const TokenId> output() const {
    return std::span<const TokenId>(tokens).subspan(num_prompt_tokens);
  }
  // Tokens once every planned step is done.
  int64_t planned_length() const { return static_cast<int64_t>(tokens.size()) + num_in_flight; }
  // The next token cannot be planned: the last one is.
  bool fully_planned() const { return planned_length() >= max_length; }
};

struct Request {
  // REQUIRES: a prompt that is not empty, n >= 1.
  Request(uint64_t id, uint64_t job_id, const std::vector<TokenId>& prompt, SamplingParams sampling,
          int n);
  // Sequences point to their request.
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  const uint64_t id;  // Unique over the life of the scheduler.
  const uint64_t job_id;
  const SamplingParams sampling;
  std::vector<Sequence> sequences;  // By sample index.

  std::span<const TokenId> prompt() const {
    return std::span<const TokenId>(sequences[0].tokens).first(sequences[0].num_prompt_tokens);
  }
  // A sequence was admitted: the first of them, since they are admitted in their order.
  bool started() const { return sequences[0].admission_order != 0; }
  // All sequences are finished. Results of theirs may still be in flight.
  bool finished() const;
  // All sequences are finished and no step in flight mentions them.
  bool settled() const;
};

}  // namespace zipage
