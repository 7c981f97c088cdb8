#include "launcher/engine_processes.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"

namespace zipage {
namespace {

constexpr off_t kSharedMemoryBytes = 64 << 20;
constexpr int kFirstEpoch = 1;

}  // namespace

absl::Status ResolveDevice(Config* config) {
#ifndef ZIPAGE_CUDA
  if (config->device == "cuda") {
    return absl::FailedPreconditionError(
        "device is cuda, and this build has no CUDA backend; use --device cpu or build the cuda "
        "preset");
  }
  config->device = "cpu";
#else
  (void)config;  // The workers see whether there is a device.
#endif
  return absl::OkStatus();
}

absl::StatusOr<FileDescriptor> MakeSharedMemory() {
  FileDescriptor memory(memfd_create("zipage-ranks", MFD_CLOEXEC));
  if (!memory.is_open() || ftruncate(memory.get(), kSharedMemoryBytes) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("cannot make %d MiB of memory shared by the ranks: %s; free some memory",
                        kSharedMemoryBytes >> 20, std::strerror(errno)));
  }
  return memory;
}

std::vector<ProcessSpec> EngineProcesses(const Config& config, const RunDirectory& run_directory,
                                         const std::string& program_directory,
                                         std::optional<int> shm_fd) {
  const std::string config_path = absl::StrCat(run_directory.path(), "/", kConfigFileName);
  std::vector<ProcessSpec> processes;
  ProcessSpec scheduler;
  scheduler.name = kSchedulerName;
  scheduler.argv = {absl::StrCat(program_directory, "/zipage-scheduler"), "--config", config_path,
                    "--run_dir", run_directory.path()};
  // It outlives a killed launcher for a moment, to remove the run directory.
  scheduler.dies_with_parent = false;
  processes.push_back(scheduler);

  for (int rank = 0; rank < config.tp; ++rank) {
    ProcessSpec worker;
    worker.name = absl::StrCat("worker rank ", rank);
    worker.argv = {absl::StrCat(program_directory, "/zipage-worker"),
                   "--config",
                   config_path,
                   "--run_dir",
                   run_directory.path(),
                   "--epoch",
                   absl::StrCat(kFirstEpoch),
                   "--rank",
                   absl::StrCat(rank),
                   "--endpoint",
                   run_directory.Endpoint(kWorkerSocketName)};
    if (shm_fd.has_value()) {
      worker.argv.insert(worker.argv.end(), {"--shm_fd", absl::StrCat(*shm_fd)});
      worker.fds.push_back(*shm_fd);
    }
    // libgomp reads it when it is loaded. Waiting threads that spin take whole time slices from the
    // other ranks and from the scheduler.
    worker.environment = {{"OMP_WAIT_POLICY", "passive"}};
    processes.push_back(worker);
  }
  return processes;
}

}  // namespace zipage
