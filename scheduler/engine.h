#pragma once
// The loop of the scheduler process: jobs in, plans out, results applied in order. Owns the jobs,
// the open requests and the scheduler; one thread owns all state.
//
// Plans run ahead: up to kMaxStepsInFlight steps are sent before the first result has come back, so
// the workers always have the next step queued.

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "proto/config.h"
#include "proto/messages.h"
#include "proto/status.h"
#include "proto/transport.h"
#include "scheduler/job/job.h"
#include "scheduler/job/request_builder.h"
#include "scheduler/response.h"
#include "scheduler/scheduler.h"
#include "scheduler/text/tokenizer.h"
#include "scheduler/usage_history.h"
#include "scheduler/worker_group.h"

namespace zipage {

class Engine {
 public:
  static constexpr int kMaxStepsInFlight = 2;

  // The parts it works with; all outlive it.
  struct Parts {
    const Config& config;
    const Tokenizer& tokenizer;
    RequestBuilder::Templates templates;
    const GenerationDefaults& generation_defaults;
    transport::ServerSocket* worker_socket;
    // That of the run directory, then the one of option job_endpoint, if there is any.
    std::vector<transport::ServerSocket*> job_sockets;
  };

  explicit Engine(const Parts& parts);

  // Runs until `*stop` is set (a signal handler does it), then drains: no request is started, the
  // running ones have drain_timeout_s to end. Returns whether every job was done; an error if the
  // engine broke.
  absl::StatusOr<bool> Run(const std::atomic<bool>* stop);

 private:
  using Time = std::chrono::steady_clock::time_point;

  struct OpenRequest {
    std::shared_ptr<Job> job;
    Response response;
    const Request* request;  // Owned by the scheduler until it is taken as finished.
  };

  static Time Now() { return std::chrono::steady_clock::now(); }

  absl::Status HandleWorkers();
  absl::Status StartServing();
  absl::StatusOr<SchedulerOptions> MakeSchedulerOptions() const;
  absl::Status ApplyResults();
  absl::Status PlanSteps();
  void AnswerFinished();
  void StartDraining();
  bool Drained() const;
  bool EndJobs();

  void HandleClients(transport::ServerSocket* socket);
  ClientReply Reply(const ClientMessage& message);
  ClientReply Submit(const SubmitJob& submit);
  ClientReply Cancel(const CancelJob& cancel);
  EngineStatus Status() const;

  // Reads lines of the jobs for a short time; true if there is more to read at once.
  bool ReadJobs();
  bool ReadJob(const std::shared_ptr<Job>& job, Time deadline);
  absl::Status Accept(const std::shared_ptr<Job>& job, ParseResult parsed);
  void AbandonJob(Job* job, const absl::Status& status);
  void FinishJobs();
  // Forgets the oldest of the jobs that ended long ago.
  void ForgetJobs();
  std::string RequestName(uint64_t request_id) const;

  Parts parts_;
  const Time started_;
  const int64_t started_unix_;  // Seconds; part of every request's id.
  bool draining_ = false;
  Time drain_deadline_;
  WorkerGroup workers_;
  std::unique_ptr<Scheduler> scheduler_;     // Once the workers are ready.
  std::unique_ptr<RequestBuilder> builder_;  // Likewise.
  std::vector<std::shared_ptr<Job>> jobs_;   // In order of submission, ended ones too.
  size_t first_to_read_ = 0;                 // Index of the job whose turn it is.
  absl::flat_hash_map<uint64_t, OpenRequest> open_requests_;
  uint64_t next_job_id_ = 1;
  uint64_t next_request_id_ = 1;
  uint64_t last_step_ = 0;
  double device_seconds_ = 0;
  double compression_seconds_ = 0;
  UsageHistory history_;
};

}  // namespace zipage
