#include "kernels/select_slots.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>
#include <functional>

#include "tests/kernels/compression_world.h"

namespace zipage {
namespace {

using testing::Tables;

struct Options {
  std::vector<int32_t> num_pinned, num_kept;
  int sink_len = 0;
  int window = 0;
};

// What is not written stays -1.
std::vector<int32_t> Select(const Tables& tables, const float* score, const Options& o,
                            int max_kept) {
  std::vector<int32_t> kept(tables.layers * tables.batch() * tables.kv_heads * max_kept, -1);
  cpu::SelectSlots({tables.shape(), score, o.num_pinned.data(), o.num_kept.data(), kept.data(),
                    max_kept, o.sink_len, o.window});
  return kept;
}

// The order of the header, sorted in full: always kept, not NaN, higher score, later.
std::vector<int32_t> Expected(const float* score, int n, int pinned, int window, int num_kept) {
  std::vector<int32_t> slots(n);
  std::iota(slots.begin(), slots.end(), 0);
  std::sort(slots.begin(), slots.end(), [&](int32_t a, int32_t b) {
    const bool always_a = a < pinned || a >= n - window;
    const bool always_b = b < pinned || b >= n - window;
    if (always_a != always_b) return always_a;
    if (!always_a && score != nullptr) {
      if (std::isnan(score[a]) != std::isnan(score[b])) return std::isnan(score[b]);
      if (score[a] != score[b] && !std::isnan(score[a])) return score[a] > score[b];
    }
    return a > b;
  });
  slots.resize(num_kept);
  std::sort(slots.begin(), slots.end());
  return slots;
}

void CheckAgainstSort(const Tables& tables, const std::vector<float>* score, const Options& o) {
  const int max_kept = *std::max_element(o.num_kept.begin(), o.num_kept.end()) + 3;
  const auto* data = score != nullptr ? score->data() : nullptr;
  const std::vector<int32_t> kept = Select(tables, data, o, max_kept);
  auto row = kept.begin();
  tables.ForEachRow([&](int layer, size_t seq, int head) {
    const float* scores = data != nullptr ? data + tables.score(layer, seq, head, 0) : nullptr;
    std::vector<int32_t> expected =
        Expected(scores, static_cast<int>(tables.slots(seq)),
                 std::max(o.num_pinned[seq], o.sink_len), o.window, o.num_kept[seq]);
    expected.resize(max_kept, -1);
    ASSERT_EQ(std::vector<int32_t>(row, row + max_kept), expected)
        << "layer " << layer << " sequence " << seq << " head " << head;
    row += max_kept;
  });
}

// Kinds of scores: all different, few different, with NaN and infinities, all equal.
TEST(SelectSlotsTest, MatchesAFullSortWhateverTheScores) {
  std::mt19937_64 rng(testing::FreshSeed());
  std::normal_distribution<float> normal;
  const std::vector<float> special = {testing::kNan, -testing::kNan, INFINITY, -INFINITY,
                                      0.0F,          -0.0F,          1e-42F,   -1e-42F};
  const std::vector<std::function<float()>> kinds = {
      [&] { return normal(rng); },
      [&] { return std::exp(-20 * std::abs(normal(rng))); },
      [&] { return static_cast<float>(rng() % 5) - 2; },
      [&] { return rng() % 3 == 0 ? special[rng() % special.size()] : normal(rng); },
      [&] { return special[rng() % special.size()]; },
      [&] { return std::bit_cast<float>(0x3F800000U + static_cast<uint32_t>(rng() % 4)); },
      [&] { return 0.25F; },
      [&] { return std::bit_cast<float>(static_cast<uint32_t>(rng())); }};
  for (int repeat = 0; repeat < 12; ++repeat) {
    const auto block_size = static_cast<int>(16 + rng() % 70);
    const Tables tables(2, 3, block_size, {3, 1, 9, 2}, 0, &rng);
    for (const auto& kind : kinds) {
      const std::vector<float> score = tables.Scores(kind);
      Options o;
      o.window = static_cast<int>(rng() % (block_size + 1));
      o.sink_len = static_cast<int>(rng() % 3 * (rng() % 10));
      for (size_t s = 0; s < tables.batch(); ++s) {
        const auto n = static_cast<int32_t>(tables.slots(s));
        o.num_pinned.push_back(rng() % 2 == 0 ? 0 : static_cast<int32_t>(rng() % (n + 1)));
        const int32_t always = std::min(n, std::max(o.num_pinned[s], o.sink_len) + o.window);
        o.num_kept.push_back(always + static_cast<int32_t>(rng() % (n - always + 1)));
      }
      CheckAgainstSort(tables, &score, o);
      CheckAgainstSort(tables, nullptr, o);
    }
  }
}

TEST(SelectSlotsTest, WithoutScoresTheNewestAreKept) {
  std::mt19937_64 rng(testing::FreshSeed());
  const Tables tables(1, 1, 16, {3}, 0, &rng);
  const std::vector<int32_t> kept = Select(tables, nullptr, {{4}, {32}, 0, 8}, 32);
  for (int i = 0; i < 32; ++i) EXPECT_EQ(kept[i], i < 4 ? i : i + 16);
}

TEST(SelectSlotsTest, OfEqualScoresTheNewestAreKept) {
  std::mt19937_64 rng(testing::FreshSeed());
  const Tables tables(1, 1, 16, {2}, 0, &rng);
  std::vector<float> score = tables.Scores([] { return 1.0F; });
  score[3] = 2;    // first
  score[20] = -1;  // last
  const std::vector<int32_t> kept = Select(tables, score.data(), {{0}, {16}, 0, 0}, 16);
  std::vector<int32_t> expected = {3};
  for (int j = 16; j < 32; ++j) {
    if (j != 20) expected.push_back(j);
  }
  EXPECT_EQ(kept, expected);
}

TEST(SelectSlotsTest, ThreadsDoNotChangeTheResult) {
  std::mt19937_64 rng(testing::FreshSeed());
  const Tables tables(3, 4, 256, {9, 8}, 0, &rng);
  std::normal_distribution<float> normal;
  const std::vector<float> score = tables.Scores([&] { return normal(rng); });
  const Options o = {{0, 100}, {2048, 1000}, 4, 16};
  const int threads = omp_get_max_threads();
  omp_set_num_threads(1);
  const std::vector<int32_t> kept = Select(tables, score.data(), o, 2048);
  omp_set_num_threads(7);
  EXPECT_EQ(Select(tables, score.data(), o, 2048), kept);
  omp_set_num_threads(threads);
}

TEST(SelectSlotsDeathTest, RefusesToKeepFewerThanIsAlwaysKept) {
  std::mt19937_64 rng(1);
  const Tables tables(1, 1, 16, {2}, 0, &rng);
  EXPECT_DEATH(Select(tables, nullptr, {{10}, {17}, 0, 8}, 32), "cannot keep 17 of 32 slots");
  EXPECT_DEATH(Select(tables, nullptr, {{0}, {33}, 0, 8}, 64), "cannot keep 33 of 32 slots");
}

}  // namespace
}  // namespace zipage
