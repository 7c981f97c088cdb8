#include "kernels/rms_norm.h"

#include <cmath>

#include "glog/logging.h"
#include "kernels/cpu/simd.h"

namespace zipage::cpu {
namespace {

constexpr int64_t kParallelElements = 1 << 16;

// Adds x to residual and returns the sum of the squares of what was stored.
template <int kLanes, typename T>
ZIPAGE_INLINE float AddAndSumSquares(const T* x, T* residual, int64_t n) {
  Vec<kLanes> sum = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    Store<kLanes>(residual + i, Load<kLanes>(x + i) + Load<kLanes>(residual + i));
    const Vec<kLanes> h = Load<kLanes>(residual + i);
    sum += h * h;
  }
  if (i < n) {
    StorePartial<kLanes>(
        residual + i, LoadPartial<kLanes>(x + i, n - i) + LoadPartial<kLanes>(residual + i, n - i),
        n - i);
    const Vec<kLanes> h = LoadPartial<kLanes>(residual + i, n - i);
    sum += h * h;
  }
  return ReduceSum<kLanes>(sum);
}

template <int kLanes, typename T>
ZIPAGE_INLINE float SumSquares(const T* x, int64_t n) {
  Vec<kLanes> sum = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    const Vec<kLanes> h = Load<kLanes>(x + i);
    sum += h * h;
  }
  if (i < n) {
    const Vec<kLanes> h = LoadPartial<kLanes>(x + i, n - i);
    sum += h * h;
  }
  return ReduceSum<kLanes>(sum);
}

template <int kLanes, typename T>
ZIPAGE_INLINE void NormRow(const RmsNormParams& p, int64_t r) {
  const int64_t n = p.hidden;
  const int64_t source = p.row_index != nullptr ? p.row_index[r] : r;
  const T* h = static_cast<const T*>(p.x) + source * n;
  float sum_squares = 0;
  if (p.residual != nullptr) {
    T* residual = static_cast<T*>(p.residual) + source * n;
    sum_squares = AddAndSumSquares<kLanes>(h, residual, n);
    h = residual;
  } else {
    sum_squares = SumSquares<kLanes>(h, n);
  }
  const float factor = 1.0F / std::sqrt(sum_squares / static_cast<float>(n) + p.eps);
  T* out = static_cast<T*>(p.out) + r * n;
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    Store<kLanes>(out + i, Load<kLanes>(h + i) * factor * Load<kLanes>(p.weight + i));
  if (i < n) {
    const Vec<kLanes> v =
        LoadPartial<kLanes>(h + i, n - i) * factor * LoadPartial<kLanes>(p.weight + i, n - i);
    StorePartial<kLanes>(out + i, v, n - i);
  }
}

template <int kLanes>
ZIPAGE_INLINE void NormRowAnyTypeImpl(const RmsNormParams& p, int64_t r) {
  if (p.dtype == DType::kFloat32) {
    NormRow<kLanes, float>(p, r);
  } else {
    NormRow<kLanes, BFloat16>(p, r);
  }
}

ZIPAGE_LEAF(void, NormRowAnyType, (const RmsNormParams& p, int64_t r), (p, r))

}  // namespace

void RmsNorm(const RmsNormParams& p) {
  CHECK(p.dtype != DType::kFloat16) << "activations are float32 or bfloat16";
#pragma omp parallel for schedule(static) if (p.rows * p.hidden > kParallelElements)
  for (int64_t r = 0; r < p.rows; ++r) NormRowAnyType(p, r);
}

}  // namespace zipage::cpu
