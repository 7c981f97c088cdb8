#pragma once
// Starts processes, notices how each ends, and leaves none behind. One supervisor per program, on
// the program's first thread, made before any other thread: it owns the signal mask, SIGCHLD, and
// every child of the program (it is their subreaper, so descendants that lost their parent come to
// it too).
//
// A child learns of the supervisor's death in two ways: its --life_fd reads end of file, and, if
// dies_with_parent, the kernel sends it SIGKILL. It tells why it ends through --error_fd: one line,
// written just before it exits. Nothing else is inherited but the standard files and `spec.fds`.

#include <sys/types.h>

#include <chrono>
#include <deque>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "launcher/file_descriptor.h"
#include "proto/status.h"

namespace zipage {

struct ProcessSpec {
  std::string name;  // For people: "worker rank 1".
  std::vector<std::string>
      argv;  // argv[0] is the path of the program. --life_fd and --error_fd follow.
  std::vector<std::pair<std::string, std::string>> environment;  // Set or replaced.
  std::vector<int> fds;          // Inherited, under the same numbers.
  bool dies_with_parent = true;  // The kernel kills it when the supervisor's program dies.
  bool prints_results = false;   // Its standard output is the program's; else it goes to stderr.
};

// How a process ended.
struct ProcessEnd {
  std::string name;
  pid_t pid = 0;
  int wait_status = 0;  // As waitpid gives it.
  std::string reason;   // What it wrote to --error_fd; empty if nothing.

  // "worker rank 1 (pid 71) was killed by signal 9 (Killed)", with the reason if there is one.
  std::string Describe() const;
  bool Exited(int status) const;
};

// The one of `ends` that most likely made the others end: killed by a signal before exited with an
// error and a reason, before an error without one, before an orderly exit; among equals the first.
// REQUIRES: ends is not empty.
const ProcessEnd& FirstCause(const std::vector<ProcessEnd>& ends);

class Supervisor {
 public:
  enum class EventKind { kNone, kSignal, kEnd };
  struct Event {
    EventKind kind = EventKind::kNone;
    int signal = 0;  // SIGINT, SIGTERM or SIGHUP.
    ProcessEnd end;
  };

  static absl::StatusOr<std::unique_ptr<Supervisor>> Create();
  // Kills whatever still runs.
  ~Supervisor();
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  // kNotFound, naming the program, if it cannot be executed.
  absl::Status Start(const ProcessSpec& spec);

  // The next thing that happened; kNone if nothing does in time.
  Event Wait(std::chrono::milliseconds timeout);

  // Sends `signal` to the process of that name if it runs.
  void Signal(const std::string& name, int signal);
  bool IsRunning(const std::string& name) const;
  size_t num_running() const { return running_.size(); }

  // After `first` ended unexpectedly: gives the others a moment to end by themselves, so that a
  // cause hidden behind its consequences is seen, then kills what is left. Returns the first cause.
  ProcessEnd EndAll(const ProcessEnd& first);

  // SIGKILL to every child and descendant that comes to the supervisor, and waits until all are
  // gone.
  void KillAll();

 private:
  struct Child {
    std::string name;
    pid_t pid = 0;
    FileDescriptor error_fd;
    std::string reason;
  };

  Supervisor() = default;
  // Turns what signal_fd_ holds into events.
  void TakeSignals();
  // Reaps every ended child; an event for those that were started here.
  void Reap();

  FileDescriptor signal_fd_;
  FileDescriptor life_read_;
  FileDescriptor life_write_;  // Never written: closing it is the message.
  std::vector<Child> running_;
  std::deque<Event> events_;
};

}  // namespace zipage
