#include "kernels/paged_attention.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "tests/kernels/random_data.h"

namespace zipage {
namespace {

using testing::Tensor;

struct Shape {
  int q_heads, kv_heads, head_dim, block_size;
  DType dtype;
};

// Sequences in a pool whose blocks are shuffled and whose unused slots are NaN.
class World {
 public:
  World(const Shape& shape, std::vector<int> lengths, std::mt19937_64* rng)
      : shape_(shape),
        lengths_(std::move(lengths)),
        max_blocks_(1),
        slot_size_(static_cast<size_t>(shape.kv_heads) * shape.head_dim),
        keys_(shape.dtype, 0),
        values_(shape.dtype, 0),
        queries_(shape.dtype, 0) {
    std::mt19937_64 contents((*rng)());  // the same whatever the block size
    int total_blocks = 3;
    int total_slots = 0;
    for (int length : lengths_) {
      const int blocks = (length + shape.block_size - 1) / shape.block_size;
      max_blocks_ = std::max(max_blocks_, blocks + 1);
      total_blocks += blocks;
      total_slots += length;
    }
    num_blocks_ = total_blocks;
    std::vector<int32_t> ids(total_blocks);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), *rng);
    keys_ = Tensor::Poison(shape.dtype, total_blocks * shape.block_size * slot_size_);
    values_ = keys_;
    // Entries past the last needed block are nonsense and must not be looked at.
    tables_.assign(lengths_.size() * max_blocks_, 1 << 30);
    std::normal_distribution<float> normal;
    for (size_t s = 0; s < lengths_.size(); ++s) {
      for (int j = 0; j < lengths_[s]; ++j) {
        int32_t& block = tables_[s * max_blocks_ + j / shape.block_size];
        if (j % shape.block_size == 0) {
          block = ids.back();
          ids.pop_back();
        }
        const size_t slot = static_cast<size_t>(block) * shape.block_size + j % shape.block_size;
        for (size_t i = 0; i < slot_size_; ++i) {
          keys_.Set(slot * slot_size_ + i, normal(contents));
          values_.Set(slot * slot_size_ + i, normal(contents));
        }
      }
      first_slot_.push_back(s == 0 ? 0 : first_slot_.back() + lengths_[s - 1]);
    }
    queries_ =
        Tensor::Random(shape.dtype, static_cast<size_t>(total_slots) * q_size(), &contents, 2.0F);
  }

  size_t q_size() const { return static_cast<size_t>(shape_.q_heads) * shape_.head_dim; }
  const std::vector<int>& lengths() const { return lengths_; }

  // A piece of one sequence: its tokens [begin, end).
  struct Chunk {
    int seq, begin, end;
  };

  // The outputs of the chunks' tokens in one call, [tokens, q_size].
  Tensor Run(const std::vector<Chunk>& chunks, decltype(&cpu::PagedAttention) function) const {
    std::vector<int32_t> tables, query_start = {0}, context_len;
    for (const Chunk& c : chunks) {
      const auto row = tables_.begin() + static_cast<int64_t>(c.seq) * max_blocks_;
      tables.insert(tables.end(), row, row + max_blocks_);
      query_start.push_back(query_start.back() + c.end - c.begin);
      context_len.push_back(c.end);
    }
    const size_t tokens = query_start.back();
    const size_t stride = q_size() + 2 * slot_size_;  // as in the fused product's rows
    Tensor q = Tensor::Poison(shape_.dtype, tokens * stride);
    size_t t = 0;
    for (const Chunk& c : chunks) {
      for (int j = c.begin; j < c.end; ++j, ++t) {
        for (size_t i = 0; i < q_size(); ++i) {
          q.Set(t * stride + i, queries_.Get((first_slot_[c.seq] + j) * q_size() + i));
        }
      }
    }
    Tensor out = Tensor::Poison(shape_.dtype, tokens * q_size());
    function({.q = q.data(),
              .key_cache = keys_.data(),
              .value_cache = values_.data(),
              .block_tables = tables.data(),
              .query_start = query_start.data(),
              .context_len = context_len.data(),
              .out = out.data(),
              .q_stride = static_cast<int64_t>(stride),
              .num_blocks = num_blocks_,
              .num_seqs = static_cast<int>(chunks.size()),
              .max_blocks = max_blocks_,
              .block_size = shape_.block_size,
              .q_heads = shape_.q_heads,
              .kv_heads = shape_.kv_heads,
              .head_dim = shape_.head_dim,
              .scale = 1.0F / std::sqrt(static_cast<float>(shape_.head_dim)),
              .dtype = shape_.dtype});
    return out;
  }

