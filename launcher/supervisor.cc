#include "launcher/supervisor.h"

#include <dirent.h>
#include <fcntl.h>
#include <glog/logging.h>
#include <linux/close_range.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"

extern char** environ;

namespace zipage {
namespace {

using Clock = std::chrono::steady_clock;

// How long others may take to end by themselves after one ended, so that the cause is found. All
// are gone well within two seconds.
constexpr std::chrono::milliseconds kCauseGrace{150};
// An orderly exit is hardly a cause: the process that ordered it has something to say.
constexpr std::chrono::milliseconds kOrderlyGrace{1000};
constexpr size_t kMaxReason = 4096;

// Everything that the child needs between fork and exec, where nothing may be allocated.
struct ExecArguments {
  std::vector<char*> argv;
  std::vector<char*> environment;
  std::vector<int> fds;
  int null_fd;
  int status_fd;
  pid_t parent;
  bool dies_with_parent;
  bool prints_results;
};

[[noreturn]] void ExecChild(const ExecArguments& a) {
  // A session of its own: Ctrl-C and a closing terminal reach only the launcher, which decides.
  setsid();
  if (a.dies_with_parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (getppid() != a.parent) _exit(127);
  }
  sigset_t none;
  sigemptyset(&none);
  sigprocmask(SIG_SETMASK, &none, nullptr);
  for (int signal_number : {SIGINT, SIGTERM, SIGHUP, SIGPIPE}) signal(signal_number, SIG_DFL);
  dup2(a.null_fd, STDIN_FILENO);
  // What other children print is for people: the launcher's standard output carries results only.
  if (!a.prints_results) dup2(STDERR_FILENO, STDOUT_FILENO);
  close_range(STDERR_FILENO + 1, ~0U, CLOSE_RANGE_CLOEXEC);
  for (int fd : a.fds) fcntl(fd, F_SETFD, 0);
  execve(a.argv[0], a.argv.data(), a.environment.data());
  const int error = errno;
  if (write(a.status_fd, &error, sizeof(error)) < 0) _exit(126);
  _exit(127);
}

std::vector<std::string> MakeEnvironment(const ProcessSpec& spec) {
  std::vector<std::string> result;
  for (const auto& [key, value] : spec.environment) {
    result.push_back(absl::StrFormat("%s=%s", key, value));
  }
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string line = *entry;
    const std::string key = line.substr(0, line.find('='));
    if (std::none_of(spec.environment.begin(), spec.environment.end(),
                     [&](const auto& pair) { return pair.first == key; })) {
      result.push_back(line);
    }
  }
  return result;
}

std::vector<char*> Pointers(std::vector<std::string>* strings) {
  std::vector<char*> pointers;
  for (std::string& s : *strings) pointers.push_back(s.data());
  pointers.push_back(nullptr);
  return pointers;
}

absl::Status MakePipe(FileDescriptor* read_end, FileDescriptor* write_end) {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("cannot make a pipe: %s; raise ulimit -n", std::strerror(errno)));
  }
  *read_end = FileDescriptor(fds[0]);
  *write_end = FileDescriptor(fds[1]);
  return absl::OkStatus();
}

// Appends what `fd` (non-blocking) holds, up to kMaxReason bytes in all.
void ReadReason(int fd, std::string* reason) {
  char buffer[1024];
  ssize_t n = 0;
  while ((n = read(fd, buffer, sizeof(buffer))) > 0 || (n < 0 && errno == EINTR)) {
    if (n > 0 && reason->size() < kMaxReason) reason->append(buffer, static_cast<size_t>(n));
  }
}

// The first line, without what would disturb a terminal.
std::string FirstLine(std::string text) {
  text = std::string(absl::StripAsciiWhitespace(text));
  text = text.substr(0, text.find('\n'));
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return absl::ascii_iscntrl(c); }, ' ');
  return text;
}

