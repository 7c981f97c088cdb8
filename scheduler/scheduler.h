#pragma once
// One step at a time: who decodes, which chunks are prefilled, who is compressed, who is admitted,
// who is preempted, under a token budget, a number of sequence and query slots and a pool of
// blocks. Owns the requests and their sequences, both kinds of slots, and the steps in flight.
// Values in, values out: no clock, socket, log or device. Scheduler thread only.
//
// Steps run ahead: Schedule may be called again before the result of the last plan has come.
// Lengths grow by one with every planned sample; a sequence whose end is known from its length is
// not planned again. An end that only the token tells (stop token, stop string, corruption, cancel)
// is noticed by Apply or the engine, and what was planned after it is dropped when its result
// comes. Slots and blocks are free for others the moment a sequence leaves, because every plan
// carries all releases so far and workers apply them first, in the order of the plans. The oldest
// running sequence is never preempted while others run, and Submit accepts only what fits the whole
// pool, so it ends, and after it the next.
//
// With compression a sequence's blocks are bounded, so they can be guaranteed: in order of
// admission, sequences that have a query slot (or never need one) are guaranteed their
// CompressionPlan::MaxBlocks as long as the sum fits the pool. The others (enable_hybrid_engine)
// run while blocks are free, are suspended where their query window begins if they have no query
// slot, and are preempted first, newest first. A guaranteed sequence finds a block whenever it
// needs one. With an adaptive budget sequences keep more than that while nobody needs the blocks.

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "proto/messages.h"
#include "proto/status.h"
#include "scheduler/admission.h"
#include "scheduler/block_manager.h"
#include "scheduler/compression_plan.h"
#include "scheduler/request.h"

namespace zipage {

struct SchedulerOptions {
  int max_num_seqs = 0;            // Sequence slots.
  int max_num_batched_tokens = 0;  // Tokens of a step, at least max_num_seqs.
  int block_size = 0;
  int64_t num_blocks = 0;           // Of the KV pool.
  int64_t max_model_len = 0;        // Positions of a sequence, at least 2.
  bool enable_prefix_cache = true;  // Off: blocks are shared within a request only.
  BlockHash block_hash = &Xxh3BlockHash;
  CompressionOptions compression;
  int64_t num_query_slots = 0;   // At least 1 with compression.
  int64_t num_host_blocks = 0;   // Blocks of swapped sequences that host memory takes.
  bool enable_hybrid = true;     // Admit sequences whose blocks are not guaranteed.
  bool adaptive_budget = false;  // Compress only when blocks are wanted.
};

// A token that became known. One for each sequence at most in an Apply.
struct TokenEvent {
  Sequence* sequence = nullptr;
  TokenId token = 0;
  std::vector<TokenLogprob> logprobs;  // As in SampledToken.
  // False for a stop token: it counts as output, but its text does not.
  bool in_text = true;
};

// Counts since the scheduler was made, and the state of now.
struct SchedulerStats {
  int64_t num_running = 0;  // Sequences.
  int64_t num_waiting = 0;
  int64_t peak_running = 0;
  int64_t num_blocks = 0;
  int64_t num_free_blocks = 0;
  int64_t num_cached_blocks = 0;
  int64_t num_used_blocks = 0;
  int64_t num_preemptions = 0;
  int64_t prompt_tokens = 0;      // Prefilled, recomputation included, prefix hits not.
  int64_t cached_tokens = 0;      // Prompt tokens that were prefix hits at a first admission.
  int64_t recomputed_tokens = 0;  // Prefilled again after a preemption.
  int64_t output_tokens = 0;
  int64_t num_query_slots = 0;
  int64_t num_used_query_slots = 0;
  int64_t num_swapped = 0;  // Sequences whose blocks are in host memory.
  int64_t num_swaps_out = 0;
  int64_t num_suspensions = 0;
  int64_t num_compressions = 0;
};

class Scheduler {
 public:
  // REQUIRES: options in the ranges that Validate(Config) accepts.
  explicit Scheduler(const SchedulerOptions& options);

