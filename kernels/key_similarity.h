#pragma once
// How much each key resembles others: step 4 of DESIGN 5 (the redundancy of R-KV, arXiv
// 2505.24133).

#include <cstdint>

#include "kernels/compression_shape.h"
#include "kernels/tensor.h"

namespace zipage {

// For every sequence, layer and KV head, over the slots of one block (lightning) or of the whole
// table (else), L of them:
//   C[m,n] = k[m].k[n] / (|k[m]| |k[n]|), C[m,m] = 0, norms at least 1e-6
//   in every column n, the last row m with C[m,n] > 0.5 is set to 0
//   row_sum[m] = sum_n C[m,n]
//   similarity = softmax of row_sum / (temperature * L) over all slots of the sequence;
//   max_norm: divided by its maximum
// fp32 arithmetic. Independent of the other sequences and of the number of threads. Flops: at most
// 2 * layers * kv_heads * head_dim * sum over sequences of slots * L, the fewer the more keys are
// alike; bytes: each key once. Every CPU thread holds one head's L keys in fp32. CHECKs the sizes.
struct KeySimilarityParams {
  CompressionShape shape;
  const void* key;           // [num_blocks, block_size, kv_heads, head_dim] of the first layer
  float* row_sum;            // out, scores' layout
  float* similarity;         // out, scores' layout
  int64_t key_layer_stride;  // elements
  int head_dim;
  float temperature;
  bool lightning;
  bool max_norm;
  DType dtype;  // of keys: kFloat32 or kBFloat16
};

namespace cpu {
void KeySimilarity(const KeySimilarityParams& p);
}  // namespace cpu

namespace reference {
// The formula as loops, sums in double; for tests.
void KeySimilarity(const KeySimilarityParams& p);
}  // namespace reference
}  // namespace zipage
