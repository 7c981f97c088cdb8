#pragma once
// One engine from start to end: starts the processes, follows them and the job, stops them, and
// says in one line what went wrong first.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "launcher/client.h"
#include "launcher/job_watch.h"
#include "launcher/progress.h"
#include "launcher/run_directory.h"
#include "launcher/supervisor.h"
#include "proto/config.h"
#include "proto/messages.h"
#include "proto/status.h"

namespace zipage {

class EngineRun {
 public:
  // Without a job the engine serves until it is told to stop. All references outlive the run.
  EngineRun(const Config& config, const RunDirectory& run_directory, Supervisor* supervisor,
            std::optional<SubmitJob> job, bool quiet);

  // Starts `processes` and returns the exit status when none is left (exit_status.h). An error is
  // the line to print before exiting with kExitFailed; no process is left then either.
  absl::StatusOr<int> Run(const std::vector<ProcessSpec>& processes);

 private:
  using TimePoint = std::chrono::steady_clock::time_point;

  absl::Status Start(const std::vector<ProcessSpec>& processes);
  // One turn each; a status to return from Run, or nothing.
  std::optional<absl::StatusOr<int>> OnSignal(int signal);
  std::optional<absl::StatusOr<int>> OnEnd(const ProcessEnd& end);
  std::optional<absl::StatusOr<int>> OnTime(TimePoint now);
  // Tells the scheduler to finish; Run goes on until all processes have ended.
  void BeginStop(TimePoint now, std::chrono::milliseconds limit);
  void Show(TimePoint now);
  // Of an engine that ended as it should, whose scheduler ended with `scheduler_status`.
  int ExitStatus(int scheduler_status) const;

  double Seconds(TimePoint now) const {
    return std::chrono::duration<double>(now - start_).count();
  }

  const Config& config_;
  const RunDirectory& run_directory_;
  Supervisor* const supervisor_;
  const std::optional<SubmitJob> submit_;
  const TimePoint start_;
  ProgressPrinter printer_;
  RateMeter token_rate_{10};
  RateMeter line_rate_{60};
  std::unique_ptr<JobClient> client_;
  std::optional<JobWatch> watch_;
  std::string startup_line_;
  bool announced_ = false;  // That the engine is ready.
  bool job_shown_ = false;
  bool interrupted_ = false;                // By a signal, while work may remain.
  std::optional<TimePoint> stop_deadline_;  // Set while the engine is stopping.
  int scheduler_status_ = 0;                // Once it has ended.
};

}  // namespace zipage
