#include "launcher/dry_run.h"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "launcher/file_descriptor.h"

namespace zipage {
namespace {

// A file without a name that holds `text`: gone when the last process that has it open is.
absl::StatusOr<FileDescriptor> MemoryFile(const std::string& text) {
  FileDescriptor file(memfd_create("zipage-config", MFD_CLOEXEC));
  size_t written = 0;
  while (file.is_open() && written < text.size()) {
    const ssize_t n = write(file.get(), text.data() + written, text.size() - written);
    if (n < 0 && errno != EINTR) break;
    if (n > 0) written += static_cast<size_t>(n);
  }
  if (!file.is_open() || written < text.size()) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "cannot hand the options to the worker: %s; free some memory", std::strerror(errno)));
  }
  return file;
}

}  // namespace

absl::StatusOr<int> DryRun(const Config& config, const std::string& program_directory,
                           Supervisor* supervisor) {
  ZIPAGE_ASSIGN_OR_RETURN(const FileDescriptor config_file, MemoryFile(ToToml(config)));
  ProcessSpec worker;
  worker.name = "worker";
  worker.argv = {absl::StrCat(program_directory, "/zipage-worker"), "--config",
                 absl::StrCat("/proc/self/fd/", config_file.get()), "--dry_run"};
  worker.fds = {config_file.get()};
  worker.prints_results = true;
  ZIPAGE_RETURN_IF_ERROR(supervisor->Start(worker));
  while (true) {
    const Supervisor::Event event = supervisor->Wait(std::chrono::hours(1));
    if (event.kind == Supervisor::EventKind::kSignal) {
      supervisor->KillAll();
      return 128 + event.signal;
    }
    if (event.kind != Supervisor::EventKind::kEnd) continue;
    const ProcessEnd& end = event.end;
    if (end.Exited(0)) return 0;
    if (!WIFEXITED(end.wait_status) || end.reason.empty()) {
      return absl::InternalError(end.Describe());
    }
    absl::FPrintF(stderr, "zipage-launch: %s\n", end.reason);
    return WEXITSTATUS(end.wait_status);
  }
}

}  // namespace zipage
