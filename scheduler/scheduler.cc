#include "scheduler/scheduler.h"

#include <glog/logging.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/strings/str_format.h"

namespace zipage {

Scheduler::Scheduler(const SchedulerOptions& options)
    : options_(options),
      blocks_(options.num_blocks, options.block_size, options.block_hash),
      sample_of_slot_(options.max_num_seqs) {
  CHECK_GE(options.max_num_seqs, 1);
  CHECK_GE(options.max_num_batched_tokens, options.max_num_seqs) << "every sequence must decode";
  CHECK_GE(options.max_model_len, 2);
  for (SequenceSlot slot = options.max_num_seqs; slot-- > 0;) free_slots_.push_back(slot);
}

absl::Status Scheduler::CheckFits(int64_t num_prompt_tokens) const {
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
  sequence->max_length =
      std::min({sequence->num_prompt_tokens + sequence->request->sampling.max_tokens,
                options_.max_model_len, blocks_.num_blocks() * blocks_.block_size()});
}

void Scheduler::Submit(std::unique_ptr<Request> request) {
  CHECK(CheckFits(static_cast<int64_t>(request->prompt().size())).ok());
  CHECK_GE(request->sampling.max_tokens, 1);
  for (Sequence& sequence : request->sequences) {
    sequence.arrival = ++num_submitted_;
    sequence.cache_salt = options_.enable_prefix_cache ? 0 : request->id;
    SetMaxLength(&sequence);
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
  const bool preempted = PlanDecode(&plan, &samples);
  int64_t token_budget = options_.max_num_batched_tokens - static_cast<int64_t>(plan.num_decoding);
  for (Sequence* sequence : running_) {
    if (token_budget == 0) break;
    if (sequence->state == SequenceState::kPrefilling) {
      PlanChunk(sequence, &token_budget, &plan, &samples);
    }
  }
  // Who is admitted into the blocks of a victim is likely the next one.
  if (!preempted) AdmitWaiting(&token_budget, &plan, &samples);

  if (plan.num_decoding == 0 && plan.chunks.empty() && released_.empty()) return std::nullopt;
  plan.released = std::exchange(released_, {});
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

bool Scheduler::PlanDecode(StepPlan* plan, std::vector<Sample>* samples) {
  bool preempted = false;
  for (size_t i = 0; i < running_.size(); ++i) {
    Sequence* sequence = running_[i];
    if (sequence->state != SequenceState::kDecoding) continue;
    const int64_t num_positions =
        static_cast<int64_t>(sequence->block_table.blocks.size()) * blocks_.block_size();
    if (sequence->num_computed == num_positions) {
      // Victims are newer than this one, so none of them is in this plan yet.
      while (blocks_.num_available() == 0 && sequence->state == SequenceState::kDecoding) {
        Preempt(Admission::Victim(running_));
        preempted = true;
      }
      if (sequence->state != SequenceState::kDecoding) break;  // It was the newest.
      plan->appended_blocks.push_back(
          {*sequence->sequence_slot, blocks_.Append(&sequence->block_table)});
    }
    ++sequence->num_computed;
    ++plan->num_decoding;
    PlanSample(sequence, samples);
  }
  return preempted;
}

void Scheduler::PlanSample(Sequence* sequence, std::vector<Sample>* samples) {
  ++sequence->num_in_flight;
  samples->push_back({*sequence->sequence_slot, sequence});
}

void Scheduler::PlanChunk(Sequence* sequence, int64_t* token_budget, StepPlan* plan,
                          std::vector<Sample>* samples) {
  const auto length = static_cast<int64_t>(sequence->tokens.size());
  const int64_t start = sequence->num_computed;
  const int64_t num_tokens = std::min(*token_budget, length - start);
  const int64_t end = start + num_tokens;
  *token_budget -= num_tokens;
  plan->chunks.push_back({*sequence->sequence_slot, static_cast<int32_t>(start),
                          static_cast<int32_t>(num_tokens), end == length});
  sequence->num_computed = end;
  blocks_.Publish(sequence->tokens, end, sequence->cache_salt, &sequence->block_table);
  if (end == length) {
    sequence->state = SequenceState::kDecoding;
    PlanSample(sequence, samples);
  }

  counts_.recomputed_tokens +=
      std::max<int64_t>(0, std::min(end, sequence->num_recomputable) - start);
  counts_.prompt_tokens += num_tokens;
}

void Scheduler::AdmitWaiting(int64_t* token_budget, StepPlan* plan, std::vector<Sample>* samples) {
  // Samples of one request follow each other and one is admitted only when the chunks of those
  // before it are planned to their end, so it finds their blocks.
  while (*token_budget > 0 && !free_slots_.empty()) {
    Sequence* sequence = admission_.Next();
    // A preempted sequence is recomputed with all of its tokens: those in flight are awaited.
    if (sequence == nullptr || sequence->num_in_flight > 0) return;
    const PrefixMatch match = blocks_.Match(sequence->tokens, sequence->cache_salt);
    const int64_t num_blocks = blocks_.NumBlocksFor(static_cast<int64_t>(sequence->tokens.size()));
    if (!admission_.Fits(*sequence, blocks_.NumTaken(match, num_blocks), blocks_.num_available(),
                         blocks_.num_blocks(), static_cast<int64_t>(running_.size()))) {
      CHECK(!running_.empty()) << "request " << sequence->request->id << " does not fit alone";
      return;
    }
    admission_.Admit(sequence);
    const bool first_time = sequence->admission_order == 0;
    sequence->admission_order = ++num_admitted_;
    sequence->state = SequenceState::kPrefilling;
    sequence->block_table = blocks_.Take(match, num_blocks);
    sequence->num_computed = static_cast<int64_t>(match.blocks.size()) * blocks_.block_size();
    sequence->sequence_slot = free_slots_.back();
    free_slots_.pop_back();
    running_.push_back(sequence);
    if (first_time) {
      sequence->num_cached_tokens = sequence->num_computed;
      counts_.cached_tokens += sequence->num_computed;
    }
    plan->new_sequences.push_back(
        {.sequence_slot = *sequence->sequence_slot,
         .tokens = sequence->tokens,
         .num_prompt_tokens = static_cast<uint32_t>(sequence->num_prompt_tokens),
         .num_cached_tokens = static_cast<uint32_t>(sequence->num_computed),
         .block_table = sequence->block_table.blocks,
         .sample_index = static_cast<uint32_t>(sequence->sample_index),
         .sampling = sequence->request->sampling});
    PlanChunk(sequence, token_budget, plan, samples);
  }
}

void Scheduler::Preempt(Sequence* sequence) {
  sequence->state = SequenceState::kWaiting;
  sequence->num_recomputable = std::max(sequence->num_recomputable, sequence->num_computed);
  sequence->num_computed = 0;
  ++sequence->num_preemptions;
  ++counts_.num_preemptions;
  admission_.Enqueue(sequence);
  RemoveFromRunning(sequence);
  GiveBack(sequence);
}

void Scheduler::GiveBack(Sequence* sequence) {
  released_.push_back(*sequence->sequence_slot);
  free_slots_.push_back(*sequence->sequence_slot);
  sequence->sequence_slot.reset();
  blocks_.Release(&sequence->block_table);
  admission_.Leave(*sequence);
}

void Scheduler::RemoveFromRunning(Sequence* sequence) {
  const auto it =
      std::ranges::lower_bound(running_, sequence->admission_order, {}, &Sequence::admission_order);
  CHECK(it != running_.end() && *it == sequence) << "request " << sequence->request->id;
  running_.erase(it);
}

absl::Status Scheduler::MatchSamples(const StepResult& result, std::vector<Sequence*>* sequences) {
  if (in_flight_.empty() || in_flight_.front().step != result.step) {
    return absl::InternalError(absl::StrFormat(
        "rank %d answered step %d; %s, so a step was lost or repeated: restart the workers",
        result.rank, result.step,
        in_flight_.empty()
            ? "none is in flight"
            : absl::StrFormat("the oldest in flight is %d", in_flight_.front().step)));
  }
  const std::vector<Sample>& samples = in_flight_.front().samples;
  for (const Sample& sample : samples) sample_of_slot_[sample.sequence_slot] = sample.sequence;
  std::optional<SequenceSlot> stray;
  const auto match = [&](SequenceSlot slot) {
    Sequence* sequence = nullptr;
    if (slot >= 0 && slot < options_.max_num_seqs) {
      sequence = std::exchange(sample_of_slot_[slot], nullptr);
    }
    if (sequence == nullptr) stray = slot;
    sequences->push_back(sequence);
  };
  sequences->reserve(samples.size());
  for (const SampledToken& sampled : result.sampled) match(sampled.sequence_slot);
  for (const SequenceSlot slot : result.corrupted) match(slot);
  for (const Sample& sample : samples) sample_of_slot_[sample.sequence_slot] = nullptr;
  if (stray.has_value() || sequences->size() != samples.size()) {
    return absl::InternalError(absl::StrFormat(
        "rank %d answered step %d for %d sequence slots of %d planned%s: restart the workers",
        result.rank, result.step, sequences->size(), samples.size(),
        stray.has_value() ? absl::StrFormat(", among them slot %d, not planned or twice", *stray)
                          : ""));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<TokenEvent>> Scheduler::Apply(StepResult result) {
  std::vector<Sequence*> sequences;
  ZIPAGE_RETURN_IF_ERROR(MatchSamples(result, &sequences));
  in_flight_.pop_front();
  std::vector<TokenEvent> events;
  events.reserve(result.sampled.size());
  for (size_t i = 0; i < sequences.size(); ++i) {
    Sequence* sequence = sequences[i];
    --sequence->num_in_flight;
    if (sequence->finished()) {
      // The token comes after the end of the sequence: dropped.
      NoteIfSettled(*sequence->request);
    } else if (i < result.sampled.size()) {
      AppendToken(sequence, &result.sampled[i], &events);
    } else {
      FinishSequence(sequence, FinishReason::kCorrupted);
    }
  }
#ifndef NDEBUG
  CheckInvariants();
#endif
  return events;
}

void Scheduler::AppendToken(Sequence* sequence, SampledToken* sampled,
                            std::vector<TokenEvent>* events) {
  const SamplingParams& sampling = sequence->request->sampling;
  sequence->tokens.push_back(sampled->token);
  const auto length = static_cast<int64_t>(sequence->tokens.size());
  ++counts_.output_tokens;
  if (sequence->sequence_slot.has_value()) {
    // A block that is full can be named once its last token is known.
    blocks_.Publish(sequence->tokens, std::min(sequence->num_computed, length),
                    sequence->cache_salt, &sequence->block_table);
  }
  const bool stops = std::ranges::binary_search(sampling.stop_token_ids, sampled->token);
  events->push_back({sequence, sampled->token, std::move(sampled->logprobs), !stops});
  if (stops) {
    FinishSequence(sequence, FinishReason::kStopToken);
  } else if (length >= sequence->max_length) {
    FinishSequence(sequence, FinishReason::kLength);
  }
}

void Scheduler::FinishSequence(Sequence* sequence, FinishReason reason) {
  sequence->finish_reason = reason;
  switch (std::exchange(sequence->state, SequenceState::kFinished)) {
    case SequenceState::kFinished:
      return;
    case SequenceState::kWaiting:
      admission_.Remove(sequence);
      break;
    case SequenceState::kPrefilling:
    case SequenceState::kDecoding:
      RemoveFromRunning(sequence);
      GiveBack(sequence);
      break;
    case SequenceState::kDraining:
      break;
  }
  NoteIfSettled(*sequence->request);
}

void Scheduler::NoteIfSettled(const Request& request) {
  if (request.settled()) settled_.push_back(request.id);
}

void Scheduler::CancelJob(uint64_t job_id) {
  for (const auto& [id, request] : requests_) {
    if (request->job_id != job_id) continue;
    for (Sequence& sequence : request->sequences) {
      if (!sequence.finished()) FinishSequence(&sequence, FinishReason::kCancelled);
    }
  }
}

std::vector<std::unique_ptr<Request>> Scheduler::TakeFinished() {
  std::vector<std::unique_ptr<Request>> finished;
  finished.reserve(settled_.size());
  for (const uint64_t id : std::exchange(settled_, {})) {
    const auto it = requests_.find(id);
    CHECK(it != requests_.end()) << "request " << id << " is taken twice";
    finished.push_back(std::move(it->second));
    requests_.erase(it);
  }
  return finished;
}

SchedulerStats Scheduler::stats() const {
  SchedulerStats stats = counts_;
  stats.num_running = static_cast<int64_t>(running_.size());
  stats.num_waiting = admission_.num_waiting();
  stats.num_blocks = blocks_.num_blocks();
  stats.num_free_blocks = blocks_.num_free();
  stats.num_cached_blocks = blocks_.num_cached();
  stats.num_used_blocks = blocks_.num_used();
  return stats;
}

void Scheduler::CheckInvariants() const {
  std::vector<const BlockTable*> tables;
  std::set<SequenceSlot> slots(free_slots_.begin(), free_slots_.end());
  CHECK_EQ(slots.size(), free_slots_.size());
  size_t num_running = 0;
  int64_t num_samples = 0;
  for (const auto& [id, request] : requests_) {
    for (const Sequence& sequence : request->sequences) {
      const bool runs = sequence.state == SequenceState::kPrefilling ||
                        sequence.state == SequenceState::kDecoding;
      num_samples += sequence.num_in_flight;
      tables.push_back(&sequence.block_table);
      CHECK_EQ(sequence.sequence_slot.has_value(), runs) << "request " << id;
      CHECK(runs || sequence.block_table.blocks.empty()) << "request " << id;
      CHECK_EQ(sequence.finished(), sequence.finish_reason.has_value()) << "request " << id;
      CHECK_GE(sequence.num_in_flight, 0) << "request " << id;
      if (!sequence.finished()) CHECK_LE(sequence.planned_length(), sequence.max_length);
      if (!runs) continue;
      ++num_running;
      CHECK(slots.insert(*sequence.sequence_slot).second) << "slot " << *sequence.sequence_slot;
      CHECK_LE(sequence.num_computed,
               static_cast<int64_t>(sequence.block_table.blocks.size()) * blocks_.block_size());
      if (sequence.state == SequenceState::kDecoding) {
        CHECK_EQ(sequence.num_computed, sequence.planned_length() - 1) << "request " << id;
      } else {
        CHECK_EQ(sequence.num_in_flight, 0) << "request " << id;
        CHECK_LT(sequence.num_computed, static_cast<int64_t>(sequence.tokens.size()));
      }
    }
  }
  CHECK_EQ(slots.size(), static_cast<size_t>(options_.max_num_seqs));
  CHECK_EQ(num_running, running_.size());
  CHECK(std::ranges::is_sorted(running_, std::less<>(), &Sequence::admission_order));
  for (const StepInFlight& step : in_flight_)
    num_samples -= static_cast<int64_t>(step.samples.size());
  CHECK_EQ(num_samples, 0);
  admission_.CheckInvariants(running_);
  blocks_.CheckInvariants(tables);
}

}  // namespace zipage
