#include "worker/cuda_memory.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"

namespace zipage {
namespace {

void FreeCuda(void* data, size_t /*bytes*/) { cudaFree(data); }

}  // namespace

absl::Status CudaStatus(cudaError_t error, const std::string& what) {
  if (error == cudaSuccess) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": ", cudaGetErrorString(error));
  if (error == cudaErrorMemoryAllocation) return absl::ResourceExhaustedError(message);
  return absl::InternalError(message);
}

absl::StatusOr<DeviceMemory> AllocateCuda(size_t bytes, const std::string& what,
                                          cudaStream_t stream) {
  const size_t size = std::max<size_t>(bytes, 1);
  void* data = nullptr;
  if (const cudaError_t error = cudaMalloc(&data, size); error != cudaSuccess) {
    cudaGetLastError();  // An allocation that fails is not an error of the next launch.
    size_t free = 0;
    size_t total = 0;
    cudaMemGetInfo(&free, &total);
    return CudaStatus(error, absl::StrCat("no device memory for ", what, " (", bytes, " bytes, ",
                                          free, " are free)"));
  }
  DeviceMemory memory(data, size, &FreeCuda);
  ZIPAGE_RETURN_IF_ERROR(
      CudaStatus(cudaMemsetAsync(data, 0, size, stream), absl::StrCat("cannot clear ", what)));
  return memory;
}

CudaCopier::~CudaCopier() {
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  for (cudaEvent_t event : used_) {
    if (event != nullptr) cudaEventDestroy(event);
  }
  if (pieces_ != nullptr) cudaFreeHost(pieces_);
  if (download_ != nullptr) cudaFreeHost(download_);
}

absl::Status CudaCopier::Start(cudaStream_t stream) {
  stream_ = stream;
  ZIPAGE_RETURN_IF_ERROR(
      CudaStatus(cudaMallocHost(&pieces_, kPieces * kPieceBytes), "no page-locked memory"));
  ZIPAGE_RETURN_IF_ERROR(
      CudaStatus(cudaMallocHost(&download_, kPieceBytes), "no page-locked memory"));
  for (cudaEvent_t& event : used_) {
    ZIPAGE_RETURN_IF_ERROR(
        CudaStatus(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "no event"));
  }
  return absl::OkStatus();
}

absl::StatusOr<uint8_t*> CudaCopier::Reserve(size_t bytes) {
  CHECK_LE(bytes, kPieceBytes);
  if (position_ + bytes > kPieceBytes) {
    ZIPAGE_RETURN_IF_ERROR(CudaStatus(cudaEventRecord(used_[piece_], stream_), "event"));
    piece_ = (piece_ + 1) % kPieces;
    position_ = 0;
    ZIPAGE_RETURN_IF_ERROR(CudaStatus(cudaEventSynchronize(used_[piece_]), "an upload failed"));
  }
  uint8_t* const at = pieces_ + piece_ * kPieceBytes + position_;
  position_ += (bytes + 15) / 16 * 16;
  return at;
}

absl::Status CudaCopier::ToDevice(void* device, const void* host, size_t bytes) {
  return ToDevice(device, bytes, 1, [host](void* piece, size_t offset, size_t count) {
    std::memcpy(piece, static_cast<const uint8_t*>(host) + offset, count);
  });
}

absl::Status CudaCopier::ToDevice(void* device, size_t bytes, size_t unit,
                                  const std::function<void(void*, size_t, size_t)>& fill) {
  const size_t most = kPieceBytes / unit * unit;
  CHECK_GT(most, 0) << unit << " bytes do not fit a piece";
  for (size_t offset = 0; offset < bytes; offset += most) {
    const size_t count = std::min(most, bytes - offset);
    ZIPAGE_ASSIGN_OR_RETURN(uint8_t* const piece, Reserve(count));
    fill(piece, offset, count);
    ZIPAGE_RETURN_IF_ERROR(CudaStatus(cudaMemcpyAsync(static_cast<uint8_t*>(device) + offset, piece,
                                                      count, cudaMemcpyHostToDevice, stream_),
                                      "cannot copy to the device"));
  }
  return absl::OkStatus();
}

absl::Status CudaCopier::ToHost(void* host, const void* device, size_t bytes) {
  const bool small = bytes <= kPieceBytes;
  if (bytes > 0) {
    ZIPAGE_RETURN_IF_ERROR(CudaStatus(
        cudaMemcpyAsync(small ? download_ : host, device, bytes, cudaMemcpyDeviceToHost, stream_),
        "cannot copy from the device"));
  }
  ZIPAGE_RETURN_IF_ERROR(CudaStatus(cudaStreamSynchronize(stream_), "the device's work failed"));
  if (small && bytes > 0) std::memcpy(host, download_, bytes);
  return absl::OkStatus();
}

absl::StatusOr<void*> CudaScratch::AtLeast(size_t bytes, cudaStream_t stream) {
  if (memory_.bytes() < bytes) {
    // A quarter more, so that a slowly growing need does not allocate at every step.
    memory_ = DeviceMemory();
    ZIPAGE_ASSIGN_OR_RETURN(memory_, AllocateCuda(bytes + bytes / 4, what_, stream));
  }
  return memory_.as();
}

}  // namespace zipage
