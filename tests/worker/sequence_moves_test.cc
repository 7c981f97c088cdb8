// Query slots, swaps, compressions and pauses of the sequence states.

#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/sequence_state.h"

namespace zipage {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

constexpr SequenceStates::Limits kLimits{.max_num_seqs = 4,
                                         .block_size = 8,
                                         .num_blocks = 20,
                                         .num_host_blocks = 7,
                                         .num_query_slots = 3,
                                         .window = 4,
                                         .sink_len = 2,
                                         .vocab_size = 100,
                                         .max_position = 100,
                                         .max_tokens = 64};

NewSequence MakeSequence(SequenceSlot slot, int num_tokens, std::vector<BlockId> table) {
  NewSequence sequence;
  sequence.sequence_slot = slot;
  sequence.tokens.assign(num_tokens, 7);
  sequence.num_prompt_tokens = 20;
  sequence.block_table = std::move(table);
  sequence.sample_index = 2;
  sequence.sampling.seed = 5;
  return sequence;
}

// Slot 1 decodes from position 24 on: blocks 3, 7, 9 are full, its query slot is 2.
StepPlan FirstPlan() {
  StepPlan plan;
  plan.step = 1;
  plan.new_sequences = {MakeSequence(1, 24, {3, 7, 9})};
  plan.query_slots = {{1, 2}};
  plan.chunks = {{1, 0, 24, true}};
  return plan;
}

StepPlan Plan(uint64_t step) {
  StepPlan plan;
  plan.step = step;
  return plan;
}

// The compression of FirstPlan's sequence to two blocks.
Compression Compress() { return {1, {3, 7, 9}, {3, 7, 5}, 8}; }

TEST(SequenceMovesTest, ACompressionPacksTheSlotsAndPositionsGoOn) {
  SequenceStates states(kLimits);
  ASSERT_TRUE(states.Apply(FirstPlan()).ok());
  StepPlan plan = Plan(2);
  plan.compressions = {Compress()};
  plan.num_decoding = 1;
  ASSERT_TRUE(states.Apply(plan).ok());
  ASSERT_EQ(states.compressions().size(), 1);
  const CompressionWork& first = states.compressions()[0];
  EXPECT_EQ(first.query_slot, 2);
  EXPECT_THAT(first.source_table, ElementsAre(3, 7, 9));
  EXPECT_THAT(first.target_table, ElementsAre(3, 7, 5));
  EXPECT_EQ(first.num_pinned, 8);
  EXPECT_EQ(first.round, 0);
  EXPECT_EQ(first.new_prompt_slots, 20);
  EXPECT_EQ(first.seed, 5);
  EXPECT_EQ(first.sample_index, 2);
  EXPECT_EQ(states.rows()[0].first_cached, 16);
  EXPECT_EQ(states.rows()[0].first_position, 24);
  EXPECT_EQ(states.at(1).num_cached, 17);
  EXPECT_EQ(states.at(1).position, 25);
  for (int step = 3; step < 10; ++step) {
    plan = Plan(step);
    plan.num_decoding = 1;
    ASSERT_TRUE(states.Apply(plan).ok());
    EXPECT_TRUE(states.compressions().empty());
  }
  plan = Plan(10);
  plan.compressions = {{1, {3, 7, 5}, {3, 8, 11}, 8}};
  plan.paused = {1};
  ASSERT_TRUE(states.Apply(plan).ok());
  EXPECT_EQ(states.compressions()[0].round, 1);
  EXPECT_EQ(states.compressions()[0].new_prompt_slots, 0);
  EXPECT_TRUE(states.rows().empty());
  EXPECT_EQ(states.at(1).position, 32);
}

TEST(SequenceMovesTest, APromptCompressedWhileItIsPrefilledIsCountedOnce) {
  SequenceStates states(kLimits);
  StepPlan plan = Plan(1);
  plan.new_sequences = {MakeSequence(0, 34, {1, 2})};
  plan.new_sequences[0].num_prompt_tokens = 30;
  plan.query_slots = {{0, 1}};
  plan.chunks = {{0, 0, 16, false}};
  ASSERT_TRUE(states.Apply(plan).ok());
  int64_t prompt_slots = 0;
  const std::vector<int64_t> starts = {16, 24, 32};
  for (size_t i = 0; i < starts.size(); ++i) {
    plan = Plan(2 + i);
    plan.compressions = {{0, {1, 2}, {1, 2}, 0}};
    const bool last = starts[i] == 32;
    plan.chunks = {{0, static_cast<int32_t>(starts[i]), last ? 2 : 8, last}};
    ASSERT_TRUE(states.Apply(plan).ok());
    EXPECT_EQ(states.compressions()[0].round, i);
    prompt_slots += states.compressions()[0].new_prompt_slots;
    EXPECT_EQ(states.rows()[0].first_cached, 8);
    EXPECT_EQ(states.rows()[0].tokens[0], 7);
  }
  EXPECT_EQ(prompt_slots, 30);
  EXPECT_TRUE(states.at(0).decodes);
}

TEST(SequenceMovesTest, RowsNameTheQueriesOfTheLastBlocksWindow) {
  SequenceStates states(kLimits);
  StepPlan plan = Plan(1);
  plan.new_sequences = {MakeSequence(0, 40, {0, 1, 2, 3, 4})};
  plan.query_slots = {{0, 2}};
  // Slots, and the first of them whose query is kept: the windows are slots 4-7, 12-15, ….
  struct Chunk {
    int start, num_tokens, first_query, window_row;
  };
  const std::vector<Chunk> chunks = {{0, 3, 3, 8},  {3, 2, 1, 8},  {5, 1, 0, 9}, {6, 12, 12, 8},
                                     {18, 6, 2, 8}, {24, 8, 4, 8}, {32, 7, 4, 8}};
  for (size_t i = 0; i < chunks.size(); ++i) {
    const Chunk& chunk = chunks[i];
    plan.step = i + 1;
    plan.chunks = {{0, chunk.start, chunk.num_tokens, false}};
    ASSERT_TRUE(states.Apply(plan).ok());
    const StepRow& row = states.rows()[0];
    EXPECT_EQ(row.first_query, chunk.first_query) << chunk.start;
    if (row.first_query < row.num_tokens) {
      EXPECT_EQ(row.window_row, chunk.window_row) << chunk.start;
    }
    plan = StepPlan();
  }
  // Without a query slot nothing is kept.
  plan.step = chunks.size() + 1;
  plan.new_sequences = {MakeSequence(3, 24, {10, 11, 12})};
  plan.chunks = {{3, 0, 24, true}};
  ASSERT_TRUE(states.Apply(plan).ok());
  EXPECT_EQ(states.rows()[0].first_query, 24);
}

TEST(SequenceMovesTest, ASwappedSequenceComesBackAsItWas) {
  SequenceStates states(kLimits);
  ASSERT_TRUE(states.Apply(FirstPlan()).ok());
  StepPlan plan = Plan(2);
  plan.paused = {1};
  ASSERT_TRUE(states.Apply(plan).ok());
  plan = Plan(3);
  plan.swaps = {{1, true, {3, 7, 9}}};
  // The blocks and the query slot are free at once.
  plan.new_sequences = {MakeSequence(0, 24, {3, 7, 9})};
  plan.query_slots = {{0, 2}};
  plan.chunks = {{0, 0, 24, true}};
  ASSERT_TRUE(states.Apply(plan).ok());
  ASSERT_EQ(states.swaps().size(), 1);
  EXPECT_TRUE(states.swaps()[0].to_host);
  EXPECT_EQ(states.swaps()[0].query_slot, 2);
  EXPECT_THAT(states.swaps()[0].blocks, ElementsAre(3, 7, 9));
  EXPECT_TRUE(states.at(1).block_table.empty());
  EXPECT_EQ(states.rows().size(), 1);

  plan = Plan(4);
  plan.swaps = {{1, false, {12, 11, 13}}};
  plan.query_slots = {{1, 0}};
  plan.compressions = {{1, {12, 11, 13}, {12, 11, 13}, 0}};
  plan.appended_blocks = {{0, 4}};
  plan.num_decoding = 2;
  ASSERT_TRUE(states.Apply(plan).ok());
  EXPECT_FALSE(states.swaps()[0].to_host);
  EXPECT_EQ(states.swaps()[0].query_slot, 0);
  EXPECT_EQ(states.compressions()[0].query_slot, 0);
  EXPECT_EQ(states.at(1).position, 25);

  // Swapped in one plan, out of turn: to the host first, whatever the order of the list.
  plan = Plan(5);
  plan.swaps = {{1, true, {12, 11, 13}}};
  plan.num_decoding = 1;
  ASSERT_TRUE(states.Apply(plan).ok());
  plan = Plan(6);
  plan.swaps = {{1, false, {3, 7, 9}}, {0, true, {3, 7, 9, 4}}};
  plan.num_decoding = 1;
  const absl::Status applied = states.Apply(plan);
  ASSERT_TRUE(applied.ok()) << applied;
  EXPECT_TRUE(states.swaps()[0].to_host);
  EXPECT_EQ(states.swaps()[0].sequence_slot, 0);
  EXPECT_FALSE(states.swaps()[1].query_slot.has_value()) << "it got no query slot";
}

TEST(SequenceMovesTest, AWindowThatStayedBehindIsCold) {
  SequenceStates states(kLimits);
  ASSERT_TRUE(states.Apply(FirstPlan()).ok());
  StepPlan plan = Plan(2);
  plan.swaps = {{1, true, {3, 7, 9}}};
  ASSERT_TRUE(states.Apply(plan).ok());
  plan = Plan(3);
  plan.swaps = {{1, false, {3, 7, 9}}};
  plan.paused = {1};
  ASSERT_TRUE(states.Apply(plan).ok());
  plan = Plan(4);
  plan.query_slots = {{1, 2}};
  plan.compressions = {Compress()};
  EXPECT_THAT(std::string(states.Apply(plan).message()),
              HasSubstr("step 4: slot 1 is compressed at 24 slots, its query slot 2 holds the "
                        "queries from 24 on, which is less than a window of 4"));
}

TEST(SequenceMovesTest, AQuerySlotMayComeRightBeforeTheWindow) {
  for (int late : {0, 1}) {
    SequenceStates states(kLimits);
    StepPlan plan = Plan(1);
    plan.new_sequences = {MakeSequence(1, 24, {3, 7, 9})};
    plan.chunks = {{1, 0, 20 + late, false}};
    ASSERT_TRUE(states.Apply(plan).ok());
    plan = Plan(2);
    plan.query_slots = {{1, 2}};
    plan.chunks = {{1, 20 + late, 4 - late, true}};
    ASSERT_TRUE(states.Apply(plan).ok());
    plan = Plan(3);
    plan.compressions = {Compress()};
    plan.num_decoding = 1;
    EXPECT_EQ(states.Apply(plan).ok(), late == 0);
  }
}

struct Mistake {
  std::string message;
  std::function<void(StepPlan*)> make;  // of the second plan, in which slot 1 decodes
};

// Every mistake follows FirstPlan, which for some is followed by `before`.
void ExpectMismatches(const std::vector<Mistake>& mistakes, const StepPlan& before = StepPlan()) {
  for (const Mistake& mistake : mistakes) {
    SequenceStates states(kLimits);
    ASSERT_TRUE(states.Apply(FirstPlan()).ok());
    StepPlan plan = Plan(2);
    plan.num_decoding = 1;
    if (before.step == 2) {
      ASSERT_TRUE(states.Apply(before).ok());
      plan = Plan(3);
    }
    mistake.make(&plan);
    const absl::Status status = states.Apply(plan);
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << mistake.message;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("step " + std::to_string(plan.step) + ": " + mistake.message));
  }
}

