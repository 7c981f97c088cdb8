#pragma once
// Rotary position embedding (Su et al., 2021) of queries and keys, with the per-head normalization
// that Qwen3 puts before it and the write of keys and values into the paged cache that follows it.

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace zipage {

// table[p, i] = cos(p * inv_freq[i]) * attention_scaling and table[p, head_dim / 2 + i] the same
// with sin, for i < head_dim / 2; the angle is rounded to fp32 first, as Hugging Face transformers
// does. Host code. table: [max_position, head_dim].
void BuildRopeTable(const float* inv_freq, int head_dim, int64_t max_position,
                    float attention_scaling, float* table);

// For every token t and head h, with cos and sin from row positions[t] of the table and
// n(v) = v / sqrt(mean(v^2) + eps) * norm_weight (n(v) = v if that weight is null), u = n(v):
//   rotate(v)[i]                = u[i] * cos[i] - u[i + head_dim / 2] * sin[i]
//   rotate(v)[i + head_dim / 2] = u[i + head_dim / 2] * cos[i] + u[i] * sin[i]     i < head_dim / 2
// Query heads are rotated in place; rotated key heads and unchanged value heads go to the cache at
// slot_mapping[t] = block * block_size + offset. The key and value parts of qkv stay as they were.
// Bytes: tokens * (2 * q_heads + 4 * kv_heads) * head_dim * sizeof(qkv), and the table rows; flops:
// 6 * tokens * (q_heads + kv_heads) * head_dim. CHECKs the element type, an even head_dim,
// positions against max_position and slots against num_slots.
struct RopeAndCacheParams {
  void* qkv;                 // [tokens, (q_heads + 2 * kv_heads) * head_dim]: queries, keys, values
  const int32_t* positions;  // [tokens]
  const int64_t* slot_mapping;  // [tokens], no slot twice
  const float* rope_table;      // [max_position, head_dim]
  const float* q_norm_weight;   // [head_dim] or null
  const float* k_norm_weight;   // [head_dim] or null
  void* key_cache;              // [num_blocks, block_size, kv_heads, head_dim] of one layer
  void* value_cache;            // the same
  int64_t tokens;
  int64_t max_position;
  int64_t num_slots;  // num_blocks * block_size
  int q_heads;
  int kv_heads;
  int head_dim;
  float norm_eps;
  DType dtype;  // of qkv and the caches: kFloat32 or kBFloat16
};

namespace cpu {
void RopeAndCache(const RopeAndCacheParams& p);
}  // namespace cpu

namespace cuda {
// The same. A position or slot out of range ends the context with a trap.
// kUnimplemented for what it was not built for, kInternal if the launch fails.
absl::Status RopeAndCache(const RopeAndCacheParams& p, Stream stream);
}  // namespace cuda
}  // namespace zipage
