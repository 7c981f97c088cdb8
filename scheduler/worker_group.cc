#include "scheduler/worker_group.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "glog/logging.h"
#include "proto/wire.h"

namespace zipage {
namespace {

// The names under which workers connect; worker.cc uses the same.
constexpr char kRankPrefix[] = "rank-";
constexpr char kHeartbeatPrefix[] = "heartbeat-";

double Seconds(std::chrono::steady_clock::duration d) {
  return std::chrono::duration<double>(d).count();
}

std::optional<uint32_t> RankOfPeer(const std::string& peer) {
  absl::string_view digits = peer;
  if (!absl::ConsumePrefix(&digits, kRankPrefix) &&
      !absl::ConsumePrefix(&digits, kHeartbeatPrefix)) {
    return std::nullopt;
  }
  uint32_t rank = 0;
  if (!absl::SimpleAtoi(digits, &rank)) return std::nullopt;
  return rank;
}

}  // namespace

WorkerGroup::WorkerGroup(transport::ServerSocket* socket, const Config& config, uint64_t epoch,
                         Time now)
    : socket_(socket), config_(config), epoch_(epoch), created_(now), workers_(config.tp) {
  for (Worker& worker : workers_) {
    worker.last_heard = now;
    worker.last_answer = now;
  }
}

absl::Status WorkerGroup::Handle(const transport::Received& received, Time now) {
  const std::optional<uint32_t> rank = RankOfPeer(received.peer);
  if (!rank.has_value() || *rank >= workers_.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "a peer named \"%s\" spoke on the worker socket; this engine has ranks 0 to %d",
        absl::string_view(received.peer).substr(0, 64), workers_.size() - 1));
  }
  absl::StatusOr<WorkerMessage> message = wire::DecodeWorkerMessage(received.bytes);
  if (!message.ok()) {
    return absl::InternalError(absl::StrFormat("worker rank %d sent a broken message: %s", *rank,
                                               message.status().message()));
  }
  Worker& worker = workers_[*rank];
  worker.last_heard = now;
  if (auto* hello = std::get_if<Hello>(&*message)) return HandleHello(*rank, *hello);
  if (auto* ready = std::get_if<Ready>(&*message)) return HandleReady(*rank, *ready);
  if (auto* result = std::get_if<StepResult>(&*message)) {
    return HandleResult(*rank, std::move(*result), now);
  }
  if (auto* heartbeat = std::get_if<Heartbeat>(&*message)) {
    worker.phase = heartbeat->phase;
    worker.step_begun = heartbeat->step;
    return absl::OkStatus();
  }
  const auto& error = std::get<WorkerError>(*message);
  const std::string where = error.step == 0 ? "" : absl::StrFormat(" at step %d", error.step);
  return {static_cast<absl::StatusCode>(error.code),
          absl::StrFormat("worker rank %d failed%s: %s", *rank, where, error.message)};
}

absl::Status WorkerGroup::HandleHello(uint32_t rank, const Hello& hello) {
  if (hello.protocol_version != kProtocolVersion) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "worker rank %d speaks protocol version %d, the scheduler %d; install one release of both",
        rank, hello.protocol_version, kProtocolVersion));
  }
  if (hello.rank != rank || hello.tp != workers_.size()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "worker rank %d introduces itself as rank %d of %d; the engine has %d ranks (option tp)",
        rank, hello.rank, hello.tp, workers_.size()));
  }
  if (hello.epoch != epoch_) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "worker rank %d belongs to epoch %d, now is %d; end the old worker (pid %d)", rank,
        hello.epoch, epoch_, hello.pid));
  }
  if (hello.config_digest != Digest(config_)) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "worker rank %d runs with other options than the scheduler; start both from one --config",
        rank));
  }
  Worker& worker = workers_[rank];
  worker.said_hello = true;
  worker.hello = hello;
  return absl::OkStatus();
}

absl::Status WorkerGroup::HandleReady(uint32_t rank, const Ready& ready) {
  Worker& worker = workers_[rank];
  if (!worker.said_hello || worker.is_ready) {
    return absl::InternalError(absl::StrFormat("worker rank %d sent Ready out of turn", rank));
  }
  worker.is_ready = true;
  worker.ready = ready;
  LOG(INFO) << absl::StrFormat(
      "worker rank %d (pid %d, %s) is ready: %s, %.2f GiB of weights, room for %d KV blocks of %d "
      "tokens (%.2f GiB)",
      rank, worker.hello.pid, worker.hello.device, ready.compute_dtype,
      static_cast<double>(ready.weight_bytes) / (1 << 30), ready.num_kv_blocks,
      config_.kvcache_block_size,
      static_cast<double>(ready.num_kv_blocks * ready.kv_block_bytes) / (1 << 30));
  return StartIfAllReady();
}