TEST(SequenceMovesTest, EveryWrongCompressionIsInternalAndNamesStepSlotAndValues) {
  const auto edit = [](StepPlan* plan) -> Compression& {
    plan->compressions.push_back(Compress());
    return plan->compressions.back();
  };
  ExpectMismatches({
      {"a compression names slot 2, which is free",
       [&](StepPlan* p) { edit(p).sequence_slot = 2; }},
      {"a compression names slot 9, there are 4", [&](StepPlan* p) { edit(p).sequence_slot = 9; }},
      {"slot 1 is compressed from blocks [3 9 7], its table is [3 7 9]",
       [&](StepPlan* p) {
         edit(p).source_table = {3, 9, 7};
       }},
      {"slot 1 is compressed from 3 blocks to 1, give 2 to 3",
       [&](StepPlan* p) { edit(p).target_table = {3}; }},
      {"slot 1 is compressed from 3 blocks to 4, give 2 to 3",
       [&](StepPlan* p) {
         edit(p).target_table = {3, 7, 9, 5};
       }},
      {"slot 1 gets block 20, there are 20", [&](StepPlan* p) { edit(p).target_table[1] = 20; }},
      {"slot 1 is compressed into block 7 at 1 and at 2 of its table",
       [&](StepPlan* p) { edit(p).target_table[2] = 7; }},
      {"slot 1 is compressed into block 9 at 1 of its table, where it was at 2",
       [&](StepPlan* p) { edit(p).target_table[1] = 9; }},
      {"slot 1 is compressed with 24 slots cached, its blocks hold 32",
       [&](StepPlan* p) {
         p->appended_blocks = {{1, 4}};
         edit(p).source_table = {3, 7, 9, 4};
       }},
      {"slot 1 is compressed to 16 slots, 13 pinned ones, 2 sinks and a window of 4 do not fit",
       [&](StepPlan* p) { edit(p).num_pinned = 13; }},
      {"slot 1 pins 8 slots, but block 3 at 0 of its table becomes 6",
       [&](StepPlan* p) { edit(p).target_table[0] = 6; }},
      {"slot 1 is compressed with 16 slots cached, its blocks hold 24",
       [&](StepPlan* p) {
         edit(p);
         p->compressions.push_back({1, {3, 7, 5}, {3, 7, 5}, 8});
       }},
      {"slot 2 is compressed without a query slot",
       [&](StepPlan* p) {
         p->new_sequences = {MakeSequence(2, 24, {0, 1})};
         p->new_sequences[0].num_cached_tokens = 16;
         p->compressions = {{2, {0, 1}, {0, 1}, 0}};
       }},
      {"slot 2 is compressed at 16 slots, its query slot 0 holds the queries from 16 on",
       [&](StepPlan* p) {
         p->new_sequences = {MakeSequence(2, 24, {0, 1})};
         p->new_sequences[0].num_cached_tokens = 16;
         p->query_slots = {{2, 0}};
         p->compressions = {{2, {0, 1}, {0, 1}, 0}};
       }},
      {"the plan decodes 1 slots, 0 slots decode",
       [&](StepPlan* p) {
         edit(p);
         p->paused = {1};
       }},
  });
}

