// The real zipage-launch, zipage-submit and zipage-status with the stand-ins of fake_engine.h.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "launcher/run_directory.h"
#include "proto/config.h"
#include "tests/launcher/processes.h"
#include "tests/launcher/temp_dir.h"

namespace zipage {
namespace {

namespace fs = std::filesystem;
using Environment = std::vector<std::pair<std::string, std::string>>;

class ProgramsTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string built = ZIPAGE_BIN_DIR;
    for (const char* name : {"launch", "submit", "status"}) {
      const std::string program = std::string("/zipage-") + name;
      ASSERT_TRUE(fs::exists(built + program)) << "build all targets first";
      // A copy, because programs are looked for beside the launcher itself.
      fs::copy_file(built + program, dir_.path() + program);
    }
    const fs::path self = fs::read_symlink("/proc/self/exe");
    fs::create_symlink(self, dir_ / "zipage-scheduler");
    fs::create_symlink(self, dir_ / "zipage-worker");
    fs::create_directory(dir_ / "runtime");
    WriteText(dir_ / "in.jsonl", "{}\n\n{}\n{}\n");
    unsetenv("SLURM_PROCID");
    setenv("XDG_RUNTIME_DIR", (dir_ / "runtime").c_str(), 1);
  }
  void TearDown() override {
    // Whatever a test did, nothing is left: no process, no run directory.
    EXPECT_TRUE(
        Eventually([&] { return ProcessesNaming(dir_.path()).empty(); }, std::chrono::seconds(10)));
    EXPECT_TRUE(RunningEngines({base()}).empty());
    EXPECT_EQ(NumRunDirectories(), 0);
  }

  std::string base() const { return dir_ / "runtime/zipage"; }
  int NumRunDirectories() const {
    int n = 0;
    std::error_code error;
    for (const auto& entry : fs::directory_iterator(base(), error))
      n += entry.is_directory() ? 1 : 0;
    return n;
  }

  std::unique_ptr<Program> Start(const std::string& program, std::vector<std::string> arguments,
                                 const Environment& environment = {}) {
    arguments.insert(arguments.begin(), dir_ / program);
    return std::make_unique<Program>(dir_, program + std::to_string(++num_started_), arguments,
                                     environment);
  }
  std::unique_ptr<Program> Launch(const Environment& environment = {}, int tp = 2,
                                  std::vector<std::string> more = {}) {
    more.insert(more.begin(), {"--model", dir_.path(), "--tp", std::to_string(tp)});
    return Start("zipage-launch", more, environment);
  }
  std::vector<std::string> JobFlags() const {
    return {"--job", dir_ / "in.jsonl", "--output", dir_ / "out.jsonl"};
  }
  // Scheduler first, then workers; with FAKE_SETSID each is a wrapper and its grandchild.
  std::vector<pid_t> Children(size_t expected) const {
    std::vector<pid_t> all;
    EXPECT_TRUE(Eventually([&] {
      all = ProcessesNaming("zipage-scheduler");
      std::erase_if(all, [&](pid_t pid) { return !Mine(pid); });
      for (pid_t pid : ProcessesNaming("zipage-worker")) {
        if (Mine(pid)) all.push_back(pid);
      }
      return all.size() == expected;
    })) << all.size();
    return all;
  }
  bool Mine(pid_t pid) const {
    return ReadText("/proc/" + std::to_string(pid) + "/cmdline").find(dir_.path()) !=
           std::string::npos;
  }
  // A served engine that answers.
  std::unique_ptr<Program> Serve(const Environment& environment = {}, int tp = 2) {
    auto launch = Launch(environment, tp);
    EXPECT_TRUE(Eventually([&] { return launch->out().find("is ready") != std::string::npos; }))
        << launch->err();
    return launch;
  }

  TempDir dir_;
  int num_started_ = 0;
};

