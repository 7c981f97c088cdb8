#include "kernels/embedding.h"

#include <cstring>

#include "glog/logging.h"
#include "kernels/cpu/simd.h"

namespace zipage::cpu {
namespace {

constexpr int64_t kParallelElements = 1 << 16;

template <typename Src, typename Dst>
ZIPAGE_INLINE void ConvertRow(const Src* src, int64_t n, Dst* dst) {
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (sizeof(Dst) == 2) {
      dst[i] = ToBFloat16(ToFloat(src[i]));
    } else {
      dst[i] = ToFloat(src[i]);
    }
  }
}

template <typename Dst>
ZIPAGE_INLINE void ConvertRow(const void* src, DType src_dtype, int64_t n, Dst* dst) {
  switch (src_dtype) {
    case DType::kFloat32:
      return ConvertRow(static_cast<const float*>(src), n, dst);
    case DType::kBFloat16:
      return ConvertRow(static_cast<const BFloat16*>(src), n, dst);
    case DType::kFloat16:
      return ConvertRow(static_cast<const Float16*>(src), n, dst);
  }
}

template <int kLanes>
ZIPAGE_INLINE void EmbedTokenImpl(const EmbeddingParams& p, int64_t t) {
  const auto out_bytes = static_cast<size_t>(p.hidden) * DTypeSize(p.out_dtype);
  char* out = static_cast<char*>(p.out) + static_cast<size_t>(t) * out_bytes;
  const int64_t row = p.ids[t] - p.first_row;
  if (row < 0 || row >= p.num_rows) {
    std::memset(out, 0, out_bytes);
    return;
  }
  const char* src = static_cast<const char*>(p.table) +
                    static_cast<size_t>(row * p.hidden) * DTypeSize(p.table_dtype);
  if (p.table_dtype == p.out_dtype) {
    std::memcpy(out, src, out_bytes);
  } else if (p.out_dtype == DType::kFloat32) {
    ConvertRow(src, p.table_dtype, p.hidden, reinterpret_cast<float*>(out));
  } else {
    ConvertRow(src, p.table_dtype, p.hidden, reinterpret_cast<BFloat16*>(out));
  }
}

ZIPAGE_LEAF(void, EmbedToken, (const EmbeddingParams& p, int64_t t), (p, t))

}  // namespace

void Embedding(const EmbeddingParams& p) {
  CHECK(p.out_dtype != DType::kFloat16) << "activations are float32 or bfloat16";
#pragma omp parallel for schedule(static) if (p.tokens * p.hidden > kParallelElements)
  for (int64_t t = 0; t < p.tokens; ++t) EmbedToken(p, t);
}

}  // namespace zipage::cpu
