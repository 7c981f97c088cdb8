#include "kernels/random_scores.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <set>

#include "kernels/philox.h"
#include "tests/kernels/compression_world.h"

namespace zipage {
namespace {

using testing::Tables;

struct Draws {
  std::vector<uint64_t> seed;
  std::vector<uint32_t> sample_index, round;
};

std::vector<float> Draw(const Tables& tables, const Draws& draws, int first_layer,
                        int first_kv_head) {
  std::vector<float> score(tables.num_scores(), testing::kNan);
  const std::vector<int32_t> num_raised(tables.batch(), 0);
  cpu::RandomScores({.shape = tables.shape(),
                     .score = score.data(),
                     .seed = draws.seed.data(),
                     .sample_index = draws.sample_index.data(),
                     .round = draws.round.data(),
                     .raised = nullptr,
                     .num_raised = num_raised.data(),
                     .max_raised = 0,
                     .first_layer = first_layer,
                     .first_kv_head = first_kv_head});
  EXPECT_TRUE(tables.OnlySlotsWritten(score));
  return score;
}

TEST(RandomScoresTest, ADrawIsTheNamedWordOfTheGenerator) {
  std::mt19937_64 rng(testing::FreshSeed());
  const Tables tables(2, 3, 18, {3, 1}, 0, &rng);
  const Draws draws = {{rng(), rng()}, {3, 0}, {0, 17}};
  const std::vector<float> score = Draw(tables, draws, 11, 5);
  tables.ForEachRow([&](int layer, size_t seq, int head) {
    for (uint32_t j = 0; j < tables.slots(seq); ++j) {
      const auto words = Philox4x32(
          {j / 4, draws.round[seq], draws.sample_index[seq],
           (static_cast<uint32_t>(11 + layer + 1) << 16) + 5 + head},
          {static_cast<uint32_t>(draws.seed[seq]), static_cast<uint32_t>(draws.seed[seq] >> 32)});
      ASSERT_EQ(score[tables.score(layer, seq, head, j)],
                static_cast<float>(words[j % 4] / 256) / (1 << 24));
    }
  });
}

TEST(RandomScoresTest, BatchesRanksAndThreadsDoNotChangeADraw) {
  std::mt19937_64 rng(testing::FreshSeed());
  const Tables whole(4, 4, 20, {2, 3, 1}, 0, &rng);
  const Draws draws = {{rng(), rng(), rng()}, {0, 1, 2}, {5, 0, 1}};
  const std::vector<float> expected = Draw(whole, draws, 0, 0);
  const int threads = omp_get_max_threads();
  for (int seq = 0; seq < 3; ++seq) {
    for (int layer = 0; layer < 4; layer += 2) {
      for (int head = 0; head < 4; head += 2) {
        omp_set_num_threads(1 + seq);
        const Tables part(2, 2, 20, {whole.len[seq]}, 0, &rng);
        const Draws own = {{draws.seed[seq]}, {draws.sample_index[seq]}, {draws.round[seq]}};
        const std::vector<float> score = Draw(part, own, layer, head);
        part.ForEachRow([&](int l, size_t, int h) {
          for (size_t j = 0; j < part.slots(0); ++j) {
            ASSERT_EQ(score[part.score(l, 0, h, j)],
                      expected[whole.score(layer + l, seq, head + h, j)]);
          }
        });
      }
    }
  }
  omp_set_num_threads(threads);
}

TEST(RandomScoresTest, EveryRoundSampleLayerHeadAndSlotDrawsAnew) {
  std::mt19937_64 rng(testing::FreshSeed());
  const Tables tables(3, 4, 64, {4, 4, 4, 4}, 0, &rng);
  const uint64_t seed = rng();
  const std::vector<float> score =
      Draw(tables, {{seed, seed, seed, seed + 1}, {0, 1, 0, 0}, {0, 0, 1, 0}}, 0, 0);
  std::set<float> values;
  double sum = 0;
  double squares = 0;
  int count = 0;
  for (const float u : score) {
    if (std::isnan(u)) continue;
    ASSERT_TRUE(u >= 0 && u < 1) << u;
    values.insert(u);
    sum += u;
    squares += u * u;
    ++count;
  }
  ASSERT_EQ(count, 3 * 4 * 4 * 256);
  // 12288 draws of 2^24 values meet 4.5 times on average; a draw that was used twice, 256 times.
  EXPECT_GT(values.size(), count - 40U);
  // Six standard deviations of the mean and of the mean square of uniform draws.
  EXPECT_NEAR(sum / count, 0.5, 6 * std::sqrt(1.0 / 12 / count));
  EXPECT_NEAR(squares / count, 1.0 / 3, 6 * std::sqrt(4.0 / 45 / count));
}

TEST(RandomScoresTest, RaisedSlotsAreAboveAllDraws) {
  std::mt19937_64 rng(testing::FreshSeed());
  const Tables tables(2, 2, 16, {2, 3}, 0, &rng);
  const Draws draws = {{1, 2}, {0, 0}, {0, 0}};
  const std::vector<float> plain = Draw(tables, draws, 0, 0);
  std::vector<float> score(tables.num_scores(), testing::kNan);
  // Rows of nine entries, of which the first five or none count; the rest is nonsense.
  std::vector<int32_t> raised(2 * 2 * 2 * 9, -1);
  std::set<size_t> expected;
  size_t row = 0;
  tables.ForEachRow([&](int layer, size_t seq, int head) {
    for (int i = 0; seq == 0 && i < 5; ++i) {
      const int32_t slot = 6 * i + head + layer;
      raised[row * 9 + i] = slot;
      expected.insert(tables.score(layer, seq, head, slot));
    }
    ++row;
  });
  const std::vector<int32_t> num_raised = {5, 0};
  cpu::RandomScores({tables.shape(), score.data(), draws.seed.data(), draws.sample_index.data(),
                     draws.round.data(), raised.data(), num_raised.data(), 9, 0, 0});
  for (size_t i = 0; i < score.size(); ++i) {
    if (std::isnan(plain[i])) continue;
    ASSERT_EQ(score[i], expected.count(i) != 0 ? 2.0F : plain[i]) << i;
  }
}

}  // namespace
}  // namespace zipage
