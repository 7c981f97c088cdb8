// zipage-worker: one tensor-parallel rank as a process. Started by zipage-launch, whose end is this
// process's end.

#include <glog/logging.h>
#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <memory>
#include <new>
#include <string>
#include <thread>

#include "proto/config.h"
#include "worker/dry_run.h"
#include "worker/worker.h"

namespace {

// Ends the process when the launcher's end of the pipe closes, however the launcher dies. Also
// covers a launcher that died before the process asked for its death signal.
void DieWithPipe(int fd) {
  std::thread([fd] {
    char byte;
    while (true) {
      const ssize_t got = read(fd, &byte, 1);
      if (got == 0 || (got < 0 && errno != EINTR)) _exit(1);
    }
  }).detach();
}

void PrintPrefix(std::ostream& out, const google::LogMessageInfo& info, void* rank) {
  out << info.severity[0] << " worker " << *static_cast<const int*>(rank) << " " << info.filename
      << ':' << info.line_number << ']';
}

// Tells why the process ends, to the launcher or, without one, to the terminal.
void Report(const absl::Status& status, int error_fd) {
  const std::string line = std::string(status.message()) + "\n";
  if (error_fd < 0 || write(error_fd, line.data(), line.size()) < 0) fputs(line.c_str(), stderr);
}

absl::Status PrintDryRun(const zipage::Config& config) {
  ZIPAGE_ASSIGN_OR_RETURN(const std::unique_ptr<zipage::Backend> backend,
                          zipage::MakeBackend(config));
  ZIPAGE_ASSIGN_OR_RETURN(const std::string text, zipage::DryRun(config, *backend));
  if (fputs(text.c_str(), stdout) < 0 || fflush(stdout) != 0) {
    return absl::UnavailableError("the memory plan cannot be written to standard output");
  }
  return absl::OkStatus();
}

int Run(int argc, char** argv, int* rank, int* error_fd) {
  zipage::Config config;
  zipage::WorkerOptions options;
  int shm_fd = -1;
  int life_fd = -1;
  CLI::App app("Zipage worker: one tensor-parallel rank; started by zipage-launch",
               "zipage-worker");
  zipage::AddOptions(&app, &config);
  app.add_option("--rank", *rank, "Tensor-parallel rank, from 0");
  app.add_option("--epoch", options.epoch, "Life of the set of workers, from 1");
  bool dry_run = false;
  app.add_flag("--dry_run", dry_run, "Print how the memory would be divided, load nothing, exit");
  app.add_option("--endpoint", options.endpoint, "The scheduler's socket for workers");
  app.add_option("--run_dir", options.run_dir, "The engine's private directory");
  app.add_option("--shm_fd", shm_fd, "File descriptor of the ranks' shared memory");
  app.add_option("--life_fd", life_fd, "Read end of a pipe; the worker ends when it closes");
  app.add_option("--error_fd", *error_fd, "Pipe that takes the reason of a failure");
  absl::Status status = zipage::ParseCommandLine(&app, argc, argv);
  if (absl::IsCancelled(status)) return 0;
  if (status.ok()) status = zipage::Validate(config);
  if (status.ok() && (*rank < 0 || *rank >= config.tp)) {
    status = absl::InvalidArgumentError("rank is " + std::to_string(*rank) + ", tp is " +
                                        std::to_string(config.tp) + "; give a rank below tp");
  }
  if (status.ok() && options.endpoint.empty() && !dry_run) {
    status = absl::InvalidArgumentError("endpoint is missing; zipage-launch starts workers");
  }
  if (!status.ok()) {
    Report(status, *error_fd);
    return 2;
  }
  if (dry_run) {
    status = PrintDryRun(config);
    if (status.ok()) return 0;
    Report(status, *error_fd);
    return 1;
  }
  options.rank = *rank;
  if (life_fd >= 0) DieWithPipe(life_fd);
  // A terminal sends SIGINT to the whole group; the launcher decides what becomes of the worker.
  signal(SIGINT, SIG_IGN);
  signal(SIGTERM, SIG_IGN);
  signal(SIGPIPE, SIG_IGN);
  if (shm_fd >= 0) {
    absl::StatusOr<std::shared_ptr<zipage::SharedMemory>> memory =
        zipage::SharedMemory::Map(shm_fd);
    close(shm_fd);
    status = memory.status();
    if (memory.ok()) options.shared_memory = *std::move(memory);
  }
  if (status.ok()) status = zipage::RunWorker(options, config);
  if (status.ok()) return 0;
  Report(status, *error_fd);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  // Ends with the launcher. One that is gone by now sends no signal: the parent has changed, or the
  // life pipe is closed.
  const pid_t parent = getppid();
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) return 1;
  int rank = 0;
  int error_fd = -1;
  try {
    FLAGS_logtostderr = true;
    google::InitGoogleLogging(argv[0], &PrintPrefix, &rank);
    return Run(argc, argv, &rank, &error_fd);
  } catch (const std::bad_alloc&) {
    Report(absl::ResourceExhaustedError("out of memory; free some, or lower max_num_batched_tokens "
                                        "or max_num_seqs"),
           error_fd);
  } catch (const std::exception& e) {
    Report(absl::InternalError(e.what()), error_fd);
  }
  return 1;
}
