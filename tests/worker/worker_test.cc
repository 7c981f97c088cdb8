#include "worker/worker.h"

#include <deque>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/messages.h"
#include "proto/transport.h"
#include "proto/wire.h"
#include "tests/worker/golden.h"

namespace zipage {
namespace {

using testing::HasSubstr;

// Plays the scheduler for workers that run as threads.
class WorkerTest : public testing::Test {
 protected:
  WorkerTest() {
    std::string pattern = testing::TempDir() + "/workerXXXXXX";
    dir_ = mkdtemp(pattern.data());
    auto server = transport::ServerSocket::Bind(&context_, "ipc://" + dir_ + "/workers", {});
    EXPECT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    config_.model = LoadGoldenModel("tiny-qwen2/f32").dir;
    config_.dtype = "float32";
    config_.kvcache_block_size = 16;
    config_.num_kvcache_blocks = 40;
    config_.max_num_seqs = 4;
    config_.max_num_batched_tokens = 64;
  }
  ~WorkerTest() override {
    for (std::thread& thread : threads_) thread.join();
    std::filesystem::remove_all(dir_);
  }

  void StartWorkers(bool shared_memory) {
    std::shared_ptr<SharedMemory> memory;
    if (shared_memory) memory = *SharedMemory::Anonymous(1 << 20);
    statuses_.resize(config_.tp);
    for (int rank = 0; rank < config_.tp; ++rank) {
      const WorkerOptions options{.rank = rank,
                                  .epoch = 3,
                                  .endpoint = server_->endpoint(),
                                  .run_dir = dir_,
                                  .shared_memory = memory};
      threads_.emplace_back(
          [this, options] { statuses_[options.rank] = RunWorker(options, config_); });
    }
  }

  // The next message that is no heartbeat, with its sender.
  std::pair<std::string, WorkerMessage> Receive() {
    while (true) {
      auto received = server_->Receive();
      if (!received.has_value()) {
        transport::WaitReadable({server_.get()}, std::chrono::milliseconds(1000));
        continue;
      }
      auto message = wire::DecodeWorkerMessage(received->bytes);
      EXPECT_TRUE(message.ok()) << message.status();
      if (const Heartbeat* heartbeat = std::get_if<Heartbeat>(&*message)) {
        EXPECT_EQ(received->peer, "heartbeat-" + std::to_string(heartbeat->rank));
        ++num_heartbeats_;
        continue;
      }
      return {received->peer, *std::move(message)};
    }
  }
  // The next message of every rank, which must be a T, in rank order. Ranks do not wait for each
  // other, so what one sends later may come first.
  template <typename T>
  std::vector<T> ReceiveFromAll() {
    std::vector<T> messages(config_.tp);
    for (int rank = 0; rank < config_.tp; ++rank) {
      const std::string peer = "rank-" + std::to_string(rank);
      while (pending_[peer].empty()) {
        auto [sender, message] = Receive();
        pending_[sender].push_back(std::move(message));
      }
      const WorkerMessage message = std::move(pending_[peer].front());
      pending_[peer].pop_front();
      if (const T* typed = std::get_if<T>(&message)) {
        messages[rank] = *typed;
        EXPECT_EQ(typed->rank, rank);
        continue;
      }
      const WorkerError* error = std::get_if<WorkerError>(&message);
      ADD_FAILURE() << "another message from " << peer
                    << (error != nullptr ? ": " + error->message : "");
    }
    return messages;
  }
  void Broadcast(const SchedulerMessage& message) {
    const std::string bytes = wire::Encode(message);
    for (int rank = 0; rank < config_.tp; ++rank) {
      const absl::Status sent = server_->Send("rank-" + std::to_string(rank), bytes);
      EXPECT_TRUE(sent.ok()) << sent;
    }
  }
  void Join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  // Hello and Ready of all ranks, then Start.
  void HandShake() {
    for (const Hello& hello : ReceiveFromAll<Hello>()) {
      EXPECT_EQ(hello.protocol_version, kProtocolVersion);
      EXPECT_EQ(hello.tp, config_.tp);
      EXPECT_EQ(hello.epoch, 3);
      EXPECT_EQ(hello.config_digest, Digest(config_));
      EXPECT_THAT(hello.device, HasSubstr("cpu"));
    }
    for (const Ready& ready : ReceiveFromAll<Ready>()) {
      EXPECT_EQ(ready.num_kv_blocks, 40);
      EXPECT_EQ(ready.vocab_size, 512);
      EXPECT_EQ(ready.max_positions, 512);
      EXPECT_EQ(ready.compute_dtype, "float32");
      // Two layers of keys, values and scores.
      EXPECT_EQ(ready.kv_block_bytes, 2 * 16 * (2 * 32 + 1) * sizeof(float));
      EXPECT_EQ(ready.num_query_slots, 4);
      EXPECT_EQ(ready.num_host_blocks, (int64_t{4} << 30) / ready.kv_block_bytes);
      EXPECT_GT(ready.weight_bytes, 0);
    }
    Broadcast(Start{.num_kv_blocks = 30, .num_query_slots = 3});
  }

