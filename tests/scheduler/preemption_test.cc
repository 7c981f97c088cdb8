// Compressed sequences that are preempted, swapped, computed again, or lose their workers.
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "scheduler/scheduler.h"
#include "tests/scheduler/fake_worker.h"
#include "tests/scheduler/scheduler_world.h"

namespace zipage {
namespace {

// An old sequence takes its fifth block when it computes position 16, and so the blocks of a young
// one, which came when the old one computed position `moment`, and which is compressed first six
// steps after that.
class PreemptionTest : public ::testing::Test {
 protected:
  static SchedulerOptions Options() {
    SchedulerOptions options = CompressingOptions();
    options.num_blocks = 7;
    return options;
  }
  // Until the young one is preempted.
  void Start(World* world, int64_t moment, const SamplingParams& young_sampling) {
    old_ = world->Submit(1, Prompt(1, 700), MaxTokens(20), 1, 1, BudgetOf(4));
    RunUntil(world, old_->sequences[0], moment);
    young_ = world->Submit(2, Prompt(7), young_sampling, 1, 1, BudgetOf(2));
    while (young().num_preemptions == 0 && !HasFailure()) {
      ASSERT_TRUE(world->Plan());
      if (young().num_preemptions == 0) world->Apply();
    }
  }
  Sequence& young() { return young_->sequences[0]; }

