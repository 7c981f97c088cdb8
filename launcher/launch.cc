// zipage-launch: starts an engine on this host, watches it, and leaves nothing behind.

#include <fcntl.h>
#include <glog/logging.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "launcher/client.h"
#include "launcher/dry_run.h"
#include "launcher/engine_processes.h"
#include "launcher/engine_run.h"
#include "launcher/exit_status.h"
#include "launcher/run_directory.h"
#include "launcher/supervisor.h"
#include "proto/config.h"

namespace {

using zipage::Config;

struct LaunchOptions {
  std::string job;
  std::string output;
  bool overwrite = false;
  std::string run_dir;
  bool quiet = false;
  bool dry_run = false;
};

void AddLaunchOptions(CLI::App* app, LaunchOptions* options) {
  app->add_option("--job", options->job,
                  "Job file (JSON Lines) to run; the engine stops when it is done. Without it the "
                  "engine serves jobs of zipage-submit until it is stopped");
  app->add_option("--output", options->output, "File for the results of --job");
  app->add_flag("--overwrite", options->overwrite, "Replace the output file if it exists");
  app->add_option(
      "--run_dir", options->run_dir,
      "Directory for sockets and the resolved configuration, new or empty; removed at the "
      "end. Default: a new one in $XDG_RUNTIME_DIR/zipage or /tmp/zipage-UID");
  app->add_flag("--quiet", options->quiet, "Show no progress");
  app->add_flag("--dry_run", options->dry_run,
                "Start nothing and load no weights: print the memory that weights, KV cache, query "
                "windows, scores and scratch take, how many sequences run at once with and without "
                "compression, and from which output length compression wins; a job is not touched");
  app->footer(zipage::kExitStatusHelp);
}

int Fail(const absl::Status& status, int exit_status) {
  absl::FPrintF(stderr, "zipage-launch: %s\n", status.message());
  return exit_status;
}

// Under Slurm one task starts the engine, with all its ranks.
absl::Status CheckSlurmTask() {
  const char* text = std::getenv("SLURM_PROCID");
  int task = 0;
  if (text == nullptr || !absl::SimpleAtoi(text, &task) || task == 0) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrFormat("this is task %d of a Slurm step, and task 0 starts the whole engine; use "
                      "srun --ntasks=1, or "
                      "unset SLURM_PROCID to run an engine in every task",
                      task));
}

absl::StatusOr<std::optional<zipage::SubmitJob>> MakeJob(const LaunchOptions& options) {
  if (options.job.empty() && options.output.empty()) return std::optional<zipage::SubmitJob>();
  if (options.job.empty() || options.output.empty()) {
    return absl::InvalidArgumentError("job and output belong together: --job IN --output OUT");
  }
  zipage::SubmitJob job;
  job.input_path = options.job;
  job.output_path = options.output;
  job.overwrite = options.overwrite;
  ZIPAGE_RETURN_IF_ERROR(zipage::PrepareJob(&job));
  return std::optional<zipage::SubmitJob>(job);
}

// The folder of this program, where the others are too.
absl::StatusOr<std::string> ProgramDirectory() {
  std::error_code error;
  const std::filesystem::path self = std::filesystem::read_symlink("/proc/self/exe", error);
  if (error) {
    return absl::InternalError(
        absl::StrFormat("cannot read /proc/self/exe: %s; is /proc mounted?", error.message()));
  }
  return self.parent_path().string();
}

absl::StatusOr<int> Launch(const Config& config, const LaunchOptions& options,
                           std::optional<zipage::SubmitJob> job) {
  ZIPAGE_ASSIGN_OR_RETURN(const std::string programs, ProgramDirectory());
  // The supervisor first: signals that come from here on are answered by an orderly end.
  ZIPAGE_ASSIGN_OR_RETURN(std::unique_ptr<zipage::Supervisor> supervisor,
                          zipage::Supervisor::Create());
  if (options.dry_run) return zipage::DryRun(config, programs, supervisor.get());
  std::unique_ptr<zipage::RunDirectory> run_directory;
  if (options.run_dir.empty()) {
    ZIPAGE_ASSIGN_OR_RETURN(run_directory,
                            zipage::RunDirectory::CreateIn(zipage::RunBases().front()));
  } else {
    ZIPAGE_ASSIGN_OR_RETURN(run_directory, zipage::RunDirectory::CreateAt(options.run_dir));
  }
  ZIPAGE_RETURN_IF_ERROR(run_directory->WriteFile(zipage::kConfigFileName, zipage::ToToml(config)));
  zipage::FileDescriptor shared_memory;
  std::optional<int> shm_fd;
  if (config.tp > 1) {
    ZIPAGE_ASSIGN_OR_RETURN(shared_memory, zipage::MakeSharedMemory());
    shm_fd = shared_memory.get();
  }
  zipage::EngineRun run(config, *run_directory, supervisor.get(), std::move(job), options.quiet);
  absl::StatusOr<int> status =
      run.Run(zipage::EngineProcesses(config, *run_directory, programs, shm_fd));
  supervisor.reset();  // Nobody may still use the directory when it is removed.
  return status;
}

// Descriptors 0 to 2 of a program started without them would go to sockets and pipes.
void OpenStandardFiles() {
  int fd = 0;
  do {
    fd = open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd >= 0) close(fd);
}

}  // namespace

// Memory alone makes this throw, and then ending is right.
int main(int argc, char** argv) {  // NOLINT(bugprone-exception-escape)
  OpenStandardFiles();
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  CLI::App app("Starts a Zipage engine on this host: a scheduler and one worker per rank.");
  Config config;
  LaunchOptions options;
  zipage::AddOptions(&app, &config);
  AddLaunchOptions(&app, &options);
  if (absl::Status parsed = zipage::ParseCommandLine(&app, argc, argv); !parsed.ok()) {
    if (absl::IsCancelled(parsed)) return zipage::kExitComplete;
    return Fail(parsed, zipage::kExitUsage);
  }
  absl::Status status = zipage::Validate(config);
  if (status.ok()) status = zipage::ResolveDevice(&config);
  if (status.ok()) status = CheckSlurmTask();
  if (!status.ok()) return Fail(status, zipage::kExitUsage);
  // To look at a job's input would consume it if it is a pipe.
  absl::StatusOr<std::optional<zipage::SubmitJob>> job =
      options.dry_run ? std::nullopt : MakeJob(options);
  if (!job.ok()) return Fail(job.status(), zipage::kExitUsage);
  absl::StatusOr<int> exit_status = Launch(config, options, *std::move(job));
  if (!exit_status.ok()) return Fail(exit_status.status(), zipage::kExitFailed);
  return *exit_status;
}
