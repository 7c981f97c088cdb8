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
#include "scheduler/ngram_guard.h"

namespace zipage {

enum class SequenceState {
  kWaiting,     // In its job's queue: never admitted, or preempted. Holds no block; a sequence slot
                // only if it is swapped to the host.
  kPrefilling,  // Holds a sequence slot and blocks; not all of its tokens have been planned.
  kDecoding,    // Holds a sequence slot and blocks; gets a token in every step, unless it is held.
  kDraining,    // Its last token is planned; slot and blocks are given back, results are still due.
  kFinished,
};

// Why a sequence that holds blocks sits out.
enum class Hold {
  kNone,
  kCompressing,  // Its compression runs beside the steps.
  kCompressed,   // That is done: the next plan resumes it.
  kSuspended,    // Its query window begins and there is no query slot for it.
  kDelayed,      // The blocks it needs are given back by this very plan; the next one resumes it.
};

enum class FinishReason {
  kStopToken,   // An id of SamplingParams::stop_token_ids, which is the last of `tokens`.
  kStopString,  // Found by the engine in the text.
  kLength,      // max_tokens, max_model_len, or the size of the KV pool.
  kRepetition,  // The degeneration guard found a loop.
  kCancelled,
  kCorrupted,  // The worker's logits were not numbers.
};

// OpenAI's finish_reason: "stop" or "length"; "repetition"; "cancelled" and "corrupted" are errors,
// named for them.
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
  // Positions that were computed once every planned step is done.
  int64_t num_computed = 0;
  // Slots of its blocks that hold keys and values then; fewer once it is compressed.
  int64_t num_slots = 0;
  BlockTable block_table;
  std::optional<SequenceSlot> sequence_slot;
  std::optional<QuerySlot> query_slot;
  int64_t num_open_compressions = 0;  // Planned ones that no result has named yet.
  Hold hold = Hold::kNone;
  int64_t num_host_blocks = 0;  // While it is swapped to the host: the blocks of its table.
  bool guaranteed = false;      // Its blocks up to CompressionPlan::MaxBlocks are reserved.
  // Of what its blocks hold: 0 again when it is recomputed, until it has ended.
  int64_t num_compressions = 0;
  int64_t most_compressions = 0;  // That it ever had; a recomputation repeats the same ones.
  int64_t last_compression = 0;   // num_computed at the last of those.

  uint64_t arrival = 0;          // Order of submission over all jobs.
  uint64_t admission_order = 0;  // From 1, new with every admission; 0 before the first.
  uint64_t cache_salt = 0;       // Sequences share blocks with those of equal salt.
  int64_t num_recomputable = 0;  // Positions that were computed before the last preemption.

  int64_t num_preemptions = 0;
  // For the usage record: most slots that held keys and values, and prompt tokens among them after
  // the last compression, mean over layers and KV heads.
  int64_t peak_slots = 0;
  float prompt_tokens_kept = 0;
  int64_t kept_slots = 0;  // By the last compression that was reported; 0: none was.
  // For the usage record: prompt tokens that were prefix hits at the first admission.
  int64_t num_cached_tokens = 0;

  std::optional<NgramGuard> guard;  // Until it ends, if its request asks for one.

  bool finished() const { return state == SequenceState::kFinished; }
  bool runs() const {
    return state == SequenceState::kPrefilling || state == SequenceState::kDecoding;
  }
  bool swapped() const { return num_host_blocks > 0; }
  // Output so far; a stop token is the last of it, and no part of the text.
  std::span<const TokenId> output() const {
    return std::span<const TokenId>(tokens).subspan(num_prompt_tokens);
  }
  // Tokens once every planned step is done.
  int64_t planned_length() const { return static_cast<int64_t>(tokens.size()) + num_in_flight; }
  // The next token cannot be planned: the last one is.
  bool fully_planned() const { return planned_length() >= max_length; }
};

// What a request may ask for besides its sampling.
struct RequestOptions {
  // Full blocks its sequences keep after a compression; empty takes the engine's.
  std::optional<int> max_cache_blocks;
  // Tokens of an n-gram, and its occurrences in the output that end a sequence; size 0 is off.
  int repetition_ngram_size = 0;
  int repetition_ngram_count = 0;
};

struct Request {
  // REQUIRES: a prompt that is not empty, n >= 1.
  Request(uint64_t id, uint64_t job_id, const std::vector<TokenId>& prompt, SamplingParams sampling,
          int n, const RequestOptions& options = {});
  // Sequences point to their request.
  Request(const Request&) = delete;
  Request& operator=(const Request&) = delete;

  const uint64_t id;  // Unique over the life of the scheduler.
  const uint64_t job_id;
  const SamplingParams sampling;
  const RequestOptions options;
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