TEST_F(ProgramsTest, RunsAJobAndTellsItsOutcomeByExitStatus) {
  const std::pair<const char*, int> cases[] = {{"0", 0}, {"1", 3}, {"3", 1}};
  for (const auto& [failed, expected] : cases) {
    auto launch = Launch({{"FAKE_FAILED_LINES", failed}}, 2, JobFlags());
    EXPECT_EQ(launch->Wait(), expected) << launch->err();
    EXPECT_NE(launch->out().find("finished: "), std::string::npos) << launch->out();
    EXPECT_NE(launch->out().find(" of 3 lines"), std::string::npos) << launch->out();
    EXPECT_EQ(NumRunDirectories(), 0);
  }
}

TEST_F(ProgramsTest, WrongArgumentsEndWithStatusTwoAndOneLine) {
  const std::vector<std::vector<std::string>> cases = {
      {"--job", dir_ / "in.jsonl"},
      {"--output", dir_ / "out"},
      {"--job", dir_ / "missing", "--output", dir_ / "out"},
      {"--device", "cuda"},
      {"--no_such_flag"},
  };
  for (const auto& flags : cases) {
    auto launch = Launch({}, 1, flags);
    EXPECT_EQ(launch->Wait(), 2) << flags[0];
    const std::string err = launch->err();
    EXPECT_EQ(std::count(err.begin(), err.end(), '\n'), 1) << err;
  }
  auto second_task = Launch({{"SLURM_PROCID", "1"}}, 1);
  EXPECT_EQ(second_task->Wait(), 2);
  EXPECT_NE(second_task->err().find("srun --ntasks=1"), std::string::npos);
}

TEST_F(ProgramsTest, ADryRunPrintsThePlanOfAWorkerAndTouchesNothing) {
  std::vector<std::string> flags = {"--dry_run", "--kvcache_block_size", "32", "--run_dir",
                                    dir_ / "here"};
  for (const std::string& flag : JobFlags()) flags.push_back(flag);
  auto launch = Launch({}, 3, flags);
  EXPECT_EQ(launch->Wait(), 0) << launch->err();
  EXPECT_EQ(launch->err(), "");
  Config config;
  config.model = dir_.path();
  config.tp = 3;
  config.device = "cpu";  // As it was resolved.
  config.kvcache_block_size = 32;
  EXPECT_EQ(launch->out(), ToToml(config));
  EXPECT_FALSE(fs::exists(dir_ / "here"));
  EXPECT_FALSE(fs::exists(dir_ / "out.jsonl"));
  EXPECT_FALSE(fs::exists(base()));
}

TEST_F(ProgramsTest, ADryRunPassesOnWhyThereIsNoPlan) {
  auto failed = Launch({{"FAKE_WORKER", "fail"}}, 1, {"--dry-run"});
  EXPECT_EQ(failed->Wait(), 2);
  EXPECT_EQ(failed->err(), "zipage-launch: model is /m, which has no config.json; give another\n");
  EXPECT_EQ(failed->out(), "");
  auto invalid = Launch({}, 1, {"--dry_run", "--pooling_size", "4"});
  EXPECT_EQ(invalid->Wait(), 2);
  EXPECT_EQ(invalid->err(), "zipage-launch: pooling_size is 4; give an odd number\n");
  fs::remove(dir_ / "zipage-worker");
  auto missing = Launch({}, 1, {"--dry_run"});
  EXPECT_EQ(missing->Wait(), 1);
  EXPECT_NE(missing->err().find(dir_ / "zipage-worker"), std::string::npos) << missing->err();
}

