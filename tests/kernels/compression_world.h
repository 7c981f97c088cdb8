#pragma once
// Sequences with full block tables in pools whose blocks are shuffled and whose other slots are
// NaN, for the tests of the compression kernels.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/compression_shape.h"
#include "tests/kernels/random_data.h"

namespace zipage::testing {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// The tables of some sequences and how to find a slot. Blocks that no table names are `spare`.
struct Tables {
  // num_blocks[s] full blocks each; `num_spare` blocks more in the pool. Entries of the table past
  // a sequence's blocks are nonsense.
  Tables(int layers, int kv_heads, int block_size, std::vector<int> num_blocks, int num_spare,
         std::mt19937_64* rng)
      : layers(layers),
        kv_heads(kv_heads),
        block_size(block_size),
        len(num_blocks.begin(), num_blocks.end()),
        max_blocks(*std::max_element(len.begin(), len.end()) + 2),
        pool_blocks(std::accumulate(len.begin(), len.end(), num_spare)),
        spare(static_cast<size_t>(pool_blocks)),
        ids(len.size() * max_blocks) {
    std::iota(spare.begin(), spare.end(), 0);
    std::shuffle(spare.begin(), spare.end(), *rng);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = i % 2 == 0 ? 1 << 30 : -5;
    for (size_t s = 0; s < len.size(); ++s) {
      for (int b = 0; b < len[s]; ++b) {
        ids[s * max_blocks + b] = spare.back();
        spare.pop_back();
      }
    }
  }

  CompressionShape shape() const {
    return {ids.data(), len.data(), layers,    static_cast<int>(len.size()),
            kv_heads,   max_blocks, block_size};
  }
  size_t batch() const { return len.size(); }
  size_t slots(size_t seq) const { return static_cast<size_t>(len[seq]) * block_size; }
  size_t num_scores() const { return static_cast<size_t>(shape().num_scores()); }
  // Of a slot's score in arrays of scores.
  size_t score(int layer, size_t seq, int head, size_t slot) const {
    return ((layer * batch() + seq) * kv_heads + head) * max_blocks * block_size + slot;
  }
  // Of a slot and head in a pool whose layers are `stride` slots and heads apart.
  size_t pool(int layer, size_t seq, int head, size_t slot, size_t stride) const {
    const size_t block = ids[seq * max_blocks + slot / block_size];
    return layer * stride + (block * block_size + slot % block_size) * kv_heads + head;
  }
  // Slots and heads of one layer.
  size_t pool_rows() const { return static_cast<size_t>(pool_blocks) * block_size * kv_heads; }

  // Calls f(layer, seq, head) for all.
  template <typename F>
  void ForEachRow(F f) const {
    for (int layer = 0; layer < layers; ++layer) {
      for (size_t seq = 0; seq < batch(); ++seq) {
        for (int head = 0; head < kv_heads; ++head) f(layer, seq, head);
      }
    }
  }

  // NaN but for the slots that sequences have, which are draw().
  template <typename F>
  std::vector<float> Scores(F draw) const {
    std::vector<float> scores(num_scores(), kNan);
    ForEachRow([&](int layer, size_t seq, int head) {
      for (size_t j = 0; j < slots(seq); ++j) scores[score(layer, seq, head, j)] = draw();
    });
    return scores;
  }
  // Whether what is not a sequence's is still NaN, as in Scores.
  bool OnlySlotsWritten(const std::vector<float>& scores) const {
    std::vector<bool> is_slot(scores.size());
    ForEachRow([&](int layer, size_t seq, int head) {
      for (size_t j = 0; j < slots(seq); ++j) is_slot[score(layer, seq, head, j)] = true;
    });
    for (size_t i = 0; i < scores.size(); ++i) {
      if (!is_slot[i] && scores[i] == scores[i]) return false;
    }
    return true;
  }

  int layers;
  int kv_heads;
  int block_size;
  std::vector<int32_t> len;
  int max_blocks;
  int pool_blocks;
  std::vector<int32_t> spare;
  std::vector<int32_t> ids;  // [batch, max_blocks]
};

inline bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

}  // namespace zipage::testing
