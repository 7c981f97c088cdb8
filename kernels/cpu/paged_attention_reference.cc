#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "glog/logging.h"
#include "kernels/paged_attention.h"

namespace zipage::reference {
namespace {

// Sums are double, so that the reference is more exact than what is held against it.
template <typename T>
void Attend(const PagedAttentionParams& p, int seq, int token, int head) {
  const int visible = p.context_len[seq] - (p.query_start[seq + 1] - 1 - token);
  const int64_t d = p.head_dim;
  const T* q = static_cast<const T*>(p.q) + token * p.q_stride + head * d;
  const auto row = [&](const void* cache, int j) {
    const int64_t block =
        p.block_tables[static_cast<int64_t>(seq) * p.max_blocks + j / p.block_size];
    const int64_t slot = block * p.block_size + j % p.block_size;
    const int kv_head = head / (p.q_heads / p.kv_heads);
    return static_cast<const T*>(cache) + (slot * p.kv_heads + kv_head) * d;
  };
  std::vector<double> weight(static_cast<size_t>(visible));
  double max = -std::numeric_limits<double>::infinity();
  for (int j = 0; j < visible; ++j) {
    const T* k = row(p.key_cache, j);
    double dot = 0;
    for (int64_t i = 0; i < d; ++i) dot += static_cast<double>(ToFloat(q[i])) * ToFloat(k[i]);
    weight[static_cast<size_t>(j)] = dot * p.scale;
    max = std::max(max, dot * p.scale);
  }
  double sum = 0;
  for (double& w : weight) sum += w = std::exp(w - max);
  std::vector<double> out(static_cast<size_t>(d));
  for (int j = 0; j < visible; ++j) {
    const T* v = row(p.value_cache, j);
    for (int64_t i = 0; i < d; ++i) {
      out[static_cast<size_t>(i)] += weight[static_cast<size_t>(j)] / sum * ToFloat(v[i]);
    }
  }
  T* to = static_cast<T*>(p.out) + (static_cast<int64_t>(token) * p.q_heads + head) * d;
  for (int64_t i = 0; i < d; ++i) {
    const auto value = static_cast<float>(out[static_cast<size_t>(i)]);
    if constexpr (sizeof(T) == 2) {
      to[i] = ToBFloat16(value);
    } else {
      to[i] = value;
    }
  }
}

}  // namespace

void PagedAttention(const PagedAttentionParams& p) {
  CHECK(p.dtype != DType::kFloat16) << "activations are float32 or bfloat16";
  for (int seq = 0; seq < p.num_seqs; ++seq) {
    for (int token = p.query_start[seq]; token < p.query_start[seq + 1]; ++token) {
      for (int head = 0; head < p.q_heads; ++head) {
        if (p.dtype == DType::kFloat32) {
          Attend<float>(p, seq, token, head);
        } else {
          Attend<BFloat16>(p, seq, token, head);
        }
      }
    }
  }
}

}  // namespace zipage::reference
