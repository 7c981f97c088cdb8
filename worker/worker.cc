#include "worker/worker.h"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "proto/messages.h"
#include "proto/transport.h"
#include "proto/wire.h"
#include "worker/comm/gloo.h"
#include "worker/comm/single.h"
#include "worker/cpu_backend.h"
#include "worker/cuda_backend.h"
#include "worker/kv_pool.h"
#include "worker/memory_plan.h"
#include "worker/model_runner.h"
#include "worker/open_model.h"

namespace zipage {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kHeartbeatEvery{1000};
// How often a wait for the scheduler wakes up for nothing.
constexpr milliseconds kReceiveTimeout{60'000};

milliseconds Milliseconds(double seconds) {
  return milliseconds(static_cast<int64_t>(seconds * 1000));
}

// What the heartbeat thread tells about the worker thread.
struct Progress {
  std::atomic<WorkerPhase> phase = WorkerPhase::kStarting;
  std::atomic<uint64_t> step = 0;
};

// Sends the progress every second from a thread and a socket of its own, until it is destroyed.
class HeartbeatSender {
 public:
  HeartbeatSender(std::unique_ptr<transport::ClientSocket> socket, int rank,
                  const Progress* progress)
      : socket_(std::move(socket)), rank_(rank), progress_(progress), thread_([this] { Loop(); }) {}
  ~HeartbeatSender() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stops_ = true;
    }
    wake_.notify_all();
    thread_.join();
  }
  HeartbeatSender(const HeartbeatSender&) = delete;
  HeartbeatSender& operator=(const HeartbeatSender&) = delete;

 private:
  void Loop() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!stops_) {
      Heartbeat heartbeat;
      heartbeat.rank = rank_;
      heartbeat.phase = progress_->phase;
      heartbeat.step = progress_->step;
      // A heartbeat that cannot be sent is one that does not arrive: the scheduler draws the
      // conclusion.
      if (const absl::Status sent = socket_->Send(wire::Encode(WorkerMessage(heartbeat)));
          !sent.ok()) {
        LOG_FIRST_N(WARNING, 1) << "rank " << rank_ << ": heartbeat: " << sent;
      }
      wake_.wait_for(lock, kHeartbeatEvery, [this] { return stops_; });
    }
  }

  std::unique_ptr<transport::ClientSocket> socket_;
  const int rank_;
  const Progress* progress_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stops_ = false;  // Guarded by mutex_.
  std::thread thread_;  // Last: it uses all of the above.
};

absl::StatusOr<std::unique_ptr<Collective>> MakeCollective(const WorkerOptions& options,
                                                           const Config& config) {
  if (config.tp == 1) return std::make_unique<SingleCollective>();
  const milliseconds timeout = Milliseconds(config.collective_timeout_s);
  const bool has_memory = options.shared_memory != nullptr;
  if (config.collective == "shm" || (config.collective == "auto" && has_memory)) {
    if (!has_memory) {
      return absl::InvalidArgumentError(
          "collective is shm, but no shared memory was handed over; use collective gloo");
    }
    return MakeSharedMemoryCollective(options.shared_memory, options.rank, config.tp, timeout);
  }
  return MakeGlooCollective({.rank = options.rank,
                             .size = config.tp,
                             .store_dir = absl::StrCat(options.run_dir, "/gloo-", options.epoch),
                             .init_timeout = Milliseconds(config.init_timeout_s),
                             .timeout = timeout});
}

class Worker {
 public:
  Worker(const WorkerOptions& options, const Config& config) : options_(options), config_(config) {}

  absl::Status Run();

 private:
  absl::Status Connect();
  // Everything between Connect and the first plan; the steps in their order.
  absl::Status Serve();
  absl::Status Load();
  absl::Status WaitForStart();
  absl::Status RunPlans();
  absl::Status Send(const WorkerMessage& message) { return socket_->Send(wire::Encode(message)); }
  // Waits as long as it takes.
  absl::StatusOr<SchedulerMessage> Receive();

