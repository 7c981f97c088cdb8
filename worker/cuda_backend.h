#pragma once
// The CUDA backend: memory, copies, matrix products and kernels of one device, on one stream. This
// header needs no CUDA; a build without ZIPAGE_CUDA has the functions too, and they say so.

#include <memory>

#include "proto/status.h"
#include "worker/backend.h"

namespace zipage {

// Devices that this process can use; 0 in a build without CUDA, or with no driver.
int NumCudaDevices();

// Backend of the device with the given index. kInvalidArgument if this build has no CUDA or there
// is no such device, kFailedPrecondition for a device older than sm_80, kInternal if CUDA fails.
absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int device);

}  // namespace zipage
