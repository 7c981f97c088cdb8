#include "scheduler/scheduler.h"

#include <glog/logging.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"

namespace zipage {

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options),
      compression_(options.compression, options.block_size),
      blocks_(options.num_blocks, options.block_size, options.block_hash),
      sample_of_slot_(options.max_num_seqs) {
  CHECK_GE(options.max_num_seqs, 1);
  CHECK_GE(options.max_num_batched_tokens, options.max_num_seqs) << "every sequence must decode";
  CHECK_GE(options.max_model_len, 2);
  if (compression_.enabled()) {
    CHECK_GE(options.num_query_slots, 1);
    CHECK(options.compression.window >= 1 && options.compression.window <= options.block_size);
  }
  ResetSlots();
}

void Scheduler::ResetSlots() {
  free_slots_.clear();
  for (SequenceSlot slot = options_.max_num_seqs; slot-- > 0;) free_slots_.push_back(slot);
  free_query_slots_.clear();
  for (auto slot = static_cast<QuerySlot>(options_.num_query_slots); slot-- > 0;) {
    free_query_slots_.push_back(slot);
  }
}

absl::Status Scheduler::CheckFits(int64_t num_prompt_tokens, const RequestOptions& options) const {
  if (num_prompt_tokens < 1) {
    return absl::InvalidArgumentError("the prompt has no tokens; give at least one");
  }
  if (num_prompt_tokens + 1 > options_.max_model_len) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the prompt has %d tokens, and with one output token is longer than max_model_len %d; "
        "shorten the prompt or raise max_model_len",
        num_prompt_tokens, options_.max_model_len));
  }
  const int64_t num_positions = blocks_.num_blocks() * blocks_.block_size();
  if (compression_.enabled() &&
      compression_.FirstPoint(num_prompt_tokens, options) <= num_positions) {
    return absl::OkStatus();
  }
  if (num_prompt_tokens + 1 > num_positions) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "the prompt has %d tokens, and with one output token is longer than the KV cache of %d "
        "blocks "
        "of %d, %d positions; shorten the prompt or raise num_kvcache_blocks or kv_cache_memory_gb",
        num_prompt_tokens, blocks_.num_blocks(), blocks_.block_size(), num_positions));
  }
  return absl::OkStatus();
}

void Scheduler::SetMaxLength(Sequence* sequence) const {
  const int64_t num_positions = blocks_.num_blocks() * blocks_.block_size();
  sequence->max_length = std::min(
      sequence->num_prompt_tokens + sequence->request->sampling.max_tokens, options_.max_model_len);
  if (!compression_.enabled() || compression_.FirstPoint(*sequence) > num_positions) {
    sequence->max_length = std::min(sequence->max_length, num_positions);
  }
}

void Scheduler::Submit(std::unique_ptr<Request> request) {
  CHECK(CheckFits(static_cast<int64_t>(request->prompt().size()), request->options).ok());
  CHECK_GE(request->sampling.max_tokens, 1);
  for (Sequence& sequence : request->sequences) {
    sequence.arrival = ++num_submitted_;
    sequence.cache_salt = options_.enable_prefix_cache ? 0 : request->id;
    SetMaxLength(&sequence);
    if (request->options.repetition_ngram_size > 0) {
      sequence.guard.emplace(request->options.repetition_ngram_size,
                             request->options.repetition_ngram_count);
    }
    admission_.Enqueue(&sequence);
  }
  const uint64_t id = request->id;
  CHECK(requests_.emplace(id, std::move(request)).second) << "request id " << id << " is not new";
}

std::optional<StepPlan> Scheduler::Schedule() {
  StepPlan plan;
  std::vector<Sample> samples;
  samples.reserve(running_.size());

  ReleaseFullyPlanned();
  Grant(&plan);
  const bool preempted = PlanRunning(&plan, &samples);
  int64_t token_budget = options_.max_num_batched_tokens - static_cast<int64_t>(plan.num_decoding);
  for (Sequence* sequence : running_) {
    if (token_budget == 0) break;
    if (sequence->state == SequenceState::kPrefilling && sequence->hold == Hold::kNone) {
      PlanChunk(sequence, &token_budget, &plan, &samples);
    }
  }
  // Who is admitted into the blocks of a victim is likely the next one.
  if (!preempted) AdmitWaiting(&token_budget, &plan, &samples);
  blocks_.Retire();
  plan.released = std::exchange(released_, {});
  if (plan == StepPlan()) {
    // Without a step the worker has no result to name a finished compression in.
    if (open_compressions_.empty() || !in_flight_.empty()) return std::nullopt;
  }
  plan.step = ++step_;
  in_flight_.push_back({plan.step, std::move(samples)});
  counts_.peak_running = std::max(counts_.peak_running, static_cast<int64_t>(running_.size()));
#ifndef NDEBUG
  CheckInvariants();
#endif
  return plan;
}