absl::Status WorkerGroup::StartIfAllReady() {
  if (!std::all_of(workers_.begin(), workers_.end(), [](const Worker& w) { return w.is_ready; })) {
    return absl::OkStatus();
  }
  const Ready& first = workers_[0].ready;
  capacity_ = {first.num_kv_blocks, first.max_positions, first.vocab_size, first.num_query_slots,
               first.num_host_blocks};
  for (size_t rank = 1; rank < workers_.size(); ++rank) {
    const Ready& other = workers_[rank].ready;
    if (other.max_positions != first.max_positions || other.vocab_size != first.vocab_size ||
        other.compute_dtype != first.compute_dtype) {
      return absl::FailedPreconditionError(
          absl::StrFormat("worker rank %d loaded another model than rank 0 (%d positions, "
                          "vocabulary %d, %s against "
                          "%d, %d, %s); give every rank the same folder",
                          rank, other.max_positions, other.vocab_size, other.compute_dtype,
                          first.max_positions, first.vocab_size, first.compute_dtype));
    }
    capacity_.num_kv_blocks = std::min(capacity_.num_kv_blocks, other.num_kv_blocks);
    capacity_.num_query_slots = std::min(capacity_.num_query_slots, other.num_query_slots);
    capacity_.num_host_blocks = std::min(capacity_.num_host_blocks, other.num_host_blocks);
  }
  started_ = true;
  return SendToAll(Start{capacity_.num_kv_blocks, capacity_.num_query_slots});
}

absl::Status WorkerGroup::HandleResult(uint32_t rank, StepResult result, Time now) {
  Worker& worker = workers_[rank];
  if (result.rank != rank || result.step != worker.step_answered + 1 ||
      result.step > last_step_sent_) {
    return absl::InternalError(absl::StrFormat(
        "worker rank %d answered step %d as rank %d; expected step %d (%d were sent)", rank,
        result.step, result.rank, worker.step_answered + 1, last_step_sent_));
  }
  worker.step_answered = result.step;
  worker.last_answer = now;
  if (rank == 0) results_.push_back(std::move(result));
  return absl::OkStatus();
}

absl::Status WorkerGroup::Broadcast(const StepPlan& plan, Time now) {
  for (Worker& worker : workers_) {
    if (worker.step_answered == last_step_sent_) worker.last_answer = now;
  }
  last_step_sent_ = plan.step;
  return SendToAll(plan);
}

std::vector<StepResult> WorkerGroup::TakeResults() { return std::exchange(results_, {}); }

absl::Status WorkerGroup::CheckDeadlines(Time now) const {
  for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
    const Worker& worker = workers_[rank];
    const double silent = Seconds(now - worker.last_heard);
    if (config_.heartbeat_timeout_s > 0 && silent > config_.heartbeat_timeout_s) {
      return absl::DeadlineExceededError(absl::StrFormat(
          "%s has sent no heartbeat for %.1f s (heartbeat_timeout_s is %g): it is stopped or its "
          "machine is overloaded",
          Describe(rank), silent, config_.heartbeat_timeout_s));
    }
    if (!started_ && !worker.is_ready && config_.init_timeout_s > 0 &&
        Seconds(now - created_) > config_.init_timeout_s) {
      return absl::DeadlineExceededError(absl::StrFormat(
          "%s is not ready after %g s; raise init_timeout_s if its weights load slowly",
          Describe(rank), config_.init_timeout_s));
    }
    const double waited = Seconds(now - worker.last_answer);
    if (config_.step_timeout_s > 0 && worker.step_answered < last_step_sent_ &&
        waited > config_.step_timeout_s) {
      return absl::DeadlineExceededError(absl::StrFormat(
          "%s has not answered step %d for %.1f s (step_timeout_s is %g)", Describe(rank),
          worker.step_answered + 1, waited, config_.step_timeout_s));
    }
  }
  return absl::OkStatus();
}

void WorkerGroup::SendShutdown() {
  const std::string bytes = wire::Encode(SchedulerMessage(Shutdown{}));
  for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
    // A rank that has not connected yet cannot be told; it ends with the launcher.
    if (!workers_[rank].said_hello) continue;
    absl::Status status = socket_->Send(kRankPrefix + std::to_string(rank), bytes);
    if (!status.ok()) LOG(WARNING) << "while shutting down: " << status.message();
  }
}

std::vector<WorkerStatus> WorkerGroup::Status(Time now) const {
  std::vector<WorkerStatus> result;
  for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
    const Worker& worker = workers_[rank];
    const Activity activity = CurrentActivity(worker);
    result.push_back({rank, worker.hello.pid, activity.phase, activity.step,
                      Seconds(now - worker.last_heard), worker.hello.device});
  }
  return result;
}

absl::Status WorkerGroup::SendToAll(const SchedulerMessage& message) {
  const std::string bytes = wire::Encode(message);
  for (uint32_t rank = 0; rank < workers_.size(); ++rank) {
    absl::Status status = socket_->Send(kRankPrefix + std::to_string(rank), bytes);
    if (!status.ok()) {
      return absl::UnavailableError(
          absl::StrFormat("%s cannot be reached: %s", Describe(rank), status.message()));
    }
  }
  return absl::OkStatus();
}

WorkerGroup::Activity WorkerGroup::CurrentActivity(const Worker& worker) const {
  if (!started_) return {worker.phase, worker.step_begun};
  if (worker.step_answered == last_step_sent_) return {WorkerPhase::kIdle, worker.step_answered};
  return {WorkerPhase::kRunning, std::max(worker.step_begun, worker.step_answered + 1)};
}

std::string WorkerGroup::Describe(uint32_t rank) const {
  const Worker& worker = workers_[rank];
  std::string text = absl::StrFormat("worker rank %d", rank);
  if (!worker.said_hello) return text + " (never connected)";
  const Activity activity = CurrentActivity(worker);
  absl::StrAppendFormat(&text, " (pid %d, %s", worker.hello.pid, WorkerPhaseName(activity.phase));
  if (activity.step > 0) absl::StrAppendFormat(&text, ", step %d", activity.step);
  return text + ")";
}

}  // namespace zipage
