#include "scheduler/job/job.h"

#include <sys/stat.h>

#include <utility>

#include "absl/strings/str_format.h"
#include "glog/logging.h"

namespace zipage {
namespace {

// It is kept, and repeated in every status.
constexpr size_t kMaxJobName = 256;

absl::Status CheckSubmit(const SubmitJob& submit) {
  for (const std::string& path : {submit.input_path, submit.output_path}) {
    if (path.empty() || path[0] != '/') {
      return absl::InvalidArgumentError(
          absl::StrFormat("job path \"%s\" is not absolute; give the full path", path));
    }
  }
  if (submit.name.size() > kMaxJobName) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job name has %d bytes; give at most %d", submit.name.size(), kMaxJobName));
  }
  struct stat input {};
  struct stat output {};
  if (stat(submit.input_path.c_str(), &input) == 0 &&
      stat(submit.output_path.c_str(), &output) == 0 && input.st_dev == output.st_dev &&
      input.st_ino == output.st_ino) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "input and output are the same file %s; give another output", submit.input_path));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Job>> Job::Open(uint64_t id, const SubmitJob& submit,
                                               size_t max_line_bytes, Time now) {
  ZIPAGE_RETURN_IF_ERROR(CheckSubmit(submit));
  ZIPAGE_ASSIGN_OR_RETURN(LineReader reader, LineReader::Open(submit.input_path, max_line_bytes));
  ZIPAGE_ASSIGN_OR_RETURN(ResultWriter writer,
                          ResultWriter::Open(submit.output_path, submit.overwrite));
  return std::unique_ptr<Job>(new Job(id, submit, std::move(reader), std::move(writer),
                                      static_cast<int64_t>(max_line_bytes), now));
}

Job::Job(uint64_t id, SubmitJob submit, LineReader reader, ResultWriter writer,
         int64_t max_line_bytes, Time now)
    : id_(id),
      submit_(std::move(submit)),
      reader_(std::move(reader)),
      writer_(std::move(writer)),
      max_line_bytes_(max_line_bytes),
      submitted_(now) {}

absl::StatusOr<std::optional<ParseResult>> Job::Next() {
  CHECK(reading()) << "job " << id_ << " has nothing to read";
  ZIPAGE_ASSIGN_OR_RETURN(const LineReader::Line line, reader_->Next());
  switch (line.kind) {
    case LineReader::Kind::kEnd:
      at_end_ = true;
      reader_.reset();
      return std::optional<ParseResult>();
    case LineReader::Kind::kPending:
      return std::optional<ParseResult>();
    case LineReader::Kind::kOverlong:
    case LineReader::Kind::kLine:
      break;
  }
  ++num_read_;
  ++num_open_;
  if (line.kind == LineReader::Kind::kOverlong) {
    return std::optional<ParseResult>(
        OverlongLineError(line.text, line.number, line.num_bytes, max_line_bytes_));
  }
  return std::optional<ParseResult>(ParseRequest(line.text, line.number));
}

absl::Status Job::AnswerSuccess(std::string_view line, int64_t prompt_tokens,
                                int64_t output_tokens) {
  ZIPAGE_RETURN_IF_ERROR(writer_.Append(line));
  CHECK_GT(num_open_, 0U) << "job " << id_ << " answered more than it read";
  --num_open_;
  ++num_succeeded_;
  prompt_tokens_ += static_cast<uint64_t>(prompt_tokens);
  output_tokens_ += static_cast<uint64_t>(output_tokens);
  return absl::OkStatus();
}

absl::Status Job::AnswerFailure(std::string_view line) {
  ZIPAGE_RETURN_IF_ERROR(writer_.Append(line));
  CHECK_GT(num_open_, 0U) << "job " << id_ << " answered more than it read";
  --num_open_;
  ++num_failed_;
  return absl::OkStatus();
}

absl::Status Job::Finish(Time now) {
  CHECK(IsComplete());
  absl::Status status = writer_.Close();
  ended_ = now;
  state_ = status.ok() ? JobState::kFinished : JobState::kFailed;
  if (!status.ok()) error_ = std::string(status.message());
  return status;
}

void Job::Abandon(const std::string& error, Time now) {
  CHECK(state_ == JobState::kRunning) << "job " << id_ << " has ended already";
  state_ = error.empty() ? JobState::kCancelled : JobState::kFailed;
  error_ = error;
  ended_ = now;
  num_open_ = 0;
  reader_.reset();
  if (absl::Status status = writer_.Close(); !status.ok() && error_.empty()) {
    error_ = std::string(status.message());
  }
}

JobStatus Job::Status(Time now, uint64_t num_running) const {
  JobStatus status;
  status.id = id_;
  status.name = submit_.name;
  status.state = state_;
  status.input_path = submit_.input_path;
  status.output_path = submit_.output_path;
  status.num_lines = at_end_ ? num_read_ : submit_.num_lines;
  status.num_read = num_read_;
  status.num_succeeded = num_succeeded_;
  status.num_failed = num_failed_;
  status.num_running = num_running;
  status.prompt_tokens = prompt_tokens_;
  status.output_tokens = output_tokens_;
  status.seconds = std::chrono::duration<double>(ended_.value_or(now) - submitted_).count();
  status.error = error_;
  return status;
}

}  // namespace zipage
