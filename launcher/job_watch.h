#pragma once
// Follows an engine, and a job in it if one was submitted here: asks for the status twice a second
// and keeps the newest. A state machine that never blocks; the caller passes the time and decides
// what too long a silence means.

#include <chrono>
#include <cstdint>
#include <optional>

#include "launcher/client.h"
#include "proto/messages.h"
#include "proto/status.h"

namespace zipage {

class JobWatch {
 public:
  using TimePoint = std::chrono::steady_clock::time_point;

  // `client` outlives the watch and is used by nobody else meanwhile.
  JobWatch(JobClient* client, TimePoint now) : client_(client), last_heard_(now) {}

  // Sends the job; the engine may still be starting.
  absl::Status Submit(const SubmitJob& job);

  // Takes what has come and asks for what is due. True if there is a new status.
  // kInvalidArgument: the engine refused the job, and why. kNotFound: it does not know the job.
  absl::StatusOr<bool> Advance(TimePoint now);

  // Empty until the engine has answered for the first time.
  const std::optional<EngineStatus>& engine() const { return engine_; }
  // Empty until the job was accepted.
  std::optional<uint64_t> job_id() const { return job_id_; }
  // Null until its first status.
  const JobStatus* job() const { return job_ ? &*job_ : nullptr; }
  bool ended() const { return job_ && job_->state != JobState::kRunning; }
  // The engine has answered anything yet.
  bool heard() const { return heard_; }
  // Time since the engine was last heard.
  std::chrono::milliseconds Silence(TimePoint now) const {
    return std::chrono::duration_cast<std::chrono::milliseconds>(now - last_heard_);
  }

 private:
  absl::Status Apply(ClientReply reply);

  JobClient* const client_;
  TimePoint last_heard_;
  bool heard_ = false;
  TimePoint next_question_;  // The clock's epoch: at once.
  bool asked_ = false;       // A status is on its way; another is not asked for.
  bool fresh_ = false;
  std::optional<EngineStatus> engine_;
  std::optional<uint64_t> job_id_;
  std::optional<JobStatus> job_;
};

}  // namespace zipage
