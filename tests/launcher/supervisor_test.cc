#include "launcher/supervisor.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <string>

#include "tests/launcher/processes.h"
#include "tests/launcher/temp_dir.h"

namespace zipage {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

ProcessSpec Shell(const std::string& name, const std::string& script) {
  ProcessSpec spec;
  spec.name = name;
  spec.argv = {"/bin/sh", "-c", script, name};
  return spec;
}

// A shell that writes its pid to `file` and then runs `rest`.
ProcessSpec Announcing(const std::string& name, const std::string& file, const std::string& rest) {
  return Shell(name, "echo $$ > " + file + ".tmp && mv " + file + ".tmp " + file + "; " + rest);
}

pid_t PidFrom(const std::string& file) {
  EXPECT_TRUE(Eventually([&] { return std::filesystem::exists(file); })) << file;
  return std::atoi(ReadText(file).c_str());
}

ProcessEnd NextEnd(Supervisor* supervisor) {
  while (true) {
    Supervisor::Event event = supervisor->Wait(seconds(60));
    EXPECT_NE(event.kind, Supervisor::EventKind::kNone);
    if (event.kind != Supervisor::EventKind::kSignal) return event.end;
  }
}

class SupervisorTest : public testing::Test {
 protected:
  void SetUp() override {
    auto supervisor = Supervisor::Create();
    ASSERT_TRUE(supervisor.ok()) << supervisor.status();
    supervisor_ = *std::move(supervisor);
  }

