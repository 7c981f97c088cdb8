#include <algorithm>
#include <cmath>
#include <vector>

#include "glog/logging.h"
#include "kernels/key_similarity.h"

namespace zipage::reference {
namespace {

using Rows = std::vector<std::vector<double>>;

// The keys of one sequence, layer and KV head, divided by their norms.
template <typename T>
Rows UnitKeys(const KeySimilarityParams& p, int layer, int seq, int head) {
  const CompressionShape& shape = p.shape;
  const T* keys = static_cast<const T*>(p.key) + layer * p.key_layer_stride;
  Rows unit;
  for (int64_t j = 0; j < int64_t{shape.table_len[seq]} * shape.block_size; ++j) {
    const int64_t block = shape.block_table[int64_t{seq} * shape.max_blocks + j / shape.block_size];
    const int64_t slot = block * shape.block_size + j % shape.block_size;
    const T* k = keys + (slot * shape.kv_heads + head) * p.head_dim;
    double squares = 0;
    for (int i = 0; i < p.head_dim; ++i) squares += std::pow(double{ToFloat(k[i])}, 2);
    const double norm = std::max(std::sqrt(squares), 1e-6);
    std::vector<double>& u = unit.emplace_back();
    for (int i = 0; i < p.head_dim; ++i) u.push_back(double{ToFloat(k[i])} / norm);
  }
  return unit;
}

// The cosines among slots [begin, end) with the diagonal and the last alike of every column zero.
Rows Cosines(const Rows& unit, size_t begin, size_t end) {
  Rows c(end - begin, std::vector<double>(end - begin));
  for (size_t m = begin; m < end; ++m) {
    for (size_t n = begin; n < end; ++n) {
      double dot = 0;
      for (size_t i = 0; i < unit[m].size(); ++i) dot += unit[m][i] * unit[n][i];
      if (m != n) c[m - begin][n - begin] = dot;
    }
  }
  for (size_t n = 0; n < c.size(); ++n) {
    for (size_t m = c.size(); m-- > 0;) {
      if (c[m][n] > 0.5) {
        c[m][n] = 0;
        break;
      }
    }
  }
  return c;
}

void CompareHead(const KeySimilarityParams& p, const Rows& unit, float* row_sum,
                 float* similarity) {
  const size_t n = unit.size();
  const size_t length = p.lightning ? static_cast<size_t>(p.shape.block_size) : n;
  std::vector<double> r;
  for (size_t begin = 0; begin < n; begin += length) {
    for (const std::vector<double>& row : Cosines(unit, begin, begin + length)) {
      double sum = 0;
      for (const double cosine : row) sum += cosine;
      r.push_back(sum);
    }
  }
  for (size_t j = 0; j < n; ++j) row_sum[j] = static_cast<float>(r[j]);
  const double max = *std::max_element(r.begin(), r.end());
  double sum = 0;
  for (double& value : r) {
    value = std::exp((value - max) / (double{p.temperature} * static_cast<double>(length)));
    sum += value;
  }
  const double divisor = p.max_norm ? *std::max_element(r.begin(), r.end()) : sum;
  for (size_t j = 0; j < n; ++j) similarity[j] = static_cast<float>(r[j] / divisor);
}

}  // namespace

void KeySimilarity(const KeySimilarityParams& p) {
  CHECK(p.dtype != DType::kFloat16) << "keys are float32 or bfloat16";
  int64_t row = 0;
  for (int layer = 0; layer < p.shape.layers; ++layer) {
    for (int seq = 0; seq < p.shape.batch; ++seq) {
      for (int head = 0; head < p.shape.kv_heads; ++head, ++row) {
        const int64_t first = row * p.shape.max_blocks * p.shape.block_size;
        const Rows unit = p.dtype == DType::kFloat32 ? UnitKeys<float>(p, layer, seq, head)
                                                     : UnitKeys<BFloat16>(p, layer, seq, head);
        CompareHead(p, unit, p.row_sum + first, p.similarity + first);
      }
    }
  }
}

}  // namespace zipage::reference