 private:
  Shape shape_;
  std::vector<int> lengths_;
  int max_blocks_;
  int64_t num_blocks_ = 0;
  size_t slot_size_;
  std::vector<int> first_slot_;  // of each sequence among all queries
  std::vector<int32_t> tables_;
  Tensor keys_, values_, queries_;
};

const std::vector<Shape>& Shapes() {
  static const auto* shapes =
      new std::vector<Shape>{{14, 2, 64, 256, DType::kFloat32}, {9, 3, 64, 16, DType::kFloat32},
                             {4, 4, 32, 48, DType::kFloat32},   {8, 1, 128, 64, DType::kFloat32},
                             {3, 1, 80, 32, DType::kFloat32},   {2, 2, 256, 16, DType::kFloat32},
                             {5, 1, 18, 16, DType::kFloat32},   {14, 2, 64, 16, DType::kBFloat16},
                             {4, 2, 48, 128, DType::kBFloat16}, {6, 2, 22, 32, DType::kBFloat16},
                             {71, 1, 64, 16, DType::kFloat32}};
  return *shapes;
}

TEST(PagedAttentionTest, MatchesTheReferenceOnMixedBatches) {
  std::mt19937_64 rng(testing::FreshSeed());
  for (const Shape& shape : Shapes()) {
    const World world(shape, {1, 63, 64, 65, 300, 17}, &rng);
    std::vector<World::Chunk> chunks;
    for (int s = 0; s < 6; ++s) {
      const int length = world.lengths()[s];
      const int begin = s % 2 == 0 ? length - 1 : static_cast<int>(rng() % length);
      chunks.push_back({s, begin, length});
    }
    chunks.push_back({4, 70, 201});
    const Tensor got = world.Run(chunks, &cpu::PagedAttention);
    const Tensor expected = world.Run(chunks, &reference::PagedAttention);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_NEAR(got.Get(i), expected.Get(i),
                  testing::RoundingOf(shape.dtype) * (10 + std::abs(expected.Get(i))))
          << shape.q_heads << "/" << shape.kv_heads << " x " << shape.head_dim << " at " << i;
    }
  }
}

TEST(PagedAttentionTest, MatchesTheReferenceOverSeveralSegments) {
  std::mt19937_64 rng(testing::FreshSeed());
  const World world({4, 2, 32, 64, DType::kFloat32}, {4500, 2048, 2049}, &rng);
  const std::vector<World::Chunk> chunks = {{0, 4100, 4500}, {1, 2047, 2048}, {2, 2040, 2049}};
  const Tensor got = world.Run(chunks, &cpu::PagedAttention);
  const Tensor expected = world.Run(chunks, &reference::PagedAttention);
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got.Get(i), expected.Get(i), 2e-5) << i;
}

// Every row of every sequence, computed in random chunks, batches and numbers of threads.
void CheckChunkingChangesNoBit(const Shape& shape, const std::vector<int>& lengths, int first_row,
                               int rounds, std::mt19937_64* rng) {
  const World world(shape, lengths, rng);
  std::vector<Tensor> whole;
  for (size_t s = 0; s < lengths.size(); ++s) {
    whole.push_back(
        world.Run({{static_cast<int>(s), std::min(first_row, lengths[s] - 1), lengths[s]}},
                  &cpu::PagedAttention));
  }
  const int threads = omp_get_max_threads();
  for (int round = 0; round < rounds; ++round) {
    omp_set_num_threads(1 + round % 5);
    std::vector<World::Chunk> chunks;
    for (size_t s = 0; s < lengths.size(); ++s) {
      int begin = std::min(first_row, lengths[s] - 1);
      while (begin < lengths[s]) {
        const int longest = round % 2 == 0 ? 3 : 200;
        const int end = std::min(lengths[s], begin + 1 + static_cast<int>((*rng)() % longest));
        chunks.push_back({static_cast<int>(s), begin, end});
        begin = end;
      }
    }
    std::shuffle(chunks.begin(), chunks.end(), *rng);
    while (!chunks.empty()) {
      const size_t take = 1 + (*rng)() % chunks.size();
      const std::vector<World::Chunk> batch(chunks.end() - take, chunks.end());
      chunks.resize(chunks.size() - take);
      const Tensor out = world.Run(batch, &cpu::PagedAttention);
      size_t t = 0;
      for (const World::Chunk& c : batch) {
        const int base = std::min(first_row, lengths[c.seq] - 1);
        const size_t count = (c.end - c.begin) * world.q_size();
        ASSERT_TRUE(out.SameBits(t * world.q_size(), whole[c.seq],
                                 (c.begin - base) * world.q_size(), count))
            << "sequence " << c.seq << " rows " << c.begin << " to " << c.end;
        t += c.end - c.begin;
      }
    }
  }
  omp_set_num_threads(threads);
}