void Scheduler::ReleaseFullyPlanned() {
  std::erase_if(running_, [this](Sequence* sequence) {
    if (!sequence->fully_planned()) return false;
    GiveBack(sequence);
    sequence->state = SequenceState::kDraining;
    return true;
  });
}

// ---------------------------------------------------------------- running sequences

void Scheduler::Grant(StepPlan* plan) {
  num_reserved_blocks_ = 0;
  all_guaranteed_ = compression_.enabled();
  if (!compression_.enabled()) return;
  num_owed_blocks_ = 0;
  int64_t num_excessive = 0;
  int64_t excessive_blocks = 0;
  for (Sequence* sequence : running_) {
    const bool needs_slot = compression_.MayCompress(*sequence);
    if (needs_slot && !sequence->query_slot.has_value() && !free_query_slots_.empty()) {
      GrantQuerySlot(sequence, plan);
    }
    const int64_t max_blocks = compression_.MaxBlocks(*sequence);
    const auto num_blocks = static_cast<int64_t>(sequence->block_table.blocks.size());
    // In order of admission without a gap, so that an old sequence with a large budget gets its
    // turn.
    all_guaranteed_ = all_guaranteed_ && (!needs_slot || sequence->query_slot.has_value()) &&
                      num_reserved_blocks_ + max_blocks <= blocks_.num_blocks();
    sequence->guaranteed = all_guaranteed_;
    if (all_guaranteed_) {
      num_reserved_blocks_ += max_blocks;
      num_owed_blocks_ += std::max<int64_t>(0, max_blocks - num_blocks);
    }
    if (num_blocks > max_blocks) {
      ++num_excessive;
      excessive_blocks += num_blocks;
    }
  }
  mean_excessive_blocks_ = num_excessive == 0 ? 0 : excessive_blocks / num_excessive;
}

void Scheduler::GrantQuerySlot(Sequence* sequence, StepPlan* plan) {
  sequence->query_slot = free_query_slots_.back();
  free_query_slots_.pop_back();
  plan->query_slots.push_back({*sequence->sequence_slot, *sequence->query_slot});
}

bool Scheduler::PlanRunning(StepPlan* plan, std::vector<Sample>* samples) {
  bool preempted = false;
  // Victims of a preemption are newer than the sequence it is for, so none of them is in the plan.
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence* sequence = running_[i];
    if (!MakeReady(sequence, plan, &preempted)) continue;
    if (sequence->state == SequenceState::kDecoding) PlanDecode(sequence, plan, samples);
  }
  return preempted;
}

bool Scheduler::MakeReady(Sequence* sequence, StepPlan* plan, bool* preempted) {
  if (sequence->hold == Hold::kCompressing) return false;
  if (sequence->hold == Hold::kSuspended && !sequence->query_slot.has_value()) return false;
  if (std::exchange(sequence->hold, Hold::kNone) != Hold::kNone) {
    plan->resumed.push_back(*sequence->sequence_slot);
  }
  if (compression_.IsDue(*sequence) && MustCompress(*sequence)) {
    return Compress(sequence, plan, preempted) && sequence->hold == Hold::kNone;
  }
  if (sequence->state == SequenceState::kPrefilling) return true;  // It has blocks for its tokens.
  if (!sequence->query_slot.has_value() && !compression_.RunsWithoutQuerySlot(*sequence)) {
    Pause(sequence, Hold::kSuspended, plan);
    ++counts_.num_suspensions;
    return false;
  }
  const int64_t num_slots =
      static_cast<int64_t>(sequence->block_table.blocks.size()) * blocks_.block_size();
  if (sequence->num_slots < num_slots) return true;
  while (blocks_.num_available() == 0) {
    if (!MakeRoom(sequence, plan, preempted)) return false;
  }
  plan->appended_blocks.push_back(
      {*sequence->sequence_slot, blocks_.Append(&sequence->block_table)});
  CHECK(!compression_.enabled() || options_.adaptive_budget ||
        static_cast<int64_t>(sequence->block_table.blocks.size()) <=
            compression_.MaxBlocks(*sequence))
      << "request " << sequence->request->id << " should have been compressed";
  if (sequence->guaranteed) num_owed_blocks_ = std::max<int64_t>(0, num_owed_blocks_ - 1);
  return true;
}

bool Scheduler::MustCompress(const Sequence& sequence) const {
  // A sequence that is computed again keeps what its budget is, and it must not grow past it.
  if (!options_.adaptive_budget || sequence.state == SequenceState::kPrefilling) return true;
  if (blocks_.num_available() - 1 < num_owed_blocks_) return true;
  // The longest have the most to give.
  return blocks_are_wanted_ &&
         static_cast<int64_t>(sequence.block_table.blocks.size()) >= mean_excessive_blocks_;
}

