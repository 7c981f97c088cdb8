#include "worker/sequence_state.h"

#include <functional>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zipage {
namespace {

using testing::HasSubstr;

constexpr SequenceStates::Limits kLimits{.max_num_seqs = 4,
                                         .block_size = 16,
                                         .num_blocks = 10,
                                         .vocab_size = 100,
                                         .max_position = 64,
                                         .max_tokens = 48};

// Slot 1 holds 20 tokens in blocks 3 and 7, of which `cached` are there already.
NewSequence MakeSequence(int cached = 0) {
  NewSequence sequence;
  sequence.sequence_slot = 1;
  for (int i = 0; i < 20; ++i) sequence.tokens.push_back(i);
  sequence.num_prompt_tokens = 18;
  sequence.num_cached_tokens = cached;
  sequence.block_table = {3, 7};
  return sequence;
}

// A first step that prefills MakeSequence completely.
StepPlan FirstPlan() {
  StepPlan plan;
  plan.step = 1;
  plan.new_sequences = {MakeSequence()};
  plan.chunks = {{1, 0, 20, true}};
  return plan;
}

TEST(SequenceStateTest, ChunksAndDecodesMoveTheStateForward) {
  SequenceStates states(kLimits);
  StepPlan plan;
  plan.step = 1;
  plan.new_sequences = {MakeSequence(16)};
  plan.chunks = {{1, 16, 3, false}};
  ASSERT_TRUE(states.Apply(plan).ok());
  ASSERT_EQ(states.rows().size(), 1);
  EXPECT_EQ(states.rows()[0].first_cached, 16);
  EXPECT_EQ(states.rows()[0].num_tokens, 3);
  EXPECT_EQ(states.rows()[0].tokens[2], 18);
  EXPECT_FALSE(states.rows()[0].samples);
  EXPECT_EQ(states.at(1).num_cached, 19);
  EXPECT_EQ(states.at(1).num_output, 2);

  plan = StepPlan();
  plan.step = 2;
  plan.chunks = {{1, 19, 1, true}};
  ASSERT_TRUE(states.Apply(plan).ok());
  EXPECT_TRUE(states.rows()[0].samples);
  EXPECT_EQ(states.rows()[0].tokens[0], 19);
  states.AppendOutput(1, 42);
  EXPECT_EQ(states.at(1).num_output, 3);

  plan = StepPlan();
  plan.step = 3;
  plan.num_decoding = 1;
  ASSERT_TRUE(states.Apply(plan).ok());
  EXPECT_EQ(states.rows()[0].tokens, nullptr);
  EXPECT_EQ(states.rows()[0].first_position, 20);
  EXPECT_EQ(states.at(1).num_cached, 21);

  plan = StepPlan();
  plan.step = 4;
  plan.released = {1};
  plan.new_sequences = {MakeSequence()};
  plan.chunks = {{1, 0, 20, true}};
  EXPECT_TRUE(states.Apply(plan).ok()) << "a slot is free again in the plan that releases it";
}

TEST(SequenceStateTest, CountsSeenTokensOnlyWithAPenalty) {
  SequenceStates states(kLimits);
  StepPlan plan = FirstPlan();
  plan.new_sequences[0].tokens[18] = 5;  // output
  plan.new_sequences[0].tokens[19] = 99;
  plan.new_sequences[0].sampling.presence_penalty = 0.5F;
  plan.new_sequences.push_back(MakeSequence());
  plan.new_sequences[1].sequence_slot = 2;
  ASSERT_TRUE(states.Apply(plan).ok());
  states.AppendOutput(1, 99);
  EXPECT_TRUE(states.at(2).seen.empty());
  ASSERT_EQ(states.at(1).seen.size(), 19);
  for (const SeenToken& seen : states.at(1).seen) {
    EXPECT_EQ(seen.output_count, seen.token == 99 ? 2 : seen.token == 5 ? 1 : 0) << seen.token;
  }
}

struct Mistake {
  std::string message;
  std::function<void(StepPlan*)> make;  // of the second plan, in which slot 1 decodes
};

TEST(SequenceStateTest, EveryMismatchIsInternalAndNamesStepSlotAndValues) {
  const auto add = [](StepPlan* plan) -> NewSequence& {
    plan->new_sequences.push_back(MakeSequence());
    plan->new_sequences.back().sequence_slot = 2;
    return plan->new_sequences.back();
  };
  const std::vector<Mistake> mistakes = {
      {"step 1: the plan is for step 3, expected 2", [](StepPlan* p) { p->step = 3; }},
      {"step 1: the plan is for step 1, expected 2", [](StepPlan* p) { p->step = 1; }},
      {"a release names slot 3, which is free", [](StepPlan* p) { p->released = {3}; }},
      {"a release names slot 4, there are 4", [](StepPlan* p) { p->released = {4}; }},
      {"a release names slot -1", [](StepPlan* p) { p->released = {-1}; }},
      {"a release names slot 1, which is free",
       [](StepPlan* p) {
         p->released = {1, 1};
       }},
      {"new sequence names slot 1, which is used", [&](StepPlan* p) { add(p).sequence_slot = 1; }},
      {"new sequence names slot 9, there are 4", [&](StepPlan* p) { add(p).sequence_slot = 9; }},
      {"slot 2 has 21 prompt tokens of 20 tokens",
       [&](StepPlan* p) { add(p).num_prompt_tokens = 21; }},
      {"slot 2 starts with 20 cached tokens, which leaves none of its 20",
       [&](StepPlan* p) { add(p).num_cached_tokens = 20; }},
      {"slot 2 starts with 17 cached tokens, its blocks hold 16",
       [&](StepPlan* p) {
         add(p).num_cached_tokens = 17;
         p->new_sequences[0].block_table = {1};
       }},
      {"slot 2 has token 100, the vocabulary has 100",
       [&](StepPlan* p) { add(p).tokens[3] = 100; }},
      {"slot 2 has token -1", [&](StepPlan* p) { add(p).tokens[3] = -1; }},
      {"slot 2 gets block 10, there are 10", [&](StepPlan* p) { add(p).block_table[1] = 10; }},
      {"slot 1 gets block -1",
       [](StepPlan* p) {
         p->appended_blocks = {{1, -1}};
       }},
      {"appended block names slot 0, which is free",
       [](StepPlan* p) {
         p->appended_blocks = {{0, 1}};
       }},
      {"the plan decodes 0 slots, 1 slots decode", [](StepPlan* p) { p->num_decoding = 0; }},
      {"the plan decodes 2 slots, 1 slots decode", [](StepPlan* p) { p->num_decoding = 2; }},
      {"slot 1 gets a chunk, but it decodes",
       [](StepPlan* p) {
         p->chunks = {{1, 20, 1, true}};
       }},
      {"slot 2 gets a chunk from 1, its next position is 0",
       [&](StepPlan* p) {
         add(p);
         p->chunks = {{2, 1, 1, false}};
       }},
      {"slot 2 gets a chunk of 0 tokens",
       [&](StepPlan* p) {
         add(p);
         p->chunks = {{2, 0, 0, false}};
       }},
      {"slot 2 gets a chunk of 2147483647 tokens from 0, it has 20",
       [&](StepPlan* p) {
         add(p);
         p->chunks = {{2, 0, 2147483647, true}};
       }},
      {"slot 2 gets a chunk up to 19 of 20 tokens that samples",
       [&](StepPlan* p) {
         add(p);
         p->chunks = {{2, 0, 19, true}};
       }},
      {"slot 2 gets a chunk up to 20 of 20 tokens that does not sample",
       [&](StepPlan* p) {
         add(p);
         p->chunks = {{2, 0, 20, false}};
       }},
      {"slot 2 runs 20 tokens from slot 0 of its table, its blocks hold 16",
       [&](StepPlan* p) {
         add(p).block_table = {1};
         p->chunks = {{2, 0, 20, true}};
       }},
      {"slot 2 runs 65 tokens from position 0, positions end at 64",
       [&](StepPlan* p) {
         add(p).tokens.assign(65, 1);
         p->new_sequences[0].block_table = {0, 1, 2, 4, 5};
         p->chunks = {{2, 0, 65, true}};
       }},
      {"the plan runs 51 tokens, at most 48",
       [&](StepPlan* p) {
         add(p).tokens.assign(50, 1);
         p->new_sequences[0].block_table = {0, 1, 2, 4};
         p->chunks = {{2, 0, 50, true}};
       }},
  };
  for (const Mistake& mistake : mistakes) {
    SequenceStates states(kLimits);
    ASSERT_TRUE(states.Apply(FirstPlan()).ok());
    StepPlan plan;
    plan.step = 2;
    plan.num_decoding = 1;
    mistake.make(&plan);
    const absl::Status status = states.Apply(plan);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << mistake.message;
    EXPECT_THAT(std::string(status.message()), HasSubstr(mistake.message));
    EXPECT_THAT(std::string(status.message()), HasSubstr("step "));
  }
}

TEST(SequenceStateTest, RunsOutOfBlocksAndPositionsWhileDecoding) {
  SequenceStates states(kLimits);
  StepPlan plan = FirstPlan();
  ASSERT_TRUE(states.Apply(plan).ok());
  plan = StepPlan();
  plan.num_decoding = 1;
  for (int cached = 20; cached < 32; ++cached) {
    plan.step = cached - 18;
    ASSERT_TRUE(states.Apply(plan).ok()) << cached;
  }
  ++plan.step;
  EXPECT_THAT(std::string(states.Apply(plan).message()),
              HasSubstr("slot 1 runs 1 tokens from slot 32 of its table, its blocks hold 32"));
}

TEST(SequenceStateTest, RandomPlansNeverBreakAnInvariant) {
  std::mt19937 random(7);
  const auto draw = [&random](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  int accepted = 0;
  for (int round = 0; round < 3000; ++round) {
    SequenceStates states(kLimits);
    StepPlan plan = FirstPlan();
    ASSERT_TRUE(states.Apply(plan).ok());
    for (int step = 2; step < 40; ++step) {
      plan = StepPlan();
      plan.step = step;
      for (SequenceSlot slot = 0; slot < kLimits.max_num_seqs; ++slot) {
        const SequenceState& sequence = states.at(slot);
        if (!sequence.used) {
          if (draw(0, 3) != 0) continue;
          plan.new_sequences.push_back(MakeSequence(draw(0, 21)));
          plan.new_sequences.back().sequence_slot = slot;
          plan.new_sequences.back().block_table.resize(draw(0, 3), draw(-1, 20) % 10);
          continue;
        }
        if (draw(0, 9) == 0) {
          plan.released.push_back(slot);
          continue;
        }
        if (draw(0, 3) == 0) plan.appended_blocks.push_back({slot, draw(0, 9)});
        if (sequence.decodes) {
          ++plan.num_decoding;
        } else {
          const int left = static_cast<int>(sequence.tokens.size() - sequence.num_cached);
          const int tokens = draw(1, left);
          plan.chunks.push_back(
              {slot, static_cast<int32_t>(sequence.num_cached), tokens, tokens == left});
        }
      }
      if (!states.Apply(plan).ok()) break;
      ++accepted;
      int64_t tokens = 0;
      for (const StepRow& row : states.rows()) {
        const SequenceState& sequence = states.at(row.sequence_slot);
        ASSERT_TRUE(sequence.used);
        ASSERT_EQ(row.first_cached + row.num_tokens, sequence.num_cached);
        ASSERT_LE(sequence.num_cached,
                  static_cast<int64_t>(sequence.block_table.size()) * kLimits.block_size);
        ASSERT_EQ(sequence.decodes, row.samples);
        for (int64_t i = 0; row.tokens != nullptr && i < row.num_tokens; ++i) {
          ASSERT_EQ(row.tokens[i], row.first_cached + i);
        }
        tokens += row.num_tokens;
      }
      ASSERT_LE(tokens, kLimits.max_tokens);
    }
  }
  EXPECT_GT(accepted, 5000);
}

}  // namespace
}  // namespace zipage
