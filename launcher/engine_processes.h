#pragma once
// What an engine consists of: the command lines, environments and inherited files of its processes.

#include <optional>
#include <string>
#include <vector>

#include "launcher/file_descriptor.h"
#include "launcher/run_directory.h"
#include "launcher/supervisor.h"
#include "proto/config.h"
#include "proto/status.h"

namespace zipage {

inline constexpr char kSchedulerName[] = "scheduler";

// Settles what "auto" leaves open and this build can decide. Errors name what it cannot do.
absl::Status ResolveDevice(Config* config);

// Memory that the ranks of this host share, all zeros, sparse until touched. It has no name in the
// file system: it is gone when the last process that holds it is.
absl::StatusOr<FileDescriptor> MakeSharedMemory();

// The scheduler first, then the workers by rank; all programs are in `program_directory`. `shm_fd`
// is given to every worker; empty for one rank.
std::vector<ProcessSpec> EngineProcesses(const Config& config, const RunDirectory& run_directory,
                                         const std::string& program_directory,
                                         std::optional<int> shm_fd);

}  // namespace zipage