  // kInvalidArgument, with the numbers and the cure, for a prompt that cannot run: it is empty, or
  // it and one output token are longer than max_model_len, or it needs more blocks than the whole
  // pool has before it is compressed.
  absl::Status CheckFits(int64_t num_prompt_tokens, const RequestOptions& options = {}) const;
  // Queues the request's sequences. They end, for kLength, at the least of prompt + max_tokens,
  // max_model_len and, if they cannot be compressed, the pool's positions. REQUIRES: CheckFits is
  // OK; an id not used before.
  void Submit(std::unique_ptr<Request> request);

  // From now on only sequences of requests that were started already are admitted: the engine
  // drains.
  void StopAdmission() { admission_.Stop(); }

  // The next step, or nothing if there is nothing to do until a result comes or a request is
  // submitted. The plan must be sent. A plan may hold
  // nothing but releases.
  std::optional<StepPlan> Schedule();

  // Applies rank 0's result of the oldest step in flight; events come in the order of the result.
  // Sequences that end by it are finished on return; a corrupted one has no event. kInternal, and
  // nothing is changed, if it is the result of another step or not that of its plan.
  absl::StatusOr<std::vector<TokenEvent>> Apply(StepResult result);

  // Ends the sequence; results of it that are in flight are dropped when they come. One that is
  // finished already gets the new reason (a stop string in the token that was the last by length).
  void FinishSequence(Sequence* sequence, FinishReason reason);
  // Ends all sequences of a job with kCancelled.
  void CancelJob(uint64_t job_id);

  // The workers are new and know nothing: steps in flight are forgotten, steps count from 1 again,
  // and sequences that ran wait with the tokens they have. Those that were compressed are computed
  // again with compressions at the same points, so their next tokens are the same.
  void StartEpoch();

  // The requests whose sequences are all finished and mentioned by no step in flight, in the order
  // in which they got there. Their sequences must have no pointers left after it.
  std::vector<std::unique_ptr<Request>> TakeFinished();

  // Sequences of the job that wait.
  int64_t num_waiting(uint64_t job_id) const { return admission_.num_waiting(job_id); }
  int64_t num_steps_in_flight() const { return static_cast<int64_t>(in_flight_.size()); }
  // Nothing to do: Schedule would return nothing, and no result is due.
  bool idle() const {
    return running_.empty() && in_flight_.empty() && released_.empty() &&
           open_compressions_.empty() && admission_.Next() == nullptr;
  }
  SchedulerStats stats() const;
  // Of everything in this folder. O(blocks + sequences + their tables).
  void CheckInvariants() const;

 private:
  struct Sample {
    SequenceSlot sequence_slot = 0;
    Sequence* sequence = nullptr;
  };
  struct StepInFlight {
    uint64_t step = 0;
    std::vector<Sample> samples;
  };
  // A compression that no result has named yet.
  struct OpenCompression {
    SequenceSlot sequence_slot = 0;
    Sequence* sequence = nullptr;  // Null if it has ended.
    int64_t kept_slots = 0;
  };
  // What a waiting sequence takes to run.
  struct Needs {
    PrefixMatch match;
    int64_t num_blocks = 0;   // Of its table.
    int64_t num_taken = 0;    // Available blocks among them.
    bool guaranteed = false;  // Its MaxBlocks can be reserved.
  };

