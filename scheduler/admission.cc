#include "scheduler/admission.h"

#include <glog/logging.h>

#include <algorithm>
#include <tuple>

namespace zipage {

void Admission::Enqueue(Sequence* sequence) {
  CHECK(jobs_[sequence->request->job_id].waiting.insert(sequence).second)
      << "request " << sequence->request->id << " waits already";
  ++num_waiting_;
}

Sequence* Admission::Next() const {
  const Job* next = nullptr;
  for (const auto& [id, job] : jobs_) {
    if (job.waiting.empty()) continue;
    // Behind a request that was not started no other was.
    if (stopped_ && !(*job.waiting.begin())->request->started()) continue;
    if (next == nullptr || std::tie(job.num_running, job.last_served) <
                               std::tie(next->num_running, next->last_served)) {
      next = &job;
    }
  }
  return next == nullptr ? nullptr : *next->waiting.begin();
}

bool Admission::Fits(const Sequence& sequence, int64_t num_taken, int64_t num_available,
                     int64_t num_blocks, int64_t num_running) const {
  int64_t reserve = 0;
  if (num_running > 0) {
    reserve = std::max<int64_t>(1, num_blocks / 100);
    if (sequence.num_preemptions > 0) reserve = std::max(reserve, num_running);
  }
  return num_taken + reserve <= num_available;
}

void Admission::Admit(Sequence* sequence) {
  Job& job = jobs_.at(sequence->request->job_id);
  CHECK_EQ(job.waiting.erase(sequence), 1U) << "request " << sequence->request->id;
  --num_waiting_;
  ++job.num_running;
  job.last_served = ++num_served_;
}

void Admission::Leave(const Sequence& sequence) {
  const auto job = jobs_.find(sequence.request->job_id);
  CHECK(job != jobs_.end() && job->second.num_running > 0) << "request " << sequence.request->id;
  --job->second.num_running;
  ForgetIfEmpty(job);
}

void Admission::Remove(Sequence* sequence) {
  const auto job = jobs_.find(sequence->request->job_id);
  CHECK(job != jobs_.end() && job->second.waiting.erase(sequence) == 1)
      << "request " << sequence->request->id;
  --num_waiting_;
  ForgetIfEmpty(job);
}

int64_t Admission::num_waiting(uint64_t job_id) const {
  const auto job = jobs_.find(job_id);
  return job == jobs_.end() ? 0 : static_cast<int64_t>(job->second.waiting.size());
}

void Admission::ForgetIfEmpty(std::map<uint64_t, Job>::iterator job) {
  if (job->second.waiting.empty() && job->second.num_running == 0) jobs_.erase(job);
}

void Admission::CheckInvariants(std::span<Sequence* const> running) const {
  std::map<uint64_t, int64_t> num_running;
  for (const Sequence* sequence : running) ++num_running[sequence->request->job_id];
  int64_t num_waiting = 0;
  for (const auto& [id, job] : jobs_) {
    CHECK_EQ(job.num_running, num_running[id]) << "job " << id;
    CHECK(job.num_running > 0 || !job.waiting.empty()) << "job " << id;
    num_waiting += static_cast<int64_t>(job.waiting.size());
    for (const Sequence* sequence : job.waiting) {
      CHECK_EQ(sequence->request->job_id, id);
      CHECK(sequence->state == SequenceState::kWaiting) << "request " << sequence->request->id;
    }
  }
  CHECK_EQ(num_waiting, num_waiting_);
  for (const auto& [id, count] : num_running) CHECK(jobs_.contains(id)) << "job " << id;
}

}  // namespace zipage