TEST_F(ProgramsTest, ADryRunEndsWithItsWorkerWhoeverIsKilled) {
  for (const int number : {SIGTERM, SIGINT, SIGKILL}) {
    auto launch = Launch({{"FAKE_WORKER", "hang"}}, 1, {"--dry_run"});
    ASSERT_TRUE(Eventually([&] { return launch->out().find('\n') != std::string::npos; }));
    const pid_t worker = std::atoi(launch->out().c_str());
    kill(launch->pid(), number);
    EXPECT_EQ(launch->Wait(), 128 + number);
    EXPECT_TRUE(Eventually([&] { return IsGone(worker); }, std::chrono::seconds(3)));
  }
  auto launch = Launch({{"FAKE_WORKER", "hang"}}, 1, {"--dry_run"});
  ASSERT_TRUE(Eventually([&] { return launch->out().find('\n') != std::string::npos; }));
  kill(std::atoi(launch->out().c_str()), SIGKILL);
  EXPECT_EQ(launch->Wait(), 1);
  EXPECT_NE(launch->err().find("was killed by signal 9 (Killed)"), std::string::npos)
      << launch->err();
}

TEST_F(ProgramsTest, HelpDocumentsTheExitStatuses) {
  for (const char* program : {"zipage-launch", "zipage-submit"}) {
    auto help = Start(program, {"--help"});
    EXPECT_EQ(help->Wait(), 0);
    EXPECT_NE(help->out().find("75"), std::string::npos) << help->out();
  }
}

TEST_F(ProgramsTest, AnyKilledProcessEndsAllOthersWithinTwoSecondsAndIsNamed) {
  for (const bool leave_session : {false, true}) {
    const Environment environment = {{leave_session ? "FAKE_SETSID" : "NOTHING", "1"}};
    const size_t num_children = leave_session ? 6 : 3;
    for (size_t victim = 0; victim < num_children; ++victim) {
      auto launch = Serve(environment);
      const std::vector<pid_t> children = Children(num_children);
      ASSERT_EQ(children.size(), num_children);
      const auto start = std::chrono::steady_clock::now();
      kill(children[victim], SIGKILL);
      EXPECT_EQ(launch->Wait(), 1);
      EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(3));
      for (pid_t pid : children) EXPECT_TRUE(IsGone(pid));
      EXPECT_EQ(NumRunDirectories(), 0);
      const std::string err = launch->err();
      const std::string name = victim < num_children / 3 ? "scheduler (pid" : "worker rank";
      EXPECT_NE(err.find("zipage-launch: " + name), std::string::npos) << err;
      if (!leave_session) {
        EXPECT_NE(err.find("(pid " + std::to_string(children[victim]) +
                           ") was killed by signal 9 (Killed)"),
                  std::string::npos)
            << err;
      }
    }
  }
}

TEST_F(ProgramsTest, AKilledLauncherTakesEverythingWithItEvenFromOtherSessions) {
  for (const char* leave_session : {"", "1"}) {
    auto launch = Serve({{"FAKE_SETSID", leave_session}, {"FAKE_ENDLESS", "1"}});
    auto submit = Start("zipage-submit", JobFlags());
    ASSERT_TRUE(Eventually([&] { return submit->err().find("accepted") != std::string::npos; }))
        << submit->err();
    const auto children = ProcessesNaming("zipage-scheduler").size();
    EXPECT_GE(children, 1U);
    launch->Kill(SIGKILL);
    EXPECT_TRUE(Eventually(
        [&] {
          return ProcessesNaming(dir_ / "zipage-scheduler").empty() &&
                 ProcessesNaming(dir_ / "zipage-worker").empty() && NumRunDirectories() == 0;
        },
        std::chrono::seconds(3)));
    EXPECT_EQ(submit->Wait(), 1);
    EXPECT_NE(submit->err().find("the engine ended"), std::string::npos) << submit->err();
  }
}

TEST_F(ProgramsTest, AReasonIsPassedOnOnce) {
  auto worker = Launch({{"FAKE_WORKER", "fail"}});
  EXPECT_EQ(worker->Wait(), 1);
  EXPECT_NE(worker->err().find("worker rank 0 (pid "), std::string::npos) << worker->err();
  EXPECT_NE(
      worker->err().find("ended with status 1: model.safetensors is truncated; copy it again\n"),
      std::string::npos)
      << worker->err();
  auto scheduler = Launch({{"FAKE_SCHEDULER", "fail"}});
  EXPECT_EQ(scheduler->Wait(), 1);
  EXPECT_NE(scheduler->err().find("tokenizer.json is missing; copy it"), std::string::npos);
}

