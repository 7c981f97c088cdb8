#include "worker/sequence_state.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace zipage {
namespace {

bool HasPenalty(const SamplingParams& p) {
  return p.repetition_penalty != 1.0F || p.presence_penalty != 0.0F || p.frequency_penalty != 0.0F;
}

void See(TokenId token, bool is_output, SequenceState* sequence) {
  const auto [it, is_new] =
      sequence->seen_index.try_emplace(token, static_cast<int32_t>(sequence->seen.size()));
  if (is_new) sequence->seen.push_back({.token = token, .output_count = 0});
  if (is_output) ++sequence->seen[it->second].output_count;
}

}  // namespace

SequenceStates::SequenceStates(const Limits& limits)
    : limits_(limits),
      sequences_(limits.max_num_seqs),
      query_slot_owners_(limits.num_query_slots) {}

absl::Status SequenceStates::Apply(const StepPlan& plan) {
  if (plan.step != step_ + 1) {
    return Mismatch("the plan is for step ", plan.step, ", expected ", step_ + 1);
  }
  step_ = plan.step;
  swaps_.clear();
  compressions_.clear();
  rows_.clear();
  prefilled_.clear();
  num_rows_tokens_ = 0;
  ZIPAGE_RETURN_IF_ERROR(ApplyDeltas(plan));
  // Decoding slots first, before a chunk makes one more slot decode from the next step on.
  ZIPAGE_RETURN_IF_ERROR(RunDecoding(plan));
  for (const PrefillChunk& chunk : plan.chunks) ZIPAGE_RETURN_IF_ERROR(RunChunk(chunk));
  if (num_rows_tokens_ > limits_.max_tokens) {
    return Mismatch("the plan runs ", num_rows_tokens_, " tokens, at most ", limits_.max_tokens,
                    " are allowed");
  }
  if (rows_.size() > static_cast<size_t>(limits_.max_num_seqs)) {
    return Mismatch("the plan runs ", rows_.size(), " rows, there are ", limits_.max_num_seqs,
                    " slots");
  }
  return absl::OkStatus();
}

absl::Status SequenceStates::ApplyDeltas(const StepPlan& plan) {
  for (SequenceSlot slot : plan.released) ZIPAGE_RETURN_IF_ERROR(Release(slot));
  for (const Swap& swap : plan.swaps) {
    if (swap.to_host) ZIPAGE_RETURN_IF_ERROR(SwapToHost(swap));
  }
  for (const NewSequence& added : plan.new_sequences) ZIPAGE_RETURN_IF_ERROR(Add(added));
  for (const QuerySlotGrant& grant : plan.query_slots) {
    ZIPAGE_RETURN_IF_ERROR(GrantQuerySlot(grant));
  }
  for (const Swap& swap : plan.swaps) {
    if (!swap.to_host) ZIPAGE_RETURN_IF_ERROR(SwapToDevice(swap));
  }
  ZIPAGE_RETURN_IF_ERROR(CheckGrantsOfSwapped(plan));
  for (const AppendedBlock& block : plan.appended_blocks) {
    ZIPAGE_RETURN_IF_ERROR(AppendBlock(block));
  }
  for (const Compression& compression : plan.compressions) {
    ZIPAGE_RETURN_IF_ERROR(Compress(compression));
  }
  for (SequenceSlot slot : plan.paused) ZIPAGE_RETURN_IF_ERROR(Pause(slot));
  for (SequenceSlot slot : plan.resumed) ZIPAGE_RETURN_IF_ERROR(Resume(slot));
  return absl::OkStatus();
}

absl::Status SequenceStates::CheckUsed(SequenceSlot slot, const char* what) const {
  if (slot < 0 || slot >= limits_.max_num_seqs) {
    return Mismatch(what, " names slot ", slot, ", there are ", limits_.max_num_seqs);
  }
  if (!sequences_[slot].used) return Mismatch(what, " names slot ", slot, ", which is free");
  return absl::OkStatus();
}

