// How sequences stop running without having ended: preemption, swaps to the host, a new epoch.

#include <glog/logging.h>

#include <algorithm>
#include <set>
#include <utility>

#include "scheduler/scheduler.h"

namespace zipage {

bool Scheduler::MakeRoom(Sequence* sequence, StepPlan* plan, bool* preempted) {
  if (blocks_.num_retiring() > 0) {
    Pause(sequence, Hold::kDelayed, plan);
    return false;
  }
  *preempted = true;
  Sequence* victim = Admission::Victim(running_);
  CHECK(!victim->guaranteed || options_.adaptive_budget)
      << "request " << victim->request->id << " is guaranteed its blocks";
  Preempt(victim, plan);
  return victim != sequence;
}

void Scheduler::Preempt(Sequence* sequence, StepPlan* plan) {
  const SequenceSlot slot = *sequence->sequence_slot;
  std::erase_if(plan->query_slots,
                [slot](const QuerySlotGrant& grant) { return grant.sequence_slot == slot; });
  std::erase(plan->resumed, slot);
  const auto num_blocks = static_cast<int64_t>(sequence->block_table.blocks.size());
  // Others are computed again: young ones are short, and the prefix cache may still know them.
  const bool swap = sequence->state == SequenceState::kDecoding &&
                    (sequence->num_compressions > 0 || sequence->hold == Hold::kSuspended) &&
                    num_used_host_blocks_ + num_blocks <= options_.num_host_blocks;
  sequence->state = SequenceState::kWaiting;
  ++sequence->num_preemptions;
  ++counts_.num_preemptions;
  admission_.Enqueue(sequence);
  RemoveFromRunning(sequence);
  if (swap) {
    plan->swaps.push_back({slot, /*to_host=*/true, sequence->block_table.blocks});
    sequence->num_host_blocks = num_blocks;
    num_used_host_blocks_ += num_blocks;
    ++counts_.num_swaps_out;
    GiveBackBlocks(sequence);
  } else {
    GiveBack(sequence);
    ForgetComputed(sequence);
  }
}

void Scheduler::ForgetComputed(Sequence* sequence) {
  sequence->num_recomputable = std::max(sequence->num_recomputable, sequence->num_computed);
  sequence->num_computed = 0;
  sequence->num_slots = 0;
  sequence->num_compressions = 0;
}

void Scheduler::GiveBack(Sequence* sequence) {
  GiveBackBlocks(sequence);
  GiveBackSequenceSlot(sequence);
}

void Scheduler::GiveBackBlocks(Sequence* sequence) {
  if (sequence->query_slot.has_value()) free_query_slots_.push_back(*sequence->query_slot);
  sequence->query_slot.reset();
  sequence->hold = Hold::kNone;
  sequence->guaranteed = false;
  blocks_.Release(&sequence->block_table);
  admission_.Leave(*sequence);
}

void Scheduler::GiveBackSequenceSlot(Sequence* sequence) {
  released_.push_back(*sequence->sequence_slot);
  free_slots_.push_back(*sequence->sequence_slot);
  sequence->sequence_slot.reset();
}

void Scheduler::RemoveFromRunning(Sequence* sequence) {
  const auto it =
      std::ranges::lower_bound(running_, sequence->admission_order, {}, &Sequence::admission_order);
  CHECK(it != running_.end() && *it == sequence) << "request " << sequence->request->id;
  running_.erase(it);
}

void Scheduler::StartEpoch() {
  step_ = 0;
  in_flight_.clear();
  released_.clear();
  open_compressions_.clear();
  ResetSlots();
  num_used_host_blocks_ = 0;
  running_.clear();
  std::set<const Request*> draining;
  for (const auto& [id, request] : requests_) {
    for (Sequence& sequence : request->sequences) {
      const bool was_in_flight = std::exchange(sequence.num_in_flight, 0) > 0;
      sequence.sequence_slot.reset();
      sequence.query_slot.reset();
      sequence.num_open_compressions = 0;
      if (sequence.finished()) {
        if (was_in_flight) draining.insert(request.get());
        continue;
      }
      sequence.num_host_blocks = 0;
      sequence.hold = Hold::kNone;
      sequence.guaranteed = false;
      if (sequence.runs()) admission_.Leave(sequence);
      if (sequence.state != SequenceState::kWaiting) admission_.Enqueue(&sequence);
      sequence.state = SequenceState::kWaiting;
      ForgetComputed(&sequence);
      sequence.block_table = BlockTable();
    }
  }
  blocks_ = BlockManager(options_.num_blocks, options_.block_size, options_.block_hash);
  for (const Request* request : draining) NoteIfSettled(*request);
}

}  // namespace zipage
