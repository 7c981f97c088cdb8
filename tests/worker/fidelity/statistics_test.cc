#include "worker/fidelity/statistics.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace zipage {
namespace {

// Of hand-made logits over four tokens.
LogitComparison Compare(const std::vector<float>& full, const std::vector<float>& other,
                        TokenId target) {
  LogitComparison out;
  cpu::CompareLogits({.full = full.data(),
                      .other = other.data(),
                      .target = &target,
                      .out = &out,
                      .num_rows = 1,
                      .vocab = static_cast<int64_t>(full.size())});
  return out;
}

// Most probable tokens `full` and `other`; natural logarithms as given.
LogitComparison Made(TokenId full, TokenId other, double divergence = 0, double full_logprob = 0,
                     double logprob = 0) {
  return {.valid = true,
          .full_argmax = full,
          .other_argmax = other,
          .divergence = divergence,
          .full_logprob = full_logprob,
          .other_logprob = logprob};
}

TEST(FidelityStatisticsTest, AveragesHandMadeLogits) {
  FidelityStatistics statistics(/*bucket_width=*/10);
  FidelityProgress progress{.num_output = 2};
  const float log3 = std::log(3.0F);
  // Full (1/2, 1/6, 1/6, 1/6), setting (1/4 each): they agree, as equals go to the lowest id.
  statistics.Add(Compare({log3, 0, 0, 0}, {7, 7, 7, 7}, 0), 0, false, &progress);
  // Full (1/6, 1/2, …), setting (1/2, 1/6, …): they do not.
  statistics.Add(Compare({0, log3, 0, 0}, {log3, 0, 0, 0}, 1), 1, true, &progress);
  const FidelitySums& all = statistics.all();
  EXPECT_EQ(all.positions, 2);
  EXPECT_DOUBLE_EQ(all.agreement(), 0.5);
  EXPECT_DOUBLE_EQ(all.full_accuracy(), 1);
  EXPECT_DOUBLE_EQ(all.accuracy(), 0.5);
  const double first = 0.5 * std::log(2.0) + 0.5 * std::log(2.0 / 3);
  const double second = (0.5 - 1.0 / 6) * std::log(3.0);
  EXPECT_NEAR(all.mean_divergence(), (first + second) / 2, 1e-6);
  EXPECT_NEAR(all.full_perplexity(), 2, 1e-6);
  EXPECT_NEAR(all.perplexity(), std::sqrt(4.0 * 6.0), 1e-5);
  const FidelitySums& after = statistics.after_compression();
  EXPECT_EQ(after.positions, 1);
  EXPECT_DOUBLE_EQ(after.agreement(), 0);
  EXPECT_NEAR(after.mean_divergence(), second, 1e-6);
  EXPECT_NEAR(after.perplexity(), 6, 1e-5);
}

TEST(FidelityStatisticsTest, CountsByPlaceInTheOutputOfEveryCase) {
  FidelityStatistics statistics(/*bucket_width=*/3);
  FidelityProgress a{.num_output = 7};
  FidelityProgress b{.num_output = 4};
  // Interleaved; the setting differs from the fourth token of each case on.
  for (int i = 0; i < 7; ++i) {
    statistics.Add(Made(1, i < 3 ? 1 : 2, i < 3 ? 0 : 0.5), 1, i >= 3, &a);
    if (i < 4) statistics.Add(Made(1, i < 3 ? 1 : 2, i < 3 ? 0 : 0.25), 1, i >= 3, &b);
  }
  ASSERT_EQ(statistics.buckets().size(), 3);
  EXPECT_EQ(statistics.buckets()[0].positions, 6);
  EXPECT_DOUBLE_EQ(statistics.buckets()[0].agreement(), 1);
  EXPECT_EQ(statistics.buckets()[1].positions, 4);
  EXPECT_DOUBLE_EQ(statistics.buckets()[1].agreement(), 0);
  EXPECT_DOUBLE_EQ(statistics.buckets()[1].mean_divergence(), (3 * 0.5 + 0.25) / 4);
  EXPECT_EQ(statistics.buckets()[2].positions, 1);
  EXPECT_EQ(statistics.all().positions, 11);
  EXPECT_EQ(statistics.after_compression().positions, 5);
}

TEST(FidelityStatisticsTest, MeansOfNothingAreNoNumbers) {
  const FidelityStatistics statistics(5);
  EXPECT_TRUE(std::isnan(statistics.all().agreement()));
  EXPECT_TRUE(std::isnan(statistics.after_compression().perplexity()));
  EXPECT_TRUE(std::isnan(statistics.prompt_kept()));
  EXPECT_EQ(statistics.recall().probes, 0);
}

TEST(FidelityStatisticsTest, AProbeIsRecalledIfEachOfItsLastTokensIs) {
  FidelityStatistics statistics(100);
  const auto run = [&](const std::vector<TokenId>& full, const std::vector<TokenId>& setting,
                       int64_t recall_tokens) {
    FidelityProgress progress{.num_output = static_cast<int64_t>(full.size()),
                              .recall_tokens = recall_tokens};
    for (size_t i = 0; i < full.size(); ++i) {
      statistics.Add(Made(full[i], setting[i]), /*target=*/7, false, &progress);
    }
  };
  run({1, 1, 7, 7}, {2, 2, 7, 7}, 2);  // what comes before does not count
  EXPECT_EQ(statistics.recall().recalled, 1);
  run({1, 7, 7, 7}, {7, 7, 3, 7}, 2);  // one token wrong
  run({7, 7, 7, 7}, {7, 7, 7, 3}, 2);
  run({7, 7, 7, 1}, {7, 7, 7, 7}, 4);  // the full cache misses, the setting does not
  run({7, 7}, {7, 7}, 0);              // no probe
  const RecallSums& recall = statistics.recall();
  EXPECT_EQ(recall.probes, 4);
  EXPECT_EQ(recall.full_recalled, 3);
  EXPECT_EQ(recall.recalled, 2);
  EXPECT_EQ(recall.tokens.positions, 2 + 2 + 2 + 4);
  EXPECT_DOUBLE_EQ(recall.tokens.accuracy(), 0.8);
  EXPECT_DOUBLE_EQ(recall.tokens.full_accuracy(), 0.9);
}

TEST(FidelityStatisticsTest, AveragesWhatIsKeptOfPromptsOverCompressedCases) {
  FidelityStatistics statistics(100);
  statistics.AddCase(0, 123, 10);
  statistics.AddCase(3, 5, 10);
  statistics.AddCase(1, 30, 30);
  EXPECT_EQ(statistics.num_cases(), 3);
  EXPECT_EQ(statistics.num_compressed_cases(), 2);
  EXPECT_EQ(statistics.num_compressions(), 4);
  EXPECT_DOUBLE_EQ(statistics.prompt_kept(), 0.75);
}

TEST(FidelityStatisticsDeathTest, ATokenBeyondTheOutputIsABug) {
  FidelityStatistics statistics(5);
  FidelityProgress progress{.num_output = 1};
  statistics.Add(Made(1, 1), 1, false, &progress);
  EXPECT_DEATH(statistics.Add(Made(1, 1), 1, false, &progress), "");
}

}  // namespace
}  // namespace zipage
