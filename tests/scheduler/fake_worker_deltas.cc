// How FakeWorker takes the deltas of a plan.

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>

#include "tests/scheduler/fake_worker.h"

namespace zipage {

void FakeWorker::ApplyDeltas(const StepPlan& plan) {
  ASSERT_EQ(plan.step, step_ + 1);
  ++step_;
  given_.clear();
  for (const SequenceSlot slot : plan.released) Release(slot);
  for (const Swap& swap : plan.swaps) {
    if (swap.to_host) SwapToHost(swap);
  }
  for (const NewSequence& added : plan.new_sequences) AddSequence(added);
  for (const QuerySlotGrant& grant : plan.query_slots) GrantQuerySlot(grant);
  for (const Swap& swap : plan.swaps) {
    if (!swap.to_host) SwapToDevice(swap);
  }
  for (const QuerySlotGrant& grant : plan.query_slots) {
    ASSERT_FALSE(slots_.at(grant.sequence_slot).host.has_value()) << grant.sequence_slot;
  }
  for (const AppendedBlock& appended : plan.appended_blocks) AppendBlock(appended);
  CheckSources(plan);
  for (const Compression& compression : plan.compressions) {
    const SequenceSlot id = compression.sequence_slot;
    const bool stays_paused =
        slots_.contains(id) && slots_[id].paused && std::ranges::count(plan.resumed, id) == 0;
    Compress(compression, stays_paused || std::ranges::count(plan.paused, id) > 0);
  }
  for (const SequenceSlot slot : plan.paused) Pause(slot);
  for (const SequenceSlot slot : plan.resumed) Resume(slot);
}

void FakeWorker::CheckBlock(BlockId block) const {
  ASSERT_GE(block, 0);
  ASSERT_LT(block, options_.num_blocks);
}

void FakeWorker::Give(BlockId block) {
  CheckBlock(block);
  given_.insert(block);
  for (const Unreported& compression : compressions_) {
    if (!compression.done && compression.blocks.contains(block)) ++num_ordered_blocks_;
  }
}

void FakeWorker::Release(SequenceSlot id) {
  ASSERT_TRUE(slots_.contains(id)) << id;
  Slot& slot = slots_[id];
  ReturnQuerySlot(&slot);
  if (slot.host.has_value()) {
    num_host_blocks_ -= static_cast<int64_t>(slot.host->pool.size()) / options_.block_size;
  }
  slots_.erase(id);
}

void FakeWorker::AddSequence(const NewSequence& added) {
  ASSERT_GE(added.sequence_slot, 0);
  ASSERT_LT(added.sequence_slot, options_.max_num_seqs);
  ASSERT_FALSE(slots_.contains(added.sequence_slot)) << added.sequence_slot;
  ASSERT_LT(added.num_cached_tokens, added.tokens.size());
  ASSERT_LE(added.num_prompt_tokens, added.tokens.size());
  ASSERT_EQ(added.num_cached_tokens % options_.block_size, 0U);
  ASSERT_LE(added.num_cached_tokens, added.block_table.size() * options_.block_size);
  for (size_t i = 0; i < added.block_table.size(); ++i) {
    CheckBlock(added.block_table[i]);
    if (i * options_.block_size >= added.num_cached_tokens) Give(added.block_table[i]);
  }
  Slot& slot = slots_[added.sequence_slot];
  slot.life = ++num_lives_;
  slot.tokens = added.tokens;
  slot.num_prompt_tokens = added.num_prompt_tokens;
  slot.table = added.block_table;
  slot.sample_index = added.sample_index;
  slot.sampling = added.sampling;
  // What the cached blocks must hold is what it would compute itself.
  uint64_t attended = fake::Attend({});
  for (; slot.position < static_cast<int64_t>(added.num_cached_tokens); ++slot.position) {
    slot.contents.push_back(fake::ContentOf(attended, slot.tokens[slot.position], slot.position));
    slot.is_prompt.push_back(slot.position < slot.num_prompt_tokens);
    attended = fake::Attend(attended, slot.contents.back());
  }
}

void FakeWorker::GrantQuerySlot(const QuerySlotGrant& grant) {
  ASSERT_TRUE(slots_.contains(grant.sequence_slot)) << grant.sequence_slot;
  ASSERT_GE(grant.query_slot, 0);
  ASSERT_LT(grant.query_slot, options_.num_query_slots);
  Slot& slot = slots_[grant.sequence_slot];
  ASSERT_FALSE(slot.query_slot.has_value()) << grant.sequence_slot;
  ASSERT_TRUE(query_slot_owners_.emplace(grant.query_slot, grant.sequence_slot).second)
      << "query slot " << grant.query_slot;
  slot.query_slot = grant.query_slot;
}

void FakeWorker::ReturnQuerySlot(Slot* slot) {
  if (slot->query_slot.has_value()) query_slot_owners_.erase(*slot->query_slot);
  slot->query_slot.reset();
}

void FakeWorker::SwapToHost(const Swap& swap) {
  ASSERT_TRUE(slots_.contains(swap.sequence_slot)) << swap.sequence_slot;
  Slot& slot = slots_[swap.sequence_slot];
  ASSERT_FALSE(slot.host.has_value()) << swap.sequence_slot;
  ASSERT_EQ(swap.device_blocks, slot.table) << swap.sequence_slot;
  num_host_blocks_ += static_cast<int64_t>(slot.table.size());
  ASSERT_LE(num_host_blocks_, options_.num_host_blocks);
  // The copy waits for a compression that writes these blocks.
  for (Unreported& compression : compressions_) compression.done |= compression.life == slot.life;
  HostCopy& host = slot.host.emplace();
  const auto num_slots = static_cast<int64_t>(slot.table.size()) * options_.block_size;
  for (int64_t i = 0; i < num_slots; ++i) host.pool.push_back(At(slot.table, i));
  if (slot.query_slot.has_value()) host.query_window = query_windows_[*slot.query_slot];
  ReturnQuerySlot(&slot);
  slot.table.clear();
  slot.paused = false;
}

void FakeWorker::SwapToDevice(const Swap& swap) {
  ASSERT_TRUE(slots_.contains(swap.sequence_slot)) << swap.sequence_slot;
  Slot& slot = slots_[swap.sequence_slot];
  ASSERT_TRUE(slot.host.has_value()) << swap.sequence_slot;
  const HostCopy host = *std::exchange(slot.host, std::nullopt);
  ASSERT_EQ(swap.device_blocks.size() * options_.block_size, host.pool.size());
  slot.table = swap.device_blocks;
  num_host_blocks_ -= static_cast<int64_t>(slot.table.size());
  for (const BlockId block : slot.table) {
    Give(block);
    for (const auto& [id, other] : slots_) {
      ASSERT_EQ(std::ranges::count(other.table, block), id == swap.sequence_slot ? 1 : 0)
          << "block " << block << " in the table of slot " << id;
    }
  }
  for (size_t i = 0; i < host.pool.size(); ++i) {
    At(slot.table, static_cast<int64_t>(i)) = host.pool[i];
  }
  if (slot.query_slot.has_value() && host.query_window.has_value()) {
    query_windows_[*slot.query_slot] = *host.query_window;
  }
}

void FakeWorker::AppendBlock(const AppendedBlock& appended) {
  ASSERT_TRUE(slots_.contains(appended.sequence_slot)) << appended.sequence_slot;
  ASSERT_FALSE(slots_[appended.sequence_slot].host.has_value()) << appended.sequence_slot;
  Give(appended.block);
  slots_[appended.sequence_slot].table.push_back(appended.block);
}

// ---------------------------------------------------------------- compression

void FakeWorker::Compress(const Compression& compression, bool beside_steps) {
  CheckCompression(compression);
  if (::testing::Test::HasFatalFailure()) return;
  Slot& slot = slots_[compression.sequence_slot];
  const std::vector<BlockId>& target = compression.target_table;
  std::vector<uint64_t> contents;
  for (size_t i = 0; i < slot.contents.size(); ++i) {
    contents.push_back(At(compression.source_table, static_cast<int64_t>(i)));
  }
  ASSERT_EQ(contents, slot.contents) << "step " << step_ << " slot " << compression.sequence_slot;
  std::vector<uint64_t> queries;
  for (const QueryRow& row : query_windows_[*slot.query_slot]) queries.push_back(row.query);
  const fake::Selection selection = {
      .num_kept = static_cast<int64_t>(target.size() - 1) * options_.block_size,
      .num_pinned = compression.num_pinned,
      .round = slot.num_compressions,
      .seed = slot.sampling.seed,
      .sample_index = slot.sample_index};
  const std::vector<int64_t> kept = fake::SelectSlots(contents, queries, selection);
  const int64_t first_written =
      compression.num_pinned / options_.block_size * int64_t{options_.block_size};
  for (size_t i = 0; i < kept.size(); ++i) {
    slot.contents[i] = contents[kept[i]];
    slot.is_prompt[i] = slot.is_prompt[kept[i]];
    const auto index = static_cast<int64_t>(i);
    if (index >= first_written) At(target, index) = slot.contents[i];
  }
  slot.contents.resize(kept.size());
  slot.is_prompt.resize(kept.size());
  slot.table = target;
  ++slot.num_compressions;
  Unreported& unreported = compressions_.emplace_back();
  unreported.slot = compression.sequence_slot;
  unreported.life = slot.life;
  unreported.done = !beside_steps;
  unreported.ready_step = step_;
  if (beside_steps) unreported.ready_step += rng_() % (options_.max_compression_delay + 1);
  unreported.prompt_tokens_kept = std::ranges::count(slot.is_prompt, true);
  unreported.blocks.insert(target.begin(), target.end());
  unreported.blocks.insert(compression.source_table.begin(), compression.source_table.end());
}

void FakeWorker::CheckCompression(const Compression& compression) {
  const SequenceSlot id = compression.sequence_slot;
  ASSERT_TRUE(slots_.contains(id)) << id;
  const Slot& slot = slots_[id];
  ASSERT_FALSE(slot.host.has_value()) << id;
  ASSERT_EQ(compression.source_table, slot.table) << "step " << step_ << " slot " << id;
  ASSERT_EQ(slot.contents.size(), slot.table.size() * options_.block_size)
      << "step " << step_ << " slot " << id << " is not full";
  for (const Unreported& other : compressions_) {
    ASSERT_TRUE(other.life != slot.life || other.done)
        << "step " << step_ << " slot " << id << " is compressed before that is finished";
  }
  ASSERT_GE(compression.target_table.size(), 2U);
  ASSERT_LE(compression.target_table.size(), slot.table.size());
  const int64_t num_kept =
      static_cast<int64_t>(compression.target_table.size() - 1) * options_.block_size;
  const fake::Rules rules = {.window = options_.window, .pin_prompt = options_.pin_prompt};
  ASSERT_EQ(compression.num_pinned, rules.NumPinned(slot.num_prompt_tokens, num_kept)) << id;
  ASSERT_LE(compression.num_pinned + options_.window, num_kept) << id;
  CheckTables(compression);
  CheckQueryWindow(compression);
}

void FakeWorker::CheckTables(const Compression& compression) {
  const SequenceSlot id = compression.sequence_slot;
  const std::vector<BlockId>& source = compression.source_table;
  const std::vector<BlockId>& target = compression.target_table;
  const size_t num_pinned_blocks = compression.num_pinned / options_.block_size;
  for (size_t i = 0; i < target.size(); ++i) {
    CheckBlock(target[i]);
    ASSERT_EQ(std::ranges::count(target, target[i]), 1) << "step " << step_ << " slot " << id;
    if (i < num_pinned_blocks) {
      ASSERT_EQ(target[i], source[i]) << "step " << step_ << " slot " << id << " pins it";
      continue;
    }
    const auto in_source = std::ranges::find(source, target[i]);
    ASSERT_TRUE(in_source == source.end() || in_source - source.begin() == static_cast<int64_t>(i))
        << "step " << step_ << " slot " << id << " moves block " << target[i];
    for (const auto& [other_id, other] : slots_) {
      ASSERT_TRUE(other_id == id || std::ranges::count(other.table, target[i]) == 0)
          << "step " << step_ << " slot " << id << " is packed into block " << target[i]
          << " of slot " << other_id;
    }
  }
}

void FakeWorker::CheckQueryWindow(const Compression& compression) {
  const SequenceSlot id = compression.sequence_slot;
  const Slot& slot = slots_[id];
  ASSERT_TRUE(slot.query_slot.has_value()) << "step " << step_ << " slot " << id;
  const std::vector<QueryRow>& rows = query_windows_[*slot.query_slot];
  for (int i = 0; i < options_.window; ++i) {
    ASSERT_TRUE(rows[i].life == slot.life &&
                rows[i].position == slot.position - options_.window + i)
        << "step " << step_ << " slot " << id << " is compressed by a cold query window, row " << i
        << " of " << options_.window;
  }
}

void FakeWorker::CheckSources(const StepPlan& plan) const {
  for (const Compression& compression : plan.compressions) {
    const std::vector<BlockId>& target = compression.target_table;
    for (const BlockId block : compression.source_table) {
      if (std::ranges::count(target, block) > 0) continue;
      ASSERT_FALSE(given_.contains(block))
          << "step " << step_ << " gives block " << block << " to another while slot "
          << compression.sequence_slot << " is compressed from it";
      for (const Compression& other : plan.compressions) {
        if (other.sequence_slot == compression.sequence_slot) continue;
        const auto begin = other.target_table.begin() + other.num_pinned / options_.block_size;
        ASSERT_EQ(std::count(begin, other.target_table.end(), block), 0)
            << "step " << step_ << " packs slot " << other.sequence_slot << " into block " << block
            << " while slot " << compression.sequence_slot << " is compressed from it";
      }
    }
  }
}

void FakeWorker::Pause(SequenceSlot id) {
  ASSERT_TRUE(slots_.contains(id)) << id;
  ASSERT_TRUE(slots_[id].runs()) << id;
  slots_[id].paused = true;
}

void FakeWorker::Resume(SequenceSlot id) {
  ASSERT_TRUE(slots_.contains(id)) << id;
  ASSERT_TRUE(slots_[id].paused) << id;
  slots_[id].paused = false;
}

}  // namespace zipage
