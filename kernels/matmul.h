#pragma once
// Products with constant weights on the CPU, through oneDNN with the weights packed once.

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/tensor.h"

namespace zipage::cpu {

// How this CPU multiplies bf16 matrices (within ONEDNN_MAX_CPU_ISA).
enum class Bf16Matmul : uint8_t {
  kNone,      // not at all (AVX2 and older): PackedLinear must compute in fp32
  kEmulated,  // correct, about three times slower than fp32 (AVX-512 without AVX512-BF16)
  kNative,    // about twice as fast as fp32
};
Bf16Matmul CpuBf16Matmul();

// y = x * w^T + bias, w: [out_features, in_features]. Built in three steps: construct, fill every
// row of w with SetRows, Pack. Then Apply any number of times. One thread at a time; Apply itself
// runs on all OpenMP threads. Holds out_features * in_features elements of the compute type;
// between construction and the end of Pack twice that.
class PackedLinear {
 public:
  // compute_dtype is the type of x and of the packed weights: kFloat32 or kBFloat16. Sums are fp32.
  PackedLinear(int64_t out_features, int64_t in_features, DType compute_dtype);
  ~PackedLinear();
  PackedLinear(PackedLinear&&) noexcept;
  PackedLinear& operator=(PackedLinear&&) noexcept;

  // Copies rows [first_row, first_row + num_rows) of w, converted to the compute type. The source
  // has in_features elements a row, rows src_stride elements apart, so that fused and sharded
  // matrices are filled straight from the checkpoint. REQUIRES: before Pack, rows inside w.
  void SetRows(int64_t first_row, int64_t num_rows, const void* src, DType src_dtype,
               int64_t src_stride);

  // Copies bias: [out_features] values from the source. Without this call there is none.
  // REQUIRES: before Pack.
  void SetBias(int64_t first, int64_t count, const void* src, DType src_dtype);

  // Reorders w into the layout the matrix kernels read and frees the plain copy. kUnimplemented if
  // the CPU cannot compute in compute_dtype, kResourceExhausted if memory is short.
  absl::Status Pack();

  // y[m, :] = w * x[m, :] + bias for m < rows; 0 rows is a no-op.
  // x: [rows, in_features] of the compute type; y: [rows, out_features] of out_dtype (kFloat32, or
  // kBFloat16 if that is the compute type), not overlapping. Bytes: the packed weights once, x, y;
  // flops: 2 * rows * in_features * out_features. The first call with a new number of rows costs
  // about 0.2 ms more. With kernels whose name begins with "brg" a row's result is bit-identical
  // for every number of rows and threads. kInternal if oneDNN fails. REQUIRES: after Pack.
  absl::Status Apply(const void* x, void* y, int64_t rows, DType out_dtype);

  // Name of the oneDNN kernel for this number of rows, such as "brg:avx512_core". REQUIRES: after
  // Pack.
  absl::StatusOr<std::string> KernelName(int64_t rows, DType out_dtype);

  // Bytes of the packed weights, which every Apply reads once.
  size_t packed_bytes() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace zipage::cpu
