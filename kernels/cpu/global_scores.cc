#include "kernels/global_scores.h"

#include <algorithm>

#include "glog/logging.h"
#include "kernels/cpu/score_rows.h"

namespace zipage::cpu {

void GlobalScores(const GlobalScoresParams& p) {
  CheckShape(p.shape);
  CHECK(!p.use_stored || p.stored != nullptr) << "no stored scores";
  const int64_t block_size = p.shape.block_size;
#pragma omp parallel for schedule(static) if (p.shape.num_scores() > kParallelScores)
  for (int64_t r = 0; r < NumScoreRows(p.shape); ++r) {
    const ScoreRow row = ScoreRowAt(p.shape, r);
    float* const s = p.score + row.first_score;
    if (p.max_norm) {
      const float max = *std::max_element(s, s + row.num_slots);
      for (int64_t j = 0; j < row.num_slots; ++j) s[j] /= max;
    }
    if (!p.use_stored) continue;
    float* const layer = p.stored + row.layer * p.stored_layer_stride;
    const int64_t last_block = row.num_slots / block_size - 1;
    for (int64_t block = p.first_block[row.seq]; block <= last_block; ++block) {
      const bool has_past = p.compressed[row.seq] != 0 && block < last_block;
      for (int64_t j = 0; j < block_size; ++j) {
        float* const f = layer + (row.table[block] * block_size + j) * p.shape.kv_heads + row.head;
        float* const now = s + block * block_size + j;
        if (has_past) *now = std::max(*now, p.decay * *f);
        *f = *now;
      }
    }
  }
}

}  // namespace zipage::cpu
