#include "launcher/job_watch.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_format.h"

namespace zipage {
namespace {

constexpr std::chrono::milliseconds kQuestionInterval{500};

}  // namespace

absl::Status JobWatch::Submit(const SubmitJob& job) { return client_->Send(job); }

absl::StatusOr<bool> JobWatch::Advance(TimePoint now) {
  fresh_ = false;
  while (true) {
    ZIPAGE_ASSIGN_OR_RETURN(std::optional<ClientReply> reply,
                            client_->Receive(std::chrono::milliseconds(0)));
    if (!reply.has_value()) break;
    last_heard_ = now;
    heard_ = true;
    ZIPAGE_RETURN_IF_ERROR(Apply(*std::move(reply)));
  }
  if (!asked_ && now >= next_question_) {
    ZIPAGE_RETURN_IF_ERROR(client_->Send(GetStatus{}));
    asked_ = true;
    next_question_ = now + kQuestionInterval;
  }
  return fresh_;
}

absl::Status JobWatch::Apply(ClientReply reply) {
  if (const auto* refused = std::get_if<Refused>(&reply)) {
    return absl::InvalidArgumentError(refused->message);
  }
  if (const auto* accepted = std::get_if<JobAccepted>(&reply)) job_id_ = accepted->job_id;
  auto* status = std::get_if<EngineStatus>(&reply);
  if (status == nullptr) return absl::OkStatus();
  engine_ = std::move(*status);
  asked_ = false;
  fresh_ = true;
  if (!job_id_.has_value()) return absl::OkStatus();
  const auto job = std::find_if(engine_->jobs.begin(), engine_->jobs.end(),
                                [this](const JobStatus& j) { return j.id == *job_id_; });
  if (job == engine_->jobs.end()) {
    return absl::NotFoundError(absl::StrFormat(
        "the engine does not know job %d any more; was it restarted? Submit the job again",
        *job_id_));
  }
  job_ = *job;
  return absl::OkStatus();
}

}  // namespace zipage
