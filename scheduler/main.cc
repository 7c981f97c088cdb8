// zipage-scheduler: the CPU process that owns every decision. Started by zipage-launch.

#include <fcntl.h>
#include <sys/file.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <filesystem>
#include <iostream>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "glog/logging.h"
#include "proto/config.h"
#include "proto/status.h"
#include "proto/transport.h"
#include "scheduler/engine.h"
#include "scheduler/text/chat_template.h"

namespace zipage {
namespace {

// Documented in zipage-launch --help.
constexpr int kExitDone = 0;
constexpr int kExitFailed = 1;
constexpr int kExitUsage = 2;
constexpr int kExitUnfinished = 75;

std::atomic<bool> stop_requested{false};

struct ProcessOptions {
  std::string run_dir;
  int life_fd = -1;
  int error_fd = -1;
};

// Waits on a thread of its own for the launcher's death, which closes the other end of the pipe:
// nobody else is left to remove the run directory then.
void WatchLauncher(int life_fd, std::string run_dir) {
  prctl(PR_SET_PDEATHSIG, SIGCONT);  // Wakes this process up for it, should it be stopped.
  std::thread([life_fd, run_dir = std::move(run_dir)] {
    char byte = 0;
    while (read(life_fd, &byte, 1) < 0 && errno == EINTR) {
    }
    // Only the holder of the lock may remove the directory; a new launcher may have been faster.
    const int lock = open((run_dir + "/lock").c_str(), O_RDWR | O_CLOEXEC);
    if (lock >= 0 && flock(lock, LOCK_EX | LOCK_NB) == 0) {
      std::error_code ignored;
      std::filesystem::remove_all(run_dir, ignored);
    }
    _exit(kExitFailed);
  }).detach();
}

absl::StatusOr<std::optional<transport::CurveServer>> LoadCurve(const Config& config) {
  if (config.curve_key_file.empty()) return std::optional<transport::CurveServer>();
  transport::CurveServer curve;
  ZIPAGE_ASSIGN_OR_RETURN(curve.keys, transport::ReadCurveKeyFile(config.curve_key_file));
  ZIPAGE_ASSIGN_OR_RETURN(curve.allowed_client_keys,
                          transport::ReadAllowedClientsFile(config.curve_allowed_clients_file));
  return std::optional<transport::CurveServer>(std::move(curve));
}

// Empty for a model without a chat template.
absl::StatusOr<std::optional<ChatTemplate>> LoadTemplate(const Tokenizer& tokenizer,
                                                         bool with_tools) {
  const std::optional<std::string> source = tokenizer.chat_template(with_tools);
  if (!source.has_value()) return std::optional<ChatTemplate>();
  ZIPAGE_ASSIGN_OR_RETURN(ChatTemplate chat_template, ChatTemplate::Parse(*source));
  return std::optional<ChatTemplate>(std::move(chat_template));
}

absl::StatusOr<bool> RunScheduler(const Config& config, const ProcessOptions& process) {
  // The sockets first: workers connect and clients ask for the status while the tokenizer loads.
  transport::Context context;
  ZIPAGE_ASSIGN_OR_RETURN(auto worker_socket,
                          transport::ServerSocket::Bind(
                              &context, "ipc://" + process.run_dir + "/worker.sock", std::nullopt));
  // Behind the mode of the run directory; the launcher and clients of this host use it.
  std::vector<std::unique_ptr<transport::ServerSocket>> job_sockets(1);
  ZIPAGE_ASSIGN_OR_RETURN(job_sockets[0],
                          transport::ServerSocket::Bind(
                              &context, "ipc://" + process.run_dir + "/job.sock", std::nullopt));
  if (!config.job_endpoint.empty()) {
    ZIPAGE_ASSIGN_OR_RETURN(const auto curve, LoadCurve(config));
    ZIPAGE_ASSIGN_OR_RETURN(job_sockets.emplace_back(),
                            transport::ServerSocket::Bind(&context, config.job_endpoint, curve));
    LOG(INFO) << "jobs are taken at " << job_sockets[1]->endpoint();
  }

  ZIPAGE_ASSIGN_OR_RETURN(const auto tokenizer, Tokenizer::Load(config.model));
  ZIPAGE_ASSIGN_OR_RETURN(const auto chat_template, LoadTemplate(*tokenizer, /*with_tools=*/false));
  ZIPAGE_ASSIGN_OR_RETURN(const auto tool_template, LoadTemplate(*tokenizer, /*with_tools=*/true));
  GenerationDefaults defaults;
  if (config.generation_config == "auto") {
    ZIPAGE_ASSIGN_OR_RETURN(defaults, ReadGenerationDefaults(config.model));
  }
  Engine::Parts parts = {config,
                         *tokenizer,
                         {.chat = chat_template.has_value() ? &*chat_template : nullptr,
                          .tools = tool_template.has_value() ? &*tool_template : nullptr},
                         defaults,
                         worker_socket.get(),
                         {}};
  for (const auto& socket : job_sockets) parts.job_sockets.push_back(socket.get());
  Engine engine(parts);
  return engine.Run(&stop_requested);
}

int Fail(const absl::Status& status, int error_fd, int exit_status) {
  const std::string line = std::string(status.message()) + "\n";
  if (error_fd < 0 || write(error_fd, line.data(), line.size()) < 0) std::cerr << line;
  return exit_status;
}

int Main(int argc, char** argv) {
  FLAGS_logtostderr = true;
  google::InitGoogleLogging("zipage-scheduler");
  CLI::App app("The scheduler process of a Zipage engine; zipage-launch starts it.");
  Config config;
  ProcessOptions process;
  AddOptions(&app, &config);
  app.add_option("--run_dir", process.run_dir, "Private directory of the engine")->required();
  app.add_option("--life_fd", process.life_fd,
                 "Pipe that reads end of file when the launcher dies");
  app.add_option("--error_fd", process.error_fd, "Pipe that takes the reason of a failure");
  absl::Status status = ParseCommandLine(&app, argc, argv);
  if (absl::IsCancelled(status)) return kExitDone;
  if (status.ok()) status = Validate(config);
  if (!status.ok()) return Fail(status, process.error_fd, kExitUsage);

  // Without SA_RESTART, so that a waiting socket wakes up.
  struct sigaction action {};
  action.sa_handler = [](int) { stop_requested = true; };
  sigaction(SIGTERM, &action, nullptr);
  signal(SIGXFSZ, SIG_IGN);  // A file-size limit is an error of write, for that job alone.
  signal(SIGINT, SIG_IGN);   // Ctrl-C reaches the whole group; the launcher decides what it means.
  if (process.life_fd >= 0) WatchLauncher(process.life_fd, process.run_dir);

  const absl::StatusOr<bool> all_done = RunScheduler(config, process);
  if (!all_done.ok()) return Fail(all_done.status(), process.error_fd, kExitFailed);
  return *all_done ? kExitDone : kExitUnfinished;
}

}  // namespace
}  // namespace zipage

int main(int argc, char** argv) { return zipage::Main(argc, argv); }
