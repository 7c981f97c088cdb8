#pragma once
// Running programs from tests and looking at what is left of them.

#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "tests/launcher/temp_dir.h"

namespace zipage {

// Not there, or a zombie: PID 1 of a container may never reap it.
inline bool IsGone(pid_t pid) {
  const std::string stat = ReadText("/proc/" + std::to_string(pid) + "/stat");
  const size_t end = stat.rfind(')');
  return end == std::string::npos || stat.compare(end, 4, ") Z ") == 0;
}

// Processes, zombies aside, whose command line holds `text`; this one aside.
inline std::vector<pid_t> ProcessesNaming(const std::string& text) {
  std::vector<pid_t> found;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/proc", error)) {
    const pid_t pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0 || pid == getpid()) continue;
    if (ReadText(entry.path().string() + "/cmdline").find(text) == std::string::npos) continue;
    if (!IsGone(pid)) found.push_back(pid);
  }
  return found;
}

// Polls until `condition` holds; false if it does not in time, which a loaded machine never needs.
inline bool Eventually(const std::function<bool()>& condition,
                       std::chrono::seconds limit = std::chrono::seconds(60)) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return true;
}

// A program whose output goes to files; killed at the end if it still runs.
class Program {
 public:
  Program(const TempDir& dir, const std::string& label, std::vector<std::string> argv,
          const std::vector<std::pair<std::string, std::string>>& environment = {})
      : out_path_(dir / (label + ".out")), err_path_(dir / (label + ".err")) {
    std::vector<char*> pointers;
    for (std::string& a : argv) pointers.push_back(a.data());
    pointers.push_back(nullptr);
    pid_ = fork();
    if (pid_ != 0) return;
    prctl(PR_SET_PDEATHSIG, SIGKILL);  // Nothing outlives a test that is killed.
    sigset_t none;
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, nullptr);
    for (const auto& [key, value] : environment) setenv(key.c_str(), value.c_str(), 1);
    dup2(open(out_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDOUT_FILENO);
    dup2(open(err_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0600), STDERR_FILENO);
    execv(pointers[0], pointers.data());
    _exit(126);
  }
  ~Program() {
    Kill(SIGKILL);
    Wait();
  }
  Program(const Program&) = delete;
  Program& operator=(const Program&) = delete;

  pid_t pid() const { return pid_; }
  void Kill(int signal_number) {
    if (!waited_) kill(pid_, signal_number);
  }
  // Exit status; 128 + signal if one killed it.
  int Wait() {
    while (!waited_ && waitpid(pid_, &wait_status_, 0) < 0 && errno == EINTR) {
    }
    waited_ = true;
    return WIFEXITED(wait_status_) ? WEXITSTATUS(wait_status_) : 128 + WTERMSIG(wait_status_);
  }
  std::string out() const { return ReadText(out_path_); }
  std::string err() const { return ReadText(err_path_); }

 private:
  const std::string out_path_;
  const std::string err_path_;
  pid_t pid_ = 0;
  bool waited_ = false;
  int wait_status_ = 0;
};

}  // namespace zipage
