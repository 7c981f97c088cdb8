#pragma once
// Spreads scores over their neighbours: step 3 of DESIGN 5.

#include <cstdint>

#include "kernels/compression_shape.h"

namespace zipage {

// out[j] = max of score[j - width / 2 … j + width / 2], cut at the sequence's ends, where
// pools[s] != 0; elsewhere out[j] = score[j]. width is odd. Bytes: 8 per score. CHECKs the sizes.
struct PoolScoresParams {
  CompressionShape shape;
  const float* score;
  float* out;            // not the same memory
  const uint8_t* pools;  // [batch]
  int width;
};

namespace cpu {
void PoolScores(const PoolScoresParams& p);
}  // namespace cpu
}  // namespace zipage
