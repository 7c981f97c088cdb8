#include "kernels/matmul.h"

#include <sys/mman.h>

#include <cstdlib>
#include <functional>
#include <oneapi/dnnl/dnnl.hpp>
#include <unordered_map>
#include <utility>

#include "absl/strings/str_format.h"
#include "glog/logging.h"
#include "kernels/cpu/simd.h"

namespace zipage::cpu {
namespace {

// Numbers of rows whose kernels are kept; past that all are dropped and made again when asked for,
// at a few microseconds each while oneDNN's own cache still has them.
constexpr size_t kMaxPrepared = 128;
// The packed layout is asked for at this number of rows; it is the same from 1 to 1024 rows.
constexpr int64_t kPackRows = 64;
constexpr size_t kHugePage = size_t{2} << 20;

struct FreeDeleter {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, FreeDeleter>;

// Null if memory is short. Large buffers ask for huge pages: streaming weights through 4 KiB pages
// costs a tenth of the bandwidth.
Buffer Allocate(size_t bytes) {
  const bool large = bytes >= 2 * kHugePage;
  void* p = nullptr;
  if (posix_memalign(&p, large ? kHugePage : 64, bytes) != 0) return nullptr;
#ifdef MADV_HUGEPAGE
  if (large) madvise(p, bytes, MADV_HUGEPAGE);
#endif
  return Buffer(p);
}

dnnl::memory::data_type ToDnnl(DType dtype) {
  return dtype == DType::kFloat32 ? dnnl::memory::data_type::f32 : dnnl::memory::data_type::bf16;
}

template <typename Src>
ZIPAGE_INLINE void ConvertRow(const Src* src, int64_t n, float* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = ToFloat(src[i]);
}
template <typename Src>
ZIPAGE_INLINE void ConvertRow(const Src* src, int64_t n, BFloat16* dst) {
  for (int64_t i = 0; i < n; ++i) dst[i] = ToBFloat16(ToFloat(src[i]));
}

template <int kLanes>
ZIPAGE_INLINE void ConvertRowAnyTypeImpl(const void* src, DType src_dtype, int64_t n, void* dst,
                                         DType dst_dtype) {
  const bool wide = dst_dtype == DType::kFloat32;
  auto* f32 = static_cast<float*>(dst);
  auto* bf16 = static_cast<BFloat16*>(dst);
  if (src_dtype == DType::kFloat32) {
    const auto* s = static_cast<const float*>(src);
    wide ? ConvertRow(s, n, f32) : ConvertRow(s, n, bf16);
  } else if (src_dtype == DType::kBFloat16) {
    const auto* s = static_cast<const BFloat16*>(src);
    wide ? ConvertRow(s, n, f32) : ConvertRow(s, n, bf16);
  } else {
    const auto* s = static_cast<const Float16*>(src);
    wide ? ConvertRow(s, n, f32) : ConvertRow(s, n, bf16);
  }
}

ZIPAGE_LEAF(void, ConvertRowAnyType,
            (const void* src, DType src_dtype, int64_t n, void* dst, DType dst_dtype),
            (src, src_dtype, n, dst, dst_dtype))

// Runs f and turns oneDNN's exceptions into a status.
template <typename F>
absl::Status Guard(const char* what, int64_t n, int64_t k, F&& f) {
  try {
    std::invoke(std::forward<F>(f));
    return absl::OkStatus();
  } catch (const dnnl::error& e) {
    const std::string message =
        absl::StrFormat("oneDNN could not %s a %d x %d matrix: %s", what, n, k, e.message);
    if (e.status == dnnl_out_of_memory) return absl::ResourceExhaustedError(message);
    if (e.status == dnnl_unimplemented) {
      return absl::UnimplementedError(message + "; give --dtype float32");
    }
    return absl::InternalError(message);
  }
}

}  // namespace

Bf16Matmul CpuBf16Matmul() {
  const auto isa = static_cast<unsigned>(dnnl::get_effective_cpu_isa());
  if (isa >= static_cast<unsigned>(dnnl::cpu_isa::avx512_core_bf16)) return Bf16Matmul::kNative;
  if (isa >= static_cast<unsigned>(dnnl::cpu_isa::avx512_core)) return Bf16Matmul::kEmulated;
  return Bf16Matmul::kNone;
}

struct PackedLinear::Impl {
  // A kernel for one number of rows and output type, with memory objects whose pointers each call
  // sets.
  struct Prepared {
    dnnl::matmul matmul;
    dnnl::memory src, dst;
    std::string kernel_name;
  };