TEST_F(ProgramsTest, ARefusedJobEndsTheEngineWithTheReason) {
  auto launch = Launch({{"FAKE_SCHEDULER", "refuse"}}, 1, JobFlags());
  EXPECT_EQ(launch->Wait(), 1);
  EXPECT_NE(launch->err().find("the output exists; use overwrite"), std::string::npos);
}

TEST_F(ProgramsTest, AMissingProgramIsNamed) {
  fs::remove(dir_ / "zipage-worker");
  auto launch = Launch();
  EXPECT_EQ(launch->Wait(), 1);
  EXPECT_NE(launch->err().find(dir_ / "zipage-worker"), std::string::npos) << launch->err();
}

TEST_F(ProgramsTest, SigtermStopsInOrderAndPassesOnWhetherWorkRemains) {
  for (int number : {SIGTERM, SIGINT, SIGHUP}) {
    auto launch = Serve();
    launch->Kill(number);
    EXPECT_EQ(launch->Wait(), 0) << launch->err();
  }
  auto unfinished = Serve({{"FAKE_SCHEDULER", "unfinished"}});
  unfinished->Kill(SIGTERM);
  EXPECT_EQ(unfinished->Wait(), 75);
  auto job = Launch({{"FAKE_SCHEDULER", "unfinished"}, {"FAKE_ENDLESS", "1"}}, 1, JobFlags());
  ASSERT_TRUE(Eventually([&] { return job->err().find("0/3 lines") != std::string::npos; }));
  job->Kill(SIGTERM);
  EXPECT_EQ(job->Wait(), 75);
}

TEST_F(ProgramsTest, ASecondSignalEndsAtOnce) {
  for (int number : {SIGTERM, SIGINT}) {
    auto launch = Launch({{"FAKE_SCHEDULER", "hang"}});
    Children(3);
    // The stand-in is deaf once it runs; before that, the signal may still end it in order.
    ASSERT_TRUE(Eventually([&] { return NumRunDirectories() == 1; }));
    kill(launch->pid(), number);
    ASSERT_TRUE(Eventually([&] { return launch->err().find("stopping") != std::string::npos; }));
    kill(launch->pid(), number);
    const int status = launch->Wait();
    EXPECT_TRUE(status == 128 + number || status == 0) << status;
  }
}

TEST_F(ProgramsTest, ASilentSchedulerIsNamed) {
  auto launch = Launch({{"FAKE_SCHEDULER", "hang"}}, 1, {"--init_timeout_s", "1"});
  EXPECT_EQ(launch->Wait(), 1);
  EXPECT_NE(launch->err().find("has not answered"), std::string::npos) << launch->err();
}

TEST_F(ProgramsTest, TwoEnginesRunSideBySideAndMustBeChosen) {
  auto first = Serve();
  auto second = Serve();
  EXPECT_EQ(NumRunDirectories(), 2);
  auto ambiguous = Start("zipage-status", {});
  EXPECT_EQ(ambiguous->Wait(), 2);
  for (const std::string& engine : RunningEngines({base()})) {
    EXPECT_NE(ambiguous->err().find(engine), std::string::npos) << ambiguous->err();
    auto chosen = Start("zipage-status", {"--engine", engine, "--json"});
    EXPECT_EQ(chosen->Wait(), 0) << chosen->err();
    EXPECT_EQ(nlohmann::json::parse(chosen->out())["model"], "fake");
  }
  for (Program* launch : {first.get(), second.get()}) {
    launch->Kill(SIGTERM);
    EXPECT_EQ(launch->Wait(), 0);
  }
}

