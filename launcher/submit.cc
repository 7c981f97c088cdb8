// zipage-submit: hands a job to a running engine and watches it.

#include <signal.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>

#include "absl/strings/str_format.h"
#include "launcher/client.h"
#include "launcher/exit_status.h"
#include "launcher/job_watch.h"
#include "launcher/progress.h"
#include "launcher/run_directory.h"
#include "proto/config.h"
#include "proto/transport.h"

namespace {

using Clock = std::chrono::steady_clock;
using zipage::EngineAddress;
using zipage::JobClient;

struct SubmitOptions {
  zipage::EngineSelection selection;
  zipage::SubmitJob job;
  bool detach = false;
  bool cancel_on_exit = false;
  bool quiet = false;
  uint64_t cancel = 0;
  std::string curve_keygen;
};

volatile sig_atomic_t received_signal = 0;

void AddSubmitOptions(CLI::App* app, SubmitOptions* options) {
  zipage::EngineSelection& engine = options->selection;
  app->add_option("--engine", engine.engine,
                  "Run directory of the engine. Default: the only one of this user that runs");
  app->add_option("--endpoint", engine.endpoint,
                  "Job socket of the engine, such as tcp://HOST:PORT");
  app->add_option("--job", options->job.input_path, "Job file (JSON Lines)");
  app->add_option("--output", options->job.output_path, "File for the results");
  app->add_flag("--overwrite", options->job.overwrite, "Replace the output file if it exists");
  app->add_option("--name", options->job.name, "Name of the job for people. Default: of its file");
  app->add_flag("--detach", options->detach, "Return when the engine has accepted the job");
  app->add_flag("--cancel_on_exit", options->cancel_on_exit,
                "Cancel the job on Ctrl-C; else it goes on");
  app->add_flag("--quiet", options->quiet, "Show no progress");
  app->add_option("--cancel", options->cancel, "Cancel the job with this id, and return");
  app->add_option("--curve_server_key", engine.curve_server_key,
                  "Public key of an engine behind CURVE, 40 characters");
  app->add_option("--curve_key_file", engine.curve_key_file, "File with the own CURVE key pair");
  app->add_option("--curve_keygen", options->curve_keygen,
                  "Write a new CURVE key pair to this file, print its public key, and return");
  app->footer(zipage::kExitStatusHelp);
}

int Fail(const absl::Status& status, int exit_status) {
  absl::FPrintF(stderr, "zipage-submit: %s\n", status.message());
  return exit_status;
}

int Keygen(const std::string& path) {
  const zipage::transport::CurveKeys keys = zipage::transport::GenerateCurveKeys();
  const absl::Status status = zipage::transport::WriteCurveKeyFile(path, keys);
  if (!status.ok()) return Fail(status, zipage::kExitFailed);
  absl::PrintF("%s\n", keys.public_key);
  return zipage::kExitComplete;
}

int Cancel(JobClient* client, uint64_t job_id) {
  const absl::StatusOr<zipage::ClientReply> reply = client->Call(zipage::CancelJob{job_id});
  if (!reply.ok()) return Fail(reply.status(), zipage::kExitFailed);
  if (const auto* refused = std::get_if<zipage::Refused>(&*reply)) {
    return Fail(absl::InvalidArgumentError(refused->message), zipage::kExitFailed);
  }
  absl::PrintF("job %d is cancelled\n", job_id);
  return zipage::kExitComplete;
}

std::string EngineFlag(const EngineAddress& address) {
  return address.run_directory.empty() ? absl::StrFormat("--endpoint %s", address.endpoint)
                                       : absl::StrFormat("--engine %s", address.run_directory);
}

// Ctrl-C or SIGTERM while the job runs.
int Leave(const EngineAddress& address, uint64_t job_id, bool cancel) {
  if (cancel) {
    // On a connection of its own: the watch's may have a reply on its way.
    const absl::StatusOr<std::unique_ptr<JobClient>> client = JobClient::Connect(address);
    if (!client.ok()) return Fail(client.status(), zipage::kExitFailed);
    const int status = Cancel(client->get(), job_id);
    return status == zipage::kExitComplete ? zipage::kExitUnfinished : status;
  }
  absl::FPrintF(stderr, "zipage-submit: job %d goes on; zipage-submit %s --cancel %d cancels it\n",
                job_id, EngineFlag(address), job_id);
  return 128 + received_signal;
}

int Watch(JobClient* client, const EngineAddress& address, const SubmitOptions& options) {
  constexpr std::chrono::milliseconds kTurn{50};
  const Clock::time_point start = Clock::now();
  zipage::ProgressPrinter printer(stderr, options.quiet);
  zipage::RateMeter token_rate(10);
  zipage::RateMeter line_rate(60);
  zipage::JobWatch watch(client, start);
  if (absl::Status sent = watch.Submit(options.job); !sent.ok()) {
    return Fail(sent, zipage::kExitFailed);
  }
  bool accepted = false;
  while (true) {
    const Clock::time_point now = Clock::now();
    const double seconds = std::chrono::duration<double>(now - start).count();
    const absl::StatusOr<bool> news = watch.Advance(now);
    absl::Status status = news.status();
    if (status.ok() && watch.Silence(now) > zipage::kAnswerTimeout) {
      status = client->NoAnswer(watch.Silence(now));
    }
    if (status.ok() && !address.run_directory.empty() &&
        !zipage::IsEngineRunning(address.run_directory) && !watch.ended()) {
      status = absl::UnavailableError(
          "the engine ended before it reported the job as done; submit it again to finish");
    }
    if (!status.ok()) {
      printer.Clear();
      const bool stopped = watch.engine().has_value() && watch.engine()->draining;
      return Fail(status, stopped ? zipage::kExitUnfinished : zipage::kExitFailed);
    }
    if (watch.job_id().has_value() && !accepted) {
      accepted = true;
      if (options.detach) {
        absl::PrintF("%d\n", *watch.job_id());
        return zipage::kExitComplete;
      }
      printer.Update(seconds, absl::StrFormat("job %d accepted", *watch.job_id()), /*news=*/true);
    }
    if (*news && watch.job() != nullptr) {
      const zipage::JobStatus& job = *watch.job();
      token_rate.Add(seconds, job.output_tokens);
      line_rate.Add(seconds, job.num_succeeded + job.num_failed);
      printer.Update(seconds, zipage::ProgressLine(*watch.engine(), job, token_rate.PerSecond(),
                                                   zipage::EtaSeconds(job, line_rate.PerSecond())));
    }
    if (watch.ended()) {
      printer.Clear();
      absl::PrintF("%s", zipage::Summary(*watch.engine(), *watch.job(), seconds));
      return zipage::JobExitStatus(*watch.job());
    }
    // Before the answer to the submission the job has no id to name or cancel.
    if (received_signal != 0 && accepted) {
      printer.Clear();
      return Leave(address, *watch.job_id(), options.cancel_on_exit);
    }
    std::this_thread::sleep_for(kTurn);
  }
}

int Run(const SubmitOptions& given) {
  SubmitOptions options = given;
  if (!options.curve_keygen.empty()) return Keygen(options.curve_keygen);
  const bool cancels = options.cancel != 0;
  if (!cancels && (options.job.input_path.empty() || options.job.output_path.empty())) {
    return Fail(absl::InvalidArgumentError(
                    "give --job IN and --output OUT, or --cancel ID, or --curve_keygen FILE"),
                zipage::kExitUsage);
  }
  if (!cancels) {
    if (absl::Status ready = zipage::PrepareJob(&options.job); !ready.ok()) {
      return Fail(ready, zipage::kExitUsage);
    }
  }
  const absl::StatusOr<EngineAddress> address =
      zipage::FindEngine(options.selection, zipage::RunBases());
  if (!address.ok()) return Fail(address.status(), zipage::kExitUsage);
  const absl::StatusOr<std::unique_ptr<JobClient>> client = JobClient::Connect(*address);
  if (!client.ok()) return Fail(client.status(), zipage::kExitUsage);
  if (cancels) return Cancel(client->get(), options.cancel);
  for (int number : {SIGINT, SIGTERM}) signal(number, [](int n) { received_signal = n; });
  return Watch(client->get(), *address, options);
}

}  // namespace

// Memory alone makes this throw, and then ending is right.
int main(int argc, char** argv) {  // NOLINT(bugprone-exception-escape)
  CLI::App app("Hands a job to a running Zipage engine and watches it.");
  SubmitOptions options;
  AddSubmitOptions(&app, &options);
  if (absl::Status parsed = zipage::ParseCommandLine(&app, argc, argv); !parsed.ok()) {
    if (absl::IsCancelled(parsed)) return zipage::kExitComplete;
    return Fail(parsed, zipage::kExitUsage);
  }
  return Run(options);
}
