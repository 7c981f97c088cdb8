#include "kernels/pack_slots.h"

#include <gtest/gtest.h>
#include <omp.h>

#include <cmath>

#include "tests/kernels/compression_world.h"

namespace zipage {
namespace {

using testing::Tables;
using testing::Tensor;

struct Case {
  int layers, kv_heads, head_dim, block_size;
  DType dtype;
};

// Where each sequence goes: the first first_block[s] blocks stay, the next fresh[s] ones are spare
// blocks, the others are the sequence's own.
struct Move {
  std::vector<int> first_block, fresh, num_kept;
};

class World {
 public:
  World(const Case& c, const std::vector<int>& num_blocks, const Move& move, std::mt19937_64* rng)
      : c_(c),
        tables_(c.layers, c.kv_heads, c.block_size, num_blocks, 12, rng),
        target_blocks_(tables_.max_blocks),
        stride_(tables_.pool_rows() + 5),
        target_(tables_.batch() * target_blocks_, 1 << 30),
        keys_(Tensor::Random(c.dtype, c.layers * stride_ * c.head_dim, rng)),
        values_(Tensor::Random(c.dtype, c.layers * stride_ * c.head_dim, rng)),
        stored_(testing::RandomFloats(c.layers * stride_, rng)),
        num_kept_(move.num_kept.begin(), move.num_kept.end()),
        max_kept_(*std::max_element(num_kept_.begin(), num_kept_.end()) + 2) {
    for (size_t s = 0; s < tables_.batch(); ++s) {
      first_slot_.push_back(move.first_block[s] * c.block_size);
      const int used = (num_kept_[s] + c.block_size - 1) / c.block_size;
      for (int b = 0; b < used; ++b) {
        const bool fresh = b >= move.first_block[s] && b < move.first_block[s] + move.fresh[s];
        target_[s * target_blocks_ + b] = tables_.ids[s * tables_.max_blocks + b];
        if (!fresh) continue;
        target_[s * target_blocks_ + b] = tables_.spare.back();
        tables_.spare.pop_back();
      }
      sequence_slot_.push_back(static_cast<int32_t>(2 * (tables_.batch() - s)));
    }
    tables_.ForEachRow([&](int, size_t seq, int) {
      std::vector<int32_t> slots(tables_.slots(seq) - first_slot_[seq]);
      std::iota(slots.begin(), slots.end(), first_slot_[seq]);
      std::vector<int32_t> row(first_slot_[seq]);
      std::iota(row.begin(), row.end(), 0);
      std::sample(slots.begin(), slots.end(), std::back_inserter(row),
                  num_kept_[seq] - first_slot_[seq], *rng);
      row.resize(max_kept_, -1);
      kept_.insert(kept_.end(), row.begin(), row.end());
    });
    for (size_t i = 0; i < c.layers * num_slots() * c.kv_heads; ++i) {
      prompt_slots_.push_back(static_cast<int32_t>((*rng)() % 100));
    }
  }

  // Packs and compares all memory with a gather from the copies of before.
  void PackAndCheck(bool with_stored = true) {
    const Tensor keys = keys_;
    const Tensor values = values_;
    const std::vector<float> stored = stored_;
    const std::vector<int32_t> prompt_slots = prompt_slots_;
    cpu::PackSlots({.shape = tables_.shape(),
                    .kept = kept_.data(),
                    .num_kept = num_kept_.data(),
                    .first_slot = first_slot_.data(),
                    .target_table = target_.data(),
                    .key = keys_.data(),
                    .value = values_.data(),
                    .stored = with_stored ? stored_.data() : nullptr,
                    .prompt_slots = prompt_slots_.data(),
                    .sequence_slot = sequence_slot_.data(),
                    .kv_layer_stride = static_cast<int64_t>(stride_ * c_.head_dim),
                    .stored_layer_stride = static_cast<int64_t>(stride_),
                    .max_kept = max_kept_,
                    .max_target_blocks = target_blocks_,
                    .max_num_seqs = static_cast<int>(num_slots()),
                    .head_dim = c_.head_dim,
                    .dtype = c_.dtype});
    // Where every row of the pool came from.
    std::vector<size_t> source(c_.layers * stride_);
    std::iota(source.begin(), source.end(), 0);
    std::vector<int32_t> prompt_expected = prompt_slots;
    const int32_t* kept = kept_.data();
    tables_.ForEachRow([&](int layer, size_t seq, int head) {
      for (int i = first_slot_[seq]; i < num_kept_[seq]; ++i) {
        const size_t block = target_[seq * target_blocks_ + i / c_.block_size];
        const size_t to =
            layer * stride_ + (block * c_.block_size + i % c_.block_size) * c_.kv_heads + head;
        source[to] = tables_.pool(layer, seq, head, kept[i], stride_);
      }
      int32_t& prompt =
          prompt_expected[(layer * num_slots() + sequence_slot_[seq]) * c_.kv_heads + head];
      const int32_t old = prompt;
      prompt = static_cast<int32_t>(
          std::count_if(kept, kept + num_kept_[seq], [old](int32_t j) { return j < old; }));
      kept += max_kept_;
    });
    for (size_t i = 0; i < source.size(); ++i) {
      const size_t d = c_.head_dim;
      ASSERT_TRUE(keys_.SameBits(i * d, keys, source[i] * d, d)) << "key row " << i;
      ASSERT_TRUE(values_.SameBits(i * d, values, source[i] * d, d)) << "value row " << i;
      ASSERT_EQ(stored_[i], stored[with_stored ? source[i] : i]) << "score " << i;
    }
    EXPECT_EQ(prompt_slots_, prompt_expected);
  }

