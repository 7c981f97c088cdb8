#pragma once
// The scheduler's end of the workers of one epoch: handshake, broadcast of plans, heartbeats,
// deadlines. Scheduler thread only; time comes in as an argument. Every error means that the epoch
// is over and names the rank, what it was doing, and the cure.

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "proto/config.h"
#include "proto/messages.h"
#include "proto/status.h"
#include "proto/transport.h"

namespace zipage {

class WorkerGroup {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // What all ranks together can hold and do: known once ready().
  struct Capacity {
    uint64_t num_kv_blocks = 0;  // Minimum over ranks.
    uint64_t max_positions = 0;  // Of the model.
    uint64_t vocab_size = 0;
    uint64_t num_query_slots = 0;  // Minimum over ranks.
    uint64_t num_host_blocks = 0;  // Likewise.
  };

  // `socket` and `config` outlive the group.
  WorkerGroup(transport::ServerSocket* socket, const Config& config, uint64_t epoch, Time now);

  // Takes one message that arrived on the socket. A peer that is no rank of this epoch is an error.
  absl::Status Handle(const transport::Received& received, Time now);

  // True once every rank has said Hello and Ready; Start has then been sent to all.
  bool ready() const { return started_; }
  const Capacity& capacity() const { return capacity_; }

  absl::Status Broadcast(const StepPlan& plan, Time now);
  // Rank 0's results that arrived since the last call, in order.
  std::vector<StepResult> TakeResults();

  // kDeadlineExceeded if a rank is late: to be ready (init_timeout_s), with a heartbeat
  // (heartbeat_timeout_s), or with the result of its oldest plan (step_timeout_s).
  absl::Status CheckDeadlines(Time now) const;

  void SendShutdown();

  std::vector<WorkerStatus> Status(Time now) const;

 private:
  struct Worker {
    bool said_hello = false;
    bool is_ready = false;
    Hello hello;
    Ready ready;
    WorkerPhase phase = WorkerPhase::kStarting;
    uint64_t step_begun = 0;
    uint64_t step_answered = 0;
    Time last_heard;
    Time last_answer;  // Of the last result, or of the plan sent while none was outstanding.
  };

  struct Activity {
    WorkerPhase phase;
    uint64_t step;
  };

  absl::Status HandleHello(uint32_t rank, const Hello& hello);
  absl::Status HandleReady(uint32_t rank, const Ready& ready);
  absl::Status HandleResult(uint32_t rank, StepResult result, Time now);
  absl::Status StartIfAllReady();
  absl::Status SendToAll(const SchedulerMessage& message);
  // What the rank does and at which step. What was sent and answered here is newer than what the
  // last heartbeat said.
  Activity CurrentActivity(const Worker& worker) const;
  std::string Describe(uint32_t rank) const;

  transport::ServerSocket* socket_;
  const Config& config_;
  uint64_t epoch_;
  Time created_;
  uint64_t last_step_sent_ = 0;
  bool started_ = false;
  Capacity capacity_;
  std::vector<Worker> workers_;  // [tp]
  std::vector<StepResult> results_;
};

}  // namespace zipage