  const WorkerOptions& options_;
  const Config& config_;
  Progress progress_;
  transport::Context context_;
  std::unique_ptr<transport::ClientSocket> socket_;
  std::unique_ptr<HeartbeatSender> heartbeat_;

  std::unique_ptr<Backend> backend_;
  std::unique_ptr<Collective> collective_;
  std::optional<Transformer> transformer_;  // until the runner takes it
  MemoryPlan memory_;
  std::unique_ptr<ModelRunner> runner_;
};

absl::Status Worker::Run() {
  ZIPAGE_RETURN_IF_ERROR(Connect());
  absl::Status served = Serve();
  if (!served.ok()) {
    WorkerError error;
    error.rank = options_.rank;
    error.step = progress_.step;
    error.code = static_cast<uint32_t>(served.code());
    error.message = std::string(served.message());
    if (const absl::Status sent = Send(error); !sent.ok()) {
      LOG(ERROR) << "rank " << options_.rank << ": cannot report an error: " << sent;
    }
  }
  return served;
}

absl::Status Worker::Connect() {
  ZIPAGE_ASSIGN_OR_RETURN(
      socket_, transport::ClientSocket::Connect(&context_, options_.endpoint,
                                                absl::StrCat("rank-", options_.rank), {}));
  ZIPAGE_ASSIGN_OR_RETURN(
      std::unique_ptr<transport::ClientSocket> heartbeat_socket,
      transport::ClientSocket::Connect(&context_, options_.endpoint,
                                       absl::StrCat("heartbeat-", options_.rank), {}));
  heartbeat_ =
      std::make_unique<HeartbeatSender>(std::move(heartbeat_socket), options_.rank, &progress_);
  return absl::OkStatus();
}

absl::Status Worker::Serve() {
  ZIPAGE_ASSIGN_OR_RETURN(backend_, MakeBackend(config_));
  Hello hello;
  hello.rank = options_.rank;
  hello.tp = config_.tp;
  hello.epoch = options_.epoch;
  hello.config_digest = Digest(config_);
  hello.pid = getpid();
  hello.device = backend_->Description();
  ZIPAGE_RETURN_IF_ERROR(Send(hello));
  progress_.phase = WorkerPhase::kLoadingWeights;
  ZIPAGE_RETURN_IF_ERROR(Load());
  progress_.phase = WorkerPhase::kWaitingForStart;
  ZIPAGE_RETURN_IF_ERROR(WaitForStart());
  return runner_ == nullptr ? absl::OkStatus() : RunPlans();
}

absl::Status Worker::Load() {
  ZIPAGE_ASSIGN_OR_RETURN(const OpenedModel model,
                          OpenModel(config_, *backend_, /*needs_checkpoint=*/true));
  MemoryRequest request{.config = config_,
                        .model = model.config,
                        .rank = options_.rank,
                        .dtype = model.dtype,
                        .stored_dtype = model.stored_dtype,
                        .max_model_len = model.max_model_len};
  ZIPAGE_ASSIGN_OR_RETURN(request.available, backend_->AvailableMemory());
  ZIPAGE_ASSIGN_OR_RETURN(memory_, PlanMemory(request));
  ZIPAGE_ASSIGN_OR_RETURN(collective_, MakeCollective(options_, config_));
  ZIPAGE_ASSIGN_OR_RETURN(Weights weights,
                          LoadWeights(model.config, *model.checkpoint, options_.rank, config_.tp,
                                      model.dtype, model.max_model_len, backend_.get()));
  Ready ready;
  ready.rank = options_.rank;
  ready.weight_bytes = weights.bytes;
  ready.compute_dtype = DTypeName(model.dtype);
  ready.max_positions = model.config.max_position;
  ready.vocab_size = model.config.vocab_size;
  ready.kv_block_bytes = memory_.kv.block_bytes();
  ready.num_kv_blocks = memory_.num_blocks;
  ready.num_query_slots = memory_.num_query_slots;
  ready.num_host_blocks = memory_.num_host_blocks;
  ZIPAGE_ASSIGN_OR_RETURN(transformer_, Transformer::Create(model.config, std::move(weights),
                                                            config_.max_num_batched_tokens,
                                                            collective_.get(), backend_.get()));
  return Send(ready);
}

