#include "kernels/query_window.h"

#include <cstring>

#include "glog/logging.h"

namespace zipage::cpu {
namespace {

constexpr int64_t kParallelElements = 1 << 16;

}  // namespace

void StoreQueries(const StoreQueriesParams& p) {
  CHECK(p.dtype != DType::kFloat16) << "queries are float32 or bfloat16";
  CHECK(p.q_heads > 0 && p.head_dim > 0) << p.q_heads << " x " << p.head_dim;
  const int64_t row_elements = int64_t{p.q_heads} * p.head_dim;
  const size_t row_bytes = static_cast<size_t>(row_elements) * DTypeSize(p.dtype);
#pragma omp parallel for schedule(static) if (p.count * row_elements > kParallelElements)
  for (int64_t i = 0; i < p.count; ++i) {
    const int64_t row = p.window_row[i];
    CHECK(row >= 0 && row < p.num_rows) << "window row " << row << " of " << p.num_rows;
    CHECK_GE(p.token[i], 0) << "of query " << i;
    std::memcpy(static_cast<char*>(p.window) + static_cast<size_t>(row) * row_bytes,
                static_cast<const char*>(p.q) +
                    static_cast<size_t>(p.token[i] * p.q_stride) * DTypeSize(p.dtype),
                row_bytes);
  }
}

}  // namespace zipage::cpu
