#include "launcher/client.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "launcher/job_watch.h"
#include "launcher/run_directory.h"
#include "proto/transport.h"
#include "proto/wire.h"
#include "tests/launcher/temp_dir.h"

namespace zipage {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

bool Contains(const absl::Status& status, const std::string& text) {
  return std::string(status.message()).find(text) != std::string::npos;
}

// A job socket whose messages the test answers itself, in the same thread.
class JobSocket {
 public:
  explicit JobSocket(const std::string& endpoint) {
    auto socket = transport::ServerSocket::Bind(&context_, endpoint, {});
    EXPECT_TRUE(socket.ok()) << socket.status();
    if (socket.ok()) socket_ = *std::move(socket);
  }
  // The next message; its sender gets the following replies.
  ClientMessage Take() {
    EXPECT_TRUE(transport::WaitReadable({socket_.get()}, seconds(60)));
    const auto received = socket_->Receive();
    if (!received.has_value()) return GetStatus{};
    peer_ = received->peer;
    auto message = wire::DecodeClientMessage(received->bytes);
    EXPECT_TRUE(message.ok()) << message.status();
    return message.ok() ? *message : GetStatus{};
  }
  bool HasMessage() { return transport::WaitReadable({socket_.get()}, milliseconds(100)); }
  void Reply(const ClientReply& reply) {
    EXPECT_TRUE(socket_->Send(peer_, wire::Encode(reply)).ok());
  }

 private:
  transport::Context context_;
  std::unique_ptr<transport::ServerSocket> socket_;
  std::string peer_;
};

class JobWatchTest : public testing::Test {
 protected:
  void SetUp() override {
    address_.endpoint = "ipc://" + (dir_ / "job.sock");
    auto client = JobClient::Connect(address_);
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }

  // Advances at `now` until a status has come or an error.
  absl::Status AdvanceToNews(JobWatch* watch, JobWatch::TimePoint now) {
    const auto deadline = std::chrono::steady_clock::now() + seconds(60);
    while (std::chrono::steady_clock::now() < deadline) {
      const absl::StatusOr<bool> news = watch->Advance(now);
      if (!news.ok()) return news.status();
      if (*news) return absl::OkStatus();
    }
    return absl::DeadlineExceededError("no status came");
  }