  // Plans run one ahead of their results.
  void RunGolden() {
    const GoldenPrompt prompt = LoadGoldenModel("tiny-qwen2/f32").prompts[1];
    StepPlan plan;
    plan.step = 1;
    NewSequence added;
    added.sequence_slot = 2;
    added.tokens = prompt.ids;
    added.num_prompt_tokens = prompt.ids.size();
    added.block_table = {7, 3, 29, 0, 11, 12};
    added.sampling.temperature = 0;
    plan.new_sequences = {added};
    plan.chunks = {{2, 0, 17, true}};
    Broadcast(plan);
    std::vector<TokenId> tokens;
    for (uint64_t step = 1; step <= 64; ++step) {
      StepPlan decode;
      decode.step = step + 1;
      decode.num_decoding = 1;
      Broadcast(decode);
      const std::vector<StepResult> results = ReceiveFromAll<StepResult>();
      for (const StepResult& result : results) ASSERT_EQ(result.step, step);
      ASSERT_EQ(results[0].sampled.size(), 1);
      tokens.push_back(results[0].sampled[0].token);
    }
    EXPECT_EQ(tokens, prompt.greedy);
    ReceiveFromAll<StepResult>();
  }

  void ExpectError(absl::StatusCode code, const std::string& text) {
    const std::vector<WorkerError> errors = ReceiveFromAll<WorkerError>();
    Join();
    for (int rank = 0; rank < config_.tp; ++rank) {
      EXPECT_EQ(errors[rank].code, static_cast<uint32_t>(code)) << errors[rank].message;
      EXPECT_THAT(errors[rank].message, HasSubstr(text));
      EXPECT_EQ(std::string(statuses_[rank].message()), errors[rank].message);
    }
  }

