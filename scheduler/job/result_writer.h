#pragma once
// Appends whole result lines to the output file of one job. Owns the file descriptor and, on a
// regular file, an exclusive flock: two jobs never write one file. Scheduler thread only. A line is
// in the kernel when Append returns, so it survives the death of this process; Close makes the file
// durable with fsync. Nothing is buffered here.

#include <cstdint>
#include <string>
#include <string_view>

#include "proto/status.h"

namespace zipage {

class ResultWriter {
 public:
  // Creates `path` or takes an existing empty file. With `overwrite` an existing file is emptied,
  // but only after its lock was won. The parent directory must exist. Errors: kAlreadyExists (not
  // empty), kFailedPrecondition (another job writes it), kNotFound, kPermissionDenied,
  // kInvalidArgument (a directory, a pipe).
  static absl::StatusOr<ResultWriter> Open(const std::string& path, bool overwrite);

  ResultWriter(ResultWriter&& other) noexcept;
  ResultWriter& operator=(ResultWriter&& other) noexcept;
  ~ResultWriter();  // closes without a word; call Close to learn of errors

  // Appends `line` and a newline. REQUIRES: no newline in `line`, not closed. On an error (a full
  // disk: kResourceExhausted, else kDataLoss) the part that was written is cut off again, so the
  // file ends with a whole line and the same Append may be tried later.
  absl::Status Append(std::string_view line);

  // fsync and close. Calling it again is a no-op.
  absl::Status Close();

 private:
  ResultWriter(std::string path, int fd, bool is_regular);

  std::string path_;
  int fd_ = -1;
  bool is_regular_ = false;
  int64_t num_bytes_ = 0;  // size of the file: all of it is whole lines
};

}  // namespace zipage
