#pragma once
// Copies between host and device through page-locked memory, and buffers that grow. One stream; the
// thread of the backend.

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "proto/status.h"
#include "worker/backend.h"

namespace zipage {

// kInternal (kResourceExhausted if memory is short) with CUDA's reason.
absl::Status CudaStatus(cudaError_t error, const std::string& what);

// Device memory, all zeros; the zeros are written in the stream's order.
absl::StatusOr<DeviceMemory> AllocateCuda(size_t bytes, const std::string& what,
                                          cudaStream_t stream);

// Uploads return when the source has been read, not when it has arrived: the source goes to pieces
// of page-locked memory that are reused in turn, each after its copies have ended.
class CudaCopier {
 public:
  static constexpr size_t kPieceBytes = size_t{4} << 20;
  static constexpr int kPieces = 8;

  CudaCopier() = default;
  ~CudaCopier();
  CudaCopier(const CudaCopier&) = delete;
  CudaCopier& operator=(const CudaCopier&) = delete;

  // Page-locked memory and events. Call once, before anything else.
  absl::Status Start(cudaStream_t stream);
  absl::Status ToDevice(void* device, const void* host, size_t bytes);
  // The same, from what fill(piece, offset, bytes) writes to page-locked memory; offsets ascend,
  // and are multiples of `unit` bytes.
  absl::Status ToDevice(void* device, size_t bytes, size_t unit,
                        const std::function<void(void*, size_t, size_t)>& fill);
  // Waits for all work of the stream.
  absl::Status ToHost(void* host, const void* device, size_t bytes);

 private:
  // Room for `bytes` (at most kPieceBytes) at a multiple of 16.
  absl::StatusOr<uint8_t*> Reserve(size_t bytes);

  cudaStream_t stream_ = nullptr;
  uint8_t* pieces_ = nullptr;    // [kPieces, kPieceBytes]
  uint8_t* download_ = nullptr;  // [kPieceBytes]
  cudaEvent_t used_[kPieces] = {};
  int piece_ = 0;
  size_t position_ = 0;  // in the piece
};

// Memory for a purpose whose need is known only when it arises. Contents are lost, and zeros again,
// when it grows.
class CudaScratch {
 public:
  explicit CudaScratch(std::string what) : what_(std::move(what)) {}
  absl::StatusOr<void*> AtLeast(size_t bytes, cudaStream_t stream);

 private:
  std::string what_;
  DeviceMemory memory_;
};

}  // namespace zipage
