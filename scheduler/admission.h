#pragma once
// Decides who runs next and who yields: the waiting sequences of every job, fair share between
// jobs, the reserve of blocks that admission leaves alone, and the victim of a preemption. Owns the
// queues, not the sequences. Scheduler thread only.
//
// Fair share: the next sequence is the head of the job with the fewest running sequences; among
// equals, of the job that was served least recently, then of the one with the lowest id. Within a
// job the order is that of submission, so a preempted sequence precedes those that never ran. The
// head is never overtaken because it is large: while it does not fit nobody is admitted, so it does
// not starve.

#include <cstdint>
#include <map>
#include <set>
#include <span>

#include "scheduler/request.h"

namespace zipage {

class Admission {
 public:
  // `sequence` waits. REQUIRES: it neither waits nor runs here.
  void Enqueue(Sequence* sequence);
  // From now on only requests that were started already are admitted.
  void Stop() { stopped_ = true; }

  // The sequence to admit next; null if none waits that may be admitted.
  Sequence* Next() const;
  // Whether `sequence` may take `num_taken` of `num_available` blocks while `num_running` others
  // run. It must leave a reserve for their growth: about 1 % of the pool, and for a sequence that
  // was preempted before a block for each of them, lest it be preempted again at once. A sequence
  // that would run alone needs no reserve.
  bool Fits(const Sequence& sequence, int64_t num_taken, int64_t num_available, int64_t num_blocks,
            int64_t num_running) const;
  // `sequence`, which waits, runs now.
  void Admit(Sequence* sequence);
  // `sequence`, which runs, runs no more. Enqueue it again if it is preempted.
  void Leave(const Sequence& sequence);
  // `sequence`, which waits, waits no more.
  void Remove(Sequence* sequence);

  // The one of `running` (in order of admission, not empty) to preempt when blocks run out: the
  // newest, so that the oldest always runs to its end.
  static Sequence* Victim(std::span<Sequence* const> running) { return running.back(); }

  int64_t num_waiting() const { return num_waiting_; }
  int64_t num_waiting(uint64_t job_id) const;
  // `running`: the sequences that run.
  void CheckInvariants(std::span<Sequence* const> running) const;

 private:
  struct ByArrival {
    bool operator()(const Sequence* a, const Sequence* b) const { return a->arrival < b->arrival; }
  };
  struct Job {
    std::set<Sequence*, ByArrival> waiting;
    int64_t num_running = 0;
    uint64_t last_served = 0;
  };
  void ForgetIfEmpty(std::map<uint64_t, Job>::iterator job);

  std::map<uint64_t, Job> jobs_;  // By id; only those with a sequence that waits or runs.
  bool stopped_ = false;
  int64_t num_waiting_ = 0;
  uint64_t num_served_ = 0;
};

}  // namespace zipage
