#pragma once
// Causal attention of new tokens over the paged KV cache: decode and prefill chunks in one call.

#include <cstdint>

#include "kernels/tensor.h"

namespace zipage {

// Sequence s has L = query_start[s+1] - query_start[s] >= 1 new tokens, whose keys and values are
// in the cache already. Its i-th new token sees slots j <= context_len[s] - L + i of its block
// table, slot j being offset j % block_size of block block_tables[s, j / block_size]. For query
// head h, KV head h / (q_heads / kv_heads):
//   out = sum_j softmax_j(q.k[j] * scale) * v[j]                               arithmetic in fp32
// A row's result is bit-identical whatever else is in the batch, however its sequence is cut into
// chunks and whatever the number of threads: slots are visited in tiles and segments that start at
// fixed multiples (online softmax, Milakov and Gimelshein, 2018; segments merged in order). Never
// reads a slot at or past context_len, nor a block table entry past the last needed one. Bytes: 2 *
// sum(context_len) * kv_heads * head_dim * sizeof(cache) for decode (once per query tile of about
// 64 rows for chunks); flops: 4 * sum over rows of visible slots * q_heads * head_dim. CHECKs the
// element type and the sizes.
struct PagedAttentionParams {
  const void* q;                // [tokens, q_heads, head_dim], rows q_stride apart
  const void* key_cache;        // [num_blocks, block_size, kv_heads, head_dim] of one layer
  const void* value_cache;      // the same
  const int32_t* block_tables;  // [num_seqs, max_blocks] block ids, padded with anything
  const int32_t* query_start;   // [num_seqs + 1], from 0
  const int32_t* context_len;   // [num_seqs] cached slots, the new tokens' included
  void* out;                    // [tokens, q_heads * head_dim]
  int64_t q_stride;             // elements from one token's queries to the next
  int64_t num_blocks;
  int num_seqs;
  int max_blocks;
  int block_size;
  int q_heads;
  int kv_heads;  // divides q_heads
  int head_dim;
  float scale;
  DType dtype;  // of q, the caches and out: kFloat32 or kBFloat16
};

namespace cpu {
void PagedAttention(const PagedAttentionParams& p);
}  // namespace cpu

namespace reference {
// The formula as loops, with two passes over the slots; for tests. Same parameters.
void PagedAttention(const PagedAttentionParams& p);
}  // namespace reference
}  // namespace zipage
