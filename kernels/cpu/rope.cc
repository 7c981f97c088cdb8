#include "kernels/rope.h"

#include <cmath>
#include <cstring>

#include "glog/logging.h"
#include "kernels/cpu/simd.h"

namespace zipage::cpu {
namespace {

constexpr int64_t kParallelElements = 1 << 15;

template <typename T>
ZIPAGE_INLINE T FromFloat(float value) {
  if constexpr (sizeof(T) == 2) {
    return ToBFloat16(value);
  } else {
    return value;
  }
}

// 1 / sqrt(mean(x^2) + eps), the same for every head and token.
template <int kLanes, typename T>
ZIPAGE_INLINE float NormFactor(const T* x, int n, float eps) {
  Vec<kLanes> sum = {};
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec<kLanes> v = Load<kLanes>(x + i);
    sum += v * v;
  }
  if (i < n) {
    const Vec<kLanes> v = LoadPartial<kLanes>(x + i, n - i);
    sum += v * v;
  }
  return 1.0F / std::sqrt(ReduceSum<kLanes>(sum) / static_cast<float>(n) + eps);
}

// out may be x.
template <int kLanes, typename T>
ZIPAGE_INLINE void RotateHead(const T* x, const float* table, const float* weight, float eps,
                              int head_dim, T* out) {
  const int half = head_dim / 2;
  const float factor = weight != nullptr ? NormFactor<kLanes>(x, head_dim, eps) : 1.0F;
  int i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    Vec<kLanes> a = Load<kLanes>(x + i);
    Vec<kLanes> b = Load<kLanes>(x + half + i);
    if (weight != nullptr) {
      a = a * factor * Load<kLanes>(weight + i);
      b = b * factor * Load<kLanes>(weight + half + i);
    }
    const Vec<kLanes> cos = Load<kLanes>(table + i);
    const Vec<kLanes> sin = Load<kLanes>(table + half + i);
    Store<kLanes>(out + i, a * cos - b * sin);
    Store<kLanes>(out + half + i, b * cos + a * sin);
  }
  for (; i < half; ++i) {
    float a = ToFloat(x[i]);
    float b = ToFloat(x[half + i]);
    if (weight != nullptr) {
      a = a * factor * weight[i];
      b = b * factor * weight[half + i];
    }
    const float cos = table[i];
    const float sin = table[half + i];
    out[i] = FromFloat<T>(a * cos - b * sin);
    out[half + i] = FromFloat<T>(b * cos + a * sin);
  }
}

template <int kLanes, typename T>
ZIPAGE_INLINE void Token(const RopeAndCacheParams& p, int64_t t) {
  const int64_t d = p.head_dim;
  const int64_t kv_size = p.kv_heads * d;
  const float* table = p.rope_table + p.positions[t] * d;
  T* q = static_cast<T*>(p.qkv) + t * (p.q_heads * d + 2 * kv_size);
  const T* k = q + p.q_heads * d;
  T* key = static_cast<T*>(p.key_cache) + p.slot_mapping[t] * kv_size;
  T* value = static_cast<T*>(p.value_cache) + p.slot_mapping[t] * kv_size;
  for (int h = 0; h < p.q_heads; ++h) {
    RotateHead<kLanes>(q + h * d, table, p.q_norm_weight, p.norm_eps, p.head_dim, q + h * d);
  }
  for (int h = 0; h < p.kv_heads; ++h) {
    RotateHead<kLanes>(k + h * d, table, p.k_norm_weight, p.norm_eps, p.head_dim, key + h * d);
  }
  std::memcpy(value, k + kv_size, static_cast<size_t>(kv_size) * sizeof(T));
}

template <int kLanes>
ZIPAGE_INLINE void TokenAnyTypeImpl(const RopeAndCacheParams& p, int64_t t) {
  if (p.dtype == DType::kFloat32) {
    Token<kLanes, float>(p, t);
  } else {
    Token<kLanes, BFloat16>(p, t);
  }
}

ZIPAGE_LEAF(void, TokenAnyType, (const RopeAndCacheParams& p, int64_t t), (p, t))

}  // namespace

void RopeAndCache(const RopeAndCacheParams& p) {
  CHECK(p.dtype != DType::kFloat16) << "activations are float32 or bfloat16";
  CHECK_EQ(p.head_dim % 2, 0);
  for (int64_t t = 0; t < p.tokens; ++t) {
    CHECK(p.positions[t] >= 0 && p.positions[t] < p.max_position)
        << "token " << t << " is at position " << p.positions[t] << " of " << p.max_position;
    CHECK(p.slot_mapping[t] >= 0 && p.slot_mapping[t] < p.num_slots)
        << "token " << t << " goes to slot " << p.slot_mapping[t] << " of " << p.num_slots;
  }
  const int64_t elements = p.tokens * (p.q_heads + 2 * p.kv_heads) * p.head_dim;
#pragma omp parallel for schedule(static) if (elements > kParallelElements)
  for (int64_t t = 0; t < p.tokens; ++t) TokenAnyType(p, t);
}

}  // namespace zipage::cpu

namespace zipage {

void BuildRopeTable(const float* inv_freq, int head_dim, int64_t max_position,
                    float attention_scaling, float* table) {
  const int half = head_dim / 2;
#pragma omp parallel for schedule(static)
  for (int64_t p = 0; p < max_position; ++p) {
    float* row = table + p * head_dim;
    for (int i = 0; i < half; ++i) {
      const float angle = static_cast<float>(p) * inv_freq[i];
      row[i] = std::cos(angle) * attention_scaling;
      row[half + i] = std::sin(angle) * attention_scaling;
    }
  }
}

}  // namespace zipage