absl::Status SequenceStates::CheckBlock(SequenceSlot slot, BlockId block) const {
  if (block >= 0 && block < limits_.num_blocks) return absl::OkStatus();
  return Mismatch("slot ", slot, " gets block ", block, ", there are ", limits_.num_blocks);
}

absl::Status SequenceStates::Release(SequenceSlot slot) {
  ZIPAGE_RETURN_IF_ERROR(CheckUsed(slot, "a release"));
  ReturnQuerySlot(&sequences_[slot]);
  num_host_blocks_ -= sequences_[slot].num_host_blocks;
  sequences_[slot] = SequenceState();
  return absl::OkStatus();
}

absl::Status SequenceStates::Add(const NewSequence& added) {
  const SequenceSlot slot = added.sequence_slot;
  if (slot < 0 || slot >= limits_.max_num_seqs) {
    return Mismatch("a new sequence names slot ", slot, ", there are ", limits_.max_num_seqs);
  }
  SequenceState& sequence = sequences_[slot];
  if (sequence.used) return Mismatch("a new sequence names slot ", slot, ", which is used");
  const auto num_tokens = static_cast<int64_t>(added.tokens.size());
  if (added.num_prompt_tokens > num_tokens) {
    return Mismatch("slot ", slot, " has ", added.num_prompt_tokens, " prompt tokens of ",
                    num_tokens, " tokens");
  }
  if (added.num_cached_tokens >= num_tokens) {
    return Mismatch("slot ", slot, " starts with ", added.num_cached_tokens,
                    " cached tokens, which leaves none of its ", num_tokens, " to compute");
  }
  for (TokenId token : added.tokens) {
    if (token < 0 || token >= limits_.vocab_size) {
      return Mismatch("slot ", slot, " has token ", token, ", the vocabulary has ",
                      limits_.vocab_size);
    }
  }
  for (BlockId block : added.block_table) ZIPAGE_RETURN_IF_ERROR(CheckBlock(slot, block));
  const int64_t covered = static_cast<int64_t>(added.block_table.size()) * limits_.block_size;
  if (covered < added.num_cached_tokens) {
    return Mismatch("slot ", slot, " starts with ", added.num_cached_tokens,
                    " cached tokens, its blocks hold ", covered);
  }
  sequence.used = true;
  sequence.block_table = added.block_table;
  sequence.num_cached = added.num_cached_tokens;
  sequence.position = added.num_cached_tokens;
  sequence.num_prompt_tokens = added.num_prompt_tokens;
  sequence.num_output = num_tokens - added.num_prompt_tokens;
  sequence.tokens = added.tokens;
  sequence.sample_index = added.sample_index;
  sequence.sampling = added.sampling;
  if (HasPenalty(added.sampling)) {
    for (int64_t i = 0; i < num_tokens; ++i) {
      See(added.tokens[i], /*is_output=*/i >= added.num_prompt_tokens, &sequence);
    }
  }
  return absl::OkStatus();
}

absl::Status SequenceStates::AppendBlock(const AppendedBlock& appended) {
  ZIPAGE_RETURN_IF_ERROR(CheckUsed(appended.sequence_slot, "an appended block"));
  ZIPAGE_RETURN_IF_ERROR(CheckBlock(appended.sequence_slot, appended.block));
  SequenceState& sequence = sequences_[appended.sequence_slot];
  if (sequence.swapped) {
    return Mismatch("slot ", appended.sequence_slot, " gets block ", appended.block,
                    ", but it is swapped to the host");
  }
  sequence.block_table.push_back(appended.block);
  return absl::OkStatus();
}

