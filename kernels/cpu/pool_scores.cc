#include "kernels/pool_scores.h"

#include <algorithm>

#include "glog/logging.h"
#include "kernels/cpu/score_rows.h"

namespace zipage::cpu {

void PoolScores(const PoolScoresParams& p) {
  CheckShape(p.shape);
  CHECK(p.width > 0 && p.width % 2 == 1) << "width " << p.width;
  CHECK(p.score != p.out) << "pooling in place";
  const int64_t half = p.width / 2;
#pragma omp parallel for schedule(static) if (p.shape.num_scores() > kParallelScores)
  for (int64_t r = 0; r < NumScoreRows(p.shape); ++r) {
    const ScoreRow row = ScoreRowAt(p.shape, r);
    const float* const s = p.score + row.first_score;
    float* const out = p.out + row.first_score;
    const int64_t n = row.num_slots;
    std::copy_n(s, n, out);
    if (p.pools[row.seq] == 0) continue;
    for (int64_t shift = 1; shift <= std::min(half, n - 1); ++shift) {
      for (int64_t j = shift; j < n; ++j) out[j] = std::max(out[j], s[j - shift]);
      for (int64_t j = shift; j < n; ++j) out[j - shift] = std::max(out[j - shift], s[j]);
    }
  }
}

}  // namespace zipage::cpu
