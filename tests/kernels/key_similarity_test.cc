#include "kernels/key_similarity.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>

#include "tests/kernels/compression_world.h"

namespace zipage {
namespace {

using testing::Tables;
using testing::Tensor;

struct Case {
  int kv_heads, head_dim, block_size;
  DType dtype;
  int layers = 2;
};

struct Result {
  std::vector<float> row_sum, similarity;
};

// The keys of some sequences; whatever is not theirs is NaN.
class World {
 public:
  World(const Case& c, const std::vector<int>& num_blocks, std::mt19937_64* rng)
      : c_(c),
        tables_(c.layers, c.kv_heads, c.block_size, num_blocks, 2, rng),
        stride_(tables_.pool_rows() + 5),
        keys_(Tensor::Poison(c.dtype, c.layers * stride_ * c.head_dim)) {}

  const Tables& tables() const { return tables_; }
  void key(int layer, size_t seq, int head, size_t slot, int i, float value) {
    keys_.Set(tables_.pool(layer, seq, head, slot, stride_) * c_.head_dim + i, value);
  }

  // Random keys: a direction of their own for every head, and copies of a few anchors with more or
  // less noise, all of random length.
  void FillRandom(std::mt19937_64* rng) {
    std::normal_distribution<float> normal;
    std::uniform_real_distribution<float> uniform(0.2F, 1.2F);
    tables_.ForEachRow([&](int layer, size_t seq, int head) {
      std::vector<std::vector<float>> anchors;
      for (int a = 0; a < 6; ++a) anchors.push_back(testing::RandomFloats(c_.head_dim, rng));
      for (size_t j = 0; j < tables_.slots(seq); ++j) {
        const std::vector<float>& anchor = anchors[(*rng)() % anchors.size()];
        const float noise = (*rng)() % 2 == 0 ? uniform(*rng) : 3.0F;
        const float length = std::exp(normal(*rng));
        for (int i = 0; i < c_.head_dim; ++i) {
          key(layer, seq, head, j, i,
              length * (anchor[i] + noise * normal(*rng) + 0.4F * anchors[0][i]));
        }
      }
    });
  }

  Result Run(decltype(&cpu::KeySimilarity) function, bool lightning, bool max_norm = false,
             int only = -1) const {
    CompressionShape shape = tables_.shape();
    if (only >= 0) {
      shape.block_table += only * shape.max_blocks;
      shape.table_len += only;
      shape.batch = 1;
    }
    const auto size = static_cast<size_t>(shape.num_scores());
    Result result = {std::vector<float>(size, testing::kNan),
                     std::vector<float>(size, testing::kNan)};
    function({.shape = shape,
              .key = keys_.data(),
              .row_sum = result.row_sum.data(),
              .similarity = result.similarity.data(),
              .key_layer_stride = static_cast<int64_t>(stride_ * c_.head_dim),
              .head_dim = c_.head_dim,
              .temperature = 0.4F,
              .lightning = lightning,
              .max_norm = max_norm,
              .dtype = c_.dtype});
    return result;
  }

