#include "tests/scheduler/fake_worker.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace zipage {
namespace {

uint64_t Mix(uint64_t h, uint64_t v) {
  h = (h ^ v) * 0x9e3779b97f4a7c15ULL;
  return h ^ (h >> 29);
}

}  // namespace

FakeWorker::FakeWorker(const FakeWorkerOptions& options)
    : options_(options), pool_(options.num_blocks * options.block_size) {}

void FakeWorker::PushToken(TokenId token, Slot* slot) {
  slot->chain.push_back(Mix(slot->chain.empty() ? 1 : slot->chain.back(), token + 1));
  slot->tokens.push_back(token);
}

TokenId FakeWorker::NextToken(std::span<const TokenId> tokens, int64_t num_prompt_tokens,
                              const SamplingParams& sampling, uint32_t sample_index,
                              TokenId vocab_size) {
  uint64_t h = Mix(sampling.seed, sample_index);
  for (const TokenId token : tokens) h = Mix(h, token + 1);
  const bool may_stop =
      static_cast<int64_t>(tokens.size()) - num_prompt_tokens >= sampling.min_tokens;
  for (;; h = Mix(h, 1)) {
    const auto token = static_cast<TokenId>((h >> 8) % vocab_size);
    if (may_stop || !std::ranges::binary_search(sampling.stop_token_ids, token)) return token;
  }
}

std::vector<TokenId> FakeWorker::OutputAlone(std::vector<TokenId> tokens, int64_t max_length,
                                             const SamplingParams& sampling, uint32_t sample_index,
                                             TokenId vocab_size) {
  const auto num_prompt_tokens = static_cast<int64_t>(tokens.size());
  while (static_cast<int64_t>(tokens.size()) < max_length) {
    tokens.push_back(NextToken(tokens, num_prompt_tokens, sampling, sample_index, vocab_size));
    if (std::ranges::binary_search(sampling.stop_token_ids, tokens.back())) break;
  }
  tokens.erase(tokens.begin(), tokens.begin() + num_prompt_tokens);
  return tokens;
}

void FakeWorker::CheckBlock(BlockId block) const {
  ASSERT_GE(block, 0);
  ASSERT_LT(block, options_.num_blocks);
}

void FakeWorker::ApplyDeltas(const StepPlan& plan) {
  ASSERT_EQ(plan.step, step_ + 1);
  ++step_;
  for (const SequenceSlot slot : plan.released) ASSERT_EQ(slots_.erase(slot), 1U) << slot;
  for (const NewSequence& added : plan.new_sequences) AddSequence(added);
  for (const AppendedBlock& appended : plan.appended_blocks) {
    ASSERT_TRUE(slots_.contains(appended.sequence_slot)) << appended.sequence_slot;
    CheckBlock(appended.block);
    slots_[appended.sequence_slot].table.push_back(appended.block);
  }
}

void FakeWorker::AddSequence(const NewSequence& added) {
  ASSERT_GE(added.sequence_slot, 0);
  ASSERT_LT(added.sequence_slot, options_.max_num_seqs);
  ASSERT_FALSE(slots_.contains(added.sequence_slot)) << added.sequence_slot;
  ASSERT_LT(added.num_cached_tokens, added.tokens.size());
  ASSERT_LE(added.num_prompt_tokens, added.tokens.size());
  ASSERT_EQ(added.num_cached_tokens % options_.block_size, 0U);
  ASSERT_LE(added.num_cached_tokens, added.block_table.size() * options_.block_size);
  for (const BlockId block : added.block_table) CheckBlock(block);
  Slot& slot = slots_[added.sequence_slot];
  for (const TokenId token : added.tokens) PushToken(token, &slot);
  slot.num_prompt_tokens = added.num_prompt_tokens;
  slot.num_cached = added.num_cached_tokens;
  slot.table = added.block_table;
  slot.sample_index = added.sample_index;
  slot.sampling = added.sampling;
}

