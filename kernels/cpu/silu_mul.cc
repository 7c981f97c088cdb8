#include "kernels/silu_mul.h"

#include <algorithm>

#include "glog/logging.h"
#include "kernels/cpu/simd.h"

namespace zipage::cpu {
namespace {

// Elements of a row that one task takes, so that a single token spreads over threads too.
constexpr int64_t kTaskElements = 4096;
constexpr int64_t kParallelElements = 1 << 15;

template <int kLanes>
ZIPAGE_INLINE Vec<kLanes> SiluMulVec(Vec<kLanes> gate, Vec<kLanes> up) {
  // Below -88, where exp would overflow, silu is 0 to within 1e-36. NaN passes through.
  const Vec<kLanes> clamped = gate < -88.0F ? Broadcast<kLanes>(-88.0F) : gate;
  return clamped / (1.0F + ExpVec<kLanes>(-clamped)) * up;
}

template <int kLanes, typename T>
ZIPAGE_INLINE void SiluMulRange(const T* gate, const T* up, int64_t n, T* out) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes)
    Store<kLanes>(out + i, SiluMulVec<kLanes>(Load<kLanes>(gate + i), Load<kLanes>(up + i)));
  if (i < n) {
    const Vec<kLanes> v = SiluMulVec<kLanes>(LoadPartial<kLanes>(gate + i, n - i),
                                             LoadPartial<kLanes>(up + i, n - i));
    StorePartial<kLanes>(out + i, v, n - i);
  }
}

template <int kLanes>
ZIPAGE_INLINE void SiluMulTaskImpl(const SiluMulParams& p, int64_t t, int64_t begin) {
  const int64_t count = std::min(kTaskElements, p.n - begin);
  const int64_t in = t * 2 * p.n + begin;
  const int64_t out = t * p.n + begin;
  if (p.dtype == DType::kFloat32) {
    const auto* x = static_cast<const float*>(p.gate_up) + in;
    SiluMulRange<kLanes>(x, x + p.n, count, static_cast<float*>(p.out) + out);
  } else {
    const auto* x = static_cast<const BFloat16*>(p.gate_up) + in;
    SiluMulRange<kLanes>(x, x + p.n, count, static_cast<BFloat16*>(p.out) + out);
  }
}

ZIPAGE_LEAF(void, SiluMulTask, (const SiluMulParams& p, int64_t t, int64_t begin), (p, t, begin))

}  // namespace

void SiluMul(const SiluMulParams& p) {
  CHECK(p.dtype != DType::kFloat16) << "activations are float32 or bfloat16";
#pragma omp parallel for collapse(2) schedule(static) if (p.tokens * p.n > kParallelElements)
  for (int64_t t = 0; t < p.tokens; ++t) {
    for (int64_t begin = 0; begin < p.n; begin += kTaskElements) SiluMulTask(p, t, begin);
  }
}

}  // namespace zipage::cpu