TEST_F(ProgramsTest, SubmitWatchesDetachesAndCancels) {
  auto none = Start("zipage-submit", JobFlags());
  EXPECT_EQ(none->Wait(), 2);
  EXPECT_NE(none->err().find("zipage-launch"), std::string::npos) << none->err();

  auto launch = Serve({{"FAKE_ENDLESS", "1"}});
  std::vector<std::string> flags = JobFlags();
  flags.insert(flags.end(), {"--detach", "--name", "mine"});
  auto detached = Start("zipage-submit", flags);
  EXPECT_EQ(detached->Wait(), 0) << detached->err();
  EXPECT_EQ(detached->out(), "1\n");

  auto watched = Start("zipage-submit", JobFlags());
  ASSERT_TRUE(Eventually([&] { return watched->err().find("accepted") != std::string::npos; }));
  watched->Kill(SIGINT);
  EXPECT_EQ(watched->Wait(), 130);
  EXPECT_NE(watched->err().find("--cancel 2"), std::string::npos) << watched->err();

  flags = JobFlags();
  flags.push_back("--cancel_on_exit");
  auto cancelling = Start("zipage-submit", flags);
  ASSERT_TRUE(Eventually([&] { return cancelling->err().find("accepted") != std::string::npos; }));
  cancelling->Kill(SIGINT);
  EXPECT_EQ(cancelling->Wait(), 75) << cancelling->err();

  EXPECT_EQ(Start("zipage-submit", {"--cancel", "1"})->Wait(), 0);
  EXPECT_EQ(Start("zipage-submit", {"--cancel", "99"})->Wait(), 1);
  auto status = Start("zipage-status", {"--json"});
  EXPECT_EQ(status->Wait(), 0);
  const nlohmann::json jobs = nlohmann::json::parse(status->out())["jobs"];
  ASSERT_EQ(jobs.size(), 3U);
  EXPECT_EQ(jobs[0]["name"], "mine");
  EXPECT_EQ(jobs[0]["state"], "cancelled");
  EXPECT_EQ(jobs[1]["state"], "running");
  EXPECT_EQ(jobs[2]["state"], "cancelled");
  auto table = Start("zipage-status", {});
  EXPECT_EQ(table->Wait(), 0);
  EXPECT_NE(table->out().find("mine"), std::string::npos) << table->out();
  launch->Kill(SIGTERM);
  EXPECT_EQ(launch->Wait(), 0);
}

TEST_F(ProgramsTest, SubmitReturnsTheJobsExitStatus) {
  auto launch = Serve({{"FAKE_FAILED_LINES", "1"}}, 1);
  auto submit = Start("zipage-submit", JobFlags());
  EXPECT_EQ(submit->Wait(), 3) << submit->err();
  EXPECT_NE(submit->out().find("2 of 3 lines succeeded, 1 failed"), std::string::npos);
  launch->Kill(SIGTERM);
  EXPECT_EQ(launch->Wait(), 0);
}

TEST_F(ProgramsTest, AGivenRunDirectoryIsUsedAndRemoved) {
  auto launch = Launch({}, 1, {"--run_dir", dir_ / "here"});
  ASSERT_TRUE(Eventually([&] { return launch->out().find(dir_ / "here") != std::string::npos; }));
  auto second = Launch({}, 1, {"--run-dir", dir_ / "here"});
  EXPECT_EQ(second->Wait(), 1);
  EXPECT_NE(second->err().find("in use"), std::string::npos) << second->err();
  auto status = Start("zipage-status", {"--engine", dir_ / "here"});
  EXPECT_EQ(status->Wait(), 0) << status->err();
  launch->Kill(SIGTERM);
  EXPECT_EQ(launch->Wait(), 0);
  EXPECT_FALSE(fs::exists(dir_ / "here"));
}

TEST_F(ProgramsTest, KeygenWritesAPrivateFileOnce) {
  auto keygen = Start("zipage-submit", {"--curve_keygen", dir_ / "key"});
  EXPECT_EQ(keygen->Wait(), 0) << keygen->err();
  EXPECT_EQ(keygen->out().size(), 41U);
  EXPECT_EQ(Start("zipage-submit", {"--curve_keygen", dir_ / "key"})->Wait(), 1);
}

}  // namespace
}  // namespace zipage
