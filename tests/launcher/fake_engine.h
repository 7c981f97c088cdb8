#pragma once
// Stand-ins for zipage-scheduler and zipage-worker: this test binary, started under their names.
// They take the real ones' command lines and keep their promises about life, and compute nothing.
// Environment variables choose what they do:
//   FAKE_SETSID=1            both run in a grandchild in a session of its own
//   FAKE_SCHEDULER=hang      never answers and ignores SIGTERM
//   FAKE_SCHEDULER=fail      ends with status 1 and a reason
//   FAKE_SCHEDULER=refuse    refuses every job
//   FAKE_SCHEDULER=unfinished  ends with status 75 when told to stop
//   FAKE_FAILED_LINES=N      that many lines of a job fail (default 0)
//   FAKE_ENDLESS=1           jobs never finish
//   FAKE_WORKER=fail         rank 0 ends with status 1 and a reason
// A worker that is started with --dry_run prints its configuration as the plan; then
//   FAKE_WORKER=fail         it ends with status 2 and a reason instead
//   FAKE_WORKER=hang         it prints its pid and waits for its end

namespace zipage {

// Both return the exit status of the process.
int FakeSchedulerMain(int argc, char** argv);
int FakeWorkerMain(int argc, char** argv);

}  // namespace zipage
