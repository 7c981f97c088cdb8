#include "kernels/select_slots.h"

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "glog/logging.h"
#include "kernels/cpu/score_rows.h"

namespace zipage::cpu {
namespace {

// A number for every score whose unsigned order is that of the scores: 0 for NaN, then -inf to
// +inf, both zeros alike.
uint32_t Ordered(float score) {
  if (score != score) return 0;
  const auto bits = std::bit_cast<uint32_t>(score + 0.0F);
  return (bits >> 31) != 0 ? ~bits : bits | 0x80000000U;
}

// A value of which `above` are larger than it, fewer than those looked for.
struct Cut {
  uint32_t value;
  int64_t above;
};

// The count-th largest of the values: digit by digit from the highest, by counting how many have
// each. REQUIRES: count in [1, values.size()].
Cut FindCut(const std::vector<uint32_t>& values, int64_t count) {
  constexpr int kDigitBits = 11;
  Cut cut = {0, 0};
  uint32_t known = 0;  // mask of the digits of cut.value that are found
  for (int shift = 32 - kDigitBits;; shift = std::max(shift - kDigitBits, 0)) {
    std::array<int32_t, 1 << kDigitBits> counts = {};
    const uint32_t digit_mask = ((1U << kDigitBits) - 1) & ~(known >> shift);
    for (const uint32_t value : values) {
      if ((value & known) == cut.value) ++counts[(value >> shift) & digit_mask];
    }
    uint32_t digit = digit_mask;
    while (cut.above + counts[digit] < count) cut.above += counts[digit--];
    cut.value |= digit << shift;
    known |= digit_mask << shift;
    if (shift == 0) return cut;
  }
}

void SelectRow(const SelectSlotsParams& p, const ScoreRow& row, std::vector<uint32_t>* values) {
  const int64_t leading =
      std::min<int64_t>(std::max(p.num_pinned[row.seq], p.sink_len), row.num_slots);
  const int64_t trailing = std::max<int64_t>(leading, row.num_slots - p.window);
  const int64_t num_chosen = p.num_kept[row.seq] - leading - (row.num_slots - trailing);
  CHECK(num_chosen >= 0 && num_chosen <= trailing - leading)
      << "sequence " << row.seq << " cannot keep " << p.num_kept[row.seq] << " of " << row.num_slots
      << " slots: the first " << leading << " and from " << trailing << " on are always kept";
  values->assign(static_cast<size_t>(trailing - leading), 0);
  for (int64_t j = leading; p.score != nullptr && j < trailing; ++j) {
    (*values)[static_cast<size_t>(j - leading)] = Ordered(p.score[row.first_score + j]);
  }
  const Cut cut = num_chosen > 0 ? FindCut(*values, num_chosen) : Cut{~0U, 0};
  // Filled from the back, so that the newest of equals come first.
  int64_t equal = num_chosen - cut.above;
  int32_t* kept = p.kept + row.index * p.max_kept + p.num_kept[row.seq];
  for (int64_t j = row.num_slots; j-- > 0;) {
    bool keeps = j < leading || j >= trailing;
    if (!keeps) {
      const uint32_t value = (*values)[static_cast<size_t>(j - leading)];
      keeps = value > cut.value || (value == cut.value && equal-- > 0);
    }
    if (keeps) *--kept = static_cast<int32_t>(j);
  }
}

}  // namespace

void SelectSlots(const SelectSlotsParams& p) {
  CheckShape(p.shape);
  CHECK(p.sink_len >= 0 && p.window >= 0) << p.sink_len << ", " << p.window;
  for (int s = 0; s < p.shape.batch; ++s) {
    CHECK_GE(p.num_pinned[s], 0) << "sequence " << s;
    CHECK_LE(p.num_kept[s], p.max_kept) << "sequence " << s;
  }
#pragma omp parallel if (p.shape.num_scores() > kParallelScores)
  {
    std::vector<uint32_t> values;
#pragma omp for schedule(static)
    for (int64_t r = 0; r < NumScoreRows(p.shape); ++r) {
      SelectRow(p, ScoreRowAt(p.shape, r), &values);
    }
  }
}

}  // namespace zipage::cpu