TEST(SequenceMovesTest, EveryWrongQuerySlotSwapAndPauseIsInternal) {
  ExpectMismatches({
      {"a query slot names slot 3, which is free",
       [](StepPlan* p) {
         p->query_slots = {{3, 0}};
       }},
      {"slot 1 gets query slot 0, it has query slot 2",
       [](StepPlan* p) {
         p->query_slots = {{1, 0}};
       }},
      {"slot 2 gets query slot 3, there are 3",
       [](StepPlan* p) {
         p->new_sequences = {MakeSequence(2, 24, {})};
         p->query_slots = {{2, 3}};
       }},
      {"slot 2 gets query slot -1, there are 3",
       [](StepPlan* p) {
         p->new_sequences = {MakeSequence(2, 24, {})};
         p->query_slots = {{2, -1}};
       }},
      {"slot 2 gets query slot 2, which belongs to slot 1",
       [](StepPlan* p) {
         p->new_sequences = {MakeSequence(2, 24, {})};
         p->query_slots = {{2, 2}};
       }},
      {"a swap to the host names slot 0, which is free",
       [](StepPlan* p) {
         p->swaps = {{0, true, {}}};
       }},
      {"slot 1 is swapped to the host from blocks [3 7], its table is [3 7 9]",
       [](StepPlan* p) {
         p->swaps = {{1, true, {3, 7}}};
       }},
      {"slot 1 is swapped to the device, where it is already",
       [](StepPlan* p) {
         p->swaps = {{1, false, {3, 7, 9}}};
       }},
      {"a pause names slot 0, which is free", [](StepPlan* p) { p->paused = {0}; }},
      {"slot 1 is paused twice",
       [](StepPlan* p) {
         p->paused = {1, 1};
       }},
      {"slot 1 is resumed, but it is not paused", [](StepPlan* p) { p->resumed = {1}; }},
      {"a resumption names slot 0, which is free", [](StepPlan* p) { p->resumed = {0}; }},
  });
  StepPlan swapped = Plan(2);
  swapped.swaps = {{1, true, {3, 7, 9}}};
  swapped.new_sequences = {MakeSequence(0, 40, {0, 1, 2, 4, 5})};
  swapped.chunks = {{0, 0, 30, false}};
  ExpectMismatches(
      {
          {"slot 1 is swapped to the host twice",
           [](StepPlan* p) {
             p->swaps = {{1, true, {}}};
           }},
          {"slot 1 is swapped to 2 blocks of the device, the host holds 3",
           [](StepPlan* p) {
             p->swaps = {{1, false, {3, 7}}};
           }},
          {"slot 1 gets block 20, there are 20",
           [](StepPlan* p) {
             p->swaps = {{1, false, {3, 7, 20}}};
           }},
          {"slot 0 swaps 5 blocks to the host, which holds 3 of 7",
           [](StepPlan* p) {
             p->swaps = {{0, true, {0, 1, 2, 4, 5}}};
           }},
          {"slot 1 gets query slot 2, but it stays swapped to the host",
           [](StepPlan* p) {
             p->query_slots = {{1, 2}};
           }},
          {"slot 1 gets block 5, but it is swapped to the host",
           [](StepPlan* p) {
             p->appended_blocks = {{1, 5}};
           }},
          {"slot 1 is compressed while it is swapped",
           [](StepPlan* p) {
             p->compressions = {{1, {}, {3, 7}, 0}};
           }},
          {"slot 1 is paused while it is swapped", [](StepPlan* p) { p->paused = {1}; }},
          {"slot 1 is resumed, but it is not paused", [](StepPlan* p) { p->resumed = {1}; }},
          {"the plan decodes 1 slots, 0 slots decode", [](StepPlan* p) { p->num_decoding = 1; }},
      },
      swapped);
  StepPlan paused = Plan(2);
  paused.num_decoding = 1;
  paused.appended_blocks = {{1, 10}};
  paused.new_sequences = {MakeSequence(0, 24, {0, 1, 2})};
  paused.paused = {0};
  ExpectMismatches({{"slot 0 gets a chunk, but it is paused",
                     [](StepPlan* p) {
                       p->chunks = {{0, 0, 24, true}};
                       p->num_decoding = 1;
                     }}},
                   paused);
}

