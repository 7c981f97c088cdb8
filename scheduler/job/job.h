#pragma once
// One job: its input being streamed, its output being appended, and its counts. Owns both files
// while it needs them, so that ended jobs hold no descriptor. Scheduler thread only.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "proto/messages.h"
#include "proto/status.h"
#include "scheduler/job/line_reader.h"
#include "scheduler/job/request_parser.h"
#include "scheduler/job/result_writer.h"

namespace zipage {

class Job {
 public:
  using Time = std::chrono::steady_clock::time_point;

  // Opens both files. Errors name the path and the cure: those of LineReader::Open and
  // ResultWriter::Open, and kInvalidArgument for a relative path or one file given as both.
  static absl::StatusOr<std::unique_ptr<Job>> Open(uint64_t id, const SubmitJob& submit,
                                                   size_t max_line_bytes, Time now);

  uint64_t id() const { return id_; }
  JobState state() const { return state_; }

  // True while lines may still come.
  bool reading() const { return state_ == JobState::kRunning && !at_end_; }
  // The next request, or why its line is none; empty if nothing can be read now. Errors as
  // LineReader::Next. REQUIRES: reading().
  absl::StatusOr<std::optional<ParseResult>> Next();

  // Appends the output line of a request that Next gave and counts it.
  absl::Status AnswerSuccess(std::string_view line, int64_t prompt_tokens, int64_t output_tokens);
  absl::Status AnswerFailure(std::string_view line);

  // Everything was read and answered: closes the output, durable.
  bool IsComplete() const { return state_ == JobState::kRunning && at_end_ && num_open_ == 0; }
  absl::Status Finish(Time now);
  // Ends the job before that. `error` empty: it was cancelled.
  void Abandon(const std::string& error, Time now);

  JobStatus Status(Time now, uint64_t num_running) const;

 private:
  Job(uint64_t id, SubmitJob submit, LineReader reader, ResultWriter writer, int64_t max_line_bytes,
      Time now);

  uint64_t id_;
  SubmitJob submit_;
  std::optional<LineReader> reader_;  // While reading().
  ResultWriter writer_;
  int64_t max_line_bytes_;
  Time submitted_;
  std::optional<Time> ended_;
  JobState state_ = JobState::kRunning;
  std::string error_;
  bool at_end_ = false;
  uint64_t num_read_ = 0;
  uint64_t num_open_ = 0;  // Requests read and not answered.
  uint64_t num_succeeded_ = 0;
  uint64_t num_failed_ = 0;
  uint64_t prompt_tokens_ = 0;
  uint64_t output_tokens_ = 0;
};

}  // namespace zipage
