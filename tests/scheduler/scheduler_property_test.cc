// Random workloads: whatever is batched, shared, preempted, cancelled or restarted, every request
// ends with the tokens it would have alone, and nothing leaks.
#include <gtest/gtest.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <memory>
#include <random>

#include "scheduler/scheduler.h"
#include "tests/scheduler/fake_worker.h"
#include "tests/scheduler/scheduler_world.h"

namespace zipage {
namespace {

struct Workload {
  SchedulerOptions options;
  size_t depth = 2;
  int num_operations = 3000;
  double cancel_probability = 0.02;
};

// Drives a World with random operations and checks every end against the request run alone.
class RandomRun {
 public:
  RandomRun(const Workload& workload, int seed)
      : workload_(workload), rng_(seed), world_(workload.options) {}

  void Run() {
    for (int i = 0; i < workload_.num_operations && !::testing::Test::HasFailure(); ++i) {
      Operate();
      TakeFinished();
    }
    // Everything ends, in a number of steps that follows from the tokens still to be computed.
    for (int steps = 0;
         !(world_.scheduler.idle() && open_.empty()) && !::testing::Test::HasFailure(); ++steps) {
      ASSERT_LT(steps, 200'000) << open_.size() << " requests do not end";
      while (world_.results.size() < workload_.depth && world_.Plan()) {
      }
      ASSERT_FALSE(world_.results.empty() && !open_.empty()) << "nothing runs, requests wait";
      if (!world_.results.empty()) Apply();
      TakeFinished();
    }
    EXPECT_TRUE(open_.empty());
    const SchedulerStats stats = world_.scheduler.stats();
    EXPECT_EQ(stats.num_used_blocks, 0);
    EXPECT_EQ(stats.num_free_blocks + stats.num_cached_blocks, stats.num_blocks);
    EXPECT_EQ(stats.num_running + stats.num_waiting, 0);
    EXPECT_EQ(world_.worker.num_slots(), 0U);
    num_preemptions += stats.num_preemptions;
    num_cached_tokens += stats.cached_tokens;
  }

  int64_t num_preemptions = 0;
  int64_t num_cached_tokens = 0;
  int64_t num_checked = 0;

 private:
  struct Expected {
    std::vector<std::vector<TokenId>> output;  // Of every sample, alone.
    std::vector<std::vector<TokenId>> heard;   // From events.
    bool cut = false;                          // Cancelled, or stopped by the engine.
  };

  bool Chance(double probability) {
    return std::uniform_real_distribution<>(0, 1)(rng_) < probability;
  }
  int Below(int n) { return static_cast<int>(rng_() % n); }

  void Operate() {
    const int kind = Below(10);
    if (kind < 2) {
      if (open_.size() < 40) Submit();
    } else if (kind < 6) {
      if (world_.results.size() < workload_.depth) world_.Plan();
    } else if (!world_.results.empty()) {
      Apply();
    }
    if (Chance(workload_.cancel_probability)) CutOne();
  }

  void Submit() {
    const SchedulerOptions& options = workload_.options;
    const int64_t pool = options.num_blocks * options.block_size;
    const int64_t limit = std::min(pool, options.max_model_len);
    // One of a few shared beginnings, then tokens of its own; at times as long as can be.
    std::vector<TokenId> prompt =
        Prompt(Below(5 * options.block_size), 1000 + 100 * static_cast<TokenId>(Below(3)));
    for (int i = Below(3 * options.block_size); i >= 0; --i) prompt.push_back(Below(4));
    if (Below(10) == 0) prompt.resize(limit - 1 - Below(3), 7);
    if (static_cast<int64_t>(prompt.size()) >= limit) prompt.resize(limit - 1);
    ASSERT_TRUE(world_.scheduler.CheckFits(static_cast<int64_t>(prompt.size())).ok());
    SamplingParams sampling;
    sampling.seed = rng_();
    sampling.max_tokens = 1 + Below(Below(4) == 0 ? 300 : 30);
    sampling.min_tokens = Below(5);
    if (Below(2) == 0) sampling.stop_token_ids = {3, 17, 30};
    const int n = Below(3) == 0 ? 1 + Below(5) : 1;
    const uint64_t id = ++num_submitted_;
    Expected& expected = open_[id];
    for (int i = 0; i < n; ++i) {
      const int64_t end =
          std::min(limit, static_cast<int64_t>(prompt.size()) + sampling.max_tokens);
      expected.output.push_back(FakeWorker::OutputAlone(prompt, end, sampling, i, 50));
    }
    expected.heard.resize(n);
    requests_[id] = world_.Submit(id, prompt, sampling, n, 1 + Below(3));
  }

  void CutOne() {
    if (open_.empty()) return;
    auto it = open_.begin();
    std::advance(it, Below(static_cast<int>(open_.size())));
    if (Below(10) == 0) {
      const uint64_t job_id = requests_[it->first]->job_id;
      for (auto& [id, expected] : open_) expected.cut |= requests_[id]->job_id == job_id;
      world_.scheduler.CancelJob(job_id);
    } else {
      it->second.cut = true;
      Sequence& sequence = requests_[it->first]->sequences[0];
      if (!sequence.finished()) {
        world_.scheduler.FinishSequence(&sequence, FinishReason::kStopString);
        EXPECT_EQ(sequence.finish_reason, FinishReason::kStopString);
      }
    }
    world_.scheduler.CheckInvariants();
  }

  void Apply() {
    std::ranges::shuffle(world_.results.front().sampled, rng_);
    for (const TokenEvent& event : world_.Apply()) {
      const uint64_t id = event.sequence->request->id;
      open_.at(id).heard[event.sequence->sample_index].push_back(event.token);
    }
  }

  void TakeFinished() {
    for (const std::unique_ptr<Request>& request : world_.scheduler.TakeFinished()) {
      const Expected& expected = open_.at(request->id);
      for (const Sequence& sequence : request->sequences) {
        const auto& alone = expected.output[sequence.sample_index];
        const std::vector<TokenId> output(sequence.output().begin(), sequence.output().end());
        ASSERT_EQ(output, expected.heard[sequence.sample_index]);
        ASSERT_LE(output.size(), alone.size());
        ASSERT_TRUE(std::equal(output.begin(), output.end(), alone.begin()));
        const FinishReason reason = sequence.finish_reason.value();
        if (!expected.cut) {
          ASSERT_EQ(output.size(), alone.size());
          const bool stopped =
              std::ranges::binary_search(request->sampling.stop_token_ids, alone.back());
          ASSERT_EQ(reason, stopped ? FinishReason::kStopToken : FinishReason::kLength);
        }
        ++num_checked;
      }
      open_.erase(request->id);
      requests_.erase(request->id);
    }
  }

  Workload workload_;
  std::mt19937 rng_;
  World world_;
  std::map<uint64_t, Expected> open_;
  std::map<uint64_t, Request*> requests_;
  uint64_t num_submitted_ = 0;
};

void RunWorkload(const Workload& workload, bool expect_preemptions) {
  int64_t num_preemptions = 0;
  int64_t num_checked = 0;
  int64_t num_cached_tokens = 0;
  for (int seed = 0; seed < 6; ++seed) {
    SCOPED_TRACE(seed);
    RandomRun run(workload, seed);
    run.Run();
    num_preemptions += run.num_preemptions;
    num_checked += run.num_checked;
    num_cached_tokens += run.num_cached_tokens;
    ASSERT_FALSE(::testing::Test::HasFailure());
  }
  EXPECT_GT(num_checked, 100);
  EXPECT_GT(num_cached_tokens, 0);
  if (expect_preemptions) {
    EXPECT_GT(num_preemptions, 20);
  }
}

TEST(SchedulerPropertyTest, EveryRequestEndsAsIfAloneInAnAmplePool) {
  for (const size_t depth : {1, 2}) {
    Workload workload{.options = SmallOptions(), .depth = depth};
    workload.options.num_blocks = 400;
    RunWorkload(workload, false);
  }
}

TEST(SchedulerPropertyTest, EveryRequestEndsAsIfAloneInATinyPool) {
  for (const size_t depth : {1, 2}) {
    Workload workload{.options = SmallOptions(), .depth = depth};
    workload.options.num_blocks = 40;
    RunWorkload(workload, true);
  }
}

TEST(SchedulerPropertyTest, EveryRequestEndsInAPoolJustLargeEnoughForTheLargest) {
  for (const size_t depth : {1, 2}) {
    Workload workload{.options = SmallOptions(), .depth = depth};
    workload.options.max_model_len = 64;
    workload.options.num_blocks = 16;
    RunWorkload(workload, true);
  }
}

TEST(SchedulerPropertyTest, EveryRequestEndsWhenThePoolIsSmallerThanTheModelLength) {
  Workload workload{.options = SmallOptions()};
  workload.options.num_blocks = 6;
  RunWorkload(workload, true);
  workload.options.num_blocks = 2;
  RunWorkload(workload, false);
}

TEST(SchedulerPropertyTest, EveryRequestEndsWithoutThePrefixCache) {
  Workload workload{.options = SmallOptions()};
  workload.options.enable_prefix_cache = false;
  workload.options.num_blocks = 40;
  RunWorkload(workload, true);
}

TEST(SchedulerPropertyTest, HashCollisionsChangeNothing) {
  Workload workload{.options = SmallOptions()};
  workload.options.num_blocks = 40;
  workload.options.block_hash = [](uint64_t parent, std::span<const TokenId> tokens) {
    return Xxh3BlockHash(parent, tokens) & 1;
  };
  RunWorkload(workload, true);
}

TEST(SchedulerPropertyTest, EveryRequestEndsWithOneTokenABatchAndWithDeepRunAhead) {
  Workload one{.options = SmallOptions(), .depth = 2, .num_operations = 1000};
  one.options.max_num_seqs = 1;
  one.options.max_num_batched_tokens = 1;
  RunWorkload(one, false);
  Workload deep{.options = SmallOptions(), .depth = 5};
  deep.options.num_blocks = 40;
  RunWorkload(deep, true);
}

}  // namespace
}  // namespace zipage