  TempDir dir_;
  EngineAddress address_;
  std::unique_ptr<JobClient> client_;
};

TEST_F(JobWatchTest, FollowsAJobFromBeforeTheEngineIsThereToItsEnd) {
  JobWatch::TimePoint now{};
  JobWatch watch(client_.get(), now);
  SubmitJob job;
  job.name = "j";
  job.num_lines = 2;
  ASSERT_TRUE(watch.Submit(job).ok());
  for (int i = 0; i < 100; ++i) {
    ASSERT_TRUE(watch.Advance(now += seconds(1)).ok());  // Asks once, however long nobody answers.
  }
  EXPECT_EQ(watch.Silence(now), seconds(100));
  EXPECT_FALSE(watch.engine().has_value());

  JobSocket server(address_.endpoint);
  EXPECT_EQ(std::get<SubmitJob>(server.Take()).num_lines, 2U);
  EXPECT_TRUE(std::holds_alternative<GetStatus>(server.Take()));
  EXPECT_FALSE(server.HasMessage()) << "questions piled up";
  server.Reply(JobAccepted{7});
  EngineStatus status;
  status.jobs.resize(2);
  status.jobs[0].id = 3;
  status.jobs[1].id = 7;
  server.Reply(status);
  ASSERT_TRUE(AdvanceToNews(&watch, now).ok());
  EXPECT_EQ(watch.Silence(now), seconds(0));
  EXPECT_EQ(watch.job_id(), 7U);
  EXPECT_FALSE(watch.ended());

  ASSERT_TRUE(watch.Advance(now += seconds(1)).ok());
  EXPECT_TRUE(std::holds_alternative<GetStatus>(server.Take()));
  status.jobs[1].state = JobState::kFinished;
  status.jobs[1].num_succeeded = 2;
  server.Reply(status);
  ASSERT_TRUE(AdvanceToNews(&watch, now).ok());
  EXPECT_TRUE(watch.ended());
  EXPECT_EQ(watch.job()->num_succeeded, 2U);
}

TEST_F(JobWatchTest, ARefusalAndAForgottenJobAreErrors) {
  JobSocket server(address_.endpoint);
  JobWatch refused(client_.get(), {});
  ASSERT_TRUE(refused.Submit({}).ok());
  server.Take();
  server.Reply(Refused{"output exists"});
  EXPECT_TRUE(Contains(AdvanceToNews(&refused, {}), "output exists"));

  const auto client = JobClient::Connect(address_);
  ASSERT_TRUE(client.ok());
  JobWatch forgotten(client->get(), {});
  ASSERT_TRUE(forgotten.Submit({}).ok());
  while (!std::holds_alternative<SubmitJob>(server.Take())) {
  }
  server.Reply(JobAccepted{1});
  server.Reply(EngineStatus{});
  EXPECT_EQ(AdvanceToNews(&forgotten, {}).code(), absl::StatusCode::kNotFound);
}

TEST_F(JobWatchTest, BytesThatAreNoReplyAreAnErrorAndNoCrash) {
  transport::Context context;
  auto server = transport::ServerSocket::Bind(&context, address_.endpoint, {});
  ASSERT_TRUE(server.ok());
  ASSERT_TRUE(client_->Send(GetStatus{}).ok());
  ASSERT_TRUE(transport::WaitReadable({server->get()}, seconds(60)));
  const auto received = (*server)->Receive();
  ASSERT_TRUE((*server)->Send(received->peer, "nonsense").ok());
  EXPECT_FALSE(client_->Receive(seconds(60)).ok());
}

TEST_F(JobWatchTest, ACallThatNobodyAnswersNamesTheEndpointAndTheCure) {
  const auto reply = client_->Call(GetStatus{}, milliseconds(50));
  EXPECT_EQ(reply.status().code(), absl::StatusCode::kUnavailable);
  EXPECT_TRUE(Contains(reply.status(), address_.endpoint)) << reply.status();
  EXPECT_TRUE(Contains(reply.status(), "zipage-status")) << reply.status();
}

TEST(JobClientTest, ACallEndsAtOnceWhenTheEngineIsGone) {
  TempDir dir;
  const auto client = JobClient::Connect({"ipc://" + (dir / "job.sock"), dir.path(), {}});
  ASSERT_TRUE(client.ok());
  const auto reply = (*client)->Call(GetStatus{}, std::chrono::hours(1));
  EXPECT_TRUE(Contains(reply.status(), "not running any more")) << reply.status();
}

TEST(FindEngineTest, TakesTheOnlyOneAndListsSeveral) {
  TempDir dir;
  const std::vector<std::string> bases{dir / "a", dir / "missing", dir / "b"};
  EXPECT_TRUE(Contains(FindEngine({}, bases).status(), "zipage-launch"));
  const auto first = RunDirectory::CreateIn(bases[2]);
  ASSERT_TRUE(first.ok());
  const auto found = FindEngine({}, bases);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->run_directory, (*first)->path());
  EXPECT_EQ(found->endpoint, "ipc://" + (*first)->path() + "/job.sock");

  const auto second = RunDirectory::CreateIn(bases[0]);
  ASSERT_TRUE(second.ok());
  const absl::Status several = FindEngine({}, bases).status();
  EXPECT_TRUE(Contains(several, (*first)->path())) << several;
  EXPECT_TRUE(Contains(several, (*second)->path())) << several;
  EngineSelection chosen;
  chosen.engine = (*second)->path();
  EXPECT_EQ(FindEngine(chosen, bases)->run_directory, (*second)->path());
  chosen.engine = dir.path();
  EXPECT_EQ(FindEngine(chosen, bases).status().code(), absl::StatusCode::kNotFound);
}

