#pragma once
// What every launcher needs: a launch's outcome as a Status, element types and head dimensions as
// template arguments.

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "kernels/tensor.h"

namespace zipage::cuda {

// The outcome of the launch just made. Does not wait: what a kernel does wrong while it runs shows
// in a later call.
inline absl::Status LaunchStatus(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(
      absl::StrCat("CUDA kernel ", kernel, " was not launched: ", cudaGetErrorString(error)));
}

// Lets a kernel use more than 48 KiB of dynamic shared memory.
template <typename Kernel>
absl::Status AllowSharedMemory(Kernel* kernel, int bytes, const char* name) {
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::InternalError(absl::StrCat("CUDA kernel ", name, " needs ", bytes,
                                          " bytes of shared memory: ", cudaGetErrorString(error)));
}

inline absl::Status UnsupportedDType(const char* kernel, DType dtype) {
  return absl::UnimplementedError(
      absl::StrCat(kernel, " on CUDA has no ", DTypeName(dtype), "; use float32 or bfloat16"));
}

// Calls fn with a null pointer to the device type of an activation's element.
template <typename Fn>
absl::Status DispatchActivation(const char* kernel, DType dtype, Fn fn) {
  switch (dtype) {
    case DType::kFloat32:
      return fn(static_cast<float*>(nullptr));
    case DType::kBFloat16:
      return fn(static_cast<__nv_bfloat16*>(nullptr));
    case DType::kFloat16:
      break;
  }
  return UnsupportedDType(kernel, dtype);
}

inline bool IsAligned(const void* pointer, size_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

template <typename T>
constexpr T CeilDiv(T a, std::type_identity_t<T> b) {
  return (a + b - 1) / b;
}

}  // namespace zipage::cuda
