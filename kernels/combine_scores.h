#pragma once
// Attention score against similarity: step 5 of DESIGN 5.

#include "kernels/compression_shape.h"

namespace zipage {

// score[j] = lambda * score[j] - (1 - lambda) * similarity[j], in place. Bytes: 12 per score.
struct CombineScoresParams {
  CompressionShape shape;
  float* score;             // in and out
  const float* similarity;  // the same layout
  float lambda;
};

namespace cpu {
void CombineScores(const CombineScoresParams& p);
}  // namespace cpu
}  // namespace zipage