TEST(SequenceMovesTest, ReleasesGiveBackQuerySlotsAndHostMemory) {
  SequenceStates states(kLimits);
  for (uint64_t step = 1; step < 20; step += 2) {
    StepPlan plan = FirstPlan();
    plan.step = step;
    if (step > 1) plan.released = {1};
    ASSERT_TRUE(states.Apply(plan).ok()) << step;
    plan = Plan(step + 1);
    if (step % 4 == 1) {
      plan.swaps = {{1, true, {3, 7, 9}}};
    } else {
      plan.paused = {1};
    }
    ASSERT_TRUE(states.Apply(plan).ok()) << step;
  }
}

// Plays a scheduler that is right, then one that changes one number.
TEST(SequenceMovesTest, RandomMovesNeverBreakAnInvariant) {
  std::mt19937 random(11);
  const auto draw = [&random](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  int num_compressions = 0;
  int num_swaps = 0;
  for (int round = 0; round < 300; ++round) {
    SequenceStates states(kLimits);
    ASSERT_TRUE(states.Apply(FirstPlan()).ok());
    for (int step = 2; step < 80; ++step) {
      StepPlan plan = Plan(step);
      const SequenceState before = states.at(1);
      const bool full = before.num_cached == 24;
      bool runs = true;
      if (before.swapped) {
        if (draw(0, 1) == 0) {
          plan.swaps = {{1, false, {3, 7, 9}}};
          plan.swaps[0].device_blocks.resize(before.num_host_blocks);
          plan.query_slots = {{1, draw(0, 2)}};
          if (full) plan.compressions = {{1, {3, 7, 9}, {3, 7, 5}, 0}};
          ++num_swaps;
        } else {
          runs = false;
        }
      } else if (draw(0, 9) == 0) {
        plan.swaps = {{1, true, before.block_table}};
        runs = false;
      } else if (before.paused) {
        plan.resumed = {1};
      } else if (full) {
        plan.compressions = {{1, before.block_table, {3, 7, draw(10, 15)}, 8}};
        plan.compressions[0].target_table[0] = before.block_table[0];
        if (draw(0, 1) == 0) {
          plan.paused = {1};
          runs = false;
        }
        ++num_compressions;
      }
      if (!plan.compressions.empty() && before.swapped) ++num_compressions;
      plan.num_decoding = runs ? 1 : 0;
      if (before.position == kLimits.max_position) break;
      const absl::Status status = states.Apply(plan);
      ASSERT_TRUE(status.ok()) << status;
      const SequenceState& after = states.at(1);
      ASSERT_EQ(after.position, before.position + (runs ? 1 : 0));
      ASSERT_EQ(after.swapped, after.block_table.empty());
      ASSERT_EQ(after.query_slot.has_value(), !after.swapped);
      ASSERT_LE(after.num_cached, 24);
      ASSERT_GE(after.num_cached, 16);
      ASSERT_EQ(states.rows().size(), runs ? 1 : 0);
    }
  }
  EXPECT_GT(num_compressions, 500);
  EXPECT_GT(num_swaps, 500);
}

}  // namespace
}  // namespace zipage
