// The deltas of SequenceStates that move a sequence: query slots, swaps, compressions, pauses.

#include <algorithm>
#include <string>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/strings/str_join.h"
#include "worker/sequence_state.h"

namespace zipage {
namespace {

std::string TableText(const std::vector<BlockId>& table) {
  return absl::StrCat("[", absl::StrJoin(table, " "), "]");
}

}  // namespace

absl::Status SequenceStates::GrantQuerySlot(const QuerySlotGrant& grant) {
  const SequenceSlot slot = grant.sequence_slot;
  ZIPAGE_RETURN_IF_ERROR(CheckUsed(slot, "a query slot"));
  if (grant.query_slot < 0 || grant.query_slot >= limits_.num_query_slots) {
    return Mismatch("slot ", slot, " gets query slot ", grant.query_slot, ", there are ",
                    limits_.num_query_slots);
  }
  SequenceState& sequence = sequences_[slot];
  if (sequence.query_slot.has_value()) {
    return Mismatch("slot ", slot, " gets query slot ", grant.query_slot, ", it has query slot ",
                    *sequence.query_slot);
  }
  std::optional<SequenceSlot>& owner = query_slot_owners_[grant.query_slot];
  if (owner.has_value()) {
    return Mismatch("slot ", slot, " gets query slot ", grant.query_slot,
                    ", which belongs to slot ", *owner);
  }
  owner = slot;
  sequence.query_slot = grant.query_slot;
  sequence.window_start = sequence.num_cached;
  return absl::OkStatus();
}

void SequenceStates::ReturnQuerySlot(SequenceState* sequence) {
  if (!sequence->query_slot.has_value()) return;
  query_slot_owners_[*sequence->query_slot].reset();
  sequence->query_slot.reset();
}

absl::Status SequenceStates::SwapToHost(const Swap& swap) {
  const SequenceSlot slot = swap.sequence_slot;
  ZIPAGE_RETURN_IF_ERROR(CheckUsed(slot, "a swap to the host"));
  SequenceState& sequence = sequences_[slot];
  if (sequence.swapped) return Mismatch("slot ", slot, " is swapped to the host twice");
  if (swap.device_blocks != sequence.block_table) {
    return Mismatch("slot ", slot, " is swapped to the host from blocks ",
                    TableText(swap.device_blocks), ", its table is ",
                    TableText(sequence.block_table));
  }
  const auto num_blocks = static_cast<int64_t>(sequence.block_table.size());
  if (num_host_blocks_ + num_blocks > limits_.num_host_blocks) {
    return Mismatch("slot ", slot, " swaps ", num_blocks, " blocks to the host, which holds ",
                    num_host_blocks_, " of ", limits_.num_host_blocks);
  }
  num_host_blocks_ += num_blocks;
  sequence.num_host_blocks = num_blocks;
  if (sequence.query_slot.has_value()) sequence.host_window_start = sequence.window_start;
  swaps_.push_back({.sequence_slot = slot,
                    .to_host = true,
                    .blocks = std::move(sequence.block_table),
                    .query_slot = sequence.query_slot});
  sequence.block_table.clear();
  ReturnQuerySlot(&sequence);
  sequence.swapped = true;
  sequence.paused = false;
  return absl::OkStatus();
}

absl::Status SequenceStates::SwapToDevice(const Swap& swap) {
  const SequenceSlot slot = swap.sequence_slot;
  ZIPAGE_RETURN_IF_ERROR(CheckUsed(slot, "a swap to the device"));
  SequenceState& sequence = sequences_[slot];
  if (!sequence.swapped) {
    return Mismatch("slot ", slot, " is swapped to the device, where it is already");
  }
  if (static_cast<int64_t>(swap.device_blocks.size()) != sequence.num_host_blocks) {
    return Mismatch("slot ", slot, " is swapped to ", swap.device_blocks.size(),
                    " blocks of the device, the host holds ", sequence.num_host_blocks);
  }
  for (BlockId block : swap.device_blocks) ZIPAGE_RETURN_IF_ERROR(CheckBlock(slot, block));
  SwapWork& work = swaps_.emplace_back();
  work.sequence_slot = slot;
  work.blocks = swap.device_blocks;
  if (sequence.query_slot.has_value() && sequence.host_window_start.has_value()) {
    work.query_slot = sequence.query_slot;
    sequence.window_start = *sequence.host_window_start;
  }
  sequence.host_window_start.reset();
  sequence.block_table = swap.device_blocks;
  num_host_blocks_ -= sequence.num_host_blocks;
  sequence.num_host_blocks = 0;
  sequence.swapped = false;
  return absl::OkStatus();
}

absl::Status SequenceStates::CheckGrantsOfSwapped(const StepPlan& plan) const {
  for (const QuerySlotGrant& grant : plan.query_slots) {
    if (!sequences_[grant.sequence_slot].swapped) continue;
    return Mismatch("slot ", grant.sequence_slot, " gets query slot ", grant.query_slot,
                    ", but it stays swapped to the host");
  }
  return absl::OkStatus();
}

absl::Status SequenceStates::Compress(const Compression& compression) {
  const SequenceSlot slot = compression.sequence_slot;
  ZIPAGE_RETURN_IF_ERROR(CheckUsed(slot, "a compression"));
  ZIPAGE_RETURN_IF_ERROR(CheckTables(compression));
  ZIPAGE_RETURN_IF_ERROR(CheckKept(compression));
  SequenceState& sequence = sequences_[slot];
  const int64_t prompt = sequence.num_prompt_tokens;
  compressions_.push_back({.sequence_slot = slot,
                           .query_slot = *sequence.query_slot,
                           .source_table = std::move(sequence.block_table),
                           .target_table = compression.target_table,
                           .num_pinned = compression.num_pinned,
                           .round = sequence.num_compressions,
                           // Until a prompt is computed its sequence holds nothing else, so its
                           // slots are the leading ones however often it was compressed.
                           .new_prompt_slots = std::min(prompt, sequence.position) -
                                               std::min(prompt, sequence.num_compressed),
                           .seed = sequence.sampling.seed,
                           .sample_index = sequence.sample_index});
  sequence.block_table = compression.target_table;
  sequence.num_cached =
      static_cast<int64_t>(compression.target_table.size() - 1) * limits_.block_size;
  sequence.window_start = sequence.num_cached;
  sequence.num_compressed = sequence.position;
  ++sequence.num_compressions;
  return absl::OkStatus();
}

absl::Status SequenceStates::CheckTables(const Compression& compression) const {
  const SequenceSlot slot = compression.sequence_slot;
  const SequenceState& sequence = sequences_[slot];
  const std::vector<BlockId>& source = compression.source_table;
  const std::vector<BlockId>& target = compression.target_table;
  if (sequence.swapped) return Mismatch("slot ", slot, " is compressed while it is swapped");
  if (source != sequence.block_table) {
    return Mismatch("slot ", slot, " is compressed from blocks ", TableText(source),
                    ", its table is ", TableText(sequence.block_table));
  }
  if (target.size() < 2 || target.size() > source.size()) {
    return Mismatch("slot ", slot, " is compressed from ", source.size(), " blocks to ",
                    target.size(), ", give 2 to ", source.size());
  }
  absl::flat_hash_map<BlockId, size_t> source_index;
  for (size_t i = 0; i < source.size(); ++i) source_index.emplace(source[i], i);
  absl::flat_hash_map<BlockId, size_t> target_index;
  for (size_t i = 0; i < target.size(); ++i) {
    ZIPAGE_RETURN_IF_ERROR(CheckBlock(slot, target[i]));
    const auto [first, is_new] = target_index.emplace(target[i], i);
    if (!is_new) {
      return Mismatch("slot ", slot, " is compressed into block ", target[i], " at ", first->second,
                      " and at ", i, " of its table");
    }
    const auto in_source = source_index.find(target[i]);
    if (in_source != source_index.end() && in_source->second != i) {
      return Mismatch("slot ", slot, " is compressed into block ", target[i], " at ", i,
                      " of its table, where it was at ", in_source->second);
    }
  }
  return absl::OkStatus();
}

absl::Status SequenceStates::CheckKept(const Compression& compression) const {
  const SequenceSlot slot = compression.sequence_slot;
  const SequenceState& sequence = sequences_[slot];
  const std::vector<BlockId>& source = compression.source_table;
  const std::vector<BlockId>& target = compression.target_table;
  const int64_t num_slots = static_cast<int64_t>(source.size()) * limits_.block_size;
  if (sequence.num_cached != num_slots) {
    return Mismatch("slot ", slot, " is compressed with ", sequence.num_cached,
                    " slots cached, its blocks hold ", num_slots);
  }
  if (!sequence.query_slot.has_value()) {
    return Mismatch("slot ", slot, " is compressed without a query slot");
  }
  if (sequence.window_start > num_slots - limits_.window) {
    return Mismatch("slot ", slot, " is compressed at ", num_slots, " slots, its query slot ",
                    *sequence.query_slot, " holds the queries from ", sequence.window_start,
                    " on, which is less than a window of ", limits_.window);
  }
  const int64_t num_kept = static_cast<int64_t>(target.size() - 1) * limits_.block_size;
  const int64_t num_pinned = compression.num_pinned;
  if (std::max<int64_t>(num_pinned, limits_.sink_len) + limits_.window > num_kept) {
    return Mismatch("slot ", slot, " is compressed to ", num_kept, " slots, ", num_pinned,
                    " pinned ones, ", limits_.sink_len, " sinks and a window of ", limits_.window,
                    " do not fit");
  }
  for (int64_t i = 0; i < num_pinned / limits_.block_size; ++i) {
    if (source[i] == target[i]) continue;
    return Mismatch("slot ", slot, " pins ", num_pinned, " slots, but block ", source[i], " at ", i,
                    " of its table becomes ", target[i]);
  }
  return absl::OkStatus();
}

absl::Status SequenceStates::Pause(SequenceSlot slot) {
  ZIPAGE_RETURN_IF_ERROR(CheckUsed(slot, "a pause"));
  SequenceState& sequence = sequences_[slot];
  if (sequence.paused) return Mismatch("slot ", slot, " is paused twice");
  if (sequence.swapped) return Mismatch("slot ", slot, " is paused while it is swapped");
  sequence.paused = true;
  return absl::OkStatus();
}

absl::Status SequenceStates::Resume(SequenceSlot slot) {
  ZIPAGE_RETURN_IF_ERROR(CheckUsed(slot, "a resumption"));
  SequenceState& sequence = sequences_[slot];
  if (!sequence.paused) return Mismatch("slot ", slot, " is resumed, but it is not paused");
  sequence.paused = false;
  return absl::OkStatus();
}

}  // namespace zipage
