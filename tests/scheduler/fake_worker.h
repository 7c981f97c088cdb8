#pragma once
// A worker without a model: it keeps per slot what a real one keeps from the deltas, and a KV pool
// whose every position remembers which history was written to it. It fails the test when a plan is
// not what a worker can execute, or when a sequence would attend to anything but its own history.
// Its next token is a function of history, seed and sample index, so a request's output can be
// known without any scheduler.

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "proto/messages.h"

namespace zipage {

struct FakeWorkerOptions {
  int max_num_seqs = 0;
  int max_num_batched_tokens = 0;
  int block_size = 0;
  int64_t num_blocks = 0;
  TokenId vocab_size = 50;
};

class FakeWorker {
 public:
  explicit FakeWorker(const FakeWorkerOptions& options);

  // Executes a plan whose results nobody waits for in between, as under run-ahead.
  StepResult Execute(const StepPlan& plan);
  // Makes the next sample of this slot come out corrupted.
  void CorruptNext(SequenceSlot slot) { corrupt_ = slot; }
  size_t num_slots() const { return slots_.size(); }

  // The token after `tokens`; no stop token before min_tokens.
  static TokenId NextToken(std::span<const TokenId> tokens, int64_t num_prompt_tokens,
                           const SamplingParams& sampling, uint32_t sample_index,
                           TokenId vocab_size);
  // What a request that runs alone puts out, up to `max_length` tokens in all.
  static std::vector<TokenId> OutputAlone(std::vector<TokenId> prompt, int64_t max_length,
                                          const SamplingParams& sampling, uint32_t sample_index,
                                          TokenId vocab_size);

 private:
  struct Slot {
    std::vector<TokenId> tokens;
    std::vector<uint64_t> chain;  // Of histories: chain[p] is a hash of tokens[0..p].
    int64_t num_prompt_tokens = 0;
    int64_t num_cached = 0;
    std::vector<BlockId> table;
    uint32_t sample_index = 0;
    SamplingParams sampling;
    bool decoding = false;
  };
  struct Row {  // Of the batch.
    SequenceSlot slot = 0;
    int64_t start = 0;
    int64_t num_tokens = 0;
    bool samples = false;
  };

  void ApplyDeltas(const StepPlan& plan);
  void AddSequence(const NewSequence& added);
  std::vector<Row> BuildBatch(const StepPlan& plan);
  void Write(const Row& row, const std::map<BlockId, int>& num_writers);
  void Attend(const Row& row);
  void CheckBlock(BlockId block) const;
  static void PushToken(TokenId token, Slot* slot);

  FakeWorkerOptions options_;
  uint64_t step_ = 0;
  std::map<SequenceSlot, Slot> slots_;
  std::vector<uint64_t> pool_;  // Chain hash at every position; 0 was never written.
  std::optional<SequenceSlot> corrupt_;
};

}  // namespace zipage
