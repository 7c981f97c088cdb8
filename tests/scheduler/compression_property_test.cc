// Random workloads with compression and everything around it. What a workload is meant to cause is
// asserted too, so that none of it goes untested unnoticed.
#include <gtest/gtest.h>

#include <initializer_list>
#include <random>

#include "scheduler/scheduler.h"
#include "tests/scheduler/random_run.h"
#include "tests/scheduler/scheduler_world.h"

namespace zipage {
namespace {

TEST(CompressionPropertyTest, EveryRequestEndsAsIfAloneInAnAmplePool) {
  for (const size_t depth : {1, 2}) {
    Workload workload{.options = CompressingOptions(), .depth = depth, .max_budget = 4};
    workload.options.num_blocks = 400;
    const RunCounts counts = RunWorkload(workload);
    EXPECT_GT(counts.num_compressions, 1000);
    EXPECT_GT(counts.cached_tokens, 1000);
    EXPECT_GT(counts.num_cut, 10);
    EXPECT_GT(counts.num_repeated, 0);
    EXPECT_EQ(counts.num_preemptions, 0);
    EXPECT_EQ(counts.num_suspensions, 0);
  }
}

// Young sequences with small budgets run beside old ones that still grow into theirs, and are
// preempted when they are compressed.
Workload PreemptingWorkload() {
  Workload workload{.options = CompressingOptions(),
                    .num_operations = 2000,
                    .max_budget = 6,
                    .max_compression_delay = 8,
                    .max_prompt = 6,
                    .long_probability = 0.8};
  workload.options.max_num_seqs = 12;
  workload.options.num_query_slots = 12;
  workload.options.num_blocks = 16;
  return workload;
}

RunCounts RunPreempting(Workload workload) {
  RunCounts counts;
  for (const size_t depth : {1, 2, 5}) {
    for (const bool async : {false, true}) {
      SCOPED_TRACE(::testing::Message() << "depth " << depth << " async " << async);
      workload.depth = depth;
      workload.options.compression.async = async;
      workload.options.compression.pin_prompt = depth != 2;
      counts.Add(RunWorkload(workload));
    }
  }
  EXPECT_GT(counts.num_preemptions, 500);
  EXPECT_GT(counts.coverage.num_preempted_before_first, 50);
  EXPECT_GT(counts.coverage.num_preempted_after_first, 20);
  EXPECT_GT(counts.coverage.num_in_flight, 200);
  EXPECT_GT(counts.coverage.num_ordered_blocks, 100);
  return counts;
}

TEST(CompressionPropertyTest, EveryRequestEndsAsIfAloneWhenCompressedOnesAreComputedAgain) {
  const RunCounts counts = RunPreempting(PreemptingWorkload());
  EXPECT_GT(counts.coverage.num_replays, 40);
  EXPECT_EQ(counts.num_swaps_out, 0);
}

TEST(CompressionPropertyTest, EveryRequestEndsAsIfAloneWhenCompressedOnesAreSwapped) {
  Workload workload = PreemptingWorkload();
  workload.options.num_host_blocks = 1000;
  const RunCounts counts = RunPreempting(workload);
  EXPECT_GT(counts.num_swaps_out, 40);
  EXPECT_EQ(counts.coverage.num_replays, 0);
}

TEST(CompressionPropertyTest, EveryRequestEndsAsIfAloneWhenTheHostHoldsAFewBlocks) {
  Workload workload = PreemptingWorkload();
  workload.options.num_host_blocks = 3;
  workload.options.num_query_slots = 4;
  const RunCounts counts = RunPreempting(workload);
  EXPECT_GT(counts.num_swaps_out, 10);
  EXPECT_GT(counts.coverage.num_replays, 5);
  EXPECT_GT(counts.num_suspensions, 50);
}

TEST(CompressionPropertyTest, EveryRequestEndsAsIfAloneWithFewQuerySlots) {
  for (const int64_t num_query_slots : {1, 2, 4}) {
    Workload workload{.options = CompressingOptions(), .max_budget = 4, .long_probability = 0.5};
    workload.options.num_query_slots = num_query_slots;
    workload.options.num_host_blocks = 10;
    workload.options.num_blocks = 30;
    const RunCounts counts = RunWorkload(workload);
    EXPECT_GT(counts.num_suspensions, 50);
    EXPECT_GT(counts.num_compressions, 500);
  }
}

TEST(CompressionPropertyTest, EveryRequestEndsInAPoolForOne) {
  int64_t num_preemptions = 0;
  for (const bool async : {false, true}) {
    for (const int64_t num_blocks : {4, 5}) {
      Workload workload{.options = CompressingOptions(),
                        .max_budget = 3,
                        .max_compression_delay = 3,
                        .long_probability = 0.6};
      workload.options.num_blocks = num_blocks;
      workload.options.num_host_blocks = 8;
      workload.options.compression.async = async;
      const RunCounts counts = RunWorkload(workload);
      EXPECT_GT(counts.num_compressions, 500);
      num_preemptions += counts.num_preemptions;
    }
  }
  EXPECT_GT(num_preemptions, 30);
}

TEST(CompressionPropertyTest, GuaranteedSequencesAloneAreNeverPreempted) {
  for (const bool compress_prefill : {false, true}) {
    Workload workload{.options = CompressingOptions(), .max_budget = 4, .long_probability = 0.5};
    workload.options.enable_hybrid = false;
    workload.options.num_blocks = 20;
    workload.options.num_query_slots = 4;
    workload.options.compression.compress_prefill = compress_prefill;
    const RunCounts counts = RunWorkload(workload);
    EXPECT_EQ(counts.num_preemptions, 0);
    EXPECT_EQ(counts.num_suspensions, 0);
    EXPECT_GT(counts.num_compressions, 1000);
    EXPECT_GT(counts.peak_running, 2);
  }
}

TEST(CompressionPropertyTest, EveryRequestEndsAsIfAloneHoweverOftenTheWorkersDie) {
  for (const size_t depth : {1, 2, 5}) {
    Workload workload = PreemptingWorkload();
    workload.depth = depth;
    workload.epoch_probability = 0.01;
    workload.options.num_host_blocks = depth == 2 ? 0 : 20;
    workload.options.compression.async = depth != 1;
    workload.options.compression.compress_prefill = true;
    const RunCounts counts = RunWorkload(workload);
    EXPECT_GT(counts.num_epochs, 50);
    EXPECT_GT(counts.num_compressions, 1000);
  }
}

TEST(CompressionPropertyTest, EveryRequestEndsOneTokenABatchAndOneSequenceAtATime) {
  for (const bool compress_prefill : {false, true}) {
    Workload workload{.options = CompressingOptions(), .num_operations = 1000, .max_budget = 4};
    workload.options.max_num_seqs = 1;
    workload.options.max_num_batched_tokens = 1;
    workload.options.compression.compress_prefill = compress_prefill;
    const RunCounts counts = RunWorkload(workload);
    EXPECT_GT(counts.num_compressions, 200);
    EXPECT_EQ(counts.peak_running, 1);
  }
}

TEST(CompressionPropertyTest, EveryRequestEndsAsIfAloneWithHashCollisionsAndWithoutPrefixCache) {
  Workload workload{.options = CompressingOptions(), .max_budget = 4};
  workload.options.num_blocks = 30;
  workload.options.block_hash = [](uint64_t parent, std::span<const TokenId> tokens) {
    return Xxh3BlockHash(parent, tokens) & 1;
  };
  EXPECT_GT(RunWorkload(workload).cached_tokens, 1000);
  workload.options.enable_prefix_cache = false;
  EXPECT_GT(RunWorkload(workload).cached_tokens, 100) << "within requests";
}

// Options of every kind, drawn together.
Workload RandomWorkload(int seed) {
  std::mt19937 rng(seed);
  const auto one_of = [&rng](std::initializer_list<int> values) {
    return *(values.begin() + rng() % values.size());
  };
  Workload workload{.options = CompressingOptions(), .num_operations = 1000};
  SchedulerOptions& options = workload.options;
  options.block_size = one_of({4, 4, 8});
  options.max_num_seqs = one_of({1, 2, 4, 8, 8, 16});
  options.max_num_batched_tokens = options.max_num_seqs + one_of({0, 5, 32});
  options.compression = {.max_cache_blocks = one_of({1, 2, 3, 4}),
                         .window = 1 + static_cast<int>(rng() % options.block_size),
                         .pin_prompt = one_of({0, 1}) == 1,
                         .compress_prefill = one_of({0, 1}) == 1,
                         .async = one_of({0, 1}) == 1};
  options.num_blocks = options.compression.max_cache_blocks + one_of({1, 2, 4, 8, 8, 16, 16, 24});
  options.num_query_slots = one_of({1, 2, 4, options.max_num_seqs});
  options.num_host_blocks = one_of({0, 4, 9, 1000});
  options.enable_hybrid = one_of({0, 1, 1, 1}) == 1;
  options.enable_prefix_cache = one_of({0, 1, 1, 1}) == 1;
  workload.depth = one_of({1, 2, 2, 5});
  workload.cancel_probability = one_of({0, 2, 10}) * 0.01;
  workload.epoch_probability = one_of({0, 0, 10}) * 0.001;
  workload.max_budget = one_of({0, 4, 6});
  workload.max_compression_delay = one_of({0, 1, 3, 8});
  workload.max_prompt = one_of({6, 1000, 1000});
  workload.long_probability = one_of({1, 3, 5, 9}) * 0.1;
  return workload;
}

TEST(CompressionPropertyTest, EveryRequestEndsAsIfAloneWithOptionsOfEveryKind) {
  RunCounts counts;
  for (int seed = 0; seed < 150 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    counts.Add(RandomRun(RandomWorkload(seed), seed).Run());
  }
  EXPECT_GT(counts.num_compressions, 10'000);
  EXPECT_GT(counts.num_suspensions, 100);
  EXPECT_GT(counts.num_preemptions, 100);
  EXPECT_GT(counts.num_swaps_out, 10);
  EXPECT_GT(counts.num_epochs, 100);
  EXPECT_GT(counts.coverage.num_replays, 10);
}

TEST(CompressionPropertyTest, EveryRequestEndsWithAnAdaptiveBudget) {
  RunCounts counts;
  for (int seed = 1000; seed < 1100 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Workload workload = RandomWorkload(seed);
    workload.options.adaptive_budget = true;
    counts.Add(RandomRun(workload, seed).Run());
  }
  EXPECT_GT(counts.num_compressions, 1000);
  EXPECT_GT(counts.num_preemptions, 50);
}

}  // namespace
}  // namespace zipage