  TempDir dir_;
  std::unique_ptr<Supervisor> supervisor_;
};

TEST_F(SupervisorTest, TellsExitStatusSignalAndReason) {
  // $2 is --life_fd's number and $4 that of --error_fd.
  ASSERT_TRUE(supervisor_->Start(Shell("a", "echo 'no such model' >&$4; exit 3")).ok());
  const ProcessEnd a = NextEnd(supervisor_.get());
  EXPECT_TRUE(a.Exited(3));
  EXPECT_EQ(a.Describe(),
            "a (pid " + std::to_string(a.pid) + ") ended with status 3: no such model");
  ASSERT_TRUE(supervisor_->Start(Shell("b", "kill -9 $$")).ok());
  const ProcessEnd b = NextEnd(supervisor_.get());
  EXPECT_EQ(b.Describe(), "b (pid " + std::to_string(b.pid) + ") was killed by signal 9 (Killed)");
  EXPECT_EQ(supervisor_->num_running(), 0U);
}

TEST_F(SupervisorTest, AReasonIsOneCleanLineHoweverLongItIs) {
  ASSERT_TRUE(supervisor_->Start(Shell("a", "printf 'x\\033[2Jy\\nsecond\\n' >&$4; exit 1")).ok());
  EXPECT_EQ(NextEnd(supervisor_.get()).reason, "x [2Jy");
  ASSERT_TRUE(
      supervisor_->Start(Shell("b", "head -c 60000 /dev/zero | tr '\\0' z >&$4; exit 1")).ok());
  const ProcessEnd end = NextEnd(supervisor_.get());
  EXPECT_GT(end.reason.size(), 4000U);
  EXPECT_LT(end.reason.size(), 6000U);
}

TEST_F(SupervisorTest, SaysWhichProgramCannotBeStarted) {
  ProcessSpec spec;
  spec.name = "worker rank 0";
  spec.argv = {dir_ / "nothing"};
  const absl::Status status = supervisor_->Start(spec);
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(status.message().find(dir_ / "nothing"), absl::string_view::npos) << status;
  EXPECT_EQ(supervisor_->num_running(), 0U);
}

TEST_F(SupervisorTest, AChildInheritsOnlyWhatItIsGiven) {
  int given[2], stray[2];
  ASSERT_EQ(pipe(given), 0);
  ASSERT_EQ(pipe(stray), 0);  // Without close-on-exec, as another library may leave one.
  ProcessSpec spec = Shell("a", "ls /proc/self/fd | tr '\\n' ' ' > " + (dir_ / "fds"));
  spec.fds = {given[0]};
  ASSERT_TRUE(supervisor_->Start(spec).ok());
  ASSERT_TRUE(NextEnd(supervisor_.get()).Exited(0));
  const std::string fds = " " + ReadText(dir_ / "fds");
  EXPECT_NE(fds.find(" " + std::to_string(given[0]) + " "), std::string::npos) << fds;
  for (int fd : {given[1], stray[0], stray[1]}) {
    EXPECT_EQ(fds.find(" " + std::to_string(fd) + " "), std::string::npos) << fds;
  }
  for (int fd : {given[0], given[1], stray[0], stray[1]}) close(fd);
}

TEST_F(SupervisorTest, OnlyAChildThatPrintsResultsGetsTheStandardOutput) {
  for (const bool prints_results : {false, true}) {
    ProcessSpec spec = Shell(
        "a", "fds=$(readlink /proc/$$/fd/1 /proc/$$/fd/2); echo \"$fds\" > " + (dir_ / "fds"));
    spec.prints_results = prints_results;
    FileDescriptor saved(dup(STDOUT_FILENO));
    FileDescriptor results(open((dir_ / "results").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    dup2(results.get(), STDOUT_FILENO);
    const absl::Status started = supervisor_->Start(spec);
    dup2(saved.get(), STDOUT_FILENO);
    ASSERT_TRUE(started.ok()) << started;
    ASSERT_TRUE(NextEnd(supervisor_.get()).Exited(0));
    const std::string fds = ReadText(dir_ / "fds");
    EXPECT_EQ(fds.substr(0, fds.find('\n')) == dir_ / "results", prints_results) << fds;
    EXPECT_EQ(fds.find(dir_ / "results", fds.find('\n')), std::string::npos) << fds;
  }
}

TEST_F(SupervisorTest, EnvironmentIsReplacedAndSignalsAreDefault) {
  ProcessSpec spec =
      Shell("a", "echo $HOME > " + (dir_ / "home") +
                     "; grep -E 'Sig(Blk|Ign)' /proc/self/status > " + (dir_ / "sig"));
  spec.environment = {{"HOME", "elsewhere"}};
  ASSERT_TRUE(supervisor_->Start(spec).ok());
  ASSERT_TRUE(NextEnd(supervisor_.get()).Exited(0));
  EXPECT_EQ(ReadText(dir_ / "home"), "elsewhere\n");
  EXPECT_EQ(ReadText(dir_ / "sig"), "SigBlk:\t0000000000000000\nSigIgn:\t0000000000000000\n");
}

TEST_F(SupervisorTest, SignalsToTheProgramAreEvents) {
  for (int number : {SIGTERM, SIGINT, SIGHUP}) {
    kill(getpid(), number);
    const Supervisor::Event event = supervisor_->Wait(seconds(60));
    EXPECT_EQ(event.kind, Supervisor::EventKind::kSignal);
    EXPECT_EQ(event.signal, number);
  }
}

TEST_F(SupervisorTest, AKilledChildEndsAllOthersWithinTwoSecondsAndIsTheCause) {
  for (const char* setsid : {"", "setsid "}) {
    for (int victim = 0; victim < 3; ++victim) {
      std::vector<pid_t> pids;
      for (int i = 0; i < 3; ++i) {
        const std::string name = "p" + std::to_string(i);
        const std::string file = dir_ / name;
        std::filesystem::remove(file);
        // Deaf to everything but SIGKILL, with a grandchild, perhaps in a session of its own.
        ASSERT_TRUE(supervisor_
                        ->Start(Announcing(name, file,
                                           "trap '' TERM INT HUP; " + std::string(setsid) +
                                               "sleep 1000 & wait; sleep 1000"))
                        .ok());
        pids.push_back(PidFrom(file));
      }
      const auto start = std::chrono::steady_clock::now();
      kill(pids[static_cast<size_t>(victim)], SIGKILL);
      const ProcessEnd cause = supervisor_->EndAll(NextEnd(supervisor_.get()));
      EXPECT_LT(std::chrono::steady_clock::now() - start, seconds(2));
      EXPECT_EQ(cause.name, "p" + std::to_string(victim));
      EXPECT_TRUE(WIFSIGNALED(cause.wait_status));
      for (pid_t pid : pids) EXPECT_TRUE(IsGone(pid));
      EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a descendant is left";
    }
  }
}

TEST_F(SupervisorTest, AStoppedChildIsKilledToo) {
  ASSERT_TRUE(supervisor_->Start(Announcing("a", dir_ / "a", "kill -STOP $$; sleep 1000")).ok());
  const pid_t pid = PidFrom(dir_ / "a");
  supervisor_->KillAll();
  EXPECT_TRUE(IsGone(pid));
  EXPECT_EQ(supervisor_->num_running(), 0U);
}

TEST_F(SupervisorTest, TheCauseIsFoundBehindAnOrderlyExit) {
  // The scheduler tells its worker to go, and only then says what is wrong.
  ASSERT_TRUE(supervisor_->Start(Shell("worker", "exit 0")).ok());
  ASSERT_TRUE(
      supervisor_->Start(Shell("scheduler", "sleep 0.3; echo 'digest differs' >&$4; exit 1")).ok());
  const ProcessEnd cause = supervisor_->EndAll(NextEnd(supervisor_.get()));
  EXPECT_EQ(cause.name, "scheduler");
  EXPECT_EQ(cause.reason, "digest differs");
}

TEST(FirstCauseTest, ASignalBeatsAReasonBeatsAStatusBeatsAnOrderlyExit) {
  const ProcessEnd orderly{"a", 1, 0, ""};
  const ProcessEnd status{"b", 2, 1 << 8, ""};
  const ProcessEnd reason{"c", 3, 1 << 8, "x"};
  const ProcessEnd killed{"d", 4, SIGKILL, ""};
  EXPECT_EQ(FirstCause({orderly, status, reason, killed}).name, "d");
  EXPECT_EQ(FirstCause({orderly, status, reason}).name, "c");
  EXPECT_EQ(FirstCause({orderly, status}).name, "b");
  EXPECT_EQ(FirstCause({reason, {"later", 5, 1 << 8, "y"}}).name, "c");
}

TEST(SupervisorDeathTest, ChildrenNoticeThatTheSupervisorWasKilled) {
  TempDir dir;
  const pid_t parent = fork();
  if (parent == 0) {
    auto supervisor = Supervisor::Create();
    if (!supervisor.ok()) _exit(1);
    ProcessSpec deaf = Announcing("deaf", dir / "deaf", "exec sleep 1000");
    ProcessSpec polite = Announcing("polite", dir / "polite", "cat <&$2; echo > " + (dir / "done"));
    polite.dies_with_parent = false;
    if (!(*supervisor)->Start(deaf).ok() || !(*supervisor)->Start(polite).ok()) _exit(1);
    while (true) (*supervisor)->Wait(seconds(1000));
  }
  const pid_t deaf = PidFrom(dir / "deaf");
  const pid_t polite = PidFrom(dir / "polite");
  EXPECT_FALSE(IsGone(deaf));
  kill(parent, SIGKILL);
  waitpid(parent, nullptr, 0);
  EXPECT_TRUE(Eventually([&] { return IsGone(deaf) && IsGone(polite); }, seconds(2)));
  EXPECT_TRUE(std::filesystem::exists(dir / "done")) << "the life pipe did not end";
}

}  // namespace
}  // namespace zipage
