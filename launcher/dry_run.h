#pragma once
// zipage-launch --dry_run: the memory plan of an engine that is not started. A worker program
// computes and prints it, from the model's shapes alone.

#include <string>

#include "launcher/supervisor.h"
#include "proto/config.h"
#include "proto/status.h"

namespace zipage {

// Runs zipage-worker of `program_directory` for it, whose output goes to standard output, and
// returns its exit status; 128 + signal if a signal ends this program meanwhile. The configuration
// travels in memory, so nothing is left behind, however this ends. An error is the line to print
// before exiting with kExitFailed. No process is left on return.
absl::StatusOr<int> DryRun(const Config& config, const std::string& program_directory,
                           Supervisor* supervisor);

}  // namespace zipage
