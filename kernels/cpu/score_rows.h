#pragma once
// The rows of scores that the kernels of KV compression work through one by one, and the pool
// memory behind their slots.

#include <cstddef>
#include <cstdint>

#include "kernels/compression_shape.h"
#include "kernels/tensor.h"

namespace zipage::cpu {

// Below so many scores a pass over them is not worth waking the other threads.
constexpr int64_t kParallelScores = 1 << 14;

// The slots of one sequence in one layer and KV head.
struct ScoreRow {
  int64_t index;  // among all rows: [layers, batch, kv_heads]
  int layer;
  int seq;
  int head;
  const int32_t* table;  // [num_slots / block_size] block ids
  int64_t num_slots;
  int64_t first_score;  // offset of slot 0 in arrays of scores
};

inline int64_t NumScoreRows(const CompressionShape& shape) {
  return int64_t{shape.layers} * shape.batch * shape.kv_heads;
}

inline ScoreRow ScoreRowAt(const CompressionShape& shape, int64_t index) {
  const auto seq = static_cast<int>(index / shape.kv_heads % shape.batch);
  return {.index = index,
          .layer = static_cast<int>(index / shape.kv_heads / shape.batch),
          .seq = seq,
          .head = static_cast<int>(index % shape.kv_heads),
          .table = shape.block_table + int64_t{seq} * shape.max_blocks,
          .num_slots = int64_t{shape.table_len[seq]} * shape.block_size,
          .first_score = index * shape.max_slots()};
}

// CHECKs that sizes are positive, tables as long as they may be and block ids not negative.
void CheckShape(const CompressionShape& shape);

// Where a row's slots lie in a pool [num_blocks, block_size, kv_heads, width] of its layer.
class PoolSlots {
 public:
  // table: [blocks] ids. layer_stride in elements of element_size bytes.
  PoolSlots(const CompressionShape& shape, const ScoreRow& row, const int32_t* table, int width,
            int64_t layer_stride, size_t element_size)
      : table_(table),
        block_size_(shape.block_size),
        slot_bytes_(static_cast<size_t>(shape.kv_heads) * width * element_size),
        first_byte_((static_cast<size_t>(row.layer) * static_cast<size_t>(layer_stride) +
                     static_cast<size_t>(row.head) * width) *
                    element_size) {}

  // Bytes from the pool's first to the row's head of this slot.
  size_t Offset(int64_t slot) const {
    const int64_t in_pool = int64_t{table_[slot / block_size_]} * block_size_ + slot % block_size_;
    return first_byte_ + static_cast<size_t>(in_pool) * slot_bytes_;
  }

 private:
  const int32_t* table_;
  int64_t block_size_;
  size_t slot_bytes_;
  size_t first_byte_;
};

}  // namespace zipage::cpu
