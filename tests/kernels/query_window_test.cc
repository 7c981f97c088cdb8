#include "kernels/query_window.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "tests/kernels/random_data.h"

namespace zipage {
namespace {

using testing::Tensor;

TEST(StoreQueriesTest, CopiesTheNamedRowsAndNothingElse) {
  std::mt19937_64 rng(testing::FreshSeed());
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const auto& [q_heads, head_dim] : {std::pair{14, 64}, {3, 22}, {1, 8}}) {
      const int64_t row = q_heads * head_dim;
      const int64_t q_stride = row + 2 * head_dim;  // as in the fused product's rows
      const int64_t tokens = 90;
      const int64_t num_rows = 112;
      const Tensor q = Tensor::Random(dtype, tokens * q_stride, &rng);
      const Tensor before = Tensor::Random(dtype, num_rows * row, &rng);
      Tensor window = before;
      // Some rows of the window, each once; some tokens more than once.
      std::vector<int64_t> rows(num_rows);
      std::iota(rows.begin(), rows.end(), 0);
      std::shuffle(rows.begin(), rows.end(), rng);
      const int64_t count = 75;
      std::vector<int32_t> token(count);
      for (int32_t& t : token) t = static_cast<int32_t>(rng() % tokens);
      cpu::StoreQueries({q.data(), token.data(), rows.data(), window.data(), count, num_rows,
                         q_stride, q_heads, head_dim, dtype});
      for (int64_t i = 0; i < num_rows; ++i) {
        if (i < count) {
          EXPECT_TRUE(window.SameBits(rows[i] * row, q, token[i] * q_stride, row)) << i;
        } else {
          EXPECT_TRUE(window.SameBits(rows[i] * row, before, rows[i] * row, row)) << i;
        }
      }
    }
  }
}

TEST(StoreQueriesDeathTest, RefusesARowOutsideTheWindows) {
  std::vector<float> q(8), window(4 * 8);
  const int32_t token = 0;
  const int64_t row = 4;
  EXPECT_DEATH(
      cpu::StoreQueries({q.data(), &token, &row, window.data(), 1, 4, 8, 1, 8, DType::kFloat32}),
      "window row 4 of 4");
}

}  // namespace
}  // namespace zipage
