#include <algorithm>
#include <cmath>
#include <vector>

#include "glog/logging.h"
#include "kernels/window_scores.h"

namespace zipage::reference {
namespace {

// Sums are double, so that the reference is more exact than what is held against it.
template <typename T>
void ScoreHead(const WindowScoresParams& p, int layer, int seq, int head) {
  const CompressionShape& shape = p.shape;
  const int64_t d = p.head_dim;
  const int64_t n = int64_t{shape.table_len[seq]} * shape.block_size;
  const int64_t group = p.q_heads / shape.kv_heads;
  const T* keys = static_cast<const T*>(p.key) + layer * p.key_layer_stride;
  const T* window = static_cast<const T*>(p.query_window) + layer * p.window_layer_stride;
  const auto key = [&](int64_t j) {
    const int64_t block = shape.block_table[int64_t{seq} * shape.max_blocks + j / shape.block_size];
    const int64_t slot = block * shape.block_size + j % shape.block_size;
    return keys + (slot * shape.kv_heads + head) * d;
  };
  std::vector<double> score(static_cast<size_t>(n));
  for (int64_t i = 0; i < p.window; ++i) {
    const int64_t visible = n - p.window + i + 1;
    std::vector<double> top(static_cast<size_t>(visible));
    for (int64_t g = 0; g < group; ++g) {
      const T* q =
          window + ((int64_t{p.query_slot[seq]} * p.window + i) * p.q_heads + head * group + g) * d;
      std::vector<double> z(static_cast<size_t>(visible));
      for (int64_t j = 0; j < visible; ++j) {
        double dot = 0;
        for (int64_t c = 0; c < d; ++c) dot += double{ToFloat(q[c])} * double{ToFloat(key(j)[c])};
        z[static_cast<size_t>(j)] = dot / std::sqrt(static_cast<double>(d));
      }
      const double max = *std::max_element(z.begin(), z.end());
      double sum = 0;
      for (double& value : z) sum += value = std::exp(value - max);
      for (size_t j = 0; j < z.size(); ++j) top[j] = std::max(top[j], z[j] / sum);
    }
    for (size_t j = 0; j < top.size(); ++j) score[j] += top[j] / p.window;
  }
  float* out = p.score + ((int64_t{layer} * shape.batch + seq) * shape.kv_heads + head) *
                             shape.max_blocks * shape.block_size;
  for (const double value : score) *out++ = static_cast<float>(value);
}

}  // namespace

void WindowScores(const WindowScoresParams& p) {
  CHECK(p.dtype != DType::kFloat16) << "keys are float32 or bfloat16";
  for (int layer = 0; layer < p.shape.layers; ++layer) {
    for (int seq = 0; seq < p.shape.batch; ++seq) {
      for (int head = 0; head < p.shape.kv_heads; ++head) {
        if (p.dtype == DType::kFloat32) {
          ScoreHead<float>(p, layer, seq, head);
        } else {
          ScoreHead<BFloat16>(p, layer, seq, head);
        }
      }
    }
  }
}

}  // namespace zipage::reference
