#include "kernels/window_scores.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>

#include "tests/kernels/compression_world.h"

namespace zipage {
namespace {

using testing::Tables;
using testing::Tensor;

struct Case {
  int q_heads, kv_heads, head_dim, block_size, window;
  DType dtype;
  int layers = 2;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.q_heads << "/" << c.kv_heads << " heads of " << c.head_dim << ", blocks of "
             << c.block_size << ", window " << c.window << ", " << DTypeName(c.dtype);
}

// Keys and query windows of some sequences; whatever is not theirs is NaN.
class World {
 public:
  World(const Case& c, const std::vector<int>& num_blocks, std::mt19937_64* rng, float scale = 1.5F)
      : c_(c),
        tables_(c.layers, c.kv_heads, c.block_size, num_blocks, 2, rng),
        key_stride_(tables_.pool_rows() + 5),
        keys_(Tensor::Poison(c.dtype, c.layers * key_stride_ * c.head_dim)),
        windows_(Tensor::Poison(c.dtype, c.layers * window_stride())),
        query_slots_(num_blocks.size() + 2) {
    std::normal_distribution<float> normal(0.0F, scale);
    std::iota(query_slots_.begin(), query_slots_.end(), 0);
    std::shuffle(query_slots_.begin(), query_slots_.end(), *rng);
    query_slots_.resize(num_blocks.size());
    tables_.ForEachRow([&](int layer, size_t seq, int head) {
      for (size_t j = 0; j < tables_.slots(seq); ++j) {
        for (int i = 0; i < c.head_dim; ++i) key(layer, seq, head, j, i, normal(*rng));
      }
    });
    for (int layer = 0; layer < c.layers; ++layer) {
      for (const int32_t slot : query_slots_) {
        for (size_t i = 0; i < window_size(); ++i) {
          windows_.Set(layer * window_stride() + slot * window_size() + i, normal(*rng));
        }
      }
    }
  }

  const Tables& tables() const { return tables_; }
  void key(int layer, size_t seq, int head, size_t slot, int i, float value) {
    keys_.Set(tables_.pool(layer, seq, head, slot, key_stride_) * c_.head_dim + i, value);
  }
  void query(int layer, size_t seq, int query, int head, int i, float value) {
    windows_.Set(layer * window_stride() + query_slots_[seq] * window_size() +
                     (static_cast<size_t>(query) * c_.q_heads + head) * c_.head_dim + i,
                 value);
  }

  // Scores of all sequences in one call, or of the one that is given.
  std::vector<float> Run(decltype(&cpu::WindowScores) function, int only = -1) const {
    CompressionShape shape = tables_.shape();
    const int32_t* query_slot = query_slots_.data();
    if (only >= 0) {
      shape.block_table += only * shape.max_blocks;
      shape.table_len += only;
      query_slot += only;
      shape.batch = 1;
    }
    std::vector<float> scores(static_cast<size_t>(shape.num_scores()), testing::kNan);
    function({.shape = shape,
              .key = keys_.data(),
              .query_window = windows_.data(),
              .query_slot = query_slot,
              .score = scores.data(),
              .key_layer_stride = static_cast<int64_t>(key_stride_ * c_.head_dim),
              .window_layer_stride = static_cast<int64_t>(window_stride()),
              .window = c_.window,
              .q_heads = c_.q_heads,
              .head_dim = c_.head_dim,
              .dtype = c_.dtype});
    return scores;
  }

 private:
  size_t window_size() const { return static_cast<size_t>(c_.window) * c_.q_heads * c_.head_dim; }
  size_t window_stride() const { return (tables_.batch() + 2) * window_size() + 3; }

  Case c_;
  Tables tables_;
  size_t key_stride_;  // slots and heads
  Tensor keys_, windows_;
  std::vector<int32_t> query_slots_;
};

const std::vector<Case>& Cases() {
  static const auto* cases = new std::vector<Case>{
      {14, 2, 64, 256, 16, DType::kFloat32}, {6, 3, 64, 16, 16, DType::kFloat32},
      {4, 4, 32, 48, 7, DType::kFloat32},    {8, 1, 128, 64, 33, DType::kFloat32},
      {5, 1, 80, 32, 1, DType::kFloat32},    {3, 3, 256, 16, 5, DType::kFloat32},
      {7, 1, 18, 24, 3, DType::kFloat32},    {8, 2, 64, 64, 64, DType::kBFloat16},
      {4, 2, 48, 128, 16, DType::kBFloat16}, {2, 1, 22, 20, 20, DType::kBFloat16}};
  return *cases;
}

TEST(WindowScoresTest, MatchesTheReferenceOnMixedBatches) {
  std::mt19937_64 rng(testing::FreshSeed());
  for (const Case& c : Cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    const World world(c, {3, 1, 5, 2}, &rng);
    const std::vector<float> got = world.Run(&cpu::WindowScores);
    const std::vector<float> expected = world.Run(&reference::WindowScores);
    EXPECT_TRUE(world.tables().OnlySlotsWritten(got));
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(expected[i])) continue;
      ASSERT_NEAR(got[i], expected[i], 1e-7 + 3e-5 * expected[i]) << i;
    }
  }
}