  void BreakKept(int row, int i, int32_t value) { kept_[row * max_kept_ + i] = value; }

 private:
  size_t num_slots() const { return 2 * tables_.batch() + 1; }

  Case c_;
  Tables tables_;
  int target_blocks_;
  size_t stride_;                // of layers, in slots and heads
  std::vector<int32_t> target_;  // [batch, target_blocks]
  Tensor keys_, values_;
  std::vector<float> stored_;
  std::vector<int32_t> num_kept_, first_slot_, sequence_slot_, kept_, prompt_slots_;
  int max_kept_;
};

const std::vector<Case>& Cases() {
  static const auto* cases = new std::vector<Case>{{2, 2, 64, 16, DType::kFloat32},
                                                   {3, 1, 128, 32, DType::kBFloat16},
                                                   {1, 5, 18, 20, DType::kFloat32},
                                                   {2, 3, 7, 17, DType::kBFloat16}};
  return *cases;
}

TEST(PackSlotsTest, InPlaceToFreshBlocksAndMixed) {
  std::mt19937_64 rng(testing::FreshSeed());
  for (const Case& c : Cases()) {
    const int b = c.block_size;
    // In place; all fresh; the first fresh; pinned blocks in front of a fresh one; nothing to move
    // but pinned blocks; not a whole number of blocks.
    const Move move = {
        {0, 0, 0, 2, 2, 0}, {0, 3, 1, 1, 0, 0}, {3 * b, 3 * b, 2 * b, 4 * b, 2 * b, 2 * b - 5}};
    World world(c, {4, 4, 3, 6, 4, 3}, move, &rng);
    world.PackAndCheck();
  }
}

TEST(PackSlotsTest, StoredScoresAreOptional) {
  std::mt19937_64 rng(testing::FreshSeed());
  World world(Cases()[0], {3, 2}, {{0, 0}, {0, 1}, {32, 16}}, &rng);
  world.PackAndCheck(/*with_stored=*/false);
}

TEST(PackSlotsTest, ManyRowsAndThreads) {
  std::mt19937_64 rng(testing::FreshSeed());
  const int threads = omp_get_max_threads();
  omp_set_num_threads(5);
  World world({4, 4, 64, 64, DType::kFloat32}, {5, 5, 4}, {{1, 0, 0}, {1, 0, 2}, {256, 256, 128}},
              &rng);
  world.PackAndCheck();
  omp_set_num_threads(threads);
}

TEST(PackSlotsTest, KeepingAllMovesNothing) {
  std::mt19937_64 rng(testing::FreshSeed());
  World world(Cases()[0], {3}, {{0}, {0}, {48}}, &rng);
  world.PackAndCheck();
}

TEST(PackSlotsDeathTest, RefusesSlotsThatAreNotAscending) {
  std::mt19937_64 rng(1);
  World world({1, 1, 8, 16, DType::kFloat32}, {3}, {{0}, {0}, {32}}, &rng);
  world.BreakKept(0, 7, 3);
  EXPECT_DEATH(world.PackAndCheck(), "kept slot 7 is 3");
  world.BreakKept(0, 31, 48);
  world.BreakKept(0, 7, 1000);
  EXPECT_DEATH(world.PackAndCheck(), "kept slot");
}

}  // namespace
}  // namespace zipage