  Config config_;
  std::string dir_;
  transport::Context context_;
  std::unique_ptr<transport::ServerSocket> server_;
  std::vector<absl::Status> statuses_;
  std::vector<std::thread> threads_;
  std::map<std::string, std::deque<WorkerMessage>> pending_;  // by sender
  int num_heartbeats_ = 0;
};

TEST_F(WorkerTest, GoesFromHelloToShutdown) {
  StartWorkers(false);
  HandShake();
  RunGolden();
  Broadcast(Shutdown());
  Join();
  EXPECT_TRUE(statuses_[0].ok()) << statuses_[0];
  EXPECT_GE(num_heartbeats_, 1);
}

TEST_F(WorkerTest, TwoRanksAgreeOverSharedMemory) {
  config_.tp = 2;
  StartWorkers(true);
  HandShake();
  RunGolden();
  Broadcast(Shutdown());
  Join();
  for (const absl::Status& status : statuses_) EXPECT_TRUE(status.ok()) << status;
}

TEST_F(WorkerTest, TwoRanksAgreeOverGloo) {
  config_.tp = 2;
  config_.collective = "gloo";
  StartWorkers(false);
  HandShake();
  RunGolden();
  Broadcast(Shutdown());
  Join();
  for (const absl::Status& status : statuses_) EXPECT_TRUE(status.ok()) << status;
}

TEST_F(WorkerTest, ShutsDownBeforeStart) {
  StartWorkers(false);
  ReceiveFromAll<Hello>();
  ReceiveFromAll<Ready>();
  Broadcast(Shutdown());
  Join();
  EXPECT_TRUE(statuses_[0].ok()) << statuses_[0];
}

TEST_F(WorkerTest, AMissingModelIsReported) {
  config_.model = dir_ + "/nothing";
  StartWorkers(false);
  ReceiveFromAll<Hello>();
  ExpectError(absl::StatusCode::kNotFound, dir_ + "/nothing");
}

TEST_F(WorkerTest, TensorParallelSizesThatDoNotDivideAreReported) {
  config_.tp = 3;
  StartWorkers(true);
  ReceiveFromAll<Hello>();
  ExpectError(absl::StatusCode::kInvalidArgument, "tp");
}

TEST_F(WorkerTest, MorePositionsThanTheModelHasAreReportedBeforeAnythingIsAllocated) {
  config_.max_model_len = 1 << 30;
  StartWorkers(false);
  ReceiveFromAll<Hello>();
  ExpectError(absl::StatusCode::kInvalidArgument, "max_model_len is 1073741824, but");
}

TEST_F(WorkerTest, Float16IsReportedWithTheCure) {
  config_.dtype = "float16";
  StartWorkers(false);
  ReceiveFromAll<Hello>();
  ExpectError(absl::StatusCode::kInvalidArgument, "use dtype auto or float32");
}

TEST_F(WorkerTest, AStartWithMoreBlocksThanFitIsReported) {
  StartWorkers(false);
  ReceiveFromAll<Hello>();
  ReceiveFromAll<Ready>();
  Broadcast(Start{.num_kv_blocks = 41});
  ExpectError(absl::StatusCode::kInternal, "41");
}

TEST_F(WorkerTest, AWrongPlanIsReportedByEveryRank) {
  config_.tp = 2;
  StartWorkers(true);
  HandShake();
  StepPlan plan;
  plan.step = 1;
  plan.num_decoding = 1;
  Broadcast(plan);
  ExpectError(absl::StatusCode::kInternal, "step 1: the plan decodes 1 slots, 0 slots decode");
}

TEST_F(WorkerTest, AStartWithMoreQuerySlotsThanFitIsReported) {
  StartWorkers(false);
  ReceiveFromAll<Hello>();
  ReceiveFromAll<Ready>();
  Broadcast(Start{.num_kv_blocks = 40, .num_query_slots = 5});
  ExpectError(absl::StatusCode::kInternal, "Start names 5 query slots, this rank has 4");
}

TEST_F(WorkerTest, TooLittleMemoryIsReportedBeforeWeightsAreLoaded) {
  config_.num_kvcache_blocks = 0;
  config_.kv_cache_memory_gb = 1 << 20;
  StartWorkers(false);
  ReceiveFromAll<Hello>();
  ExpectError(absl::StatusCode::kResourceExhausted, "kv_cache_memory_gb is 1.04858e+06");
}

TEST_F(WorkerTest, APoolThatCannotHoldABudgetIsReported) {
  config_.num_kvcache_blocks = 8;
  StartWorkers(false);
  ReceiveFromAll<Hello>();
  ExpectError(absl::StatusCode::kInvalidArgument, "lower max_cache_blocks_per_seq to 7");
}

TEST_F(WorkerTest, CompressionsAreDoneAndReportedByRankZero) {
  config_.tp = 2;
  StartWorkers(true);
  HandShake();
  StepPlan plan;
  plan.step = 1;
  NewSequence added;
  added.sequence_slot = 2;
  added.tokens.assign(32, 5);
  added.num_prompt_tokens = 20;
  added.block_table = {7, 3};
  plan.new_sequences = {added};
  plan.query_slots = {{2, 1}};
  plan.chunks = {{2, 0, 32, true}};
  Broadcast(plan);
  plan = StepPlan();
  plan.step = 2;
  plan.compressions = {{2, {7, 3}, {7, 3}, 0}};
  plan.num_decoding = 1;
  Broadcast(plan);
  ReceiveFromAll<StepResult>();
  const std::vector<StepResult> results = ReceiveFromAll<StepResult>();
  ASSERT_EQ(results[0].finished_compressions.size(), 1);
  EXPECT_EQ(results[0].finished_compressions[0].sequence_slot, 2);
  // A block is kept, of which the window (the whole block) is output but for four tokens.
  EXPECT_EQ(results[0].finished_compressions[0].prompt_tokens_kept, 4);
  EXPECT_GT(results[0].device_micros, results[0].compression_micros);
  EXPECT_TRUE(results[1].finished_compressions.empty());
  Broadcast(Shutdown());
  Join();
  for (const absl::Status& status : statuses_) EXPECT_TRUE(status.ok()) << status;
}

}  // namespace
}  // namespace zipage
