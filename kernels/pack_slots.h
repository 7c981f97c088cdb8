#pragma once
// Moves what survives to the front: step 8 of DESIGN 5.

#include <cstdint>

#include "kernels/compression_shape.h"
#include "kernels/tensor.h"

namespace zipage {

// For every sequence s, layer and KV head, keys, values and stored scores of slot kept[i] of the
// block table go to slot i of target_table, for first_slot[s] <= i < num_kept[s]; slots before
// first_slot stay where they are. A block may be in both tables, at the same index only: since
// kept[i] >= i the copy is safe in place. REQUIRES: no block that is written is another sequence's.
// Then prompt_slots[l, sequence_slot[s], h] becomes the number of kept slots below its old value:
// how many of the slots, all leading ones, are of the prompt. Bytes: 2 * layers * sum(num_kept) *
// kv_heads * (2 * head_dim * sizeof(key) + 4). CHECKs the sizes.
struct PackSlotsParams {
  CompressionShape shape;
  const int32_t* kept;           // [layers, batch, kv_heads, max_kept] ascending
  const int32_t* num_kept;       // [batch]
  const int32_t* first_slot;     // [batch] a multiple of block_size; kept[i] = i below it
  const int32_t* target_table;   // [batch, max_target_blocks]
  void* key;                     // [num_blocks, block_size, kv_heads, head_dim] of the first layer
  void* value;                   // the same
  float* stored;                 // [num_blocks, block_size, kv_heads] of the first layer, or null
  int32_t* prompt_slots;         // [layers, max_num_seqs, kv_heads] of the first layer
  const int32_t* sequence_slot;  // [batch]
  int64_t kv_layer_stride;       // elements from one layer's keys (values) to the next
  int64_t stored_layer_stride;   // elements
  int max_kept;
  int max_target_blocks;
  int max_num_seqs;
  int head_dim;
  DType dtype;  // of keys and values
};

namespace cpu {
void PackSlots(const PackSlotsParams& p);
}  // namespace cpu
}  // namespace zipage
