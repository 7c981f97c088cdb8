#pragma once
// A worker whose model is fake_model.h: it keeps per slot what a real one keeps from the deltas,
// a KV pool and query windows. It fails the test when a plan is not what a worker can execute, when
// what a plan does depends on how fast a compression beside the steps is, and when a sequence would
// attend to anything but its own history.

#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <vector>

#include "proto/messages.h"
#include "tests/scheduler/fake_model.h"

namespace zipage {

struct FakeWorkerOptions {
  int max_num_seqs = 0;
  int max_num_batched_tokens = 0;
  int block_size = 0;
  int64_t num_blocks = 0;
  int64_t num_query_slots = 0;
  int64_t num_host_blocks = 0;
  int window = 0;
  bool pin_prompt = false;
  // A compression of a paused slot is reported up to so many steps after its own.
  int max_compression_delay = 0;
  uint64_t delay_seed = 0;
};

class FakeWorker {
 public:
  explicit FakeWorker(const FakeWorkerOptions& options);

  // Executes a plan whose results nobody waits for in between, as under run-ahead.
  StepResult Execute(const StepPlan& plan);
  // Makes the next sample of this slot come out corrupted.
  void CorruptNext(SequenceSlot slot) { corrupt_ = slot; }

  size_t num_slots() const { return slots_.size(); }
  size_t num_used_query_slots() const { return query_slot_owners_.size(); }
  int64_t num_used_host_blocks() const { return num_host_blocks_; }
  // Compressions that no result has named.
  size_t num_unreported() const { return compressions_.size(); }
  // Blocks that somebody got while a compression that reads or writes them was not reported: a
  // worker that compresses beside the steps has to order the writes.
  int64_t num_ordered_blocks() const { return num_ordered_blocks_; }

 private:
  struct QueryRow {
    uint64_t life = 0;  // 0 was never written.
    int64_t position = 0;
    uint64_t query = 0;
  };
  struct HostCopy {
    std::vector<uint64_t> pool;                         // [blocks, block_size]
    std::optional<std::vector<QueryRow>> query_window;  // [window]
  };
  struct Slot {
    uint64_t life = 0;  // Unique: a slot's next sequence has another.
    std::vector<TokenId> tokens;
    int64_t num_prompt_tokens = 0;
    int64_t position = 0;            // Of the next token that is computed.
    std::vector<uint64_t> contents;  // What its slots of the pool must hold.
    std::vector<bool> is_prompt;     // [contents]
    std::vector<BlockId> table;
    std::optional<QuerySlot> query_slot;
    uint32_t num_compressions = 0;
    uint32_t sample_index = 0;
    SamplingParams sampling;
    bool decoding = false;
    bool paused = false;
    std::optional<HostCopy> host;  // While it is swapped.

    bool runs() const { return !paused && !host.has_value(); }
  };
  // A compression that no result has named.
  struct Unreported {
    SequenceSlot slot = 0;
    uint64_t life = 0;
    uint64_t ready_step = 0;
    bool done = false;  // It must be: something that came after it in order needs it.
    int64_t prompt_tokens_kept = 0;
    std::set<BlockId> blocks;  // Sources and targets.
  };
  struct Row {  // Of the batch.
    SequenceSlot slot = 0;
    int64_t num_tokens = 0;
    bool samples = false;
  };

  // fake_worker_deltas.cc
  void ApplyDeltas(const StepPlan& plan);
  void Release(SequenceSlot id);
  void AddSequence(const NewSequence& added);
  void GrantQuerySlot(const QuerySlotGrant& grant);
  void ReturnQuerySlot(Slot* slot);
  void SwapToHost(const Swap& swap);
  void SwapToDevice(const Swap& swap);
  void AppendBlock(const AppendedBlock& appended);
  void Compress(const Compression& compression, bool beside_steps);
  void CheckCompression(const Compression& compression);
  void CheckTables(const Compression& compression);
  void CheckQueryWindow(const Compression& compression);
  // What the plan gives to others must not be what a compression of the plan reads.
  void CheckSources(const StepPlan& plan) const;
  void Pause(SequenceSlot id);
  void Resume(SequenceSlot id);
  void Give(BlockId block);
  void CheckBlock(BlockId block) const;
  uint64_t& At(const std::vector<BlockId>& table, int64_t slot) {
    return pool_[int64_t{table[slot / options_.block_size]} * options_.block_size +
                 slot % options_.block_size];
  }

  // fake_worker.cc
  std::vector<Row> BuildBatch(const StepPlan& plan);
  void CheckRuns(SequenceSlot id) const;
  void Write(const Row& row, const std::map<BlockId, int>& num_writers);
  void KeepQuery(const Slot& slot);
  uint64_t Attend(const Row& row);
  void Sample(const Row& row, uint64_t attended, StepResult* result);
  void Report(const StepPlan& plan, StepResult* result);

  FakeWorkerOptions options_;
  std::mt19937_64 rng_;
  uint64_t step_ = 0;
  uint64_t num_lives_ = 0;
  std::map<SequenceSlot, Slot> slots_;
  std::map<QuerySlot, SequenceSlot> query_slot_owners_;
  std::vector<uint64_t> pool_;                        // [num_blocks, block_size]; 0 is unwritten.
  std::vector<std::vector<QueryRow>> query_windows_;  // [num_query_slots, window]
  int64_t num_host_blocks_ = 0;
  std::vector<Unreported> compressions_;  // In the order of the plans.
  std::set<BlockId> given_;               // To tables, by the plan that is executed.
  int64_t num_ordered_blocks_ = 0;
  std::optional<SequenceSlot> corrupt_;
};

}  // namespace zipage