  Impl(int64_t n, int64_t k, DType dtype) : n(n), k(k), dtype(dtype) {}

  dnnl::matmul::primitive_desc Describe(int64_t rows, DType out_dtype,
                                        const dnnl::memory::desc& weights) const {
    using Tag = dnnl::memory::format_tag;
    const dnnl::memory::desc src({rows, k}, ToDnnl(dtype), Tag::ab);
    const dnnl::memory::desc dst({rows, n}, ToDnnl(out_dtype), Tag::ab);
    if (!bias) return {{src, weights, dst}, engine};
    const dnnl::memory::desc bias_desc({1, n}, dnnl::memory::data_type::f32, Tag::ab);
    return {{src, weights, bias_desc, dst}, engine};
  }

  absl::StatusOr<Prepared*> Prepare(int64_t rows, DType out_dtype) {
    CHECK(packed) << "Apply before Pack";
    CHECK(out_dtype == DType::kFloat32 || out_dtype == dtype) << "output " << DTypeName(out_dtype);
    const int64_t key = rows * 2 + (out_dtype == DType::kFloat32 ? 0 : 1);
    if (auto it = prepared.find(key); it != prepared.end()) return &it->second;
    if (prepared.size() >= kMaxPrepared) prepared.clear();
    Prepared p;
    absl::Status status = Guard("multiply with", n, k, [&] {
      const auto pd = Describe(rows, out_dtype, packed_memory.get_desc());
      p.matmul = dnnl::matmul(pd);
      p.src = dnnl::memory(pd.src_desc(), engine, nullptr);
      p.dst = dnnl::memory(pd.dst_desc(), engine, nullptr);
      p.kernel_name = pd.impl_info_str();
    });
    if (!status.ok()) return status;
    return &prepared.emplace(key, std::move(p)).first->second;
  }

