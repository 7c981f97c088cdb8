// What cuda_backend.h promises, in a build without CUDA.

#include "worker/cuda_backend.h"

namespace zipage {

int NumCudaDevices() { return 0; }

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int /*device*/) {
  return absl::InvalidArgumentError(
      "device is cuda, this build has cpu only; use device cpu or build with ZIPAGE_CUDA=ON");
}

}  // namespace zipage
