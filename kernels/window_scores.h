#pragma once
// How much the query window attends to each cached slot: step 1 of DESIGN 5.

#include <cstdint>

#include "kernels/compression_shape.h"
#include "kernels/tensor.h"

namespace zipage {

// For sequence s with n slots, layer l, KV head h and its G = q_heads / kv_heads query heads:
//   z[g,i,j] = q[g,i] . k[j] / sqrt(head_dim), -inf where j > n - w + i    window query i, slot j
//   score[j] = mean_i max_g softmax_j(z[g,i,:])[j]
// fp32 arithmetic whatever the element type. A score does not depend on the other sequences nor on
// the number of threads. Bytes: layers * sum(n) * kv_heads * head_dim * sizeof(key), each key once;
// flops: 2 * layers * sum(n) * w * q_heads * head_dim. A CPU thread holds the logits of as many
// window queries as fit 2 MiB, but of one at least. CHECKs the element type and the sizes.
struct WindowScoresParams {
  CompressionShape shape;
  const void* key;              // [num_blocks, block_size, kv_heads, head_dim] of the first layer
  const void* query_window;     // [query slots, w, q_heads, head_dim] of the first layer
  const int32_t* query_slot;    // [batch]
  float* score;                 // out
  int64_t key_layer_stride;     // elements from one layer's keys to the next
  int64_t window_layer_stride;  // the same for the windows
  int window;                   // w, in [1, 64] and at most block_size
  int q_heads;                  // a multiple of kv_heads
  int head_dim;
  DType dtype;  // of keys and queries: kFloat32 or kBFloat16
};

namespace cpu {
void WindowScores(const WindowScoresParams& p);
}  // namespace cpu

namespace reference {
// The formula as loops, sums in double; for tests.
void WindowScores(const WindowScoresParams& p);
}  // namespace reference
}  // namespace zipage
