// Compression in the scheduler, one danger at a time.
#include <gtest/gtest.h>

#include <algorithm>

#include "scheduler/scheduler.h"
#include "tests/scheduler/fake_worker.h"
#include "tests/scheduler/scheduler_world.h"

namespace zipage {
namespace {

TEST(CompressionTest, ALongOutputStaysInItsBudgetAndOneBlock) {
  ForEachMode([](SchedulerOptions options, size_t depth) {
    options.max_model_len = 2000;
    World world(options, /*max_compression_delay=*/2);
    Request* request = world.Submit(1, Prompt(10), MaxTokens(1500));
    Sequence& sequence = request->sequences[0];
    while (!request->finished() && !HasFailure()) {
      while (world.results.size() < depth && world.Plan()) {
      }
      ASSERT_LE(world.scheduler.stats().num_used_blocks, 4);
      if (sequence.num_computed == 1500) {
        EXPECT_EQ(world.scheduler.stats().num_used_blocks, 4);
      }
      world.Apply();
    }
    world.RunToEnd(depth);
    world.ExpectAllAsAlone();
    EXPECT_EQ(sequence.output().size(), 1500U);
    // First at 16 slots, then every 4 of the 1509 positions computed.
    EXPECT_EQ(sequence.num_compressions, 1 + (1509 - 17) / 4);
    EXPECT_EQ(sequence.peak_slots, 16);
    EXPECT_EQ(sequence.kept_slots, 12);
    world.ExpectEmpty();
  });
}

TEST(CompressionTest, SixteenRequestsWithASharedPrefixDoNotBleed) {
  ForEachMode([](SchedulerOptions options, size_t depth) {
    options.max_num_seqs = 16;
    options.num_query_slots = 16;
    for (const int64_t num_blocks : {100, 64, 20, 9}) {
      options.num_blocks = num_blocks;
      World world(options, /*max_compression_delay=*/3);
      for (uint64_t id = 1; id <= 16; ++id) {
        std::vector<TokenId> prompt = Prompt(8);  // Two blocks, then some of its own.
        for (uint64_t i = 0; i < id % 7; ++i) prompt.push_back(static_cast<TokenId>(200 + id));
        SamplingParams sampling = MaxTokens(20 + static_cast<int>(id));
        sampling.seed = id;
        world.Submit(id, prompt, sampling, id % 5 == 0 ? 3 : 1);
      }
      world.RunToEnd(depth);
      world.ExpectAllAsAlone();
      world.ExpectEmpty();
      EXPECT_GT(world.scheduler.stats().cached_tokens, 16 * 4);
      EXPECT_GT(world.scheduler.stats().num_compressions, 16);
    }
  });
}

TEST(CompressionTest, APinnedPrefixStaysSharedThroughCompressions) {
  SchedulerOptions options = CompressingOptions();
  options.compression.max_cache_blocks = 4;
  options.compression.pin_prompt = true;
  World world(options);
  for (uint64_t id = 1; id <= 8; ++id) {
    SamplingParams sampling = MaxTokens(60);
    sampling.seed = id;
    world.Submit(id, Prompt(9), sampling);
  }
  for (int i = 0; i < 50; ++i) {
    ASSERT_TRUE(world.Plan());
    world.Apply();
  }
  EXPECT_GE(world.scheduler.stats().num_compressions, 8 * 5);
  // Two blocks of the prompt are everybody's, three are each one's own.
  EXPECT_EQ(world.scheduler.stats().num_used_blocks, 2 + 8 * 3);
  world.RunToEnd(2);
  world.ExpectAllAsAlone();
}

TEST(CompressionTest, WhatWasCompressedIsNeverFoundInThePrefixCache) {
  SchedulerOptions options = CompressingOptions();
  World world(options);
  const Request* first = world.Submit(1, Prompt(6), MaxTokens(40));
  world.RunToEnd(1);
  // Its whole text as a prompt: only blocks from before the first compression are known, and the
  // last block of the first 16 slots is computed for its queries.
  std::vector<TokenId> text = first->sequences[0].tokens;
  const Request* second = world.Submit(2, text, MaxTokens(40));
  world.RunToEnd(1);
  EXPECT_EQ(second->sequences[0].num_cached_tokens, 16);
  text.resize(30);
  options.compression.compress_prefill = true;
  World prefill(options);
  for (uint64_t id = 1; id <= 2; ++id) prefill.Submit(id, text, MaxTokens(40));
  prefill.RunToEnd(1);
  const Request* third = prefill.Submit(3, text, MaxTokens(40));
  prefill.RunToEnd(1);
  EXPECT_EQ(third->sequences[0].num_cached_tokens, 12);
  world.ExpectAllAsAlone();
  prefill.ExpectAllAsAlone();
}

// The queries of the window are computed by the sequence itself, however much of its prompt is
// cached, and only where it had its query slot in time: the worker refuses a cold window.
TEST(CompressionTest, PromptsOfEveryLengthAroundABlockAreCompressedByAWarmWindow) {
  ForEachMode([](SchedulerOptions options, size_t depth) {
    for (const int window : {1, 2, 4}) {
      for (const int max_num_batched_tokens : {9, 64}) {
        for (const bool compress_prefill : {false, true}) {
          options.compression.window = window;
          options.max_num_batched_tokens = max_num_batched_tokens;
          options.compression.compress_prefill = compress_prefill;
          World world(options, /*max_compression_delay=*/3);
          uint64_t id = 0;
          for (int length = 1; length <= 30; ++length) {
            for (int i = 0; i < 2; ++i) world.Submit(++id, Prompt(length), MaxTokens(22));
          }
          world.RunToEnd(depth);
          world.ExpectAllAsAlone();
          world.ExpectEmpty();
        }
      }
    }
  });
}

TEST(CompressionTest, AStopTokenBesideACompressionEndsTheSequenceAsAlone) {
  ForEachMode([](const SchedulerOptions& options, size_t depth) {
    for (size_t last = 0; last < 30; ++last) {
      World world(options, /*max_compression_delay=*/1);
      const Request* request = world.Submit(1, Prompt(6), StopAt(options, Prompt(6), last), 2);
      world.RunToEnd(depth);
      world.ExpectAllAsAlone();
      EXPECT_EQ(request->sequences[0].output().size(), last + 1);
      world.ExpectEmpty();
    }
  });
}

TEST(CompressionTest, ACompressionInThePlanOfAReleaseIsRight) {
  int num_together = 0;
  ForEachMode([&](const SchedulerOptions& options, size_t depth) {
    for (int max_tokens = 1; max_tokens < 30; ++max_tokens) {
      World world(options);
      world.Submit(1, Prompt(8), MaxTokens(max_tokens));
      world.Submit(2, Prompt(9), MaxTokens(40));
      world.RunToEnd(depth);
      world.ExpectAllAsAlone();
      num_together += static_cast<int>(std::ranges::count_if(world.plans, [](const StepPlan& plan) {
        return !plan.released.empty() && !plan.compressions.empty();
      }));
    }
  });
  EXPECT_GT(num_together, 20);
}

TEST(CompressionTest, BlocksOfACancelledCompressionAreGivenToOthersAtOnce) {
  for (const bool pin_prompt : {false, true}) {
    SchedulerOptions options = CompressingOptions();
    options.compression.async = true;
    options.compression.pin_prompt = pin_prompt;
    options.num_blocks = 4;
    World world(options, /*max_compression_delay=*/1'000'000);
    Request* first = world.Submit(1, Prompt(6), MaxTokens(40));
    RunUntil(&world, first->sequences[0], 16);
    world.Submit(2, Prompt(14, 300), MaxTokens(40), 1, 2);
    ASSERT_TRUE(world.Plan());
    ASSERT_EQ(world.plans.back().compressions.size(), 1U);
    ASSERT_EQ(first->sequences[0].hold, Hold::kCompressing);
    world.scheduler.CancelJob(1);
    ASSERT_TRUE(world.Plan());
    EXPECT_EQ(world.plans.back().released.size(), 1U);
    ASSERT_EQ(world.plans.back().new_sequences.size(), 1U);
    EXPECT_EQ(world.plans.back().new_sequences[0].block_table.size(), 4U) << "all there are";
    EXPECT_EQ(world.coverage().num_ordered_blocks, 4);
    world.RunToEnd(2);
    EXPECT_EQ(first->sequences[0].num_compressions, 0) << "no token needs it";
    EXPECT_EQ(first->sequences[0].finish_reason, FinishReason::kCancelled);
    ASSERT_EQ(world.TakeFinished().size(), 2U);
    world.ExpectEmpty();
  }
}

TEST(CompressionTest, ACompressingSequenceSitsOutAndIsWaitedForWhenNothingElseRuns) {
  SchedulerOptions options = CompressingOptions();
  options.compression.async = true;
  World world(options, /*max_compression_delay=*/1'000'000);
  Request* request = world.Submit(1, Prompt(6), MaxTokens(40));
  Sequence& sequence = request->sequences[0];
  RunUntil(&world, sequence, 16);
  ASSERT_TRUE(world.Plan());
  EXPECT_EQ(world.plans.back().compressions.size(), 1U);
  EXPECT_EQ(world.plans.back().paused.size(), 1U);
  EXPECT_EQ(world.plans.back().num_decoding, 0U);
  EXPECT_FALSE(world.Plan()) << "a step is in flight that may tell";
  world.Apply();
  EXPECT_EQ(sequence.hold, Hold::kCompressing);
  ASSERT_TRUE(world.Plan()) << "nothing is in flight: the worker must wait";
  StepPlan empty;
  empty.step = world.plans.back().step;
  EXPECT_EQ(world.plans.back(), empty);
  EXPECT_FALSE(world.Plan());
  world.Apply();
  EXPECT_EQ(sequence.hold, Hold::kCompressed);
  ASSERT_TRUE(world.Plan());
  EXPECT_EQ(world.plans.back().resumed.size(), 1U);
  EXPECT_EQ(world.plans.back().num_decoding, 1U);
  world.RunToEnd(2);
  world.ExpectAllAsAlone();
  world.ExpectEmpty();
}

TEST(CompressionTest, AReportOfACompressionThatWasNotPlannedOrTwiceIsRefused) {
  World world(CompressingOptions());
  Request* request = world.Submit(1, Prompt(6), MaxTokens(40));
  RunUntil(&world, request->sequences[0], 16);
  ASSERT_TRUE(world.Plan());
  const StepResult good = world.results.front();
  ASSERT_EQ(good.finished_compressions.size(), 1U);
  std::vector<StepResult> bad(3, good);
  bad[0].finished_compressions.push_back(good.finished_compressions[0]);
  bad[1].finished_compressions[0].sequence_slot = 5;
  bad[2].finished_compressions[0].sequence_slot = -1;
  for (const StepResult& result : bad) {
    EXPECT_EQ(world.scheduler.Apply(result).status().code(), absl::StatusCode::kInternal);
    world.scheduler.CheckInvariants();
  }
  EXPECT_EQ(request->sequences[0].kept_slots, 0) << "refused results changed nothing";
  world.Apply();
  EXPECT_EQ(request->sequences[0].kept_slots, 12);
  world.RunToEnd(1);
  world.ExpectAllAsAlone();
}

TEST(CompressionTest, RefusesAndBoundsOnlyWhatCannotBeCompressedInThePool) {
  SchedulerOptions options = CompressingOptions();
  options.num_blocks = 8;
  Scheduler scheduler(options);
  EXPECT_TRUE(scheduler.CheckFits(32).ok()) << "compressed before its first output is computed";
  const absl::Status too_long = scheduler.CheckFits(33);
  EXPECT_EQ(too_long.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(too_long.message().find("8 blocks of 4, 32 positions"), absl::string_view::npos)
      << too_long;
  EXPECT_FALSE(scheduler.CheckFits(32, BudgetOf(8)).ok()) << "needs a ninth block";
  EXPECT_TRUE(scheduler.CheckFits(31, BudgetOf(8)).ok());
  options.compression.compress_prefill = true;
  Scheduler prefill(options);
  EXPECT_TRUE(prefill.CheckFits(199).ok());
  EXPECT_FALSE(prefill.CheckFits(200).ok()) << "max_model_len";
  EXPECT_FALSE(prefill.CheckFits(32, BudgetOf(8)).ok());

  World world(options);
  const Request* bounded = world.Submit(1, Prompt(10), MaxTokens(100), 1, 1, BudgetOf(8));
  const Request* longest = world.Submit(2, Prompt(150), MaxTokens(100));
  world.RunToEnd(2);
  EXPECT_EQ(bounded->sequences[0].tokens.size(), 32U);
  EXPECT_EQ(longest->sequences[0].tokens.size(), 200U);
  world.ExpectAllAsAlone();
}

TEST(CompressionTest, BudgetsAreTheRequests) {
  World world(CompressingOptions());
  for (int budget = 1; budget <= 6; ++budget) {
    world.Submit(budget, Prompt(5), MaxTokens(80), 1, 1, BudgetOf(budget));
  }
  world.Submit(7, Prompt(5), MaxTokens(80));
  world.RunToEnd(2);
  world.ExpectAllAsAlone();
  for (const std::unique_ptr<Request>& request : world.TakeFinished()) {
    const int64_t budget = request->id < 7 ? static_cast<int64_t>(request->id) : 3;
    EXPECT_EQ(request->sequences[0].kept_slots, 4 * budget);
    EXPECT_EQ(request->sequences[0].peak_slots, 4 * (budget + 1));
  }
}

// ---------------------------------------------------------------- query slots

TEST(CompressionTest, ASuspendedSequenceGoesOnWhenAQuerySlotIsFree) {
  for (const int window : {1, 2, 4}) {
    SchedulerOptions options = CompressingOptions();
    options.compression.window = window;
    options.num_query_slots = 1;
    World world(options);
    const Request* holder = world.Submit(1, Prompt(6), MaxTokens(40));
    const Request* other = world.Submit(2, Prompt(5), MaxTokens(40));
    // So short that it is never compressed.
    const Request* needs_none = world.Submit(3, Prompt(4), MaxTokens(13));
    Sequence& sequence = world.Submit(4, Prompt(5), MaxTokens(40))->sequences[0];
    EXPECT_EQ(other->sequences.size(), 1U);
    bool was_suspended = false;
    while (!holder->finished() && !HasFailure()) {
      ASSERT_TRUE(world.Plan());
      world.Apply();
      if (sequence.hold != Hold::kSuspended) continue;
      was_suspended = true;
      EXPECT_EQ(sequence.num_computed, 16 - window) << "where its query window begins";
    }
    EXPECT_TRUE(was_suspended);
    EXPECT_TRUE(needs_none->finished());
    EXPECT_EQ(world.scheduler.stats().num_suspensions, 2);
    ASSERT_TRUE(world.Plan());
    EXPECT_EQ(world.plans.back().query_slots.size(), 1U);
    EXPECT_EQ(world.plans.back().resumed, std::vector{*other->sequences[0].sequence_slot})
        << "the oldest";
    world.RunToEnd(2);
    EXPECT_EQ(world.scheduler.stats().num_suspensions, 2);
    EXPECT_EQ(world.scheduler.stats().num_preemptions, 0);
    world.ExpectAllAsAlone();
    world.ExpectEmpty();
  }
}

TEST(CompressionTest, AQuerySlotThatComesInMidBlockIsInTime) {
  for (int first_tokens = 1; first_tokens < 14; ++first_tokens) {
    SchedulerOptions options = CompressingOptions();
    options.num_query_slots = 1;
    World world(options);
    world.Submit(1, Prompt(16, 500), MaxTokens(first_tokens + 1));
    world.Submit(2, Prompt(5), MaxTokens(40));
    world.RunToEnd(2);
    world.ExpectAllAsAlone();
  }
}

TEST(CompressionTest, AQuerySlotIsNotGrantedToAVictimOfTheSamePlan) {
  SchedulerOptions options = CompressingOptions();
  options.num_query_slots = 1;
  options.num_blocks = 10;
  World world(options);
  // Three that are never compressed and take their third blocks in one step, and two that need the
  // query slot.
  for (uint64_t id = 1; id <= 3; ++id) {
    world.Submit(id, Prompt(1, 100 * static_cast<TokenId>(id)), MaxTokens(20), 1, 1, BudgetOf(4));
  }
  Request* holder = world.Submit(4, Prompt(1, 700), MaxTokens(40), 1, 2, BudgetOf(2));
  const Sequence& holds = holder->sequences[0];
  RunUntil(&world, holds, 1);
  Sequence& victim = world.Submit(5, Prompt(1, 800), MaxTokens(40), 1, 1)->sequences[0];
  RunUntil(&world, holds, 8);
  ASSERT_EQ(world.scheduler.stats().num_used_blocks, 10);
  ASSERT_TRUE(holds.query_slot.has_value());
  world.scheduler.CancelJob(2);
  ASSERT_TRUE(world.Plan());
  EXPECT_EQ(victim.num_preemptions, 1);
  EXPECT_TRUE(world.plans.back().query_slots.empty());
  world.RunToEnd(2);
  EXPECT_EQ(victim.finish_reason, FinishReason::kLength);
}

// ---------------------------------------------------------------- guarantees

TEST(CompressionTest, TheExcessOfALongPromptCountsAtAdmission) {
  SchedulerOptions options = CompressingOptions();
  options.enable_hybrid = false;
  options.num_blocks = 22;
  World world(options);
  // 40 tokens take ten blocks until they are compressed to three and one.
  std::vector<const Request*> requests;
  for (uint64_t id = 1; id <= 4; ++id) {
    requests.push_back(world.Submit(id, Prompt(40, 100 * static_cast<TokenId>(id)), MaxTokens(30)));
  }
  int64_t most_used = 0;
  size_t most_running = 0;
  while (!requests.back()->finished() && !HasFailure()) {
    ASSERT_TRUE(world.Plan());
    world.Apply();
    most_used = std::max(most_used, world.scheduler.stats().num_used_blocks);
    size_t num_uncompressed = 0;
    size_t num_running = 0;
    for (const Request* request : requests) {
      const Sequence& sequence = request->sequences[0];
      num_running += sequence.runs() ? 1 : 0;
      num_uncompressed += sequence.runs() && sequence.num_compressions == 0 ? 1 : 0;
    }
    EXPECT_LE(num_uncompressed, 2U);
    most_running = std::max(most_running, num_running);
  }
  EXPECT_LE(most_used, 22);
  EXPECT_EQ(most_running, 4U) << "two that are compressed leave room for one more, then another";
  EXPECT_EQ(world.scheduler.stats().num_preemptions, 0);
  world.RunToEnd(1);
  world.ExpectAllAsAlone();
}

TEST(CompressionTest, WithoutTheHybridEngineOnlyGuaranteedSequencesRunAndNoneIsPreempted) {
  ForEachMode([](SchedulerOptions options, size_t depth) {
    options.enable_hybrid = false;
    options.num_blocks = 11;
    World world(options, /*max_compression_delay=*/2);
    for (uint64_t id = 1; id <= 20; ++id) {
      world.Submit(id, Prompt(4 + static_cast<int>(id % 5)), MaxTokens(30), 1, id % 2,
                   BudgetOf(1 + static_cast<int>(id % 4)));
    }
    world.RunToEnd(depth);
    EXPECT_EQ(world.scheduler.stats().num_preemptions, 0);
    EXPECT_GT(world.scheduler.stats().peak_running, 2);
    world.ExpectAllAsAlone();
    world.ExpectEmpty();
  });
}

TEST(CompressionTest, TheHybridEngineAdmitsMoreThanAreGuaranteed) {
  for (const bool enable_hybrid : {false, true}) {
    SchedulerOptions options = CompressingOptions();
    options.enable_hybrid = enable_hybrid;
    options.num_blocks = 16;
    World world(options);
    for (uint64_t id = 1; id <= 8; ++id) {
      world.Submit(id, Prompt(3, 100 * static_cast<TokenId>(id)), MaxTokens(30));
    }
    ASSERT_TRUE(world.Plan());
    EXPECT_EQ(world.plans.back().new_sequences.size(), enable_hybrid ? 8U : 4U);
    world.RunToEnd(2);
    EXPECT_EQ(world.scheduler.stats().num_preemptions > 0, enable_hybrid);
    world.ExpectAllAsAlone();
  }
}

// ---------------------------------------------------------------- adaptive budget

TEST(CompressionTest, AnAdaptiveBudgetIsFullWhileBlocksAreFree) {
  SchedulerOptions options = CompressingOptions();
  options.adaptive_budget = true;
  World world(options);
  const Request* request = world.Submit(1, Prompt(6), MaxTokens(150));
  world.RunToEnd(2);
  EXPECT_EQ(world.scheduler.stats().num_compressions, 0);
  EXPECT_EQ(request->sequences[0].peak_slots, 155);
  // As if there were no budget.
  options.compression = {};
  EXPECT_TRUE(std::ranges::equal(request->sequences[0].output(),
                                 RunAlone(options, Prompt(6), MaxTokens(150)).output));
}

TEST(CompressionTest, AnAdaptiveBudgetIsCompressedWhenThePoolIsFullAndNoLengthIsLost) {
  for (const size_t depth : {1, 2}) {
    SchedulerOptions options = CompressingOptions();
    options.adaptive_budget = true;
    options.num_blocks = 12;
    World world(options);
    const Request* request = world.Submit(1, Prompt(6), MaxTokens(150));
    world.RunToEnd(depth);
    EXPECT_EQ(request->sequences[0].tokens.size(), 156U);
    EXPECT_EQ(request->sequences[0].peak_slots, 48) << "the whole pool";
    EXPECT_GT(request->sequences[0].num_compressions, 1);
    EXPECT_EQ(request->sequences[0].kept_slots, 12);
    EXPECT_EQ(world.scheduler.stats().num_preemptions, 0);
  }
}

TEST(CompressionTest, UnderPressureTheLongestAdaptiveBudgetsGiveFirst) {
  SchedulerOptions options = CompressingOptions();
  options.adaptive_budget = true;
  options.num_blocks = 40;
  World world(options);
  Request* longest = world.Submit(1, Prompt(80), MaxTokens(100));
  Request* shorter = world.Submit(2, Prompt(20, 500), MaxTokens(100));
  RunUntil(&world, longest->sequences[0], 100);
  EXPECT_EQ(world.scheduler.stats().num_compressions, 0);
  // It wants more than is free.
  world.Submit(3, Prompt(70, 900), MaxTokens(20));
  while (world.scheduler.stats().num_compressions == 0 && !HasFailure()) {
    ASSERT_TRUE(world.Plan());
    world.Apply();
  }
  EXPECT_EQ(longest->sequences[0].num_compressions, 1);
  EXPECT_EQ(shorter->sequences[0].num_compressions, 0);
  world.RunToEnd(2);
  EXPECT_EQ(world.TakeFinished().size(), 3U);
  world.ExpectEmpty();
}

}  // namespace
}  // namespace zipage