absl::Status SequenceStates::Run(SequenceSlot slot, int64_t num_tokens, StepRow* row) {
  SequenceState& sequence = sequences_[slot];
  const int64_t covered = static_cast<int64_t>(sequence.block_table.size()) * limits_.block_size;
  if (sequence.num_cached + num_tokens > covered) {
    return Mismatch("slot ", slot, " runs ", num_tokens, " tokens from slot ", sequence.num_cached,
                    " of its table, its blocks hold ", covered);
  }
  if (sequence.position + num_tokens > limits_.max_position) {
    return Mismatch("slot ", slot, " runs ", num_tokens, " tokens from position ",
                    sequence.position, ", positions end at ", limits_.max_position);
  }
  row->sequence_slot = slot;
  row->first_cached = sequence.num_cached;
  row->first_position = sequence.position;
  row->num_tokens = num_tokens;
  row->first_query = num_tokens;
  if (sequence.query_slot.has_value()) {
    const int64_t last = sequence.num_cached + num_tokens - 1;
    const int64_t window_begin =
        last - last % limits_.block_size + limits_.block_size - limits_.window;
    const int64_t first = std::max(sequence.num_cached, window_begin);
    row->first_query = std::min(first - sequence.num_cached, num_tokens);
    row->window_row = *sequence.query_slot * int64_t{limits_.window} + first - window_begin;
  }
  sequence.num_cached += num_tokens;
  sequence.position += num_tokens;
  num_rows_tokens_ += num_tokens;
  return absl::OkStatus();
}

absl::Status SequenceStates::RunDecoding(const StepPlan& plan) {
  uint32_t num_decoding = 0;
  for (SequenceSlot slot = 0; slot < limits_.max_num_seqs; ++slot) {
    const SequenceState& sequence = sequences_[slot];
    if (!sequence.decodes || sequence.paused || sequence.swapped) continue;
    ++num_decoding;
    StepRow& row = rows_.emplace_back();
    ZIPAGE_RETURN_IF_ERROR(Run(slot, 1, &row));
    row.samples = true;
  }
  if (num_decoding != plan.num_decoding) {
    return Mismatch("the plan decodes ", plan.num_decoding, " slots, ", num_decoding,
                    " slots decode");
  }
  return absl::OkStatus();
}

absl::Status SequenceStates::RunChunk(const PrefillChunk& chunk) {
  const SequenceSlot slot = chunk.sequence_slot;
  ZIPAGE_RETURN_IF_ERROR(CheckUsed(slot, "a chunk"));
  SequenceState& sequence = sequences_[slot];
  if (sequence.decodes) return Mismatch("slot ", slot, " gets a chunk, but it decodes");
  if (sequence.paused || sequence.swapped) {
    return Mismatch("slot ", slot, " gets a chunk, but it is ",
                    sequence.swapped ? "swapped to the host" : "paused");
  }
  if (chunk.start != sequence.position) {
    return Mismatch("slot ", slot, " gets a chunk from ", chunk.start, ", its next position is ",
                    sequence.position);
  }
  const auto num_tokens = static_cast<int64_t>(sequence.tokens.size());
  const int64_t end = int64_t{chunk.start} + chunk.num_tokens;
  if (chunk.num_tokens < 1 || end > num_tokens) {
    return Mismatch("slot ", slot, " gets a chunk of ", chunk.num_tokens, " tokens from ",
                    chunk.start, ", it has ", num_tokens, " tokens");
  }
  if (chunk.samples != (end == num_tokens)) {
    return Mismatch("slot ", slot, " gets a chunk up to ", end, " of ", num_tokens, " tokens that ",
                    chunk.samples ? "samples" : "does not sample");
  }
  StepRow& row = rows_.emplace_back();
  ZIPAGE_RETURN_IF_ERROR(Run(slot, chunk.num_tokens, &row));
  row.tokens = sequence.tokens.data() + chunk.start;
  row.samples = chunk.samples;
  if (chunk.samples) {
    sequence.decodes = true;
    prefilled_.push_back(std::move(sequence.tokens));
    sequence.tokens.clear();
  }
  return absl::OkStatus();
}

void SequenceStates::AppendOutput(SequenceSlot slot, TokenId token) {
  SequenceState& sequence = sequences_[slot];
  ++sequence.num_output;
  if (HasPenalty(sequence.sampling)) See(token, /*is_output=*/true, &sequence);
}

}  // namespace zipage