  Request* old_ = nullptr;
  Request* young_ = nullptr;
};

TEST_F(PreemptionTest, AroundTheFirstCompressionChangesNothing) {
  Coverage coverage;
  ForEachMode([&](SchedulerOptions options, size_t depth) {
    for (const int64_t num_host_blocks : {0, 2, 3}) {
      for (int64_t moment = 2; moment < 15; ++moment) {
        SCOPED_TRACE(::testing::Message() << "moment " << moment << " host " << num_host_blocks);
        options.num_blocks = Options().num_blocks;
        options.num_host_blocks = num_host_blocks;
        World world(options, /*max_compression_delay=*/2);
        old_ = world.Submit(1, Prompt(1, 700), MaxTokens(20), 1, 1, BudgetOf(4));
        while (old_->sequences[0].num_computed < moment) {
          while (world.results.size() < depth && world.Plan()) {
          }
          world.Apply();
        }
        young_ = world.Submit(2, Prompt(7), MaxTokens(50), 1, 1, BudgetOf(2));
        world.RunToEnd(depth);
        EXPECT_EQ(old_->sequences[0].num_preemptions, 0);
        world.ExpectAllAsAlone();
        world.ExpectEmpty();
        coverage.Add(world.coverage());
        EXPECT_TRUE(num_host_blocks == 3 || world.scheduler.stats().num_swaps_out == 0);
        if (HasFailure()) return;
      }
    }
  });
  EXPECT_GT(coverage.num_preempted_before_first, 20);
  EXPECT_GT(coverage.num_preempted_after_first, 20);
  EXPECT_GT(coverage.num_replays, 20);
  EXPECT_GT(coverage.num_swaps, 10);
  EXPECT_GT(coverage.num_in_flight, 20);
}

TEST_F(PreemptionTest, WithoutHostMemoryACompressedSequenceIsComputedAgainWithTheSameCompressions) {
  World world(Options());
  Start(&world, 4, MaxTokens(50));
  EXPECT_EQ(young().state, SequenceState::kWaiting);
  EXPECT_EQ(young().num_compressions, 0) << "of what its blocks hold";
  world.RunToEnd(1);
  EXPECT_GT(world.coverage().num_replays, 0);
  EXPECT_GT(world.scheduler.stats().num_compressions, young().num_compressions);
  world.ExpectAllAsAlone();
}

TEST_F(PreemptionTest, WithHostMemoryItIsSwappedAndItsQueryWindowToo) {
  for (int64_t moment = 3; moment < 10; ++moment) {
    SchedulerOptions options = Options();
    options.num_host_blocks = 3;
    World world(options);
    Start(&world, moment, MaxTokens(50));
    ASSERT_TRUE(young().swapped());
    EXPECT_EQ(world.plans.back().swaps.size(), 1U);
    EXPECT_TRUE(world.plans.back().swaps[0].to_host);
    EXPECT_EQ(world.scheduler.stats().num_swapped, 1);
    EXPECT_EQ(world.scheduler.stats().num_used_query_slots, 0);
    world.RunToEnd(1);
    EXPECT_EQ(world.scheduler.stats().num_swaps_out, 1);
    EXPECT_EQ(world.scheduler.stats().num_compressions, young().num_compressions) << "none twice";
    world.ExpectAllAsAlone();
    world.ExpectEmpty();
  }
}

TEST_F(PreemptionTest, ASwappedSequenceThatIsCancelledLeavesNothing) {
  SchedulerOptions options = Options();
  options.num_host_blocks = 3;
  for (const bool epoch : {false, true}) {
    World world(options);
    Start(&world, 5, MaxTokens(50));
    ASSERT_TRUE(young().swapped());
    if (epoch) world.StartEpoch();
    world.scheduler.FinishSequence(&young(), FinishReason::kStopString);
    world.scheduler.CheckInvariants();
    world.RunToEnd(2);
    world.ExpectEmpty();
    EXPECT_EQ(world.TakeFinished().size(), 2U);
  }
}

// The first compression is not reported when its sequence is swapped, comes back and is compressed
// again: what resumes it is the report of the second.
TEST_F(PreemptionTest, AReportOfAnEarlierCompressionDoesNotResume) {
  SchedulerOptions options = Options();
  options.num_host_blocks = 3;
  options.compression.async = true;
  World world(options, /*max_compression_delay=*/1'000'000);
  Start(&world, 9, MaxTokens(50));
  ASSERT_TRUE(young().swapped());
  EXPECT_EQ(young().num_compressions, 1);
  EXPECT_EQ(world.worker->num_unreported(), 1U);
  world.RunToEnd(1);
  world.ExpectAllAsAlone();
  world.ExpectEmpty();
}

// The step that compressed it and sampled its last token is in flight when it is preempted.
TEST_F(PreemptionTest, WhatIsInFlightCountsIfItEndsTheSequence) {
  for (const int64_t num_host_blocks : {0, 3}) {
    for (int64_t moment = 4; moment < 10; ++moment) {
      SchedulerOptions options = Options();
      options.num_host_blocks = num_host_blocks;
      // The token that the step before the preemption samples.
      const auto last = static_cast<size_t>(15 - moment);
      World world(options);
      old_ = world.Submit(1, Prompt(1, 700), MaxTokens(20), 1, 1, BudgetOf(4));
      RunUntil(&world, old_->sequences[0], moment);
      young_ = world.Submit(2, Prompt(7), StopAt(options, Prompt(7), last, BudgetOf(2)), 1, 1,
                            BudgetOf(2));
      while (young().num_preemptions == 0 && !HasFailure()) {
        if (world.results.size() == 2) world.Apply();
        ASSERT_TRUE(world.Plan());
      }
      EXPECT_GE(young().num_in_flight, 1);
      world.RunToEnd(2);
      EXPECT_EQ(young().output().size(), last + 1);
      world.ExpectAllAsAlone();
      world.ExpectEmpty();
      if (HasFailure()) return;
    }
  }
}

// ---------------------------------------------------------------- epochs

TEST(EpochTest, EveryMomentIsGoodForAnEpochToEnd) {
  ForEachMode([](SchedulerOptions options, size_t depth) {
    options.num_blocks = 12;
    options.num_host_blocks = 8;
    for (int moment = 1; moment < 60; moment += 2) {
      World world(options, /*max_compression_delay=*/2);
      for (uint64_t id = 1; id <= 6; ++id) {
        world.Submit(id, Prompt(3 + 2 * static_cast<int>(id)), MaxTokens(25), 2, 1,
                     BudgetOf(1 + static_cast<int>(id) % 4));
      }
      for (int step = 0; step < moment; ++step) {
        while (world.results.size() < depth && world.Plan()) {
        }
        world.Apply();
      }
      world.StartEpoch();
      EXPECT_EQ(world.scheduler.stats().num_running, 0);
      EXPECT_EQ(world.scheduler.stats().num_swapped, 0);
      world.RunToEnd(depth);
      world.ExpectAllAsAlone();
      world.ExpectEmpty();
      EXPECT_EQ(world.TakeFinished().size(), 6U);
    }
  });
}

}  // namespace
}  // namespace zipage
