#pragma once
// What the kernels of KV compression (DESIGN 5) have in common: several sequences of different
// length, some consecutive layers, one score per slot.

#include <cstdint>

namespace zipage {

// Sequence s has table_len[s] full blocks, block_table[s, 0 … table_len[s]); its slot j is offset
// j % block_size of block j / block_size of that table. Arrays of scores are float32
// [layers, batch, kv_heads, max_blocks * block_size]; entries past a sequence's slots are neither
// read nor written.
struct CompressionShape {
  const int32_t* block_table = nullptr;  // [batch, max_blocks] block ids, padded with anything
  const int32_t* table_len = nullptr;    // [batch] blocks, in [1, max_blocks]
  int layers = 0;
  int batch = 0;
  int kv_heads = 0;
  int max_blocks = 0;
  int block_size = 0;

  int64_t max_slots() const { return int64_t{max_blocks} * block_size; }
  int64_t num_scores() const { return int64_t{layers} * batch * kv_heads * max_slots(); }
};

}  // namespace zipage
