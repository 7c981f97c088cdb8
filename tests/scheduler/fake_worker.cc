#include "tests/scheduler/fake_worker.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace zipage {

FakeWorker::FakeWorker(const FakeWorkerOptions& options)
    : options_(options),
      rng_(options.delay_seed),
      pool_(options.num_blocks * options.block_size),
      query_windows_(options.num_query_slots, std::vector<QueryRow>(options.window)) {}

std::vector<FakeWorker::Row> FakeWorker::BuildBatch(const StepPlan& plan) {
  std::vector<Row> batch;
  int64_t num_tokens = 0;
  for (const auto& [id, slot] : slots_) {
    if (!slot.decoding || !slot.runs()) continue;
    CheckRuns(id);
    batch.push_back({id, 1, true});
  }
  EXPECT_EQ(batch.size(), plan.num_decoding);
  for (const PrefillChunk& chunk : plan.chunks) {
    EXPECT_TRUE(slots_.contains(chunk.sequence_slot)) << chunk.sequence_slot;
    Slot& slot = slots_[chunk.sequence_slot];
    EXPECT_FALSE(slot.decoding) << chunk.sequence_slot;
    EXPECT_TRUE(slot.runs()) << chunk.sequence_slot;
    CheckRuns(chunk.sequence_slot);
    EXPECT_EQ(chunk.start, slot.position);
    EXPECT_GT(chunk.num_tokens, 0);
    const auto length = static_cast<int64_t>(slot.tokens.size());
    EXPECT_LE(chunk.start + chunk.num_tokens, length);
    EXPECT_EQ(chunk.samples, chunk.start + chunk.num_tokens == length);
    slot.decoding = chunk.samples;
    batch.push_back({chunk.sequence_slot, chunk.num_tokens, chunk.samples});
  }
  for (const Row& row : batch) num_tokens += row.num_tokens;
  EXPECT_LE(num_tokens, options_.max_num_batched_tokens);
  return batch;
}

void FakeWorker::CheckRuns(SequenceSlot id) const {
  for (const Unreported& compression : compressions_) {
    if (compression.life != slots_.at(id).life) continue;
    EXPECT_TRUE(compression.done) << "slot " << id << " runs in step " << step_
                                  << " before its compression is finished";
  }
}

void FakeWorker::Write(const Row& row, const std::map<BlockId, int>& num_writers) {
  Slot& slot = slots_[row.slot];
  uint64_t attended = fake::Attend(slot.contents);
  for (int64_t i = 0; i < row.num_tokens; ++i) {
    const auto index = static_cast<int64_t>(slot.contents.size());
    ASSERT_LT(index / options_.block_size, static_cast<int64_t>(slot.table.size()))
        << "step " << step_ << " slot " << row.slot;
    const BlockId block = slot.table[index / options_.block_size];
    ASSERT_EQ(num_writers.at(block), 1) << "block " << block << " is written by two";
    const uint64_t content =
        fake::ContentOf(attended, slot.tokens.at(slot.position), slot.position);
    At(slot.table, index) = content;
    attended = fake::Attend(attended, content);
    slot.contents.push_back(content);
    slot.is_prompt.push_back(slot.position < slot.num_prompt_tokens);
    KeepQuery(slot);
    ++slot.position;
  }
}

void FakeWorker::KeepQuery(const Slot& slot) {
  const auto offset = static_cast<int64_t>(slot.contents.size() - 1) % options_.block_size;
  const int64_t row = offset - (options_.block_size - options_.window);
  if (!slot.query_slot.has_value() || row < 0) return;
  query_windows_[*slot.query_slot][row] = {slot.life, slot.position,
                                           fake::QueryOf(slot.contents.back())};
}

uint64_t FakeWorker::Attend(const Row& row) {
  const Slot& slot = slots_[row.slot];
  uint64_t attended = fake::Attend({});
  for (size_t i = 0; i < slot.contents.size(); ++i) {
    const uint64_t held = At(slot.table, static_cast<int64_t>(i));
    EXPECT_EQ(held, slot.contents[i]) << "step " << step_ << " slot " << row.slot << " attends to "
                                      << i << ", block " << slot.table[i / options_.block_size];
    if (held != slot.contents[i]) return 0;
    attended = fake::Attend(attended, held);
  }
  return attended;
}

void FakeWorker::Sample(const Row& row, uint64_t attended, StepResult* result) {
  Slot& slot = slots_[row.slot];
  const auto length = static_cast<int64_t>(slot.tokens.size());
  EXPECT_EQ(slot.position, length);
  const TokenId token =
      fake::NextToken(attended, length, slot.num_prompt_tokens, slot.sampling, slot.sample_index);
  slot.tokens.push_back(token);
  if (corrupt_ == row.slot) {
    corrupt_.reset();
    result->corrupted.push_back(row.slot);
  } else {
    result->sampled.push_back({row.slot, token, {}});
  }
}

void FakeWorker::Report(const StepPlan& plan, StepResult* result) {
  StepPlan empty;
  empty.step = plan.step;
  if (plan == empty) {
    // Nothing but to wait for a compression.
    ASSERT_FALSE(compressions_.empty()) << "step " << step_ << " is empty";
    compressions_.front().ready_step = step_;
  }
  std::set<SequenceSlot> later;  // Reports of one slot come in order.
  std::erase_if(compressions_, [&](const Unreported& compression) {
    if (compression.ready_step > step_ || later.contains(compression.slot)) {
      later.insert(compression.slot);
      return false;
    }
    result->finished_compressions.push_back(
        {compression.slot, static_cast<float>(compression.prompt_tokens_kept)});
    return true;
  });
}

StepResult FakeWorker::Execute(const StepPlan& plan) {
  StepResult result;
  result.step = plan.step;
  ApplyDeltas(plan);
  if (::testing::Test::HasFatalFailure()) return result;
  const std::vector<Row> batch = BuildBatch(plan);
  // A sequence may write every block after its cached slots. Others may have that block too, but
  // only as cached: it is filled in this very step.
  std::map<BlockId, int> num_writers;
  for (const auto& [id, slot] : slots_) {
    for (size_t i = slot.contents.size() / options_.block_size; i < slot.table.size(); ++i) {
      ++num_writers[slot.table[i]];
    }
  }
  // A layer writes the keys and values of the whole batch before anybody attends to them.
  for (const Row& row : batch) Write(row, num_writers);
  if (::testing::Test::HasFatalFailure()) return result;
  for (const Row& row : batch) {
    const uint64_t attended = Attend(row);
    if (row.samples) Sample(row, attended, &result);
  }
  Report(plan, &result);
  return result;
}

}  // namespace zipage
