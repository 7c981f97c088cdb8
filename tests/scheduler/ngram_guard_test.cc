#include "scheduler/ngram_guard.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <span>
#include <vector>

namespace zipage {
namespace {

// Occurrences of the last `size` tokens in all of them, counted one by one.
int CountLast(const std::vector<TokenId>& tokens, int size) {
  int count = 0;
  for (auto it = tokens.begin(); tokens.end() - it >= size; ++it) {
    count += std::equal(it, it + size, tokens.end() - size) ? 1 : 0;
  }
  return count;
}

// Whether a guard says so at each length of `tokens`, told after every token.
std::vector<bool> Verdicts(const std::vector<TokenId>& tokens, int size, int limit) {
  NgramGuard guard(size, limit);
  std::vector<bool> verdicts;
  for (size_t length = 1; length <= tokens.size(); ++length) {
    verdicts.push_back(guard.Add(std::span(tokens).first(length)));
  }
  return verdicts;
}

TEST(NgramGuardTest, FindsTheExamplesOfItsHeader) {
  EXPECT_EQ(Verdicts({1, 2, 5, 1, 2, 1, 2}, 2, 3),
            (std::vector<bool>{false, false, false, false, false, false, true}));
  EXPECT_EQ(Verdicts({7, 7, 7, 7}, 2, 3), (std::vector<bool>{false, false, false, true}));
}

TEST(NgramGuardTest, AgreesWithCountingOnRandomTokens) {
  std::mt19937_64 random(11);
  int num_repeats = 0;
  for (int round = 0; round < 300; ++round) {
    const int size = 1 + static_cast<int>(random() % 6);
    const int limit = 2 + static_cast<int>(random() % 5);
    const auto num_different = static_cast<TokenId>(1 + random() % 4);
    std::vector<TokenId> tokens;
    NgramGuard guard(size, limit);
    for (int i = 0; i < 120; ++i) {
      tokens.push_back(static_cast<TokenId>(random() % 1000) % num_different);
      const bool expected =
          static_cast<int>(tokens.size()) >= size && CountLast(tokens, size) >= limit;
      ASSERT_EQ(guard.Add(tokens), expected) << size << " " << limit << " " << i;
      num_repeats += expected ? 1 : 0;
    }
  }
  EXPECT_GT(num_repeats, 1000);
}

TEST(NgramGuardTest, FindsLoopsOfEveryPeriodAtTheirLimitAndNotBefore) {
  for (int size = 1; size <= 9; ++size) {
    for (int period = 1; period <= 13; ++period) {
      for (int limit = 2; limit <= 5; ++limit) {
        // Tokens that never come again, then the loop.
        std::vector<TokenId> tokens;
        for (TokenId token = 1000; token < 1020; ++token) tokens.push_back(token);
        const auto found_at = tokens.size() + static_cast<size_t>(size + (limit - 1) * period);
        for (size_t i = 0; tokens.size() < found_at + 40; ++i) {
          tokens.push_back(static_cast<TokenId>(i % static_cast<size_t>(period)));
        }
        const std::vector<bool> verdicts = Verdicts(tokens, size, limit);
        for (size_t length = 1; length <= tokens.size(); ++length) {
          ASSERT_EQ(verdicts[length - 1], length >= found_at)
              << "size " << size << " period " << period << " limit " << limit << " at " << length;
        }
      }
    }
  }
}

TEST(NgramGuardTest, IsQuietAgainWhenTheLoopEnds) {
  std::vector<TokenId> tokens(10, 3);
  for (TokenId token = 100; token < 130; ++token) tokens.push_back(token);
  const std::vector<bool> verdicts = Verdicts(tokens, 3, 4);
  EXPECT_TRUE(verdicts[9]);
  EXPECT_EQ(std::count(verdicts.begin() + 10, verdicts.end(), true), 0);
}

TEST(NgramGuardTest, CatchesUpWithOutputItWasNotTold) {
  std::mt19937_64 random(12);
  for (int round = 0; round < 200; ++round) {
    std::vector<TokenId> tokens(100);
    for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 3);
    const std::vector<bool> verdicts = Verdicts(tokens, 3, 6);
    NgramGuard guard(3, 6);
    size_t length = 0;
    while (length < tokens.size()) {
      length = std::min(tokens.size(), length + 1 + random() % 20);
      ASSERT_EQ(guard.Add(std::span(tokens).first(length)), verdicts[length - 1]) << length;
    }
  }
}

TEST(NgramGuardTest, NeverTakesVariedOutputForALoop) {
  std::mt19937_64 random(13);
  std::vector<TokenId> tokens(200'000);
  for (TokenId& token : tokens) token = static_cast<TokenId>(random() % 150'000);
  NgramGuard guard(4, 2);
  for (size_t length = 1; length <= tokens.size(); ++length) {
    ASSERT_FALSE(guard.Add(std::span(tokens).first(length))) << length;
  }
}

TEST(NgramGuardDeathTest, RefusesLimitsThatEveryNgramReachesAndShrunkOutput) {
  EXPECT_DEATH(NgramGuard(0, 2), "size");
  EXPECT_DEATH(NgramGuard(1, 1), "occurs once");
  NgramGuard guard(2, 2);
  const std::vector<TokenId> tokens = {1, 2, 3};
  guard.Add(tokens);
  EXPECT_DEATH(guard.Add(std::span(tokens).first(2)), "shorter");
}

}  // namespace
}  // namespace zipage