// Living or dead children of this process, adopted ones included.
std::vector<pid_t> ChildrenOfThisProcess() {
  std::vector<pid_t> children;
  const std::unique_ptr<DIR, int (*)(DIR*)> proc(opendir("/proc"), closedir);
  while (const dirent* entry = proc ? readdir(proc.get()) : nullptr) {
    const pid_t pid = std::atoi(entry->d_name);
    if (pid <= 0) continue;
    const std::unique_ptr<FILE, int (*)(FILE*)> file(
        fopen(absl::StrFormat("/proc/%d/stat", pid).c_str(), "re"), fclose);
    char line[512];
    if (!file || fgets(line, sizeof(line), file.get()) == nullptr) continue;
    // The name, in parentheses, may hold anything: fields count from the last parenthesis.
    const char* rest = std::strrchr(line, ')');
    pid_t parent = 0;
    char state = 0;
    if (rest != nullptr && sscanf(rest + 1, " %c %d", &state, &parent) == 2 && parent == getpid()) {
      children.push_back(pid);
    }
  }
  return children;
}

bool IsIgnored(int signal_number) {
  struct sigaction action {};
  return sigaction(signal_number, nullptr, &action) == 0 && action.sa_handler == SIG_IGN;
}

int Weight(const ProcessEnd& end) {
  if (WIFSIGNALED(end.wait_status)) return 3;
  if (end.Exited(0)) return 0;
  return end.reason.empty() ? 1 : 2;
}

}  // namespace

std::string ProcessEnd::Describe() const {
  std::string how;
  if (WIFSIGNALED(wait_status)) {
    const int number = WTERMSIG(wait_status);
    how = absl::StrFormat("was killed by signal %d (%s)", number, strsignal(number));
  } else {
    how = absl::StrFormat("ended with status %d", WEXITSTATUS(wait_status));
  }
  return absl::StrFormat("%s (pid %d) %s%s%s", name, pid, how, reason.empty() ? "" : ": ", reason);
}

bool ProcessEnd::Exited(int status) const {
  return WIFEXITED(wait_status) && WEXITSTATUS(wait_status) == status;
}

const ProcessEnd& FirstCause(const std::vector<ProcessEnd>& ends) {
  CHECK(!ends.empty());
  return *std::max_element(ends.begin(), ends.end(), [](const ProcessEnd& a, const ProcessEnd& b) {
    return Weight(a) < Weight(b);
  });
}

absl::StatusOr<std::unique_ptr<Supervisor>> Supervisor::Create() {
  std::unique_ptr<Supervisor> supervisor(new Supervisor());
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (int number : {SIGINT, SIGTERM, SIGHUP}) {
    if (!IsIgnored(number)) sigaddset(&set, number);  // nohup, and & in scripts, ignore some.
  }
  signal(SIGPIPE, SIG_IGN);
  signal(SIGCHLD, SIG_DFL);  // An inherited SIG_IGN would hide how children end.
  sigprocmask(SIG_BLOCK, &set, nullptr);
  prctl(PR_SET_CHILD_SUBREAPER, 1);
  supervisor->signal_fd_ = FileDescriptor(signalfd(-1, &set, SFD_CLOEXEC | SFD_NONBLOCK));
  if (!supervisor->signal_fd_.is_open()) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("cannot make a signalfd: %s; raise ulimit -n", std::strerror(errno)));
  }
  ZIPAGE_RETURN_IF_ERROR(MakePipe(&supervisor->life_read_, &supervisor->life_write_));
  return supervisor;
}

Supervisor::~Supervisor() { KillAll(); }

absl::Status Supervisor::Start(const ProcessSpec& spec) {
  FileDescriptor error_read, error_write, status_read, status_write;
  ZIPAGE_RETURN_IF_ERROR(MakePipe(&error_read, &error_write));
  ZIPAGE_RETURN_IF_ERROR(MakePipe(&status_read, &status_write));
  fcntl(error_read.get(), F_SETFL, O_NONBLOCK);
  const FileDescriptor null_file(open("/dev/null", O_RDONLY | O_CLOEXEC));

  std::vector<std::string> argv = spec.argv;
  argv.insert(argv.end(), {"--life_fd", std::to_string(life_read_.get()), "--error_fd",
                           std::to_string(error_write.get())});
  std::vector<std::string> environment = MakeEnvironment(spec);
  ExecArguments arguments{Pointers(&argv),       Pointers(&environment), spec.fds,
                          null_file.get(),       status_write.get(),     getpid(),
                          spec.dies_with_parent, spec.prints_results};
  arguments.fds.insert(arguments.fds.end(), {life_read_.get(), error_write.get()});

  const pid_t pid = fork();
  if (pid < 0) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("cannot start %s: %s; raise ulimit -u", spec.name, std::strerror(errno)));
  }
  if (pid == 0) ExecChild(arguments);
  status_write.Close();
  error_write.Close();
  int error = 0;
  ssize_t n = 0;
  while ((n = read(status_read.get(), &error, sizeof(error))) < 0 && errno == EINTR) {
  }
  if (n > 0) {
    waitpid(pid, nullptr, 0);
    return absl::NotFoundError(absl::StrFormat(
        "cannot start %s: %s: %s; build all programs, and keep them in one directory", spec.name,
        spec.argv[0], std::strerror(error)));
  }
  running_.push_back({spec.name, pid, std::move(error_read), ""});
  return absl::OkStatus();
}

