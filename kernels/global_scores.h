#pragma once
// Scores remembered from one compression to the next: step 2 of DESIGN 5.

#include <cstdint>

#include "kernels/compression_shape.h"

namespace zipage {

// In place, for every sequence, layer and KV head:
//   max_norm:   s[j] /= max_j s
//   use_stored: s[j] = max(s[j], decay * f[j])  if the sequence was compressed before and j is not
//               in its last block; then f[j] = s[j] for all its slots
// f of the leading first_block blocks of a sequence is neither read nor written: other sequences
// may share them. REQUIRES: no two sequences of the batch name the same block after those. Bytes: 4
// to 12 per score. CHECKs the sizes.
struct GlobalScoresParams {
  CompressionShape shape;
  float* score;                 // in and out
  float* stored;                // f: [num_blocks, block_size, kv_heads] of the first layer
  const uint8_t* compressed;    // [batch] 1: compressed before
  const int32_t* first_block;   // [batch]
  int64_t stored_layer_stride;  // elements
  float decay;
  bool max_norm;
  bool use_stored;
};

namespace cpu {
void GlobalScores(const GlobalScoresParams& p);
}  // namespace cpu
}  // namespace zipage
