// The results' half of the scheduler: tokens and compressions that came, and sequences' ends.

#include <glog/logging.h>

#include <algorithm>
#include <set>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_format.h"
#include "scheduler/scheduler.h"

namespace zipage {

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

absl::Status Scheduler::MatchCompressions(const StepResult& result) const {
  if (result.finished_compressions.empty()) return absl::OkStatus();
  absl::flat_hash_map<SequenceSlot, int> num_open;
  for (const OpenCompression& open : open_compressions_) ++num_open[open.sequence_slot];
  for (const FinishedCompression& finished : result.finished_compressions) {
    if (--num_open[finished.sequence_slot] >= 0) continue;
    return absl::InternalError(absl::StrFormat(
        "rank %d finished a compression of sequence slot %d in step %d that was not planned, or "
        "twice: restart the workers",
        result.rank, finished.sequence_slot, result.step));
  }
  return absl::OkStatus();
}

void Scheduler::ApplyCompression(const FinishedCompression& finished) {
  const auto open = std::ranges::find(open_compressions_, finished.sequence_slot,
                                      &OpenCompression::sequence_slot);
  Sequence* const sequence = open->sequence;
  const int64_t kept_slots = open->kept_slots;
  open_compressions_.erase(open);
  if (sequence == nullptr) return;
  sequence->prompt_tokens_kept = finished.prompt_tokens_kept;
  sequence->kept_slots = kept_slots;
  // A sequence that was preempted meanwhile may wait for a later one.
  const bool is_last = --sequence->num_open_compressions == 0;
  if (is_last && sequence->hold == Hold::kCompressing) sequence->hold = Hold::kCompressed;
}

void Scheduler::ForgetCompressionsOf(Sequence* sequence) {
  if (std::exchange(sequence->num_open_compressions, 0) == 0) return;
  for (OpenCompression& open : open_compressions_) {
    if (open.sequence == sequence) open.sequence = nullptr;
  }
}

absl::StatusOr<std::vector<TokenEvent>> Scheduler::Apply(StepResult result) {
  std::vector<Sequence*> sequences;
  ZIPAGE_RETURN_IF_ERROR(MatchSamples(result, &sequences));
  ZIPAGE_RETURN_IF_ERROR(MatchCompressions(result));
  in_flight_.pop_front();
  for (const FinishedCompression& finished : result.finished_compressions) {
    ApplyCompression(finished);
  }
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
  if (sequence->runs()) {
    // A block that is full can be named once its last token is known.
    blocks_.Publish(sequence->tokens, std::min(sequence->num_computed, length),
                    sequence->cache_salt, &sequence->block_table);
  }
  const bool stops = std::ranges::binary_search(sampling.stop_token_ids, sampled->token);
  events->push_back({sequence, sampled->token, std::move(sampled->logprobs), !stops});
  const bool repeats = sequence->guard.has_value() && sequence->guard->Add(sequence->output()) &&
                       length - sequence->num_prompt_tokens >= sampling.min_tokens;
  if (stops) {
    FinishSequence(sequence, FinishReason::kStopToken);
  } else if (repeats) {
    FinishSequence(sequence, FinishReason::kRepetition);
  } else if (length >= sequence->max_length) {
    FinishSequence(sequence, FinishReason::kLength);
  }
}

void Scheduler::ForgetSurplus(Sequence* sequence) {
  ForgetCompressionsOf(sequence);
  sequence->guard.reset();
  // What was planned after the end, before that was known, does not count.
  const int64_t num_needed = static_cast<int64_t>(sequence->tokens.size()) - 1;
  sequence->peak_slots = std::min(sequence->peak_slots, num_needed);
  sequence->num_compressions = sequence->most_compressions;
  if (sequence->num_compressions > 0 && num_needed <= sequence->last_compression) {
    --sequence->num_compressions;
  }
}

void Scheduler::FinishSequence(Sequence* sequence, FinishReason reason) {
  sequence->finish_reason = reason;
  if (!sequence->finished()) ForgetSurplus(sequence);
  switch (std::exchange(sequence->state, SequenceState::kFinished)) {
    case SequenceState::kFinished:
      return;
    case SequenceState::kWaiting:
      admission_.Remove(sequence);
      if (sequence->swapped()) {
        num_used_host_blocks_ -= std::exchange(sequence->num_host_blocks, 0);
        GiveBackSequenceSlot(sequence);
      }
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
  stats.num_query_slots = options_.num_query_slots;
  stats.num_used_query_slots =
      options_.num_query_slots - static_cast<int64_t>(free_query_slots_.size());
  stats.num_swapped = options_.max_num_seqs - static_cast<int64_t>(free_slots_.size()) -
                      static_cast<int64_t>(running_.size());
  return stats;
}

void Scheduler::CheckRunning(const Sequence& sequence) const {
  const uint64_t id = sequence.request->id;
  const auto num_blocks = static_cast<int64_t>(sequence.block_table.blocks.size());
  CHECK_LE(sequence.num_slots, num_blocks * blocks_.block_size()) << "request " << id;
  CHECK(sequence.num_compressions > 0 || sequence.num_slots == sequence.num_computed)
      << "request " << id;
  if (sequence.state == SequenceState::kDecoding) {
    CHECK_EQ(sequence.num_computed, sequence.planned_length() - 1) << "request " << id;
  } else {
    CHECK_EQ(sequence.num_in_flight, 0) << "request " << id;
    CHECK_LT(sequence.num_computed, static_cast<int64_t>(sequence.tokens.size()));
  }
  if (!compression_.enabled()) return;
  if (!options_.adaptive_budget) {
    CHECK_LE(num_blocks, compression_.MaxBlocks(sequence))
        << "request " << id << " should have been compressed";
  }
  CHECK(sequence.query_slot.has_value() || sequence.hold == Hold::kSuspended ||
        compression_.RunsWithoutQuerySlot(sequence, sequence.num_computed))
      << "request " << id << " has no query slot";
}

void Scheduler::CheckInvariants() const {
  std::vector<const BlockTable*> tables;
  std::set<SequenceSlot> slots(free_slots_.begin(), free_slots_.end());
  CHECK_EQ(slots.size(), free_slots_.size());
  std::set<QuerySlot> query_slots(free_query_slots_.begin(), free_query_slots_.end());
  CHECK_EQ(query_slots.size(), free_query_slots_.size());
  size_t num_running = 0;
  int64_t num_samples = 0;
  int64_t num_host_blocks = 0;
  for (const auto& [id, request] : requests_) {
    for (const Sequence& sequence : request->sequences) {
      num_samples += sequence.num_in_flight;
      num_host_blocks += sequence.num_host_blocks;
      tables.push_back(&sequence.block_table);
      const bool waits = sequence.state == SequenceState::kWaiting;
      CHECK_EQ(sequence.sequence_slot.has_value(), sequence.runs() || sequence.swapped())
          << "request " << id;
      CHECK(sequence.runs() || sequence.block_table.blocks.empty()) << "request " << id;
      CHECK(sequence.runs() || !sequence.query_slot.has_value()) << "request " << id;
      CHECK(waits || !sequence.swapped()) << "request " << id;
      CHECK_EQ(sequence.finished(), sequence.finish_reason.has_value()) << "request " << id;
      CHECK_GE(sequence.num_in_flight, 0) << "request " << id;
      if (!sequence.finished()) CHECK_LE(sequence.planned_length(), sequence.max_length);
      if (sequence.sequence_slot.has_value()) {
        CHECK(slots.insert(*sequence.sequence_slot).second) << "slot " << *sequence.sequence_slot;
      }
      if (sequence.query_slot.has_value()) {
        CHECK(query_slots.insert(*sequence.query_slot).second)
            << "query slot " << *sequence.query_slot;
      }
      if (!sequence.runs()) continue;
      ++num_running;
      CheckRunning(sequence);
    }
  }
  CHECK_EQ(slots.size(), static_cast<size_t>(options_.max_num_seqs));
  CHECK_EQ(query_slots.size(), static_cast<size_t>(options_.num_query_slots));
  CHECK_EQ(num_host_blocks, num_used_host_blocks_);
  CHECK_EQ(num_running, running_.size());
  CHECK(std::ranges::is_sorted(running_, std::less<>(), &Sequence::admission_order));
  CHECK(std::ranges::is_partitioned(running_, &Sequence::guaranteed)) << "guaranteed ones first";
  for (const StepInFlight& step : in_flight_)
    num_samples -= static_cast<int64_t>(step.samples.size());
  CHECK_EQ(num_samples, 0);
  admission_.CheckInvariants(running_);
  blocks_.CheckInvariants(tables);
}

}  // namespace zipage