Supervisor::Event Supervisor::Wait(std::chrono::milliseconds timeout) {
  const Clock::time_point deadline = Clock::now() + timeout;
  while (events_.empty()) {
    // Rounded up: a remainder below a millisecond must not turn into a busy loop.
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
    pollfd waiting{signal_fd_.get(), POLLIN, 0};
    const int n = poll(&waiting, 1, std::max(0, static_cast<int>(left.count())));
    if (n > 0) {
      TakeSignals();
    } else if (n == 0 && left.count() <= 0) {
      return {};
    }
  }
  Event event = std::move(events_.front());
  events_.pop_front();
  return event;
}

void Supervisor::TakeSignals() {
  signalfd_siginfo info{};
  while (read(signal_fd_.get(), &info, sizeof(info)) == sizeof(info)) {
    if (info.ssi_signo == SIGCHLD) {
      Reap();  // SIGCHLD of several children may have become one.
    } else {
      events_.push_back({EventKind::kSignal, static_cast<int>(info.ssi_signo), {}});
    }
  }
}

void Supervisor::Reap() {
  int wait_status = 0;
  pid_t pid = 0;
  while ((pid = waitpid(-1, &wait_status, WNOHANG)) > 0) {
    const auto child = std::find_if(running_.begin(), running_.end(),
                                    [pid = pid](const Child& c) { return c.pid == pid; });
    if (child == running_.end()) continue;  // An adopted orphan.
    ReadReason(child->error_fd.get(), &child->reason);
    events_.push_back(
        {EventKind::kEnd, 0, {child->name, pid, wait_status, FirstLine(std::move(child->reason))}});
    running_.erase(child);
  }
}

void Supervisor::Signal(const std::string& name, int signal_number) {
  for (const Child& child : running_) {
    // Not reaped yet, so the pid is still this child's.
    if (child.name == name) kill(child.pid, signal_number);
  }
}

bool Supervisor::IsRunning(const std::string& name) const {
  return std::any_of(running_.begin(), running_.end(),
                     [&](const Child& child) { return child.name == name; });
}

ProcessEnd Supervisor::EndAll(const ProcessEnd& first) {
  const Clock::time_point start = Clock::now();
  std::vector<ProcessEnd> ends{first};
  while (Weight(FirstCause(ends)) < 3 && num_running() > 0) {
    const auto grace = Weight(FirstCause(ends)) == 0 ? kOrderlyGrace : kCauseGrace;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(start + grace - Clock::now());
    if (left.count() <= 0) break;
    Event event = Wait(left);
    if (event.kind == EventKind::kEnd) ends.push_back(std::move(event.end));
  }
  KillAll();
  return FirstCause(ends);
}

void Supervisor::KillAll() {
  // Killing a child may hand its own children over: repeat until there are none.
  const Clock::time_point deadline = Clock::now() + std::chrono::seconds(5);
  while (Clock::now() < deadline) {
    Reap();
    const std::vector<pid_t> children = ChildrenOfThisProcess();
    if (children.empty()) break;
    for (pid_t pid : children) kill(pid, SIGKILL);
    pollfd waiting{signal_fd_.get(), POLLIN, 0};
    poll(&waiting, 1, 20);
    signalfd_siginfo info{};
    while (read(signal_fd_.get(), &info, sizeof(info)) == sizeof(info)) {
      if (info.ssi_signo != SIGCHLD) {
        events_.push_back({EventKind::kSignal, static_cast<int>(info.ssi_signo), {}});
      }
    }
  }
  // How the killed ended is no news.
  std::erase_if(events_, [](const Event& event) { return event.kind == EventKind::kEnd; });
  for (const Child& child : running_) {
    LOG(ERROR) << child.name << " (pid " << child.pid << ") does not end after SIGKILL";
  }
}

}  // namespace zipage
