#include "kernels/pack_slots.h"

#include <algorithm>
#include <cstring>

#include "glog/logging.h"
#include "kernels/cpu/score_rows.h"

namespace zipage::cpu {
namespace {

// Below so many bytes the copies are not worth waking the other threads.
constexpr int64_t kParallelBytes = 1 << 17;

// pool: [num_blocks, block_size, kv_heads, width] of the first layer, elements of element_size.
void PackRow(const PackSlotsParams& p, const ScoreRow& row, void* pool, int width,
             int64_t layer_stride, size_t element_size) {
  const int32_t* const target = p.target_table + int64_t{row.seq} * p.max_target_blocks;
  const PoolSlots from(p.shape, row, row.table, width, layer_stride, element_size);
  const PoolSlots to(p.shape, row, target, width, layer_stride, element_size);
  const int32_t* const kept = p.kept + row.index * p.max_kept;
  char* const bytes = static_cast<char*>(pool);
  for (int64_t i = p.first_slot[row.seq]; i < p.num_kept[row.seq]; ++i) {
    const size_t source = from.Offset(kept[i]);
    const size_t destination = to.Offset(i);
    if (source == destination) continue;
    std::memcpy(bytes + destination, bytes + source, static_cast<size_t>(width) * element_size);
  }
}

void CheckSequence(const PackSlotsParams& p, int s) {
  CHECK(p.num_kept[s] >= 0 && p.num_kept[s] <= p.max_kept) << "sequence " << s;
  CHECK(p.first_slot[s] >= 0 && p.first_slot[s] % p.shape.block_size == 0)
      << "sequence " << s << " is packed from slot " << p.first_slot[s];
  const int64_t num_blocks = (int64_t{p.num_kept[s]} + p.shape.block_size - 1) / p.shape.block_size;
  CHECK_LE(num_blocks, p.max_target_blocks) << "sequence " << s;
  for (int64_t b = p.first_slot[s] / p.shape.block_size; b < num_blocks; ++b) {
    CHECK_GE(p.target_table[int64_t{s} * p.max_target_blocks + b], 0)
        << "block " << b << " of sequence " << s;
  }
  CHECK(p.sequence_slot[s] >= 0 && p.sequence_slot[s] < p.max_num_seqs)
      << "sequence slot " << p.sequence_slot[s] << " of " << p.max_num_seqs;
}

// Ascending, and no slot moves up: the copy in place relies on it.
void CheckKept(const PackSlotsParams& p, const ScoreRow& row) {
  const int32_t* const kept = p.kept + row.index * p.max_kept;
  const int32_t num_kept = p.num_kept[row.seq];
  for (int32_t i = 0; i < num_kept; ++i) {
    CHECK(kept[i] >= i && (i == 0 || kept[i] > kept[i - 1]))
        << "kept slot " << i << " is " << kept[i];
  }
  CHECK(num_kept == 0 || kept[num_kept - 1] < row.num_slots)
      << "kept slot " << kept[num_kept - 1] << " of " << row.num_slots;
}

}  // namespace

void PackSlots(const PackSlotsParams& p) {
  CheckShape(p.shape);
  CHECK(p.dtype != DType::kFloat16) << "keys are float32 or bfloat16";
  CHECK_GT(p.head_dim, 0);
  int64_t most_kept = 0;
  for (int s = 0; s < p.shape.batch; ++s) {
    CheckSequence(p, s);
    most_kept = std::max<int64_t>(most_kept, p.num_kept[s]);
  }
  const int64_t num_rows = NumScoreRows(p.shape);
  const size_t element_size = DTypeSize(p.dtype);
#pragma omp parallel for schedule(static) if (num_rows * most_kept * p.head_dim > kParallelBytes)
  for (int64_t r = 0; r < num_rows; ++r) {
    const ScoreRow row = ScoreRowAt(p.shape, r);
    CheckKept(p, row);
    PackRow(p, row, p.key, p.head_dim, p.kv_layer_stride, element_size);
    PackRow(p, row, p.value, p.head_dim, p.kv_layer_stride, element_size);
    if (p.stored != nullptr) {
      PackRow(p, row, p.stored, 1, p.stored_layer_stride, sizeof(float));
    }
    int32_t* const prompt_slots =
        p.prompt_slots +
        (int64_t{row.layer} * p.max_num_seqs + p.sequence_slot[row.seq]) * p.shape.kv_heads +
        row.head;
    const int32_t* const kept = p.kept + r * p.max_kept;
    *prompt_slots = static_cast<int32_t>(
        std::lower_bound(kept, kept + p.num_kept[row.seq], *prompt_slots) - kept);
  }
}

}  // namespace zipage::cpu
