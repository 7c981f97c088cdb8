// Random workloads with the full cache.
#include <gtest/gtest.h>

#include "scheduler/scheduler.h"
#include "tests/scheduler/random_run.h"
#include "tests/scheduler/scheduler_world.h"

namespace zipage {
namespace {

void Check(const Workload& workload, bool expect_preemptions) {
  const RunCounts counts = RunWorkload(workload);
  EXPECT_GT(counts.cached_tokens, 0);
  EXPECT_GT(counts.num_cut, 0);
  EXPECT_EQ(counts.num_compressions, 0);
  if (expect_preemptions) {
    EXPECT_GT(counts.num_preemptions, 20);
  }
  if (workload.epoch_probability > 0) {
    EXPECT_GT(counts.num_epochs, 10);
  }
}

TEST(SchedulerPropertyTest, EveryRequestEndsAsIfAloneInAnAmplePool) {
  for (const size_t depth : {1, 2}) {
    Workload workload{.options = SmallOptions(), .depth = depth};
    workload.options.num_blocks = 400;
    Check(workload, false);
  }
}

TEST(SchedulerPropertyTest, EveryRequestEndsAsIfAloneInATinyPool) {
  for (const size_t depth : {1, 2}) {
    Workload workload{.options = SmallOptions(), .depth = depth};
    workload.options.num_blocks = 40;
    Check(workload, true);
  }
}

TEST(SchedulerPropertyTest, EveryRequestEndsInAPoolJustLargeEnoughForTheLargest) {
  for (const size_t depth : {1, 2}) {
    Workload workload{.options = SmallOptions(), .depth = depth};
    workload.options.max_model_len = 64;
    workload.options.num_blocks = 16;
    Check(workload, true);
  }
}

TEST(SchedulerPropertyTest, EveryRequestEndsWhenThePoolIsSmallerThanTheModelLength) {
  Workload workload{.options = SmallOptions()};
  workload.options.num_blocks = 6;
  Check(workload, true);
  workload.options.num_blocks = 2;
  Check(workload, false);
}

TEST(SchedulerPropertyTest, EveryRequestEndsWithoutThePrefixCache) {
  Workload workload{.options = SmallOptions()};
  workload.options.enable_prefix_cache = false;
  workload.options.num_blocks = 40;
  Check(workload, true);
}

TEST(SchedulerPropertyTest, HashCollisionsChangeNothing) {
  Workload workload{.options = SmallOptions()};
  workload.options.num_blocks = 40;
  workload.options.block_hash = [](uint64_t parent, std::span<const TokenId> tokens) {
    return Xxh3BlockHash(parent, tokens) & 1;
  };
  Check(workload, true);
}

TEST(SchedulerPropertyTest, EveryRequestEndsWithOneTokenABatchAndWithDeepRunAhead) {
  Workload one{.options = SmallOptions(), .depth = 2, .num_operations = 1000};
  one.options.max_num_seqs = 1;
  one.options.max_num_batched_tokens = 1;
  Check(one, false);
  Workload deep{.options = SmallOptions(), .depth = 5};
  deep.options.num_blocks = 40;
  Check(deep, true);
}

TEST(SchedulerPropertyTest, EveryRequestEndsAsIfAloneHoweverOftenTheWorkersDie) {
  for (const size_t depth : {1, 2, 5}) {
    Workload workload{.options = SmallOptions(), .depth = depth, .epoch_probability = 0.01};
    workload.options.num_blocks = 40;
    Check(workload, true);
  }
}

}  // namespace
}  // namespace zipage