TEST(FindEngineTest, AnEndpointStandsForItselfAndCurveNeedsBothHalves) {
  EngineSelection selection;
  selection.endpoint = "tcp://host:1234";
  const auto found = FindEngine(selection, {});
  ASSERT_TRUE(found.ok());
  EXPECT_EQ(found->endpoint, "tcp://host:1234");
  EXPECT_FALSE(found->curve.has_value());
  selection.engine = "/somewhere";
  EXPECT_TRUE(Contains(FindEngine(selection, {}).status(), "give one of them"));
  selection.engine = "";
  TempDir dir;
  const transport::CurveKeys own = transport::GenerateCurveKeys();
  const transport::CurveKeys server = transport::GenerateCurveKeys();
  ASSERT_TRUE(transport::WriteCurveKeyFile(dir / "key", own).ok());
  selection.curve_key_file = dir / "key";
  EXPECT_TRUE(Contains(FindEngine(selection, {}).status(), "curve_server_key"));
  selection.curve_server_key = server.public_key;
  const auto secured = FindEngine(selection, {});
  ASSERT_TRUE(secured.ok()) << secured.status();
  EXPECT_EQ(secured->curve->keys.secret_key, own.secret_key);
  EXPECT_EQ(secured->curve->server_key, server.public_key);
  selection.curve_server_key = "short";
  EXPECT_TRUE(Contains(FindEngine(selection, {}).status(), "curve_server_key"));
}

TEST(PrepareJobTest, CountsLinesThatAreNotBlank) {
  TempDir dir;
  const std::pair<const char*, uint64_t> cases[] = {
      {"", 0},
      {"\n\n", 0},
      {"a", 1},
      {"a\n", 1},
      {"a\nb", 2},
      {"a\r\n\r\nb\r\n", 2},
      {" \t\n  x  \n \n", 1},
      {"\n\na\n\n", 1},
  };
  for (const auto& [text, expected] : cases) {
    WriteText(dir / "in", text);
    SubmitJob job;
    job.input_path = dir / "in";
    job.output_path = dir / "out";
    ASSERT_TRUE(PrepareJob(&job).ok());
    EXPECT_EQ(job.num_lines, expected) << text;
    EXPECT_EQ(job.name, "in");
  }
  // Lines across the borders of the read buffer.
  std::string big;
  for (int i = 0; i < 300'000; ++i) big += std::string(static_cast<size_t>(i % 13), 'x') + "\n";
  WriteText(dir / "in", big);
  SubmitJob job;
  job.input_path = dir / "in";
  job.output_path = dir / "out";
  ASSERT_TRUE(PrepareJob(&job).ok());
  EXPECT_EQ(job.num_lines, 300'000U - (300'000U + 12U) / 13U);
}

TEST(PrepareJobTest, MakesPathsAbsoluteAndRefusesWhatIsNoJob) {
  TempDir dir;
  const auto back = std::filesystem::current_path();
  std::filesystem::current_path(dir.path());
  WriteText("in", "x");
  SubmitJob job;
  job.input_path = "in";
  job.output_path = "sub/../out";
  EXPECT_TRUE(PrepareJob(&job).ok());
  std::filesystem::current_path(back);
  EXPECT_EQ(job.input_path, dir / "in");
  EXPECT_EQ(job.output_path, dir / "out");
  job.output_path = dir / "in";
  EXPECT_TRUE(Contains(PrepareJob(&job), "a file of their own"));
  job.output_path = dir / "out";
  job.input_path = dir / "missing";
  EXPECT_TRUE(Contains(PrepareJob(&job), dir / "missing"));
  job.input_path = dir.path();
  EXPECT_TRUE(Contains(PrepareJob(&job), "not a file"));
}

}  // namespace
}  // namespace zipage
