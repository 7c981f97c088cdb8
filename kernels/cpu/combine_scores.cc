#include "kernels/combine_scores.h"

#include "kernels/cpu/score_rows.h"

namespace zipage::cpu {

void CombineScores(const CombineScoresParams& p) {
  CheckShape(p.shape);
#pragma omp parallel for schedule(static) if (p.shape.num_scores() > kParallelScores)
  for (int64_t r = 0; r < NumScoreRows(p.shape); ++r) {
    const ScoreRow row = ScoreRowAt(p.shape, r);
    float* const s = p.score + row.first_score;
    const float* const similarity = p.similarity + row.first_score;
    for (int64_t j = 0; j < row.num_slots; ++j) {
      s[j] = p.lambda * s[j] - (1 - p.lambda) * similarity[j];
    }
  }
}

}  // namespace zipage::cpu
