#pragma once
// Causal attention of new tokens over the paged KV cache: decode and prefill chunks in one call.

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/stream.h"
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
  // query_start[num_seqs], which a launch on CUDA must know on the host.
  int64_t num_tokens = 0;
};

namespace cpu {
void PagedAttention(const PagedAttentionParams& p);
}  // namespace cpu

namespace cuda {
// Where the segments of a sequence that decodes meet. One for all calls of a stream.
struct PagedAttentionScratch {
  int32_t* counters;  // [num_seqs * q_heads] zero before the first call, and after each
  float* partials;    // [NumPartials(p)]
};
// Floats of partials that a call needs; at most num_seqs * 16 * q_heads * (head_dim + 2).
int64_t NumPartials(const PagedAttentionParams& p);

// All pointers are device memory. Sequences with one new token take the decode kernel: context_len
// is cut into segments of 512 slots (longer ones above 8,192, so that there are at most 16), which
// run side by side, keys and values being read once for all query heads of a KV head (up to 16 of
// them); the last segment to end merges all. The others take the prefill kernel, 128 (token, head)
// rows a CTA. Both multiply in bf16 on tensor cores with fp32 sums; weights are rounded to bf16. A
// row's result is bit-identical whatever else is in the batch, and however its sequence is cut into
// chunks of two or more tokens. float32, and head dimensions other than 64, 96, 128 and 256, take a
// slow kernel in fp32 (head_dim up to 256). kUnimplemented above that, kInternal if a launch fails.
absl::Status PagedAttention(const PagedAttentionParams& p, const PagedAttentionScratch& scratch,
                            Stream stream);
}  // namespace cuda

namespace reference {
// The formula as loops, with two passes over the slots; for tests. Same parameters.
void PagedAttention(const PagedAttentionParams& p);
}  // namespace reference
}  // namespace zipage
