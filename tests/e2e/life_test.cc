// Life and death of the processes: whichever is killed or stopped, and whenever, all others end
// soon, the cause is named, and what was written are whole lines.

#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "tests/e2e/engine_fixture.h"

namespace zipage {
namespace {

using Clock = std::chrono::steady_clock;

class LifeTest : public EngineTest {
 protected:
  // An engine of two ranks with a job that takes minutes, after the first lines are answered.
  std::unique_ptr<Program> LaunchLongJob(Flags flags = {}) {
    std::unique_ptr<Program> launch = StartLongJob(std::move(flags));
    EXPECT_TRUE(Eventually([&] { return CountLines(ReadText(OutputPath("long"))) > 0; }))
        << launch->err();
    return launch;
  }
  std::unique_ptr<Program> StartLongJob(Flags flags = {}) {
    if (long_job_.empty()) {
      // Outputs of many lengths, so that some request ends in nearly every step.
      std::vector<Json> requests = SimpleRequests(20'000, 1);
      for (size_t i = 0; i < requests.size(); ++i) requests[i]["max_tokens"] = 5 + i % 300;
      long_job_ = JobFlags("long", requests);
    }
    std::filesystem::remove(OutputPath("long"));
    flags.insert(flags.begin(), {"--tp", "2", "--max_num_seqs", "32"});
    flags.insert(flags.end(), long_job_.begin(), long_job_.end());
    return Launch(flags);
  }
  // Whole lines only, each with an answer; how many.
  size_t CheckLongOutput() {
    const std::vector<Json> lines = ReadOutput(OutputPath("long"));
    for (const Json& line : lines) {
      EXPECT_EQ(line.at("response").at("status_code"), 200) << line.dump();
    }
    return lines.size();
  }
  bool ErrorSays(const Program& launch, const std::string& text) {
    return launch.err().find(text) != std::string::npos;
  }

 private:
  Flags long_job_;
};

enum class Moment { kLoading, kRunning, kIdle };

TEST_F(LifeTest, AnyKilledProcessEndsAllOthersAndIsNamed) {
  std::mt19937 random(20240607);
  Clock::duration slowest{};
  const std::vector<std::string> victims = {"launcher", "scheduler", "worker rank 0",
                                            "worker rank 1"};
  for (int round = 0; round < 24; ++round) {
    const auto moment = static_cast<Moment>(round % 3);
    const std::string& victim = victims[static_cast<size_t>(round / 3) % victims.size()];
    SCOPED_TRACE("round " + std::to_string(round) + ": " + victim + ", moment " +
                 std::to_string(round % 3));
    auto launch = moment == Moment::kIdle      ? Serve({"--tp", "2"})
                  : moment == Moment::kRunning ? LaunchLongJob()
                                               : StartLongJob();
    const pid_t scheduler = SchedulerPid();
    const pid_t workers[2] = {WorkerPid(0), WorkerPid(1)};
    // Not a wait for anything: it moves the kill to another instruction each time.
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 200'000));
    const pid_t pid = victim == "launcher"    ? launch->pid()
                      : victim == "scheduler" ? scheduler
                                              : workers[victim.back() - '0'];
    ASSERT_EQ(kill(pid, SIGKILL), 0);
    const Clock::time_point killed = Clock::now();
    const int status = launch->Wait();
    ExpectNothingLeft();  // Fails beyond its limit.
    EXPECT_LT(Clock::now() - killed, std::chrono::seconds(5));
    if (victim == "launcher") {
      EXPECT_EQ(status, 128 + SIGKILL);
    } else {
      EXPECT_EQ(status, 1);
      EXPECT_TRUE(ErrorSays(*launch, "zipage-launch: " + victim + " (pid " + std::to_string(pid) +
                                         ") was killed by signal 9"))
          << launch->err();
    }
    if (moment == Moment::kRunning) {
      EXPECT_GT(CheckLongOutput(), 0U);
    }
    slowest = std::max<Clock::duration>(slowest, Clock::now() - killed);
  }
  RecordProperty("slowest_ms", static_cast<int>(slowest / std::chrono::milliseconds(1)));
}

TEST_F(LifeTest, AKilledEngineLeavesAJobThatAnotherCanRunAtOnce) {
  auto launch = LaunchLongJob();
  kill(WorkerPid(1), SIGKILL);
  EXPECT_EQ(launch->Wait(), 1);
  RunJob(SimpleRequests(3, 3), {"--tp", "2"});
}

TEST_F(LifeTest, AStoppedWorkerIsNamedWithPhaseAndStep) {
  for (const int rank : {0, 1}) {
    auto launch = LaunchLongJob({"--heartbeat_timeout_s", "2"});
    const pid_t pid = WorkerPid(rank);
    kill(pid, SIGSTOP);
    EXPECT_EQ(launch->Wait(), 1);
    const std::string error = launch->err();
    const size_t at = error.find("worker rank " + std::to_string(rank) + " (pid " +
                                 std::to_string(pid) + ", running, step ");
    EXPECT_NE(at, std::string::npos) << error;
    EXPECT_NE(error.find("heartbeat_timeout_s is 2", at), std::string::npos) << error;
    ExpectNothingLeft();
    EXPECT_GT(CheckLongOutput(), 0U);
  }
}

TEST_F(LifeTest, AStoppedSchedulerIsNoticedByTheLauncher) {
  auto launch = LaunchLongJob({"--heartbeat_timeout_s", "2"});
  kill(SchedulerPid(), SIGSTOP);
  EXPECT_EQ(launch->Wait(), 1);
  EXPECT_TRUE(ErrorSays(*launch, "the scheduler has not answered for 2 s")) << launch->err();
}

TEST_F(LifeTest, AWorkerThatStopsForAShortWhileGoesOn) {
  auto launch = Launch([&] {
    Flags flags = JobFlags("job", SimpleRequests(200, 300));
    flags.insert(flags.end(), {"--tp", "2", "--max_num_seqs", "8"});
    return flags;
  }());
  EXPECT_TRUE(Eventually([&] { return CountLines(ReadText(OutputPath("job"))) > 0; }));
  const pid_t pid = WorkerPid(1);
  kill(pid, SIGSTOP);
  // Longer than the pause between two heartbeats.
  EXPECT_TRUE(
      StatusBecomes([](const Json& s) { return s.at("workers")[1].at("heartbeat_age") > 1.5; }));
  const int lines_before = CountLines(ReadText(OutputPath("job")));
  EXPECT_LT(lines_before, 200);
  kill(pid, SIGCONT);
  EXPECT_EQ(launch->Wait(), 0) << launch->err();
  EXPECT_EQ(ReadOutput(OutputPath("job")).size(), 200U);
}

TEST_F(LifeTest, SigtermStopsAtOnceWithoutDrainTimeAndTellsThatWorkRemains) {
  auto launch = LaunchLongJob({"--drain_timeout_s", "0"});
  launch->Kill(SIGTERM);
  EXPECT_EQ(launch->Wait(), 75) << launch->err();
  EXPECT_GT(CheckLongOutput(), 0U);
}

TEST_F(LifeTest, SigtermLetsRunningRequestsFinish) {
  auto launch = LaunchLongJob({"--drain_timeout_s", "300"});
  launch->Kill(SIGTERM);
  EXPECT_TRUE(Eventually([&] { return ErrorSays(*launch, "zipage: stopping"); }));
  const int lines_before = CountLines(ReadText(OutputPath("long")));
  EXPECT_EQ(launch->Wait(), 75) << launch->err();
  // Those 32 that ran were answered, and none was started after them: lines come in the order of
  // the file, apart from what runs at the same time.
  std::set<int> answered;
  for (const Json& line : ReadOutput(OutputPath("long"))) {
    EXPECT_EQ(line.at("response").at("status_code"), 200);
    answered.insert(std::stoi(line.at("custom_id").get<std::string>().substr(7)));
  }
  EXPECT_GT(static_cast<int>(answered.size()), lines_before);
  EXPECT_EQ(*answered.rbegin() + 1, static_cast<int>(answered.size()))
      << "a request that ran was dropped";
  EXPECT_LT(answered.size(), 20'000U);
}

TEST_F(LifeTest, SignalsToAnIdleEngineAreAnOrderlyEnd) {
  for (const int number : {SIGTERM, SIGINT, SIGHUP}) {
    auto launch = Serve({"--tp", "2"});
    launch->Kill(number);
    EXPECT_EQ(launch->Wait(), 0) << launch->err();
    ExpectNothingLeft();
  }
}

TEST_F(LifeTest, ASecondSignalEndsAtOnce) {
  for (const int number : {SIGINT, SIGTERM}) {
    auto launch = LaunchLongJob({"--drain_timeout_s", "1000"});
    // Stopped workers cannot finish their requests, so the engine is still draining.
    const pid_t worker = WorkerPid(0);
    kill(worker, SIGSTOP);
    launch->Kill(number);
    EXPECT_TRUE(Eventually([&] { return ErrorSays(*launch, "zipage: stopping"); }));
    launch->Kill(number);
    EXPECT_EQ(launch->Wait(), 128 + number) << launch->err();
    ExpectNothingLeft();
    EXPECT_GT(CheckLongOutput(), 0U);
  }
}

TEST_F(LifeTest, ASignalWhileItLoadsEndsTheEngine) {
  std::mt19937 random(11);
  for (int round = 0; round < 4; ++round) {
    auto launch = StartLongJob({"--drain_timeout_s", "0"});
    SchedulerPid();
    std::this_thread::sleep_for(std::chrono::microseconds(random() % 100'000));
    launch->Kill(SIGTERM);
    EXPECT_EQ(launch->Wait(), 75) << launch->err();
    ExpectNothingLeft();
    CheckLongOutput();
  }
}

}  // namespace
}  // namespace zipage
