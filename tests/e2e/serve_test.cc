// An engine that serves: jobs of several clients, status, cancelling, other engines beside it, and
// the TCP endpoint.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "launcher/run_directory.h"
#include "tests/e2e/engine_fixture.h"

namespace zipage {
namespace {

class ServeTest : public EngineTest {
 protected:
  Outcome Submit(const std::string& name, const std::vector<Json>& lines, Flags flags = {}) {
    const Flags job = JobFlags(name, lines);
    flags.insert(flags.end(), job.begin(), job.end());
    return Run("zipage-submit", flags);
  }
  // Hands over a job that takes minutes; its id.
  std::string SubmitLongJob(const std::string& name, Flags flags = {}) {
    flags.push_back("--detach");
    const Outcome outcome = Submit(name, SimpleRequests(20'000, 400), flags);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    return outcome.out.substr(0, outcome.out.find('\n'));
  }
  static Json JobOf(const Json& status, const std::string& name) {
    for (const Json& job : status.at("jobs")) {
      if (job.at("name") == name) return job;
    }
    return {{"state", "unknown"}, {"num_succeeded", 0}};
  }
  static void Stop(Program* launch, int status) {
    launch->Kill(SIGTERM);
    EXPECT_EQ(launch->Wait(), status) << launch->err();
  }
  // Where a served engine takes jobs by TCP, from its log.
  static std::string TcpEndpoint(const Program& launch) {
    const std::string log = launch.err();
    const size_t begin = log.find("tcp://127.0.0.1:");
    EXPECT_NE(begin, std::string::npos) << log;
    return begin == std::string::npos ? "" : log.substr(begin, log.find('\n', begin) - begin);
  }
  // Others of this user outside the test's directory, which clients would find too.
  bool OtherEnginesRun() const {
    return RunningEngines(RunBases()).size() > RunDirectories().size();
  }
};

TEST_F(ServeTest, ServesConcurrentClientsAndEmptyJobsAndTheSameJobAgain) {
  auto launch = Serve({"--tp", "2"});
  const Flags engine = {"--engine", RunDirectories().at(0)};
  struct stat info {};
  ASSERT_EQ(stat(engine[1].c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0700U);

  const std::vector<Json> requests = RandomRequests(20, 30, /*seed=*/5);
  std::vector<std::unique_ptr<Program>> clients;
  for (const char* name : {"a", "b", "c"}) {
    Flags flags = JobFlags(name, requests);
    flags.insert(flags.end(), engine.begin(), engine.end());
    clients.push_back(Start("zipage-submit", flags));
  }
  Flags empty_flags = JobFlags("empty", {});
  empty_flags.insert(empty_flags.end(), engine.begin(), engine.end());
  clients.push_back(Start("zipage-submit", empty_flags));
  for (auto& client : clients) EXPECT_EQ(client->Wait(), 0) << client->err();
  EXPECT_EQ(ReadText(OutputPath("empty")), "");
  const std::vector<Json> first = ReadOutput(OutputPath("a"));
  EXPECT_EQ(first.size(), requests.size());
  for (const char* name : {"b", "c"}) {
    const std::vector<Json> other = ReadOutput(OutputPath(name));
    EXPECT_EQ(other.size(), requests.size());
    for (const Json& request : requests) {
      const std::string id = request.at("id");
      EXPECT_EQ(TokenIds(Find(other, id)), TokenIds(Find(first, id))) << id;
    }
  }

  const Outcome refused = Submit("a", requests, engine);
  EXPECT_EQ(refused.status, 1);
  EXPECT_NE(refused.err.find("overwrite"), std::string::npos) << refused.err;
  EXPECT_EQ(CountLines(refused.err), 1) << refused.err;
  const Outcome again = Submit("a", requests, {"--overwrite", engine[0], engine[1]});
  EXPECT_EQ(again.status, 0) << again.err;
  EXPECT_EQ(ReadOutput(OutputPath("a")).size(), requests.size());
  EXPECT_EQ(Status(engine).at("jobs").size(), 5U);
  Stop(launch.get(), 0);
}

TEST_F(ServeTest, ASmallJobDoesNotWaitForABigOneAndTheBigOneCanBeCancelled) {
  auto launch = Serve({"--max_num_seqs", "32", "--max_num_batched_tokens", "256"});
  const Flags engine = {"--engine", RunDirectories().at(0)};
  const std::string big = SubmitLongJob("big", engine);
  EXPECT_TRUE(StatusBecomes([](const Json& s) { return JobOf(s, "big").at("num_succeeded") > 0; }));
  const Outcome small = Submit("small", SimpleRequests(5, 20), engine);
  EXPECT_EQ(small.status, 0) << small.err;
  EXPECT_EQ(ReadOutput(OutputPath("small")).size(), 5U);

  const Json status = Status(engine);
  EXPECT_EQ(JobOf(status, "big").at("state"), "running");
  EXPECT_EQ(JobOf(status, "small").at("state"), "finished");
  EXPECT_EQ(JobOf(status, "small").at("num_succeeded"), 5);
  EXPECT_GT(status.at("num_running"), 0);
  EXPECT_EQ(status.at("num_free_blocks").get<int>() + status.at("num_used_blocks").get<int>() +
                status.at("num_cached_blocks").get<int>(),
            status.at("num_blocks"));
  const Outcome text = Run("zipage-status", engine);
  EXPECT_EQ(text.status, 0);
  for (const char* word : {"ready", "small", "big", "finished", "running", "cpu"}) {
    EXPECT_NE(text.out.find(word), std::string::npos) << word << " in " << text.out;
  }

  Flags cancel = {"--cancel", big};
  cancel.insert(cancel.end(), engine.begin(), engine.end());
  const Outcome cancelled = Run("zipage-submit", cancel);
  EXPECT_EQ(cancelled.status, 0) << cancelled.err;
  EXPECT_EQ(JobOf(Status(engine), "big").at("state"), "cancelled");
  EXPECT_EQ(Run("zipage-submit", cancel).status, 1);
  EXPECT_FALSE(ReadOutput(OutputPath("big")).empty());
  EXPECT_TRUE(StatusBecomes([](const Json& s) { return s.at("num_used_blocks") == 0; }));
  // The engine goes on.
  EXPECT_EQ(Submit("after", SimpleRequests(3, 5), engine).status, 0);
  Stop(launch.get(), 0);
}

TEST_F(ServeTest, AJobOutlivesItsClientAndAWatcherLearnsOfACancelledOne) {
  auto launch = Serve({"--max_num_seqs", "16"});
  const Flags engine = {"--engine", RunDirectories().at(0)};
  Flags flags = JobFlags("orphan", SimpleRequests(300, 200));
  flags.insert(flags.end(), engine.begin(), engine.end());
  auto killed = Start("zipage-submit", flags);
  EXPECT_TRUE(
      StatusBecomes([](const Json& s) { return JobOf(s, "orphan").at("num_succeeded") > 0; }));
  killed->Kill(SIGKILL);
  EXPECT_EQ(killed->Wait(), 128 + SIGKILL);

  Flags watched_flags = JobFlags("watched", SimpleRequests(20'000, 400));
  watched_flags.insert(watched_flags.end(), engine.begin(), engine.end());
  auto watched = Start("zipage-submit", watched_flags);
  EXPECT_TRUE(
      StatusBecomes([](const Json& s) { return JobOf(s, "watched").at("num_succeeded") > 0; }));
  const Json job = JobOf(Status(engine), "watched");
  EXPECT_EQ(Run("zipage-submit",
                {"--cancel", std::to_string(job.at("id").get<int>()), engine[0], engine[1]})
                .status,
            0);
  EXPECT_EQ(watched->Wait(), 75) << watched->err();

  EXPECT_TRUE(
      StatusBecomes([](const Json& s) { return JobOf(s, "orphan").at("state") == "finished"; }));
  EXPECT_EQ(ReadOutput(OutputPath("orphan")).size(), 300U);
  Stop(launch.get(), 0);
}

TEST_F(ServeTest, EnginesShareAHostAndClientsFindTheOnlyOne) {
  auto first = Serve();
  const bool alone = !OtherEnginesRun();
  if (alone) {
    EXPECT_EQ(Run("zipage-status", {}).status, 0);
    EXPECT_EQ(Submit("found", SimpleRequests(2, 2)).status, 0);
  }
  std::vector<std::unique_ptr<Program>> others;
  for (int i = 0; i < 3; ++i) others.push_back(Launch({"--tp", i == 0 ? "2" : "1"}));
  for (const auto& other : others) {
    EXPECT_TRUE(Eventually([&] { return other->out().find("stop:") != std::string::npos; }))
        << other->err();
  }
  const std::vector<std::string> engines = RunDirectories();
  ASSERT_EQ(engines.size(), 4U);
  const Outcome ambiguous = Run("zipage-status", {});
  EXPECT_EQ(ambiguous.status, 2);
  EXPECT_EQ(CountLines(ambiguous.err), 1) << ambiguous.err;
  for (const std::string& engine : engines) {
    EXPECT_NE(ambiguous.err.find(engine), std::string::npos) << ambiguous.err;
    EXPECT_EQ(
        Submit("one" + engine.substr(engine.size() - 6), SimpleRequests(2, 2), {"--engine", engine})
            .status,
        0);
  }
  // Ending one leaves the others alone.
  Stop(first.get(), 0);
  EXPECT_EQ(RunDirectories().size(), 3U);
  for (const std::string& engine : RunDirectories()) {
    EXPECT_EQ(Run("zipage-status", {"--engine", engine}).status, 0);
  }
  for (const auto& other : others) Stop(other.get(), 0);
  if (!alone) GTEST_SKIP() << "other engines of this user run: finding the only one is not tested";
}

TEST_F(ServeTest, TakesJobsByTcpWhenInsecureIsSaidExplicitly) {
  auto launch = Serve({"--job_endpoint", "tcp://127.0.0.1:*", "--insecure_tcp"});
  const Flags engine = {"--endpoint", TcpEndpoint(*launch)};
  EXPECT_EQ(Submit("tcp", SimpleRequests(3, 3), engine).status, 0);
  EXPECT_EQ(ReadOutput(OutputPath("tcp")).size(), 3U);
  EXPECT_TRUE(Status(engine).at("ready"));
  Stop(launch.get(), 0);
}

TEST_F(ServeTest, LetsInOnlyClientsWhoseCurveKeysItKnows) {
  std::map<std::string, std::string> public_key;
  for (const char* who : {"engine", "friend", "stranger"}) {
    const Outcome keygen = Run("zipage-submit", {"--curve_keygen", dir_ / who});
    ASSERT_EQ(keygen.status, 0) << keygen.err;
    public_key[who] = keygen.out.substr(0, keygen.out.find('\n'));
    EXPECT_EQ(public_key[who].size(), 40U);
    EXPECT_EQ(Run("zipage-submit", {"--curve_keygen", dir_ / who}).status, 1) << "overwritten";
  }
  WriteText(dir_ / "allowed", public_key["friend"] + "  # a friend\n");
  auto launch = Serve({"--job_endpoint", "tcp://127.0.0.1:*", "--curve_key_file", dir_ / "engine",
                       "--curve_allowed_clients_file", dir_ / "allowed"});
  const std::string endpoint = TcpEndpoint(*launch);
  const auto client = [&](const std::string& who, const std::string& server) -> Flags {
    return {"--endpoint",         endpoint,          "--curve_key_file", dir_ / who,
            "--curve_server_key", public_key[server]};
  };
  // Refused clients wait out their time limit, all at once.
  std::vector<std::unique_ptr<Program>> refused;
  refused.push_back(Start("zipage-status", client("stranger", "engine")));
  refused.push_back(Start("zipage-status", client("friend", "stranger")));
  refused.push_back(Start("zipage-status", {"--endpoint", endpoint}));
  Flags job = JobFlags("stranger", SimpleRequests(1, 1));
  const Flags stranger = client("stranger", "engine");
  job.insert(job.end(), stranger.begin(), stranger.end());
  refused.push_back(Start("zipage-submit", job));

  EXPECT_EQ(Submit("friend", SimpleRequests(3, 3), client("friend", "engine")).status, 0);
  EXPECT_EQ(ReadOutput(OutputPath("friend")).size(), 3U);
  for (auto& program : refused) {
    EXPECT_EQ(program->Wait(), 1) << program->out();
    EXPECT_EQ(CountLines(program->err()), 1) << program->err();
    EXPECT_NE(program->err().find("CURVE"), std::string::npos) << program->err();
  }
  EXPECT_EQ(Status(client("friend", "engine")).at("jobs").size(), 1U);
  Stop(launch.get(), 0);
}

}  // namespace
}  // namespace zipage
