#pragma once
// Exit statuses of zipage-launch and zipage-submit: what a script or a batch system may rely on.

#include "proto/messages.h"

namespace zipage {

inline constexpr int kExitComplete = 0;
inline constexpr int kExitFailed = 1;
inline constexpr int kExitUsage = 2;
inline constexpr int kExitPartial = 3;
inline constexpr int kExitUnfinished =
    75;  // EX_TEMPFAIL of sysexits.h: Slurm scripts requeue on it.

inline constexpr char kExitStatusHelp[] =
    "Exit status:\n"
    "  0    everything done; of a job: every line was answered\n"
    "  1    failed: the engine or the job broke, or no line of the job succeeded\n"
    "  2    wrong options or arguments\n"
    "  3    partial: the job is finished, and some lines are error records\n"
    "  75   stopped before everything was done (SIGTERM, or cancelled): submit again to finish\n"
    "  130  ended at once by a second Ctrl-C, or by Ctrl-C in zipage-submit (the job goes on)\n"
    "  143  ended at once by a second SIGTERM";

// Of a job that has ended; kExitUnfinished for one that has not.
inline int JobExitStatus(const JobStatus& job) {
  switch (job.state) {
    case JobState::kRunning:
    case JobState::kCancelled:
      return kExitUnfinished;
    case JobState::kFailed:
      return kExitFailed;
    case JobState::kFinished:
      break;
  }
  if (job.num_failed == 0) return kExitComplete;
  return job.num_succeeded == 0 ? kExitFailed : kExitPartial;
}

}  // namespace zipage
