#pragma once
// Matrix products with constant weights on a CUDA device, through cuBLASLt; the only door to it.

#include <cstddef>
#include <cstdint>
#include <memory>

#include "kernels/stream.h"
#include "kernels/tensor.h"
#include "proto/status.h"

namespace zipage {

// One product: y = x * w^T + bias. All pointers are device memory.
struct CudaProduct {
  const void* weight;  // [out_features, in_features] of dtype
  const void* bias;    // [out_features] of out_dtype, or null
  const void* x;       // [rows, in_features] of dtype
  void* y;             // [rows, out_features] of out_dtype
  int64_t out_features;
  int64_t in_features;
  int64_t rows;
  DType dtype;      // kFloat32 (computed in fp32, not tf32) or kBFloat16 (fp32 sums)
  DType out_dtype;  // kFloat32 or dtype
};

// A handle, its workspace and the algorithms found so far: one per shape, asked for once. The
// workspace is used by one product at a time, so all calls are on one stream.
class CudaMatmul {
 public:
  // Bytes of workspace, which the caller allocates and keeps: what NVIDIA recommends for Hopper.
  static constexpr size_t kWorkspaceBytes = size_t{32} << 20;

  static absl::StatusOr<std::unique_ptr<CudaMatmul>> Create(void* workspace);
  ~CudaMatmul();
  CudaMatmul(const CudaMatmul&) = delete;
  CudaMatmul& operator=(const CudaMatmul&) = delete;

  // Enqueues the product; 0 rows is a no-op. The first product of a shape (features, rows, types,
  // alignment) asks cuBLASLt's heuristics, which takes some 100 us of the host. Bytes: the weights
  // once, x, y; flops: 2 * rows * in_features * out_features. kInternal if cuBLASLt fails.
  absl::Status Run(const CudaProduct& product, Stream stream);

 private:
  struct Impl;
  explicit CudaMatmul(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zipage
