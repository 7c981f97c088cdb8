#include "kernels/compare_logits.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace zipage {
namespace {

std::vector<LogitComparison> Compare(const std::vector<float>& full,
                                     const std::vector<float>& other, int64_t vocab,
                                     const std::vector<int32_t>& target) {
  std::vector<LogitComparison> out(target.size());
  cpu::CompareLogits({.full = full.data(),
                      .other = other.data(),
                      .target = target.data(),
                      .out = out.data(),
                      .num_rows = static_cast<int64_t>(target.size()),
                      .vocab = vocab});
  return out;
}

LogitComparison CompareOne(const std::vector<float>& full, const std::vector<float>& other,
                           int32_t target = 0) {
  return Compare(full, other, static_cast<int64_t>(full.size()), {target})[0];
}

// log softmax, all in double.
std::vector<double> LogSoftmax(const float* row, int64_t vocab) {
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t i = 0; i < vocab; ++i) max = std::max(max, double{row[i]});
  double sum = 0;
  for (int64_t i = 0; i < vocab; ++i) sum += std::exp(row[i] - max);
  std::vector<double> logs(vocab);
  for (int64_t i = 0; i < vocab; ++i) logs[i] = row[i] - max - std::log(sum);
  return logs;
}

TEST(CompareLogitsTest, EqualsTheFormulaForEveryVocabularySizeAndScale) {
  std::mt19937 random(1);
  for (const int64_t vocab : {1, 2, 15, 16, 17, 1023, 1024, 1025, 4096, 50'001}) {
    for (const float scale : {0.01F, 1.0F, 10.0F, 40.0F}) {
      std::normal_distribution<float> normal(3, scale);
      std::normal_distribution<float> change(0, scale / 4);
      constexpr int64_t kRows = 3;
      std::vector<float> full(kRows * vocab);
      std::vector<float> other(kRows * vocab);
      for (int64_t i = 0; i < kRows * vocab; ++i) {
        full[i] = normal(random);
        other[i] = full[i] + change(random);
      }
      const std::vector<int32_t> target = {0, static_cast<int32_t>(vocab / 2),
                                           static_cast<int32_t>(vocab - 1)};
      const std::vector<LogitComparison> out = Compare(full, other, vocab, target);
      for (int64_t r = 0; r < kRows; ++r) {
        const std::vector<double> p = LogSoftmax(full.data() + r * vocab, vocab);
        const std::vector<double> q = LogSoftmax(other.data() + r * vocab, vocab);
        double divergence = 0;
        for (int64_t i = 0; i < vocab; ++i) divergence += std::exp(p[i]) * (p[i] - q[i]);
        SCOPED_TRACE(testing::Message() << vocab << " " << scale);
        ASSERT_TRUE(out[r].valid);
        EXPECT_NEAR(out[r].divergence, divergence, 1e-5 + 1e-4 * divergence);
        EXPECT_NEAR(out[r].full_logprob, p[target[r]], 1e-4);
        EXPECT_NEAR(out[r].other_logprob, q[target[r]], 1e-4);
        EXPECT_EQ(out[r].full_argmax, std::max_element(p.begin(), p.end()) - p.begin());
        EXPECT_EQ(out[r].other_argmax, std::max_element(q.begin(), q.end()) - q.begin());
      }
    }
  }
}

TEST(CompareLogitsTest, EqualRowsDivergeByExactlyNothing) {
  std::mt19937 random(2);
  std::normal_distribution<float> normal(0, 5);
  for (const int64_t vocab : {7, 512, 151'936}) {
    std::vector<float> row(vocab);
    for (float& logit : row) logit = normal(random);
    const LogitComparison compared = CompareOne(row, row);
    EXPECT_EQ(compared.divergence, 0.0) << vocab;
    EXPECT_EQ(compared.full_logprob, compared.other_logprob);
    EXPECT_EQ(compared.full_argmax, compared.other_argmax);
  }
}

TEST(CompareLogitsTest, IsTheDivergenceOfTheSecondFromTheFirst) {
  // p = (3/4, 1/4), q = (1/2, 1/2).
  const float log3 = std::log(3.0F);
  const LogitComparison forward = CompareOne({log3, 0}, {5, 5}, 1);
  EXPECT_NEAR(forward.divergence, 0.75 * std::log(1.5) + 0.25 * std::log(0.5), 1e-6);
  EXPECT_NEAR(forward.full_logprob, std::log(0.25), 1e-6);
  EXPECT_NEAR(forward.other_logprob, std::log(0.5), 1e-6);
  const LogitComparison backward = CompareOne({5, 5}, {log3, 0}, 1);
  EXPECT_NEAR(backward.divergence, 0.5 * std::log(2.0 / 3) + 0.5 * std::log(2.0), 1e-6);
}

TEST(CompareLogitsTest, TakesTheLowestIdOfEqualsAsGreedySamplingDoes) {
  const LogitComparison compared = CompareOne({1, 2, 2, 0}, {0, 1, 3, 3});
  EXPECT_EQ(compared.full_argmax, 1);
  EXPECT_EQ(compared.other_argmax, 2);
}

TEST(CompareLogitsTest, RefusesWhatIsNoNumberInItsRowOnly) {
  const float bad[] = {std::nanf(""), std::numeric_limits<float>::infinity(),
                       -std::numeric_limits<float>::infinity()};
  for (const float value : bad) {
    for (int side = 0; side < 2; ++side) {
      std::vector<float> full(3 * 33, 0.5F);
      std::vector<float> other = full;
      (side == 0 ? full : other)[33 + 20] = value;
      const std::vector<LogitComparison> out = Compare(full, other, 33, {1, 2, 3});
      EXPECT_TRUE(out[0].valid);
      EXPECT_FALSE(out[1].valid) << value << " " << side;
      EXPECT_EQ(out[1].divergence, 0);
      EXPECT_TRUE(out[2].valid);
    }
  }
}

TEST(CompareLogitsTest, LogitsFarBelowTheFirstAddNothing) {
  EXPECT_NEAR(CompareOne({0, -500, 3}, {0, -900, 3}).divergence, 0, 1e-9);
}

TEST(CompareLogitsDeathTest, ATargetBeyondTheVocabularyIsABug) {
  EXPECT_DEATH(CompareOne({0, 1}, {0, 1}, 2), "target 2");
}

}  // namespace
}  // namespace zipage
