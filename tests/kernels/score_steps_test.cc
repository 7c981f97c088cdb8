// The steps between attention scores and selection: global scores, pooling, combination.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "kernels/combine_scores.h"
#include "kernels/global_scores.h"
#include "kernels/pool_scores.h"
#include "tests/kernels/compression_world.h"

namespace zipage {
namespace {

using testing::kNan;
using testing::Tables;

class ScoreStepsTest : public ::testing::Test {
 protected:
  float Uniform() { return std::uniform_real_distribution<float>(0.001F, 1.0F)(rng_); }
  std::vector<float> RandomScores() {
    return tables_.Scores([this] { return Uniform(); });
  }

  std::mt19937_64 rng_{testing::FreshSeed()};
  const Tables tables_{2, 3, 16 + static_cast<int>(rng_() % 20), {3, 1, 5, 4}, 2, &rng_};
};

TEST_F(ScoreStepsTest, GlobalScoresRememberTheBestOfThePast) {
  const size_t stride = tables_.pool_rows() + 7;
  const std::vector<uint8_t> compressed = {1, 1, 0, 1};
  const std::vector<int32_t> first_block = {0, 0, 2, 2};
  // Only the past of sequences that have one may be read: the rest is NaN.
  std::vector<float> stored(2 * stride, kNan);
  tables_.ForEachRow([&](int layer, size_t seq, int head) {
    if (compressed[seq] == 0) return;
    for (size_t j = first_block[seq] * tables_.block_size;
         j < tables_.slots(seq) - tables_.block_size; ++j) {
      stored[tables_.pool(layer, seq, head, j, stride)] = 2 * Uniform();
    }
  });
  const std::vector<float> score_before = RandomScores();
  const std::vector<float> stored_before = stored;
  for (const bool max_norm : {false, true}) {
    std::vector<float> score = score_before;
    stored = stored_before;
    cpu::GlobalScores({.shape = tables_.shape(),
                       .score = score.data(),
                       .stored = stored.data(),
                       .compressed = compressed.data(),
                       .first_block = first_block.data(),
                       .stored_layer_stride = static_cast<int64_t>(stride),
                       .decay = 0.75F,
                       .max_norm = max_norm,
                       .use_stored = true});
    EXPECT_TRUE(tables_.OnlySlotsWritten(score));
    std::vector<float> stored_expected = stored_before;
    int num_past = 0;
    tables_.ForEachRow([&](int layer, size_t seq, int head) {
      const size_t n = tables_.slots(seq);
      const float* before = score_before.data() + tables_.score(layer, seq, head, 0);
      const float top = max_norm ? *std::max_element(before, before + n) : 1.0F;
      for (size_t j = 0; j < n; ++j) {
        float expected = before[j] / top;
        const size_t at = tables_.pool(layer, seq, head, j, stride);
        if (!std::isnan(stored_before[at])) {
          num_past += static_cast<int>(0.75F * stored_before[at] > expected);
          expected = std::max(expected, 0.75F * stored_before[at]);
        }
        if (j >= static_cast<size_t>(first_block[seq]) * tables_.block_size) {
          stored_expected[at] = expected;
        }
        ASSERT_EQ(score[tables_.score(layer, seq, head, j)], expected) << seq << ", " << j;
      }
    });
    EXPECT_GT(num_past, 0);
    // Blocks before first_block, those of other sequences and the gap between layers are as before.
    EXPECT_TRUE(testing::SameBits(stored, stored_expected));
  }
}

TEST_F(ScoreStepsTest, MaxNormAloneNeedsNoStoredScores) {
  const std::vector<float> before = RandomScores();
  std::vector<float> score = before;
  cpu::GlobalScores({.shape = tables_.shape(),
                     .score = score.data(),
                     .stored = nullptr,
                     .compressed = nullptr,
                     .first_block = nullptr,
                     .stored_layer_stride = 0,
                     .decay = 0.8F,
                     .max_norm = true,
                     .use_stored = false});
  EXPECT_TRUE(tables_.OnlySlotsWritten(score));
  tables_.ForEachRow([&](int layer, size_t seq, int head) {
    const size_t first = tables_.score(layer, seq, head, 0);
    const auto row = before.begin() + static_cast<int64_t>(first);
    const float top = *std::max_element(row, row + static_cast<int64_t>(tables_.slots(seq)));
    for (size_t j = 0; j < tables_.slots(seq); ++j) {
      ASSERT_EQ(score[first + j], before[first + j] / top);
    }
  });
}

TEST_F(ScoreStepsTest, PoolingTakesTheBestOfTheNeighbours) {
  const std::vector<float> score = tables_.Scores([this] { return Uniform() - 0.5F; });
  const std::vector<uint8_t> pools = {1, 1, 0, 1};
  for (const int width : {1, 3, 5, 7, 1001}) {
    std::vector<float> out(score.size(), kNan);
    cpu::PoolScores({tables_.shape(), score.data(), out.data(), pools.data(), width});
    EXPECT_TRUE(tables_.OnlySlotsWritten(out));
    tables_.ForEachRow([&](int layer, size_t seq, int head) {
      const auto n = static_cast<int64_t>(tables_.slots(seq));
      const float* row = score.data() + tables_.score(layer, seq, head, 0);
      for (int64_t j = 0; j < n; ++j) {
        const int64_t half = pools[seq] != 0 ? width / 2 : 0;
        const float expected = *std::max_element(row + std::max<int64_t>(j - half, 0),
                                                 row + std::min(j + half + 1, n));
        ASSERT_EQ(out[tables_.score(layer, seq, head, j)], expected) << width << ", " << j;
      }
    });
  }
}

TEST_F(ScoreStepsTest, CombiningWeighsScoreAgainstSimilarity) {
  const std::vector<float> before = RandomScores();
  const std::vector<float> similarity = RandomScores();
  for (const float lambda : {0.0F, 0.2F, 1.0F}) {
    std::vector<float> score = before;
    cpu::CombineScores({tables_.shape(), score.data(), similarity.data(), lambda});
    for (size_t i = 0; i < score.size(); ++i) {
      ASSERT_EQ(std::isnan(score[i]), std::isnan(before[i]));
      if (std::isnan(before[i])) continue;
      ASSERT_NEAR(score[i], double{lambda} * before[i] - (1.0 - lambda) * similarity[i], 1e-6);
    }
  }
}

using ScoreStepsDeathTest = ScoreStepsTest;

TEST_F(ScoreStepsDeathTest, EvenWidthsAreRefused) {
  std::vector<float> score = RandomScores();
  std::vector<float> out = score;
  const std::vector<uint8_t> pools(4);
  EXPECT_DEATH(cpu::PoolScores({tables_.shape(), score.data(), out.data(), pools.data(), 4}),
               "width 4");
}

TEST_F(ScoreStepsDeathTest, TablesThatCannotBeAreRefused) {
  std::vector<float> score = RandomScores();
  CompressionShape shape = tables_.shape();
  std::vector<int32_t> len = tables_.len;
  len[2] = tables_.max_blocks + 1;
  shape.table_len = len.data();
  EXPECT_DEATH(cpu::CombineScores({shape, score.data(), score.data(), 0.2F}),
               "sequence 2 has .* blocks of at most");
  len[2] = 6;  // the sixth entry is nonsense
  EXPECT_DEATH(cpu::CombineScores({shape, score.data(), score.data(), 0.2F}),
               "block 5 of sequence 2");
}

}  // namespace
}  // namespace zipage
