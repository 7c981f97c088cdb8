#include "scheduler/usage_history.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <vector>

namespace zipage {
namespace {

constexpr size_t kMaxParts = UsageHistory::kMaxParts;

TEST(UsageHistoryTest, IsEmptyBeforeAnythingRan) {
  UsageHistory history;
  EXPECT_TRUE(history.running().empty());
  history.Add(0, 5, 1);
  EXPECT_TRUE(history.running().empty());
  EXPECT_TRUE(history.block_share().empty());
}

TEST(UsageHistoryTest, EqualsTheMeansOfTheTimeline) {
  std::mt19937_64 random(21);
  for (int round = 0; round < 30; ++round) {
    UsageHistory history(/*part_micros=*/1 + random() % 4);
    std::vector<double> running;  // By microsecond.
    std::vector<double> share;
    while (running.size() < 4000) {
      const uint64_t micros = random() % (random() % 10 == 0 ? 300 : 6);
      const auto now = static_cast<double>(random() % 100);
      const double used = static_cast<double>(random() % 1001) / 1000;
      history.Add(micros, now, used);
      running.insert(running.end(), micros, now);
      share.insert(share.end(), micros, used);

      const auto part = static_cast<size_t>(std::llround(history.part_seconds() * 1e6));
      const std::vector<float> by_part = history.running();
      const std::vector<float> share_by_part = history.block_share();
      ASSERT_EQ(by_part.size(), (running.size() + part - 1) / part);
      ASSERT_EQ(share_by_part.size(), by_part.size());
      ASSERT_LE(by_part.size(), kMaxParts);
      for (size_t i = 0; i < by_part.size(); ++i) {
        const size_t begin = i * part;
        const size_t end = std::min(begin + part, running.size());
        const auto mean = [&](const std::vector<double>& values) {
          return std::accumulate(values.begin() + static_cast<ptrdiff_t>(begin),
                                 values.begin() + static_cast<ptrdiff_t>(end), 0.0) /
                 static_cast<double>(end - begin);
        };
        ASSERT_NEAR(by_part[i], mean(running), 1e-4) << i;
        ASSERT_NEAR(share_by_part[i], mean(share), 1e-6) << i;
      }
    }
  }
}

TEST(UsageHistoryTest, KeepsMoreThanHalfOfItsPartsHoweverLongItRuns) {
  UsageHistory history;
  double seconds = 0;
  for (int step = 0; step < 100'000; ++step) {
    history.Add(37'001, 8, 0.5);
    seconds += 0.037001;
    const size_t num_parts = history.running().size();
    ASSERT_LE(num_parts, kMaxParts);
    ASSERT_GT(num_parts, kMaxParts / 2);
    ASSERT_LE(seconds, history.part_seconds() * static_cast<double>(num_parts) + 1e-6);
    ASSERT_GT(seconds, history.part_seconds() * static_cast<double>(num_parts - 1) - 1e-6);
  }
  EXPECT_EQ(history.running(), std::vector<float>(history.running().size(), 8));
  EXPECT_EQ(history.block_share(), std::vector<float>(history.running().size(), 0.5));
}

TEST(UsageHistoryTest, TakesAStepLongerThanAllBeforeIt) {
  UsageHistory history(/*part_micros=*/1);
  for (int i = 0; i < 10; ++i) history.Add(1, 100, 1);
  history.Add(uint64_t{1} << 50, 3, 0.25);
  const std::vector<float> running = history.running();
  ASSERT_LE(running.size(), kMaxParts);
  for (const float value : running) EXPECT_NEAR(value, 3, 1e-3);
  for (const float value : history.block_share()) EXPECT_NEAR(value, 0.25, 1e-3);
}

}  // namespace
}  // namespace zipage