  void ResetSlots();
  void ReleaseFullyPlanned();
  // Hands query slots and guarantees to running sequences, oldest first.
  void Grant(StepPlan* plan);
  // Plans compressions and the decode of every decoding sequence; true if somebody was preempted.
  bool PlanRunning(StepPlan* plan, std::vector<Sample>* samples);
  // Makes the sequence ready for its next position: resumes it, compresses it, or gives it a block.
  // False if it does not run in this step, because it is held or was preempted.
  bool MakeReady(Sequence* sequence, StepPlan* plan, bool* preempted);
  // False if it is held, or was preempted, for want of blocks.
  bool Compress(Sequence* sequence, StepPlan* plan, bool* preempted);
  // Whether a due sequence is compressed now; always, unless its budget is adaptive.
  bool MustCompress(const Sequence& sequence) const;
  void PlanDecode(Sequence* sequence, StepPlan* plan, std::vector<Sample>* samples);
  void PlanChunk(Sequence* sequence, int64_t* token_budget, StepPlan* plan,
                 std::vector<Sample>* samples);
  void AdmitWaiting(int64_t* token_budget, StepPlan* plan, std::vector<Sample>* samples);
  // Empty if the sequence cannot run now.
  std::optional<Needs> CanAdmit(const Sequence& sequence);
  void Admit(Sequence* sequence, const Needs& needs, StepPlan* plan);
  void PlanSample(Sequence* sequence, std::vector<Sample>* samples);
  void GrantQuerySlot(Sequence* sequence, StepPlan* plan);

  absl::Status MatchSamples(const StepResult& result, std::vector<Sequence*>* sequences);
  absl::Status MatchCompressions(const StepResult& result) const;
  void ApplyCompression(const FinishedCompression& finished);
  void AppendToken(Sequence* sequence, SampledToken* sampled, std::vector<TokenEvent>* events);
  // Gets a block for a sequence that found none available: by preempting the newest sequence. False
  // if `sequence` must do without: it is delayed, or the newest itself.
  bool MakeRoom(Sequence* sequence, StepPlan* plan, bool* preempted);
  // The sequence sits out from now on.
  static void Pause(Sequence* sequence, Hold hold, StepPlan* plan);
  void Preempt(Sequence* sequence, StepPlan* plan);
  // Waits again, with the tokens it has and nothing computed.
  static void ForgetComputed(Sequence* sequence);
  // Gives back slots and blocks of a sequence that is no longer in running_.
  void GiveBack(Sequence* sequence);
  void GiveBackBlocks(Sequence* sequence);
  void GiveBackSequenceSlot(Sequence* sequence);
  void ForgetCompressionsOf(Sequence* sequence);
  // The sequence ends with the tokens it has.
  void ForgetSurplus(Sequence* sequence);
  void RemoveFromRunning(Sequence* sequence);
  void SetMaxLength(Sequence* sequence) const;
  void NoteIfSettled(const Request& request);
  void CheckRunning(const Sequence& sequence) const;

  SchedulerOptions options_;
  CompressionPlan compression_;
  BlockManager blocks_;
  Admission admission_;
  std::map<uint64_t, std::unique_ptr<Request>> requests_;
  std::vector<uint64_t> settled_;   // Request ids for TakeFinished.
  std::vector<Sequence*> running_;  // Prefilling or decoding, in order of admission.
  std::vector<SequenceSlot> free_slots_;
  std::vector<QuerySlot> free_query_slots_;
  int64_t num_used_host_blocks_ = 0;
  std::deque<OpenCompression> open_compressions_;  // In the order of their plans.
  // As of the last Grant, and kept up to date by Admit: blocks reserved for guaranteed sequences,
  // and whether those are all that run.
  int64_t num_reserved_blocks_ = 0;
  bool all_guaranteed_ = true;
  // For an adaptive budget: reserved blocks that are not held yet, mean blocks of the tables that
  // are over their budget, and whether a sequence waits for blocks.
  int64_t num_owed_blocks_ = 0;
  int64_t mean_excessive_blocks_ = 0;
  bool blocks_are_wanted_ = false;
  std::vector<SequenceSlot> released_;  // To be sent with the next plan.
  std::deque<StepInFlight> in_flight_;
  std::vector<Sequence*> sample_of_slot_;  // Scratch of MatchSamples; all null outside of it.
  uint64_t step_ = 0;
  uint64_t num_submitted_ = 0;
  uint64_t num_admitted_ = 0;
  SchedulerStats counts_;  // The counts; the state of now is filled in by stats().
};

}  // namespace zipage
