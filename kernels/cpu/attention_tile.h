#pragma once
// The inner part of the CPU attention: one tile of slots against some query rows of one KV head, as
// an online softmax. A row's arithmetic depends only on that row and on the slots, never on which
// rows are beside it.

#include <cstdint>

#include "kernels/cpu/key_tile.h"
#include "kernels/tensor.h"

namespace zipage::cpu {

// Partial sums of a row's weights.
constexpr int kSumLanes = 16;

// head_dim rounded up to whole vectors: the row length of values and outputs below.
constexpr int PaddedHeadDim(int head_dim) { return (head_dim + 15) / 16 * 16; }

// One tile's keys and values in fp32, laid out for the products.
struct PackedTile {
  float* keys;    // [head_dim, kTileSlots], slots past num_slots are 0
  float* values;  // [kTileSlots, PaddedHeadDim], columns past head_dim are 0
};

// Fills the tile from num_slots <= kTileSlots head rows anywhere in memory.
void PackTile(const void* const* key_rows, const void* const* value_rows, int num_slots,
              int head_dim, DType dtype, const PackedTile& tile);

// Online softmax of query rows: with z the scores so far, max = max z, sum = sum exp(z - max), held
// in 16 lanes, and out = sum exp(z - max) * v.
struct SoftmaxRows {
  const float* q;  // [num_rows, head_dim], scaled
  const int32_t*
      visible;  // [num_rows]: slots of the whole sequence that the row sees; not descending
  float* max;   // [num_rows]
  float* sum;   // [num_rows, kSumLanes]
  float* out;   // [num_rows, PaddedHeadDim]
  int num_rows;
  int head_dim;
};

// The state before any slot.
void ResetRows(const SoftmaxRows& rows);

// Adds the tile's slots, which are first_slot and up of the sequence, to every row that sees them.
void AddTile(const PackedTile& tile, int first_slot, const SoftmaxRows& rows);

// Adds to `into` what `from` accumulated over later slots. Rows of `from` that saw no slot change
// nothing.
void MergeRows(const SoftmaxRows& from, const SoftmaxRows& into);

// out / sum of one row, rounded to dtype; dst: [head_dim].
void FinishRow(const SoftmaxRows& rows, int row, DType dtype, void* dst);

// dst[i] = src[i] * scale for a query row.
void ScaleRow(const void* src, DType dtype, int n, float scale, float* dst);

}  // namespace zipage::cpu
