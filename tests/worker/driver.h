#pragma once
// Plays the scheduler for the ranks of a test.

#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "proto/messages.h"
#include "tests/worker/ranks.h"

namespace zipage {

// A request of a test.
struct TestRequest {
  std::vector<TokenId> prompt;
  SamplingParams sampling;
  uint32_t sample_index = 0;
  int64_t chunk_size = 1 << 20;  // of prefill
  std::vector<TokenId> output;   // so far
  std::vector<BlockId> prefix;   // blocks that hold the first tokens already
  int64_t budget = 0;            // blocks that a compression keeps; 0: never compressed
  bool pauses = false;           // while it is compressed, and some steps longer
  bool late_query_slot = false;  // gets it right before its query window begins, else at once
  // Set by the driver.
  SequenceSlot slot = -1;
  std::vector<BlockId> table;
  int64_t num_cached = 0;  // slots of the table that are in use
  int64_t position = 0;    // of the next token
  int64_t num_compressions = 0;
  std::optional<QuerySlot> query_slot;
  int64_t num_paused_steps = 0;  // that are left; 0: runs
  int64_t num_host_blocks = 0;   // of a swapped request
  bool decodes = false;
  bool corrupted = false;
  std::vector<SampledToken> samples;
  std::vector<float> prompt_tokens_kept;  // of every compression
};

// Plays the scheduler: every added request runs in every step, unless it is paused or swapped, and
// is compressed when its budget is full. Block ids, query slots, blocks that a compression packs
// in place and lengths of pauses are drawn at random. Blocks and query slots that nobody has are
// full of NaN after every step.
class Driver {
 public:
  Driver(Ranks* ranks, uint32_t seed);

  void Add(TestRequest* request);
  void Release(TestRequest* request);
  // With the next step: to host memory and, in any later step, back.
  void SwapOut(TestRequest* request);
  void SwapIn(TestRequest* request);
  // One step; appends to the requests' outputs.
  void Step();
  // The request is compressed before its next token.
  bool IsDue(const TestRequest& request) const;
  // Slots at which its next compression is due, if it has a budget.
  int64_t NextPoint(const TestRequest& request) const;
  // Steps until every added request has max_tokens outputs, each released when it has.
  void RunToEnd();

 private:
  void Grow(TestRequest* request, int64_t num_tokens, StepPlan* plan);
  void Compress(TestRequest* request, StepPlan* plan);
  // Puts the request's next tokens into the plan.
  void RunNext(TestRequest* request, StepPlan* plan);
  void GrantQuerySlot(TestRequest* request, StepPlan* plan);
  void ReturnQuerySlot(TestRequest* request);
  BlockId TakeBlock();
  // A running request has it as prefix: it is neither written nor ever free again.
  bool IsShared(BlockId block) const;
  void GiveBlocks(const std::vector<BlockId>& blocks);
  void Apply(const StepResult& result);
  void PoisonWhatIsFree();

  Ranks* ranks_;
  std::vector<BlockId> free_blocks_;
  std::vector<QuerySlot> free_query_slots_;
  std::vector<BlockId> given_blocks_;         // since the last step
  std::vector<QuerySlot> given_query_slots_;  // since the last step
  std::vector<SequenceSlot> free_slots_;
  std::vector<TestRequest*> running_;
  StepPlan plan_;  // the next one, under construction
  std::mt19937 random_;
};

}  // namespace zipage