TEST(WindowScoresTest, ALongTableIsWorkedThroughInParts) {
  std::mt19937_64 rng(testing::FreshSeed());
  // 512 query rows over more than 1024 slots do not fit at once, nor do 16 over 40000.
  for (const auto& [c, num_blocks] : std::vector<std::pair<Case, std::vector<int>>>{
           {{8, 1, 16, 64, 64, DType::kFloat32, 1}, {21, 2}},
           {{9, 1, 8, 256, 10, DType::kFloat32, 1}, {157}}}) {
    const World world(c, num_blocks, &rng);
    const std::vector<float> got = world.Run(&cpu::WindowScores);
    const std::vector<float> expected = world.Run(&reference::WindowScores);
    for (size_t i = 0; i < got.size(); ++i) {
      if (std::isnan(expected[i])) continue;
      ASSERT_NEAR(got[i], expected[i], 1e-7 + 3e-5 * expected[i]) << i;
    }
  }
}

TEST(WindowScoresTest, OtherSequencesAndThreadsDoNotChangeABit) {
  std::mt19937_64 rng(testing::FreshSeed());
  const int threads = omp_get_max_threads();
  for (const Case& c : Cases()) {
    SCOPED_TRACE(::testing::Message() << c);
    const World world(c, {2, 3, 1}, &rng);
    const Tables& tables = world.tables();
    const std::vector<float> together = world.Run(&cpu::WindowScores);
    for (int seq = 0; seq < 3; ++seq) {
      omp_set_num_threads(1 + 2 * seq);
      const std::vector<float> alone = world.Run(&cpu::WindowScores, seq);
      const size_t row = alone.size() / c.layers;
      for (int layer = 0; layer < c.layers; ++layer) {
        ASSERT_EQ(
            std::memcmp(alone.data() + layer * row,
                        together.data() + tables.score(layer, seq, 0, 0), row * sizeof(float)),
            0)
            << "sequence " << seq << " layer " << layer;
      }
    }
  }
  omp_set_num_threads(threads);
}

TEST(WindowScoresTest, ProbabilitiesOfASingleHeadAddUpToOne) {
  std::mt19937_64 rng(testing::FreshSeed());
  const Case c = {3, 3, 32, 32, 9, DType::kFloat32};
  const World world(c, {4, 1}, &rng);
  const std::vector<float> scores = world.Run(&cpu::WindowScores);
  world.tables().ForEachRow([&](int layer, size_t seq, int head) {
    double sum = 0;
    for (size_t j = 0; j < world.tables().slots(seq); ++j) {
      sum += scores[world.tables().score(layer, seq, head, j)];
    }
    EXPECT_NEAR(sum, 1, 1e-5);
  });
}

TEST(WindowScoresTest, AQuerySeesNoSlotAfterItsOwn) {
  std::mt19937_64 rng(testing::FreshSeed());
  const Case c = {1, 1, 16, 32, 8, DType::kFloat32, 1};
  World world(c, {2}, &rng);
  // Every query looks for the key of the slot after its own; only the last one may find any key.
  const size_t n = 64;
  for (size_t j = 0; j < n; ++j) {
    for (int i = 0; i < 16; ++i) world.key(0, 0, 0, j, i, 0);
  }
  for (int query = 0; query < 8; ++query) {
    for (int i = 0; i < 16; ++i) world.query(0, 0, query, 0, i, i == query ? 400.0F : 0.0F);
  }
  for (int query = 0; query < 7; ++query) world.key(0, 0, 0, n - 8 + query + 1, query, 1);
  world.key(0, 0, 0, 3, 7, 1);
  const std::vector<float> scores = world.Run(&cpu::WindowScores);
  // Queries 0 to 6 spread evenly over 57 to 63 slots; query 7 falls on slot 3 alone.
  double even = 0;
  for (int visible = 57; visible <= 63; ++visible) even += 1.0 / visible / 8;
  EXPECT_NEAR(scores[0], even, 1e-6);
  EXPECT_NEAR(scores[3], even + 1.0 / 8, 1e-6);
  EXPECT_NEAR(scores[62], 1.0 / 63 / 8, 1e-6);
  EXPECT_NEAR(scores[63], 0, 1e-6);
}

TEST(WindowScoresTest, ExtremeLogitsStayFinite) {
  std::mt19937_64 rng(testing::FreshSeed());
  const Case c = {4, 2, 64, 16, 16, DType::kFloat32};
  const World world(c, {3, 2}, &rng, /*scale=*/300);
  const std::vector<float> got = world.Run(&cpu::WindowScores);
  world.tables().ForEachRow([&](int layer, size_t seq, int head) {
    float top = 0;
    for (size_t j = 0; j < world.tables().slots(seq); ++j) {
      const float score = got[world.tables().score(layer, seq, head, j)];
      ASSERT_TRUE(score >= 0 && score <= 1) << score;
      top = std::max(top, score);
    }
    EXPECT_GE(top, 1.0F / 16 - 1e-6F);
  });
}

TEST(WindowScoresDeathTest, RefusesAWindowThatDoesNotFitItsBlock) {
  std::mt19937_64 rng(1);
  const World world({2, 1, 16, 16, 17, DType::kFloat32}, {2}, &rng);
  EXPECT_DEATH(world.Run(&cpu::WindowScores), "a window of 17 in blocks of 16");
}

}  // namespace
}  // namespace zipage
