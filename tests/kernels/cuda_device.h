#pragma once
// Device memory for the tests of CUDA kernels. Every allocation of a test is filled with bytes 0xFF
// (NaN, and no valid index) before its contents arrive.

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <vector>

#include "absl/status/status.h"
#include "kernels/stream.h"
#include "tests/kernels/random_data.h"

namespace zipage::testing {

// Tests of kernels derive from it; they are skipped where there is no device.
class CudaTest : public ::testing::Test {
 protected:
  void SetUp() override {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0) {
      GTEST_SKIP() << "NO CUDA DEVICE: CUDA KERNELS ARE NOT TESTED HERE";
    }
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), cudaSuccess);
  }
  void TearDown() override {
    if (stream_ != nullptr) {
      EXPECT_EQ(cudaStreamSynchronize(stream_), cudaSuccess)
          << cudaGetErrorString(cudaGetLastError());
      cudaStreamDestroy(stream_);
    }
  }
  // A launch succeeded and so did the work.
  void Finish(const absl::Status& status) {
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(cudaStreamSynchronize(stream_), cudaSuccess)
        << cudaGetErrorString(cudaGetLastError());
  }

  cudaStream_t stream_ = nullptr;
  std::mt19937_64 rng_{FreshSeed()};
};

class DeviceArray {
 public:
  explicit DeviceArray(size_t bytes) : bytes_(bytes) {
    EXPECT_EQ(cudaMalloc(&data_, bytes + 1), cudaSuccess);
    EXPECT_EQ(cudaMemset(data_, 0xFF, bytes), cudaSuccess);
    EXPECT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
  DeviceArray(const void* host, size_t bytes) : DeviceArray(bytes) {
    if (bytes > 0) {
      EXPECT_EQ(cudaMemcpy(data_, host, bytes, cudaMemcpyHostToDevice), cudaSuccess);
    }
  }
  template <typename T>
  explicit DeviceArray(const std::vector<T>& values)
      : DeviceArray(values.data(), values.size() * sizeof(T)) {}
  explicit DeviceArray(const Tensor& tensor)
      : DeviceArray(tensor.data(), tensor.size() * DTypeSize(tensor.dtype())) {}
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  template <typename T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }
  void Read(void* host) const {
    if (bytes_ == 0) return;
    EXPECT_EQ(cudaMemcpy(host, data_, bytes_, cudaMemcpyDeviceToHost), cudaSuccess);
  }
  template <typename T>
  std::vector<T> Read() const {
    std::vector<T> values(bytes_ / sizeof(T));
    Read(values.data());
    return values;
  }
  Tensor ReadTensor(DType dtype) const {
    Tensor tensor(dtype, bytes_ / DTypeSize(dtype));
    Read(tensor.data());
    return tensor;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_;
};

}  // namespace zipage::testing