  int64_t n, k;
  DType dtype;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  Buffer plain;   // [n, k] of dtype until Pack
  Buffer bias;    // [n] float, or null
  Buffer packed;  // after Pack
  dnnl::memory packed_memory, bias_memory;
  std::unordered_map<int64_t, Prepared> prepared;  // by rows and output type
};

PackedLinear::PackedLinear(int64_t out_features, int64_t in_features, DType compute_dtype)
    : impl_(std::make_unique<Impl>(out_features, in_features, compute_dtype)) {
  CHECK(out_features > 0 && in_features > 0) << out_features << " x " << in_features;
  CHECK(compute_dtype != DType::kFloat16) << "activations are float32 or bfloat16";
  impl_->plain =
      Allocate(static_cast<size_t>(out_features * in_features) * DTypeSize(compute_dtype));
}
PackedLinear::~PackedLinear() = default;
PackedLinear::PackedLinear(PackedLinear&&) noexcept = default;
PackedLinear& PackedLinear::operator=(PackedLinear&&) noexcept = default;

void PackedLinear::SetRows(int64_t first_row, int64_t num_rows, const void* src, DType src_dtype,
                           int64_t src_stride) {
  CHECK(!impl_->packed) << "SetRows after Pack";
  CHECK(first_row >= 0 && num_rows >= 0 && first_row + num_rows <= impl_->n)
      << "rows " << first_row << " to " << first_row + num_rows << " of " << impl_->n;
  if (!impl_->plain) return;  // Pack reports it
  const int64_t k = impl_->k;
  const size_t src_row_bytes = static_cast<size_t>(src_stride) * DTypeSize(src_dtype);
  const size_t dst_row_bytes = static_cast<size_t>(k) * DTypeSize(impl_->dtype);
  const char* from = static_cast<const char*>(src);
  char* to =
      static_cast<char*>(impl_->plain.get()) + static_cast<size_t>(first_row) * dst_row_bytes;
#pragma omp parallel for schedule(static)
  for (int64_t r = 0; r < num_rows; ++r) {
    ConvertRowAnyType(from + static_cast<size_t>(r) * src_row_bytes, src_dtype, k,
                      to + static_cast<size_t>(r) * dst_row_bytes, impl_->dtype);
  }
}

void PackedLinear::SetBias(int64_t first, int64_t count, const void* src, DType src_dtype) {
  CHECK(!impl_->packed) << "SetBias after Pack";
  CHECK(first >= 0 && count >= 0 && first + count <= impl_->n)
      << "bias " << first << " to " << first + count << " of " << impl_->n;
  if (!impl_->bias) {
    impl_->bias = Allocate(static_cast<size_t>(impl_->n) * sizeof(float));
    CHECK(impl_->bias) << "no memory for " << impl_->n << " floats";
    std::memset(impl_->bias.get(), 0, static_cast<size_t>(impl_->n) * sizeof(float));
  }
  ConvertRowAnyType(src, src_dtype, count, static_cast<float*>(impl_->bias.get()) + first,
                    DType::kFloat32);
}

absl::Status PackedLinear::Pack() {
  Impl& impl = *impl_;
  CHECK(!impl.packed) << "Pack called twice";
  const auto short_of_memory = [&] {
    return absl::ResourceExhaustedError(
        absl::StrFormat("no memory for a %d x %d %s matrix; give more memory or more ranks", impl.n,
                        impl.k, DTypeName(impl.dtype)));
  };
  if (!impl.plain) return short_of_memory();
  Buffer packed;
  absl::Status status = Guard("pack", impl.n, impl.k, [&] {
    using Tag = dnnl::memory::format_tag;
    const dnnl::memory::desc any({impl.k, impl.n}, ToDnnl(impl.dtype), Tag::any);
    const auto packed_desc = impl.Describe(kPackRows, impl.dtype, any).weights_desc();
    packed = Allocate(packed_desc.get_size());
    if (!packed) return;
    const dnnl::memory::desc plain_desc({impl.k, impl.n}, ToDnnl(impl.dtype), Tag::ba);
    dnnl::memory plain(plain_desc, impl.engine, impl.plain.get());
    impl.packed_memory = dnnl::memory(packed_desc, impl.engine, packed.get());
    dnnl::reorder(plain, impl.packed_memory).execute(impl.stream, plain, impl.packed_memory);
    impl.stream.wait();
    if (impl.bias) {
      const dnnl::memory::desc bias_desc({1, impl.n}, dnnl::memory::data_type::f32, Tag::ab);
      impl.bias_memory = dnnl::memory(bias_desc, impl.engine, impl.bias.get());
    }
  });
  if (!status.ok()) return status;
  if (!packed) return short_of_memory();
  impl.packed = std::move(packed);
  impl.plain.reset();
  return absl::OkStatus();
}

absl::Status PackedLinear::Apply(const void* x, void* y, int64_t rows, DType out_dtype) {
  if (rows == 0) return absl::OkStatus();
  auto prepared = impl_->Prepare(rows, out_dtype);
  if (!prepared.ok()) return prepared.status();
  Impl::Prepared& p = **prepared;
  return Guard("multiply with", impl_->n, impl_->k, [&] {
    p.src.set_data_handle(const_cast<void*>(x));
    p.dst.set_data_handle(y);
    std::unordered_map<int, dnnl::memory> args = {
        {DNNL_ARG_SRC, p.src}, {DNNL_ARG_WEIGHTS, impl_->packed_memory}, {DNNL_ARG_DST, p.dst}};
    if (impl_->bias) args.emplace(DNNL_ARG_BIAS, impl_->bias_memory);
    p.matmul.execute(impl_->stream, args);
    impl_->stream.wait();
  });
}

absl::StatusOr<std::string> PackedLinear::KernelName(int64_t rows, DType out_dtype) {
  auto prepared = impl_->Prepare(rows, out_dtype);
  if (!prepared.ok()) return prepared.status();
  return (*prepared)->kernel_name;
}

size_t PackedLinear::packed_bytes() const { return impl_->packed_memory.get_desc().get_size(); }

}  // namespace zipage::cpu