absl::StatusOr<SchedulerMessage> Worker::Receive() {
  while (true) {
    absl::StatusOr<std::string> bytes = socket_->Receive(kReceiveTimeout);
    if (bytes.ok()) return wire::DecodeSchedulerMessage(*bytes);
    if (!absl::IsDeadlineExceeded(bytes.status())) return bytes.status();
  }
}

absl::Status Worker::WaitForStart() {
  ZIPAGE_ASSIGN_OR_RETURN(const SchedulerMessage message, Receive());
  if (std::holds_alternative<Shutdown>(message)) return absl::OkStatus();
  const Start* start = std::get_if<Start>(&message);
  if (start == nullptr) return absl::InternalError("a step plan arrived before Start");
  if (start->num_kv_blocks < 1 ||
      start->num_kv_blocks > static_cast<uint64_t>(memory_.num_blocks)) {
    return absl::InternalError(absl::StrCat("Start names ", start->num_kv_blocks,
                                            " KV blocks, this rank has ", memory_.num_blocks));
  }
  if (start->num_query_slots > static_cast<uint64_t>(memory_.num_query_slots)) {
    return absl::InternalError(absl::StrCat("Start names ", start->num_query_slots,
                                            " query slots, this rank has ",
                                            memory_.num_query_slots));
  }
  ZIPAGE_ASSIGN_OR_RETURN(
      KvPool pool,
      KvPool::Create(memory_.kv, static_cast<int64_t>(start->num_kv_blocks), backend_.get()));
  ZIPAGE_ASSIGN_OR_RETURN(
      runner_, ModelRunner::Create(config_, *std::move(transformer_), std::move(pool),
                                   static_cast<int64_t>(start->num_query_slots), collective_.get(),
                                   backend_.get()));
  return absl::OkStatus();
}

absl::Status Worker::RunPlans() {
  while (true) {
    progress_.phase = WorkerPhase::kIdle;
    ZIPAGE_ASSIGN_OR_RETURN(const SchedulerMessage message, Receive());
    if (std::holds_alternative<Shutdown>(message)) return absl::OkStatus();
    const StepPlan* plan = std::get_if<StepPlan>(&message);
    if (plan == nullptr) return absl::InternalError("a second Start arrived");
    progress_.step = plan->step;
    progress_.phase = WorkerPhase::kRunning;
    ZIPAGE_ASSIGN_OR_RETURN(const StepResult result, runner_->Run(*plan));
    ZIPAGE_RETURN_IF_ERROR(Send(result));
  }
}

}  // namespace

absl::StatusOr<std::unique_ptr<Backend>> MakeBackend(const Config& config) {
  const bool has_cuda = NumCudaDevices() > 0;
  if (config.device == "cuda" || (config.device == "auto" && has_cuda)) {
    if (has_cuda && config.tp > 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "tp is ", config.tp, ", which device cuda does not do; use tp 1 or device cpu"));
    }
    if (const std::string policy = ResolveCompression(config).compression_policy;
        has_cuda && policy != "none") {
      return absl::InvalidArgumentError(absl::StrCat(
          "compression_policy is ", config.compression_policy,
          ", but device cuda keeps the full KV cache; use compression_policy none or device cpu"));
    }
    return MakeCudaBackend(/*device=*/0);
  }
  const int threads =
      config.cpu_threads > 0 ? config.cpu_threads : CpuBackend::DefaultThreads(config.tp);
  return std::make_unique<CpuBackend>(threads);
}

absl::Status RunWorker(const WorkerOptions& options, const Config& config) {
  Worker worker(options, config);
  return worker.Run();
}

}  // namespace zipage
