#pragma once
// One tensor-parallel rank from its first message to its last: connect, Hello, load, Ready, Start,
// then plan in and result out until Shutdown. A second thread sends heartbeats, also while a step
// runs. Owns everything of the rank; nothing is global, so tests run several ranks as threads.

#include <cstdint>
#include <memory>
#include <string>

#include "proto/config.h"
#include "proto/status.h"
#include "worker/backend.h"
#include "worker/comm/shared_memory.h"

namespace zipage {

struct WorkerOptions {
  int rank = 0;
  uint64_t epoch = 1;
  std::string endpoint;  // the scheduler's socket for workers
  std::string run_dir;   // the engine's private directory; Gloo's ranks meet there
  // Shared by all ranks of the epoch; null: none was handed over.
  std::shared_ptr<SharedMemory> shared_memory;
};

// What the rank computes on. kInvalidArgument for a device that this build lacks.
absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const Config& config);

// Returns when the scheduler says so (OK) or with the error that was reported to it as WorkerError.
// Blocks; run one per thread. A scheduler that is gone is not noticed: the process's life pipe does
// that (main.cc).
absl::Status RunWorker(const WorkerOptions& options, const Config& config);

}  // namespace zipage
