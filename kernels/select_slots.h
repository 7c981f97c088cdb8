#pragma once
// Which slots survive: steps 6 and 7 of DESIGN 5.

#include <cstdint>

#include "kernels/compression_shape.h"

namespace zipage {

// For every sequence s, layer and KV head: kept = the num_kept[s] slots that come first in the
// order
//   always kept (the first num_pinned[s], the first sink_len, the last `window`), then higher
//   score, then later slot,
// in ascending order; entries of kept past num_kept are not written. Scores are compared as
// integers of the same order, so the result is exact; NaN counts as lower than every number, -0 as
// 0. A null score is a score of 0 everywhere: the newest are kept. Bytes: 4 per score, a few times.
// CHECKs the sizes, and that what is always kept fits num_kept.
struct SelectSlotsParams {
  CompressionShape shape;
  const float* score;         // or null
  const int32_t* num_pinned;  // [batch]
  const int32_t* num_kept;    // [batch] at most the sequence's slots, and max_kept
  int32_t* kept;              // [layers, batch, kv_heads, max_kept] out
  int max_kept;
  int sink_len;
  int window;
};

namespace cpu {
void SelectSlots(const SelectSlotsParams& p);
}  // namespace cpu
}  // namespace zipage
