// The rules against a sequence whose slots are counted one by one.
#include "scheduler/compression_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <vector>

namespace zipage {
namespace {

constexpr int kBlockSize = 4;
constexpr int64_t kMaxLength = 60;

std::unique_ptr<Request> MakeRequest(int64_t num_prompt_tokens, std::optional<int> budget,
                                     int64_t max_length) {
  RequestOptions options;
  options.max_cache_blocks = budget;
  auto request = std::make_unique<Request>(1, 1, std::vector<TokenId>(num_prompt_tokens, 5),
                                           SamplingParams(), 1, options);
  request->sequences[0].max_length = max_length;
  return request;
}

// A sequence that computes a position after the other, in the blocks it needs, and is compressed
// where DESIGN 4 says so.
class CountedSequence {
 public:
  CountedSequence(int64_t num_prompt_tokens, int64_t budget, bool compress_prefill)
      : num_prompt_tokens_(num_prompt_tokens),
        budget_(budget),
        compress_prefill_(compress_prefill) {}

  bool IsDue() const {
    const bool is_full = num_slots % kBlockSize == 0;
    return is_full && num_slots / kBlockSize > budget_ &&
           (compress_prefill_ || num_computed >= num_prompt_tokens_);
  }
  // True if it was compressed before.
  bool Compute() {
    const bool is_due = IsDue();
    if (is_due) num_slots = budget_ * kBlockSize;
    num_compressions += is_due ? 1 : 0;
    ++num_slots;
    ++num_computed;
    return is_due;
  }
  int64_t num_blocks() const { return (num_slots + kBlockSize - 1) / kBlockSize; }

  int64_t num_slots = 0;
  int64_t num_computed = 0;
  int64_t num_compressions = 0;

