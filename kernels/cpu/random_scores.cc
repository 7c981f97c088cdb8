#include "kernels/random_scores.h"

#include <array>

#include "glog/logging.h"
#include "kernels/cpu/score_rows.h"
#include "kernels/philox.h"

namespace zipage::cpu {

void RandomScores(const RandomScoresParams& p) {
  CheckShape(p.shape);
  CHECK(p.first_layer >= 0 && p.first_layer + p.shape.layers < 1 << 15) << p.first_layer;
  CHECK(p.first_kv_head >= 0 && p.first_kv_head + p.shape.kv_heads <= 1 << 16) << p.first_kv_head;
#pragma omp parallel for schedule(static) if (p.shape.num_scores() > kParallelScores)
  for (int64_t r = 0; r < NumScoreRows(p.shape); ++r) {
    const ScoreRow row = ScoreRowAt(p.shape, r);
    float* const s = p.score + row.first_score;
    const uint64_t seed = p.seed[row.seq];
    const auto layer = static_cast<uint32_t>(p.first_layer + row.layer);
    const auto head = static_cast<uint32_t>(p.first_kv_head + row.head);
    for (int64_t j = 0; j < row.num_slots; j += 4) {
      const std::array<uint32_t, 4> words =
          Philox4x32({static_cast<uint32_t>(j / 4), p.round[row.seq], p.sample_index[row.seq],
                      ((layer + 1) << 16) | head},
                     {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
      for (int64_t i = 0; i < 4 && j + i < row.num_slots; ++i) {
        s[j + i] = static_cast<float>(words[static_cast<size_t>(i)] >> 8) * 0x1p-24F;
      }
    }
    for (int i = 0; i < p.num_raised[row.seq]; ++i) {
      const int32_t slot = p.raised[row.index * p.max_raised + i];
      CHECK(slot >= 0 && slot < row.num_slots) << "slot " << slot << " of " << row.num_slots;
      s[slot] = 2.0F;
    }
  }
}

}  // namespace zipage::cpu