 private:
  Case c_;
  Tables tables_;
  size_t stride_;  // slots and heads
  Tensor keys_;
};

const std::vector<Case>& Cases() {
  static const auto* cases =
      new std::vector<Case>{{2, 64, 256, DType::kFloat32, 1}, {3, 64, 16, DType::kFloat32},
                            {1, 128, 64, DType::kFloat32},    {2, 32, 48, DType::kFloat32},
                            {1, 80, 100, DType::kFloat32},    {2, 256, 16, DType::kFloat32},
                            {1, 18, 24, DType::kFloat32},     {2, 64, 64, DType::kBFloat16},
                            {1, 22, 20, DType::kBFloat16}};
  return *cases;
}

TEST(KeySimilarityTest, MatchesTheReferenceOnMixedBatches) {
  std::mt19937_64 rng(testing::FreshSeed());
  for (const Case& c : Cases()) {
    World world(c, {2, 1, 3}, &rng);
    world.FillRandom(&rng);
    for (const int options : {0, 1, 2, 3}) {
      SCOPED_TRACE(::testing::Message() << c.kv_heads << " x " << c.head_dim << ", blocks of "
                                        << c.block_size << ", options " << options);
      const bool lightning = options % 2 != 0;
      const bool max_norm = options / 2 != 0;
      const Result got = world.Run(&cpu::KeySimilarity, lightning, max_norm);
      const Result expected = world.Run(&reference::KeySimilarity, lightning, max_norm);
      EXPECT_TRUE(world.tables().OnlySlotsWritten(got.row_sum));
      EXPECT_TRUE(world.tables().OnlySlotsWritten(got.similarity));
      // A cosine within rounding of 0.5 may be alike in one precision only, and moves about 0.5
      // between two row sums. That is rare.
      int num_moved = 0;
      for (size_t i = 0; i < got.row_sum.size(); ++i) {
        if (std::isnan(expected.row_sum[i])) continue;
        const float off = std::abs(got.row_sum[i] - expected.row_sum[i]);
        const bool moved = std::abs(off - 0.5F) < 1e-3F;
        num_moved += static_cast<int>(moved);
        ASSERT_TRUE(off < 2e-4F || moved)
            << i << ": " << got.row_sum[i] << " for " << expected.row_sum[i];
        ASSERT_NEAR(got.similarity[i], expected.similarity[i],
                    expected.similarity[i] * (moved ? 0.2 : 1e-4 + 0.5 * num_moved))
            << i;
      }
      EXPECT_LE(num_moved, 2);
    }
  }
}

TEST(KeySimilarityTest, OtherSequencesAndThreadsDoNotChangeABit) {
  std::mt19937_64 rng(testing::FreshSeed());
  const int threads = omp_get_max_threads();
  for (const Case& c : Cases()) {
    World world(c, {2, 3, 1}, &rng);
    world.FillRandom(&rng);
    const Tables& tables = world.tables();
    for (const bool lightning : {false, true}) {
      const Result together = world.Run(&cpu::KeySimilarity, lightning);
      for (int seq = 0; seq < 3; ++seq) {
        omp_set_num_threads(1 + 2 * seq);
        const Result alone = world.Run(&cpu::KeySimilarity, lightning, false, seq);
        const size_t row = alone.row_sum.size() / c.layers;
        for (int layer = 0; layer < c.layers; ++layer) {
          const size_t at = tables.score(layer, seq, 0, 0);
          ASSERT_EQ(std::memcmp(alone.row_sum.data() + layer * row, together.row_sum.data() + at,
                                row * sizeof(float)),
                    0);
          ASSERT_EQ(std::memcmp(alone.similarity.data() + layer * row,
                                together.similarity.data() + at, row * sizeof(float)),
                    0);
        }
      }
    }
  }
  omp_set_num_threads(threads);
}

// Copies of unit vectors, so that every cosine is exactly 0 or 1: in each group of s copies the
// newest loses all its similarities (it is every other's last alike row), the one before it only
// that to the newest, and the others keep s - 1.
TEST(KeySimilarityTest, TheNewestOfCopiesIsNotRedundant) {
  std::mt19937_64 rng(testing::FreshSeed());
  for (const int block_size : {16, 40, 256}) {
    for (const bool lightning : {false, true}) {
      const Case c = {2, 32, block_size, DType::kBFloat16};
      World world(c, {3, 1}, &rng);
      const Tables& tables = world.tables();
      std::vector<float> expected(tables.num_scores(), testing::kNan);
      tables.ForEachRow([&](int layer, size_t seq, int head) {
        const size_t n = tables.slots(seq);
        const size_t length = lightning ? block_size : n;
        std::vector<int> direction(n);
        for (size_t j = 0; j < n; ++j) {
          direction[j] = static_cast<int>(rng() % 32);
          const float size = std::ldexp(1.0F, static_cast<int>(rng() % 9) - 4);
          for (int i = 0; i < 32; ++i) {
            world.key(layer, seq, head, j, i, i == direction[j] ? size : 0.0F);
          }
        }
        for (size_t j = 0; j < n; ++j) {
          const size_t begin = j / length * length;
          const auto of = direction.begin();
          const auto copies = std::count(of + begin, of + begin + length, direction[j]);
          const auto later = std::count(of + j + 1, of + begin + length, direction[j]);
          expected[tables.score(layer, seq, head, j)] =
              later == 0 ? 0.0F : static_cast<float>(later == 1 ? copies - 2 : copies - 1);
        }
      });
      const Result got = world.Run(&cpu::KeySimilarity, lightning);
      for (size_t i = 0; i < expected.size(); ++i) {
        if (std::isnan(expected[i])) continue;
        ASSERT_EQ(got.row_sum[i], expected[i]) << i;
      }
    }
  }
}

// Of one block of 16 slots in which `keys`, of four elements, come first and zeros after.
std::vector<float> RowSumsOf(const std::vector<std::vector<float>>& keys) {
  std::mt19937_64 rng(1);
  World world({1, 4, 16, DType::kFloat32, 1}, {1}, &rng);
  for (size_t j = 0; j < 16; ++j) {
    for (int i = 0; i < 4; ++i) world.key(0, 0, 0, j, i, j < keys.size() ? keys[j][i] : 0.0F);
  }
  std::vector<float> sums = world.Run(&cpu::KeySimilarity, true).row_sum;
  sums.resize(16);
  return sums;
}

TEST(KeySimilarityTest, ACosineOfExactlyOneHalfIsNotAlike) {
  const std::vector<float> half = RowSumsOf({{1, 1, 1, 1}, {2, 0, 0, 0}});
  EXPECT_EQ(half[0], 0.5F);
  EXPECT_EQ(half[1], 0.5F);
  const std::vector<float> more = RowSumsOf({{1, 1, 1, 0.99F}, {2, 0, 0, 0}});
  EXPECT_NEAR(more[0], 0, 1e-6);
  EXPECT_NEAR(more[1], 0, 1e-6);
}

TEST(KeySimilarityTest, OppositeKeysCountAgainstEachOther) {
  const std::vector<float> sums = RowSumsOf({{1, 0, 0, 0}, {-3, 0, 0, 0}, {0, 2, 0, 0}});
  EXPECT_EQ(sums[0], -1);
  EXPECT_EQ(sums[1], -1);
  EXPECT_EQ(sums[2], 0);
}

TEST(KeySimilarityTest, KeysOfNoLengthResembleNothing) {
  for (const float sum : RowSumsOf({{0, 0, 0, 0}, {1e-20F, 0, 0, 0}})) EXPECT_NEAR(sum, 0, 1e-12);
}

TEST(KeySimilarityTest, SimilarityAddsUpToOneOrPeaksAtOne) {
  std::mt19937_64 rng(testing::FreshSeed());
  World world({2, 32, 30, DType::kFloat32}, {3, 2}, &rng);
  world.FillRandom(&rng);
  const Result sums = world.Run(&cpu::KeySimilarity, false);
  const Result peaks = world.Run(&cpu::KeySimilarity, false, true);
  const Tables& tables = world.tables();
  tables.ForEachRow([&](int layer, size_t seq, int head) {
    double sum = 0;
    float peak = 0;
    for (size_t j = 0; j < tables.slots(seq); ++j) {
      sum += sums.similarity[tables.score(layer, seq, head, j)];
      peak = std::max(peak, peaks.similarity[tables.score(layer, seq, head, j)]);
    }
    EXPECT_NEAR(sum, 1, 1e-5);
    EXPECT_EQ(peak, 1);
  });
}

}  // namespace
}  // namespace zipage