 private:
  int64_t num_prompt_tokens_;
  int64_t budget_;
  bool compress_prefill_;
};

struct Case {
  int64_t num_prompt_tokens = 0;
  int budget = 0;
  bool own_budget = false;  // The request's, not the engine's.
  bool compress_prefill = false;
  int window = 0;
};

template <typename Check>
void ForEachCase(const Check& check) {
  for (int64_t num_prompt_tokens = 1; num_prompt_tokens < 26; ++num_prompt_tokens) {
    for (int budget = 1; budget <= 4; ++budget) {
      for (const bool own_budget : {false, true}) {
        for (const bool compress_prefill : {false, true}) {
          for (const int window : {1, 2, kBlockSize}) {
            SCOPED_TRACE(::testing::Message()
                         << "prompt " << num_prompt_tokens << " budget " << budget << " own "
                         << own_budget << " compress_prefill " << compress_prefill << " window "
                         << window);
            check(Case{num_prompt_tokens, budget, own_budget, compress_prefill, window});
          }
        }
      }
    }
  }
}

CompressionPlan PlanOf(const Case& c) {
  return CompressionPlan({.max_cache_blocks = c.own_budget ? 7 : c.budget,
                          .window = c.window,
                          .compress_prefill = c.compress_prefill},
                         kBlockSize);
}

std::unique_ptr<Request> RequestOf(const Case& c, int64_t max_length) {
  return MakeRequest(c.num_prompt_tokens,
                     c.own_budget ? std::optional<int>(c.budget) : std::nullopt, max_length);
}

TEST(CompressionPlanTest, IsDueWhereTheSlotsSayAndFirstAtTheFirstPoint) {
  ForEachCase([](const Case& c) {
    const CompressionPlan plan = PlanOf(c);
    const auto request = RequestOf(c, kMaxLength);
    Sequence& sequence = request->sequences[0];
    CountedSequence counted(c.num_prompt_tokens, c.budget, c.compress_prefill);
    EXPECT_EQ(plan.Budget(sequence), c.budget);
    while (counted.num_computed < kMaxLength) {
      sequence.num_computed = counted.num_computed;
      sequence.num_slots = counted.num_slots;
      sequence.block_table.blocks.resize(counted.num_blocks());
      ASSERT_EQ(plan.IsDue(sequence), counted.IsDue()) << counted.num_computed;
      const bool was_first = counted.num_compressions == 0;
      const int64_t num_slots = counted.num_slots;
      if (counted.Compute() && was_first) {
        ASSERT_EQ(plan.FirstPoint(sequence), num_slots);
      }
      if (counted.num_computed <= plan.FirstPoint(sequence)) {
        ASSERT_EQ(counted.num_compressions, 0);
      } else {
        ASSERT_GT(counted.num_compressions, 0);
      }
    }
  });
}

TEST(CompressionPlanTest, IsNotDueWithAnEmptyOrHalfFullLastBlock) {
  const CompressionPlan plan({.max_cache_blocks = 2, .window = 2}, kBlockSize);
  const auto request = MakeRequest(3, std::nullopt, kMaxLength);
  Sequence& sequence = request->sequences[0];
  sequence.num_computed = 30;
  sequence.block_table.blocks.resize(3);
  for (int64_t slots = 0; slots < 12; ++slots) {
    sequence.num_slots = slots;
    EXPECT_FALSE(plan.IsDue(sequence)) << slots;
  }
  sequence.num_slots = 12;
  EXPECT_TRUE(plan.IsDue(sequence));
  const CompressionPlan none({}, kBlockSize);
  EXPECT_FALSE(none.enabled());
  EXPECT_FALSE(none.IsDue(sequence));
  EXPECT_FALSE(none.MayCompress(sequence));
  EXPECT_TRUE(none.RunsWithoutQuerySlot(sequence));
}

TEST(CompressionPlanTest, MayCompressIfAndOnlyIfAPositionIsComputedBehindTheFirstPoint) {
  ForEachCase([](const Case& c) {
    for (int64_t max_length = c.num_prompt_tokens + 1; max_length < kMaxLength; ++max_length) {
      const CompressionPlan plan = PlanOf(c);
      const auto request = RequestOf(c, max_length);
      CountedSequence counted(c.num_prompt_tokens, c.budget, c.compress_prefill);
      // The last token is never computed.
      while (counted.num_computed < max_length - 1) counted.Compute();
      ASSERT_EQ(plan.MayCompress(request->sequences[0]), counted.num_compressions > 0)
          << max_length;
    }
  });
}

TEST(CompressionPlanTest, MaxBlocksIsTheMostThatTheTableWillHave) {
  ForEachCase([](const Case& c) {
    for (int64_t max_length = c.num_prompt_tokens + 1; max_length < kMaxLength; ++max_length) {
      const CompressionPlan plan = PlanOf(c);
      const auto request = RequestOf(c, max_length);
      Sequence& sequence = request->sequences[0];
      CountedSequence counted(c.num_prompt_tokens, c.budget, c.compress_prefill);
      int64_t promised = plan.MaxBlocks(sequence);
      int64_t most = 0;  // Since it was promised.
      while (counted.num_computed < max_length - 1) {
        if (counted.Compute()) {
          ASSERT_LE(most, promised);
          if (sequence.num_compressions == 0) {
            ASSERT_EQ(most, promised) << "no more than needed";
          }
          ++sequence.num_compressions;
          promised = plan.MaxBlocks(sequence);
          ASSERT_EQ(promised, c.budget + 1);
          most = 0;
        }
        most = std::max(most, counted.num_blocks());
        ASSERT_LE(most, promised);
      }
      if (sequence.num_compressions == 0) {
        ASSERT_EQ(most, promised);
      }
    }
  });
}

TEST(CompressionPlanTest, RunsWithoutAQuerySlotUpToItsWindow) {
  ForEachCase([](const Case& c) {
    const CompressionPlan plan = PlanOf(c);
    const auto request = RequestOf(c, kMaxLength);
    Sequence& sequence = request->sequences[0];
    CountedSequence counted(c.num_prompt_tokens, c.budget, c.compress_prefill);
    const int64_t first = plan.FirstPoint(sequence);
    while (counted.num_computed < kMaxLength - 1) {
      sequence.num_computed = counted.num_computed;
      sequence.num_compressions = counted.num_compressions + (counted.IsDue() ? 1 : 0);
      // The queries of the window are those of the positions before the first point.
      const bool is_in_window = counted.num_computed >= first - c.window;
      ASSERT_EQ(plan.RunsWithoutQuerySlot(sequence), !is_in_window) << counted.num_computed;
      ASSERT_EQ(plan.RunsWithoutQuerySlot(sequence, counted.num_computed),
                counted.num_computed <= first - c.window);
      counted.Compute();
    }
  });
  const CompressionPlan plan({.max_cache_blocks = 2, .window = 2}, kBlockSize);
  const auto request = MakeRequest(3, std::nullopt, 13);  // Computes 12 positions: three blocks.
  EXPECT_TRUE(plan.RunsWithoutQuerySlot(request->sequences[0], 12)) << "it is never compressed";
  request->sequences[0].max_length = 14;
  EXPECT_FALSE(plan.RunsWithoutQuerySlot(request->sequences[0], 12));
}

TEST(CompressionPlanTest, PinsThePromptUpToHalfTheBudgetAndNeverTheWindow) {
  for (int window = 1; window <= kBlockSize; ++window) {
    for (int budget = 1; budget <= 5; ++budget) {
      const int64_t num_kept = budget * kBlockSize;
      for (int64_t num_prompt_tokens = 1; num_prompt_tokens < 40; ++num_prompt_tokens) {
        CompressionOptions options = {.max_cache_blocks = budget, .window = window};
        const auto request = MakeRequest(num_prompt_tokens, std::nullopt, 100);
        const Sequence& sequence = request->sequences[0];
        EXPECT_EQ(CompressionPlan(options, kBlockSize).NumPinned(sequence), 0);
        options.pin_prompt = true;
        const int64_t num_pinned = CompressionPlan(options, kBlockSize).NumPinned(sequence);
        EXPECT_GE(num_pinned, 0);
        EXPECT_LE(num_pinned, num_prompt_tokens);
        EXPECT_LE(num_pinned * 2, num_kept);
        EXPECT_LE(num_pinned + window, num_kept);
        // As much as that allows.
        EXPECT_TRUE(num_pinned == num_prompt_tokens || (num_pinned + 1) * 2 > num_kept ||
                    num_pinned + 1 + window > num_kept);
      }
    }
  }
}

}  // namespace
}  // namespace zipage