bool Scheduler::Compress(Sequence* sequence, StepPlan* plan, bool* preempted) {
  const int64_t num_pinned = compression_.NumPinned(*sequence);
  const int64_t num_pinned_blocks = num_pinned / blocks_.block_size();
  const int64_t num_blocks = compression_.Budget(*sequence) + 1;
  BlockTable& table = sequence->block_table;
  while (blocks_.num_available() < blocks_.NumTakenByPack(table, num_pinned_blocks, num_blocks)) {
    if (!MakeRoom(sequence, plan, preempted)) return false;
  }
  CHECK(sequence->query_slot.has_value()) << "request " << sequence->request->id;
  const SequenceSlot slot = *sequence->sequence_slot;
  Compression& compression = plan->compressions.emplace_back();
  compression.sequence_slot = slot;
  compression.source_table = table.blocks;
  compression.num_pinned = static_cast<uint32_t>(num_pinned);
  blocks_.Pack(num_pinned_blocks, num_blocks, &table);
  compression.target_table = table.blocks;
  sequence->num_slots = (num_blocks - 1) * blocks_.block_size();
  if (++sequence->num_compressions > sequence->most_compressions) {
    sequence->most_compressions = sequence->num_compressions;
    sequence->last_compression = sequence->num_computed;
  }
  ++counts_.num_compressions;
  open_compressions_.push_back({slot, sequence, sequence->num_slots});
  ++sequence->num_open_compressions;
  if (compression_.async()) Pause(sequence, Hold::kCompressing, plan);
  return true;
}

void Scheduler::Pause(Sequence* sequence, Hold hold, StepPlan* plan) {
  const SequenceSlot slot = *sequence->sequence_slot;
  sequence->hold = hold;
  // One that was resumed for nothing stays as it is.
  if (std::erase(plan->resumed, slot) == 0) plan->paused.push_back(slot);
}

void Scheduler::PlanDecode(Sequence* sequence, StepPlan* plan, std::vector<Sample>* samples) {
  ++sequence->num_computed;
  ++sequence->num_slots;
  sequence->peak_slots = std::max(sequence->peak_slots, sequence->num_slots);
  ++plan->num_decoding;
  PlanSample(sequence, samples);
}

void Scheduler::PlanSample(Sequence* sequence, std::vector<Sample>* samples) {
  ++sequence->num_in_flight;
  samples->push_back({*sequence->sequence_slot, sequence});
}

void Scheduler::PlanChunk(Sequence* sequence, int64_t* token_budget, StepPlan* plan,
                          std::vector<Sample>* samples) {
  const auto length = static_cast<int64_t>(sequence->tokens.size());
  const int64_t start = sequence->num_computed;
  // The table ends where the sequence is compressed.
  const int64_t num_free_slots =
      static_cast<int64_t>(sequence->block_table.blocks.size()) * blocks_.block_size() -
      sequence->num_slots;
  const int64_t num_tokens = std::min({*token_budget, length - start, num_free_slots});
  CHECK_GT(num_tokens, 0) << "request " << sequence->request->id;
  const int64_t end = start + num_tokens;
  *token_budget -= num_tokens;
  plan->chunks.push_back({*sequence->sequence_slot, static_cast<int32_t>(start),
                          static_cast<int32_t>(num_tokens), end == length});
  sequence->num_computed = end;
  sequence->num_slots += num_tokens;
  sequence->peak_slots = std::max(sequence->peak_slots, sequence->num_slots);
  blocks_.Publish(sequence->tokens, end, sequence->cache_salt, &sequence->block_table);
  if (end == length) {
    sequence->state = SequenceState::kDecoding;
    PlanSample(sequence, samples);
  }

  counts_.recomputed_tokens +=
      std::max<int64_t>(0, std::min(end, sequence->num_recomputable) - start);
  counts_.prompt_tokens += num_tokens;
}

// ---------------------------------------------------------------- admission

void Scheduler::AdmitWaiting(int64_t* token_budget, StepPlan* plan, std::vector<Sample>* samples) {
  // Samples of one request follow each other and one is admitted only when the chunks of those
  // before it are planned to their end, so it finds their blocks.
  blocks_are_wanted_ = false;
  while (*token_budget > 0) {
    Sequence* sequence = admission_.Next();
    // A preempted sequence is recomputed with all of its tokens: those in flight are awaited.
    if (sequence == nullptr || sequence->num_in_flight > 0) return;
    const std::optional<Needs> needs = CanAdmit(*sequence);
    if (!needs.has_value()) return;
    Admit(sequence, *needs, plan);
    if (sequence->state == SequenceState::kPrefilling) {
      PlanChunk(sequence, token_budget, plan, samples);
      continue;
    }
    // It comes back from the host, into blocks of its own: nobody is preempted for it.
    bool preempted = false;
    if (MakeReady(sequence, plan, &preempted)) {
      PlanDecode(sequence, plan, samples);
      --*token_budget;
    }
    CHECK(!preempted) << "request " << sequence->request->id;
  }
}