TEST(PagedAttentionTest, ChunksBatchesAndThreadsDoNotChangeABit) {
  std::mt19937_64 rng(testing::FreshSeed());
  for (const Shape& shape : Shapes()) {
    if (shape.q_heads > 20) continue;
    SCOPED_TRACE(::testing::Message() << shape.q_heads << " x " << shape.head_dim);
    CheckChunkingChangesNoBit(shape, {150, 64, 7, 129}, 0, 4, &rng);
  }
}

TEST(PagedAttentionTest, SplittingALongSequenceDoesNotChangeABit) {
  std::mt19937_64 rng(testing::FreshSeed());
  CheckChunkingChangesNoBit({4, 1, 64, 128, DType::kFloat32}, {6300, 2050}, 6000, 6, &rng);
  CheckChunkingChangesNoBit({7, 1, 32, 16, DType::kBFloat16}, {4200}, 4090, 6, &rng);
}

TEST(PagedAttentionTest, TheBlockSizeOnlyMovesSlots) {
  const uint64_t seed = testing::FreshSeed();
  std::vector<Tensor> outs;
  for (int block_size : {16, 48, 256}) {
    std::mt19937_64 rng(seed);
    const World world({4, 2, 64, block_size, DType::kFloat32}, {333}, &rng);
    outs.push_back(world.Run({{0, 200, 333}}, &cpu::PagedAttention));
    EXPECT_TRUE(outs.back().SameBits(0, outs[0], 0, outs[0].size())) << block_size;
  }
}

TEST(PagedAttentionTest, ExtremeScoresStayFinite) {
  std::mt19937_64 rng(testing::FreshSeed());
  const Shape shape = {2, 1, 16, 16, DType::kFloat32};
  std::vector<float> keys(16 * 16), values(16 * 16), q(2 * 16), out(2 * 16);
  for (float& v : values) v = std::normal_distribution<float>()(rng);
  for (size_t i = 0; i < keys.size(); ++i) keys[i] = i / 16 == 3 ? 1e4F : -1e4F;
  for (float& v : q) v = 1e4F;
  const int32_t table = 0;
  const int32_t starts[] = {0, 1};
  const int32_t context = 16;
  cpu::PagedAttention({q.data(), keys.data(), values.data(), &table, starts, &context, out.data(),
                       32, 1, 1, 1, 16, shape.q_heads, 1, 16, 0.25F, DType::kFloat32});
  for (int i = 0; i < 32; ++i) ASSERT_FLOAT_EQ(out[i], values[3 * 16 + i % 16]);
}

TEST(PagedAttentionDeathTest, RefusesABlockOutsideThePool) {
  std::vector<float> cache(16 * 16), q(16), out(16);
  const int32_t table = 1;
  const int32_t starts[] = {0, 1};
  const int32_t context = 1;
  const PagedAttentionParams p = {q.data(),
                                  cache.data(),
                                  cache.data(),
                                  &table,
                                  starts,
                                  &context,
                                  out.data(),
                                  16,
                                  1,
                                  1,
                                  1,
                                  16,
                                  1,
                                  1,
                                  16,
                                  0.25F,
                                  DType::kFloat32};
  EXPECT_DEATH(cpu::PagedAttention(p), "sequence 0 has block 1 of 1");
}

}  // namespace
}  // namespace zipage
