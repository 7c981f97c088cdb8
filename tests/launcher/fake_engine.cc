#include "tests/launcher/fake_engine.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

#include "proto/messages.h"
#include "proto/transport.h"
#include "proto/wire.h"
#include "tests/launcher/temp_dir.h"

namespace zipage {
namespace {

volatile sig_atomic_t told_to_stop = 0;

// Every flag has a value but --dry_run.
std::map<std::string, std::string> Flags(int argc, char** argv) {
  std::map<std::string, std::string> flags;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    flags[name] = name == "--dry_run" || i + 1 == argc ? "" : argv[++i];
  }
  return flags;
}

std::string Variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

int FailWith(const std::map<std::string, std::string>& flags, const std::string& reason) {
  const std::string line = reason + "\n";
  if (write(std::stoi(flags.at("--error_fd")), line.data(), line.size()) < 0) return 99;
  return 1;
}

// Waits for the launcher's death in a thread of its own.
void WatchLife(int life_fd, const std::string& remove) {
  std::thread([life_fd, remove] {
    pollfd waiting{life_fd, POLLIN, 0};
    while (poll(&waiting, 1, -1) <= 0) {
    }
    // Only with the lock is the directory nobody else's.
    const int lock = remove.empty() ? -1 : open((remove + "/lock").c_str(), O_RDWR | O_CLOEXEC);
    if (lock >= 0 && flock(lock, LOCK_EX | LOCK_NB) == 0) std::filesystem::remove_all(remove);
    _exit(1);
  }).detach();
}

// With FAKE_SETSID the caller goes on in a grandchild that left the session and the process group,
// while the child waits for it, as a wrapper script would.
void MaybeLeaveSession(bool dies_with_parent) {
  if (Variable("FAKE_SETSID").empty()) return;
  const pid_t child = fork();
  if (child == 0) {
    setsid();
    if (dies_with_parent) prctl(PR_SET_PDEATHSIG, SIGKILL);
    return;
  }
  int status = 0;
  waitpid(child, &status, 0);
  _exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
}

class FakeJobs {
 public:
  explicit FakeJobs(int tp) {
    status_.model = "fake";
    status_.ready = true;
    status_.num_blocks = 10;
    for (int rank = 0; rank < tp; ++rank) {
      status_.workers.push_back({static_cast<uint32_t>(rank), 1, WorkerPhase::kIdle, 0, 0, "fake"});
    }
  }

  ClientReply Answer(const ClientMessage& message) {
    if (const auto* submit = std::get_if<SubmitJob>(&message)) return Accept(*submit);
    if (const auto* cancel = std::get_if<CancelJob>(&message)) {
      if (cancel->job_id == 0 || cancel->job_id > status_.jobs.size()) {
        return Refused{"no such job"};
      }
      status_.jobs[cancel->job_id - 1].state = JobState::kCancelled;
      return JobCancelled{cancel->job_id};
    }
    EngineStatus now = status_;
    now.draining = told_to_stop != 0;
    return now;
  }

 private:
  ClientReply Accept(const SubmitJob& submit) {
    if (Variable("FAKE_SCHEDULER") == "refuse") return Refused{"the output exists; use overwrite"};
    JobStatus job;
    job.id = status_.jobs.size() + 1;
    job.name = submit.name;
    job.input_path = submit.input_path;
    job.output_path = submit.output_path;
    job.num_lines = submit.num_lines;
    if (Variable("FAKE_ENDLESS").empty()) {
      const std::string failed = Variable("FAKE_FAILED_LINES");
      job.state = JobState::kFinished;
      job.num_failed = failed.empty() ? 0 : std::stoull(failed);
      job.num_succeeded = job.num_lines - job.num_failed;
      job.output_tokens = 10 * job.num_succeeded;
    }
    status_.jobs.push_back(job);
    return JobAccepted{job.id};
  }

  EngineStatus status_;
};

int PrintPlan(const std::map<std::string, std::string>& flags) {
  const std::string mode = Variable("FAKE_WORKER");
  if (mode == "fail") {
    FailWith(flags, "model is /m, which has no config.json; give another");
    return 2;
  }
  const std::string text =
      mode == "hang" ? std::to_string(getpid()) + "\n" : ReadText(flags.at("--config"));
  if (write(STDOUT_FILENO, text.data(), text.size()) < 0) return 99;
  while (mode == "hang") pause();
  return 0;
}

}  // namespace

int FakeSchedulerMain(int argc, char** argv) {
  MaybeLeaveSession(/*dies_with_parent=*/false);
  const std::map<std::string, std::string> flags = Flags(argc, argv);
  const std::string run_dir = flags.at("--run_dir");
  const std::string mode = Variable("FAKE_SCHEDULER");
  signal(SIGTERM, [](int) { told_to_stop = 1; });
  WatchLife(std::stoi(flags.at("--life_fd")), run_dir);
  if (ReadText(flags.at("--config")).empty()) return FailWith(flags, "no configuration");
  if (mode == "fail") return FailWith(flags, "tokenizer.json is missing; copy it");
  if (mode == "hang") {
    while (true) pause();
  }
  transport::Context context;
  auto socket = transport::ServerSocket::Bind(&context, "ipc://" + run_dir + "/job.sock", {});
  if (!socket.ok()) return FailWith(flags, std::string(socket.status().message()));
  FakeJobs jobs(/*tp=*/1);
  while (told_to_stop == 0) {
    transport::WaitReadable({socket->get()}, std::chrono::milliseconds(20));
    while (auto received = (*socket)->Receive()) {
      auto message = wire::DecodeClientMessage(received->bytes);
      if (!message.ok()) return FailWith(flags, std::string(message.status().message()));
      const absl::Status sent =
          (*socket)->Send(received->peer, wire::Encode(jobs.Answer(*message)));
      if (!sent.ok()) continue;  // A client that left.
    }
  }
  WriteText(run_dir + "/shutdown", "");
  return mode == "unfinished" ? 75 : 0;
}

int FakeWorkerMain(int argc, char** argv) {
  MaybeLeaveSession(/*dies_with_parent=*/true);
  const std::map<std::string, std::string> flags = Flags(argc, argv);
  WatchLife(std::stoi(flags.at("--life_fd")), "");
  if (flags.contains("--dry_run")) return PrintPlan(flags);
  if (Variable("FAKE_WORKER") == "fail" && flags.at("--rank") == "0") {
    return FailWith(flags, "model.safetensors is truncated; copy it again");
  }
  while (!std::filesystem::exists(flags.at("--run_dir") + "/shutdown")) {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return 0;
}

}  // namespace zipage