std::optional<Scheduler::Needs> Scheduler::CanAdmit(const Sequence& sequence) {
  if (!sequence.swapped() && free_slots_.empty()) return std::nullopt;
  const bool may_compress = compression_.MayCompress(sequence);
  auto length = static_cast<int64_t>(sequence.tokens.size());
  if (may_compress && free_query_slots_.empty() &&
      (sequence.swapped() || !compression_.RunsWithoutQuerySlot(sequence, length))) {
    return std::nullopt;
  }
  Needs needs;
  if (sequence.swapped()) {
    needs.num_blocks = sequence.num_host_blocks;
  } else {
    // Beyond its first compression it computes into the blocks it has; the block whose window
    // scores is computed, not matched.
    if (may_compress) length = std::min(length, compression_.FirstPoint(sequence));
    needs.match = blocks_.Match(std::span(sequence.tokens).first(length), sequence.cache_salt);
    needs.num_blocks = blocks_.NumBlocksFor(length);
  }
  needs.num_taken = blocks_.NumTaken(needs.match, needs.num_blocks);
  if (compression_.enabled()) {
    const int64_t max_blocks = compression_.MaxBlocks(sequence);
    needs.guaranteed = all_guaranteed_ && (!may_compress || !free_query_slots_.empty()) &&
                       num_reserved_blocks_ + max_blocks <= blocks_.num_blocks();
    // Sequences over their budget may still hold what is reserved.
    if (options_.adaptive_budget) {
      const int64_t num_owed =
          num_owed_blocks_ + std::max<int64_t>(0, max_blocks - needs.num_blocks);
      needs.guaranteed = needs.guaranteed && needs.num_taken + num_owed <= blocks_.num_available();
    }
    // What this plan's compressions give back comes with the next one.
    if (needs.guaranteed && needs.num_taken > blocks_.num_available()) return std::nullopt;
    if (needs.guaranteed) return needs;
  }
  const auto num_running = static_cast<int64_t>(running_.size());
  const bool may_run = options_.enable_hybrid || !compression_.enabled();
  if (may_run && admission_.Fits(sequence, needs.num_taken, blocks_.num_available(),
                                 blocks_.num_blocks(), num_running)) {
    return needs;
  }
  CHECK(!running_.empty()) << "request " << sequence.request->id << " does not fit alone";
  blocks_are_wanted_ = true;
  return std::nullopt;
}

void Scheduler::Admit(Sequence* sequence, const Needs& needs, StepPlan* plan) {
  admission_.Admit(sequence);
  const bool first_time = sequence->admission_order == 0;
  sequence->admission_order = ++num_admitted_;
  sequence->block_table = blocks_.Take(needs.match, needs.num_blocks);
  running_.push_back(sequence);
  const bool was_swapped = sequence->swapped();
  if (was_swapped) {
    sequence->state = SequenceState::kDecoding;
    num_used_host_blocks_ -= std::exchange(sequence->num_host_blocks, 0);
    plan->swaps.push_back(
        {*sequence->sequence_slot, /*to_host=*/false, sequence->block_table.blocks});
    sequence->block_table.packed = true;  // What the blocks hold came from elsewhere.
  } else {
    sequence->state = SequenceState::kPrefilling;
    sequence->num_computed = static_cast<int64_t>(needs.match.blocks.size()) * blocks_.block_size();
    sequence->num_slots = sequence->num_computed;
    sequence->sequence_slot = free_slots_.back();
    free_slots_.pop_back();
    plan->new_sequences.push_back(
        {.sequence_slot = *sequence->sequence_slot,
         .tokens = sequence->tokens,
         .num_prompt_tokens = static_cast<uint32_t>(sequence->num_prompt_tokens),
         .num_cached_tokens = static_cast<uint32_t>(sequence->num_computed),
         .block_table = sequence->block_table.blocks,
         .sample_index = static_cast<uint32_t>(sequence->sample_index),
         .sampling = sequence->request->sampling});
  }
  if (first_time) {
    sequence->num_cached_tokens = sequence->num_computed;
    counts_.cached_tokens += sequence->num_computed;
  }
  if (compression_.MayCompress(*sequence) && !free_query_slots_.empty()) {
    GrantQuerySlot(sequence, plan);
  }
  sequence->guaranteed = needs.guaranteed;
  all_guaranteed_ = all_guaranteed_ && needs.guaranteed;
  if (needs.guaranteed) {
    const int64_t max_blocks = compression_.MaxBlocks(*sequence);
    num_reserved_blocks_ += max_blocks;
    num_owed_blocks_ += std::max<int64_t>(0, max_blocks - needs.num_blocks);
  }
}

}  // namespace zipage
