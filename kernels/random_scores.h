#pragma once
// Scores drawn at random, for policies that keep a random share of the slots.

#include <cstdint>

#include "kernels/compression_shape.h"

namespace zipage {

// score[j] = u in [0, 1), the upper 24 bits of word j % 4 of Philox4x32 with sequence s's seed as
// the key (low word first) and the counter (j / 4, round, sample index, (layer + 1) << 16 | KV
// head), layer and head being the model's: a draw depends on nothing else, so it is the same for
// any number of ranks and any batch. Sampling's counters end in 0, so it never uses one of these.
// Then score[j] = 2 for the slots in raised. Bytes: 4 per score. CHECKs the sizes.
struct RandomScoresParams {
  CompressionShape shape;
  float* score;                  // out
  const uint64_t* seed;          // [batch]
  const uint32_t* sample_index;  // [batch]
  const uint32_t* round;         // [batch] compressions before this one
  const int32_t* raised;         // [layers, batch, kv_heads, max_raised] slots
  const int32_t* num_raised;     // [batch] of each row, at most max_raised
  int max_raised;
  int first_layer;    // of the model
  int first_kv_head;  // of the model: this rank's first
};

namespace cpu {
void RandomScores(const RandomScoresParams& p);
}  // namespace cpu
}  // namespace zipage
