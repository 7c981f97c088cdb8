#include "launcher/engine_run.h"

#include <signal.h>
#include <sys/wait.h>

#include <algorithm>
#include <cstdio>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "launcher/engine_processes.h"
#include "launcher/exit_status.h"

namespace zipage {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTurn{50};
// For processes to end once there is nothing left to do, and beyond the drain limit.
constexpr std::chrono::milliseconds kStopGrace{10'000};
// For workers after the scheduler: they have nothing to lose, and some cannot hear of the end while
// they load weights.
constexpr std::chrono::milliseconds kWorkerGrace{2'000};

std::chrono::milliseconds Milliseconds(double seconds) {
  return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
}

}  // namespace

EngineRun::EngineRun(const Config& config, const RunDirectory& run_directory,
                     Supervisor* supervisor, std::optional<SubmitJob> job, bool quiet)
    : config_(config),
      run_directory_(run_directory),
      supervisor_(supervisor),
      submit_(std::move(job)),
      start_(Clock::now()),
      printer_(stderr, quiet) {}

absl::StatusOr<int> EngineRun::Run(const std::vector<ProcessSpec>& processes) {
  absl::Status started = Start(processes);
  while (started.ok()) {
    std::optional<absl::StatusOr<int>> result;
    const Supervisor::Event event = supervisor_->Wait(kTurn);
    switch (event.kind) {
      case Supervisor::EventKind::kNone:
        break;
      case Supervisor::EventKind::kSignal:
        result = OnSignal(event.signal);
        break;
      case Supervisor::EventKind::kEnd:
        result = OnEnd(event.end);
        break;
    }
    if (!result.has_value()) result = OnTime(Clock::now());
    if (result.has_value()) {
      printer_.Clear();
      supervisor_->KillAll();
      return *std::move(result);
    }
  }
  supervisor_->KillAll();
  return started;
}

absl::Status EngineRun::Start(const std::vector<ProcessSpec>& processes) {
  // Before the client, whose socket has a thread of its own: only one thread forks.
  for (const ProcessSpec& process : processes) {
    ZIPAGE_RETURN_IF_ERROR(supervisor_->Start(process));
  }
  // Without the run directory, whose lock is our own: only silence tells that nobody is there.
  ZIPAGE_ASSIGN_OR_RETURN(client_,
                          JobClient::Connect({run_directory_.Endpoint(kJobSocketName), "", {}}));
  watch_.emplace(client_.get(), Clock::now());
  return submit_.has_value() ? watch_->Submit(*submit_) : absl::OkStatus();
}

std::optional<absl::StatusOr<int>> EngineRun::OnSignal(int signal_number) {
  printer_.Clear();
  if (interrupted_) {
    absl::FPrintF(stderr, "zipage: ending at once\n");
    return 128 + signal_number;
  }
  interrupted_ = true;
  if (!stop_deadline_.has_value()) {
    absl::FPrintF(
        stderr,
        "zipage: stopping: running requests may finish for %.0f s, no new ones start; once "
        "more ends at once\n",
        config_.drain_timeout_s);
  }
  BeginStop(Clock::now(), Milliseconds(config_.drain_timeout_s) + kStopGrace);
  return std::nullopt;
}

std::optional<absl::StatusOr<int>> EngineRun::OnEnd(const ProcessEnd& end) {
  const bool is_scheduler = end.name == kSchedulerName;
  if (is_scheduler && interrupted_ && WIFSIGNALED(end.wait_status) &&
      WTERMSIG(end.wait_status) == SIGTERM) {
    // Our own signal came before the scheduler listened for it: it had nothing running yet.
    return submit_.has_value() ? kExitUnfinished : kExitComplete;
  }
  const bool orderly = end.Exited(kExitComplete) || (is_scheduler && end.Exited(kExitUnfinished));
  if (!stop_deadline_.has_value() || !orderly) {
    printer_.Clear();
    return absl::UnavailableError(supervisor_->EndAll(end).Describe());
  }
  if (is_scheduler) {
    scheduler_status_ = WEXITSTATUS(end.wait_status);
    // It was what the workers worked for.
    stop_deadline_ = std::min(*stop_deadline_, Clock::now() + kWorkerGrace);
  }
  if (supervisor_->num_running() > 0) return std::nullopt;
  return ExitStatus(scheduler_status_);
}

std::optional<absl::StatusOr<int>> EngineRun::OnTime(TimePoint now) {
  if (stop_deadline_.has_value() && now >= *stop_deadline_) {
    printer_.Clear();
    if (!supervisor_->IsRunning(kSchedulerName)) return ExitStatus(scheduler_status_);
    return absl::DeadlineExceededError(absl::StrFormat(
        "the scheduler did not stop within drain_timeout_s (%.0f s) and %d s more; it is killed",
        config_.drain_timeout_s, kStopGrace.count() / 1000));
  }
  if (!supervisor_->IsRunning(kSchedulerName)) return std::nullopt;  // Nobody to ask.
  absl::StatusOr<bool> news = watch_->Advance(now);
  if (!news.ok()) {
    // A stopping engine refuses a job that has not reached it in time.
    if (interrupted_) return std::nullopt;
    // Of an engine that may still work for others nobody submits to: it ends with its job.
    return news.status();
  }
  if (*news) Show(now);
  if (submit_.has_value() && watch_->ended() && !stop_deadline_.has_value()) {
    BeginStop(now, kStopGrace);
  }
  const double limit = watch_->heard() ? config_.heartbeat_timeout_s : config_.init_timeout_s;
  if (limit > 0 && !stop_deadline_.has_value() && watch_->Silence(now) > Milliseconds(limit)) {
    return absl::DeadlineExceededError(absl::StrFormat(
        "the scheduler has not answered for %.0f s (%s); it is killed, and its log above says what "
        "it did last",
        limit, watch_->heard() ? "heartbeat_timeout_s" : "init_timeout_s"));
  }
  return std::nullopt;
}

void EngineRun::BeginStop(TimePoint now, std::chrono::milliseconds limit) {
  if (!stop_deadline_.has_value()) supervisor_->Signal(kSchedulerName, SIGTERM);
  stop_deadline_ = now + limit;
}

void EngineRun::Show(TimePoint now) {
  const EngineStatus& engine = *watch_->engine();
  const double seconds = Seconds(now);
  if (!engine.ready) {
    const std::string line = absl::StrCat("zipage: starting: ", StartupLine(engine, config_.tp));
    printer_.Update(seconds, line, /*news=*/line != startup_line_);
    startup_line_ = line;
    return;
  }
  if (!announced_) {
    printer_.Clear();
    announced_ = true;
    if (submit_.has_value()) {
      printer_.Update(seconds, absl::StrFormat("zipage: ready after %s", FormatDuration(seconds)),
                      /*news=*/true);
    } else {
      absl::PrintF("zipage: %s is ready after %s\n", engine.model, FormatDuration(seconds));
      absl::PrintF("  submit:  zipage-submit --engine %s --job IN.jsonl --output OUT.jsonl\n",
                   run_directory_.path());
      absl::PrintF("  watch:   zipage-status --engine %s\n", run_directory_.path());
      if (!engine.job_endpoint.empty()) absl::PrintF("  also at: %s\n", engine.job_endpoint);
      absl::PrintF("  stop:    Ctrl-C or SIGTERM\n");
      fflush(stdout);
    }
  }
  const JobStatus* job = watch_->job();
  if (job == nullptr) return;
  token_rate_.Add(seconds, job->output_tokens);
  line_rate_.Add(seconds, job->num_succeeded + job->num_failed);
  printer_.Update(
      seconds,
      ProgressLine(engine, *job, token_rate_.PerSecond(), EtaSeconds(*job, line_rate_.PerSecond())),
      /*news=*/!std::exchange(job_shown_, true));
  if (watch_->ended()) {
    printer_.Clear();
    absl::PrintF("%s", Summary(engine, *job, seconds));
    fflush(stdout);
  }
}

int EngineRun::ExitStatus(int scheduler_status) const {
  if (submit_.has_value() && watch_->ended()) return JobExitStatus(*watch_->job());
  if (!submit_.has_value() || scheduler_status == kExitUnfinished) return scheduler_status;
  if (!watch_->job_id().has_value()) return kExitUnfinished;  // It was stopped before it took it.
  // It was told to stop and reports that everything is done; the last status seen is a little
  // older.
  const JobStatus* job = watch_->job();
  return job != nullptr && job->num_failed > 0 ? kExitPartial : kExitComplete;
}

}  // namespace zipage