std::vector<FakeWorker::Row> FakeWorker::BuildBatch(const StepPlan& plan) {
  std::vector<Row> batch;
  int64_t num_tokens = 0;
  for (const auto& [id, slot] : slots_) {
    if (slot.decoding) batch.push_back({id, slot.num_cached, 1, true});
  }
  EXPECT_EQ(batch.size(), plan.num_decoding);
  for (const PrefillChunk& chunk : plan.chunks) {
    EXPECT_TRUE(slots_.contains(chunk.sequence_slot)) << chunk.sequence_slot;
    Slot& slot = slots_[chunk.sequence_slot];
    EXPECT_FALSE(slot.decoding) << chunk.sequence_slot;
    EXPECT_EQ(chunk.start, slot.num_cached);
    EXPECT_GT(chunk.num_tokens, 0);
    const auto length = static_cast<int64_t>(slot.tokens.size());
    EXPECT_LE(chunk.start + chunk.num_tokens, length);
    EXPECT_EQ(chunk.samples, chunk.start + chunk.num_tokens == length);
    slot.decoding = chunk.samples;
    batch.push_back({chunk.sequence_slot, chunk.start, chunk.num_tokens, chunk.samples});
  }
  for (const Row& row : batch) num_tokens += row.num_tokens;
  EXPECT_LE(num_tokens, options_.max_num_batched_tokens);
  return batch;
}

void FakeWorker::Write(const Row& row, const std::map<BlockId, int>& num_writers) {
  Slot& slot = slots_[row.slot];
  ASSERT_EQ(slot.num_cached, row.start);
  for (int64_t p = row.start; p < row.start + row.num_tokens; ++p) {
    ASSERT_LT(p / options_.block_size, static_cast<int64_t>(slot.table.size()));
    const BlockId block = slot.table[p / options_.block_size];
    ASSERT_EQ(num_writers.at(block), 1) << "block " << block << " is written by two";
    pool_[int64_t{block} * options_.block_size + p % options_.block_size] = slot.chain.at(p);
  }
  slot.num_cached += row.num_tokens;
}

void FakeWorker::Attend(const Row& row) {
  const Slot& slot = slots_[row.slot];
  for (int64_t p = 0; p < slot.num_cached; ++p) {
    const BlockId block = slot.table[p / options_.block_size];
    ASSERT_EQ(pool_[int64_t{block} * options_.block_size + p % options_.block_size], slot.chain[p])
        << "step " << step_ << " slot " << row.slot << " position " << p << " block " << block;
  }
}

StepResult FakeWorker::Execute(const StepPlan& plan) {
  ApplyDeltas(plan);
  StepResult result;
  result.step = plan.step;
  const std::vector<Row> batch = BuildBatch(plan);
  // A sequence may write every block after its cached positions. Others may have that block too,
  // but only as cached: it is filled in this very step.
  std::map<BlockId, int> num_writers;
  for (const auto& [id, slot] : slots_) {
    for (size_t i = slot.num_cached / options_.block_size; i < slot.table.size(); ++i) {
      ++num_writers[slot.table[i]];
    }
  }
  // A layer writes the keys and values of the whole batch before anybody attends to them.
  for (const Row& row : batch) Write(row, num_writers);
  for (const Row& row : batch) {
    Attend(row);
    if (!row.samples) continue;
    Slot& slot = slots_[row.slot];
    EXPECT_EQ(slot.num_cached, static_cast<int64_t>(slot.tokens.size()));
    const TokenId token = NextToken(slot.tokens, slot.num_prompt_tokens, slot.sampling,
                                    slot.sample_index, options_.vocab_size);
    PushToken(token, &slot);
    if (corrupt_ == row.slot) {
      corrupt_.reset();
      result.corrupted.push_back(row.slot);
    } else {
      result.sampled.push_back({row.slot, token, {}});
    }
  }
  return result;
}

}  // namespace zipage
