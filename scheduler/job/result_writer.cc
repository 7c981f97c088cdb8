#include "scheduler/job/result_writer.h"

#include <fcntl.h>
#include <glog/logging.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"

namespace zipage {
namespace {

absl::Status OpenError(const std::string& path, int error) {
  const std::string what =
      absl::StrFormat("cannot open output file %s: %s; ", path, strerror(error));
  switch (error) {
    case ENOENT:
    case ENOTDIR:
      return absl::NotFoundError(what + "give a path in a directory that exists");
    case EACCES:
    case EPERM:
    case EROFS:
      return absl::PermissionDeniedError(what + "give a path the engine's user may write");
    case EISDIR:
      return absl::InvalidArgumentError(what + "give the path of a file");
    case ENOSPC:
    case EDQUOT:
      return absl::ResourceExhaustedError(what + "free some space");
    default:
      return absl::UnavailableError(what + "give another path");
  }
}

absl::Status WriteError(const std::string& path, int error) {
  const std::string what =
      absl::StrFormat("cannot write output file %s: %s; ", path, strerror(error));
  if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
    return absl::ResourceExhaustedError(
        what + "free some space (or raise the file size limit), then submit the job again");
  }
  return absl::DataLossError(what + "check its disk, then submit the job again");
}

// Checks and locks what was opened, and empties it if it may.
absl::Status LockAndCheck(const std::string& path, int fd, bool overwrite, bool* is_regular) {
  struct stat info {};
  if (fstat(fd, &info) != 0) return OpenError(path, errno);
  *is_regular = S_ISREG(info.st_mode);
  if (!*is_regular) {
    if (S_ISCHR(info.st_mode)) return absl::OkStatus();  // /dev/null and its like
    return absl::InvalidArgumentError(
        absl::StrFormat("output %s is not a regular file; give the path of a file", path));
  }
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    if (errno == EWOULDBLOCK) {
      return absl::FailedPreconditionError(absl::StrFormat(
          "output file %s is being written by another job; give another path or wait for it",
          path));
    }
    // Some network file systems have no locks; the job is worth more than the guard.
    LOG(WARNING) << "output file " << path << " cannot be locked (" << strerror(errno)
                 << "): take care that no other job writes it";
  }
  // Only now is the size ours: another job may have written and left since open.
  if (fstat(fd, &info) != 0) return OpenError(path, errno);
  if (info.st_nlink == 0) {
    return absl::UnavailableError(
        absl::StrFormat("output file %s was removed while it was opened; try again", path));
  }
  if (info.st_size == 0) return absl::OkStatus();
  if (!overwrite) {
    return absl::AlreadyExistsError(
        absl::StrFormat("output file %s already holds %d bytes; give another path or --overwrite",
                        path, static_cast<int64_t>(info.st_size)));
  }
  if (ftruncate(fd, 0) != 0) return OpenError(path, errno);
  return absl::OkStatus();
}

}  // namespace

ResultWriter::ResultWriter(std::string path, int fd, bool is_regular)
    : path_(std::move(path)), fd_(fd), is_regular_(is_regular) {}

ResultWriter::ResultWriter(ResultWriter&& other) noexcept { *this = std::move(other); }

ResultWriter& ResultWriter::operator=(ResultWriter&& other) noexcept {
  path_ = std::move(other.path_);
  std::swap(fd_, other.fd_);
  is_regular_ = other.is_regular_;
  num_bytes_ = other.num_bytes_;
  return *this;
}

ResultWriter::~ResultWriter() {
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<ResultWriter> ResultWriter::Open(const std::string& path, bool overwrite) {
  // Non-blocking only so that opening a pipe without a reader fails instead of waiting.
  const int fd =
      open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0644);
  if (fd < 0) return OpenError(path, errno);
  ResultWriter writer(path, fd, /*is_regular=*/true);
  ZIPAGE_RETURN_IF_ERROR(LockAndCheck(path, fd, overwrite, &writer.is_regular_));
  return writer;
}

absl::Status ResultWriter::Append(std::string_view line) {
  CHECK_GE(fd_, 0) << path_ << " is closed";
  CHECK(line.find('\n') == std::string_view::npos) << "a result of several lines";
  char newline = '\n';
  const size_t total = line.size() + 1;
  for (size_t done = 0; done < total;) {
    iovec parts[2] = {{const_cast<char*>(line.data()) + std::min(done, line.size()),
                       line.size() - std::min(done, line.size())},
                      {&newline, 1}};
    const ssize_t written = writev(fd_, parts, 2);
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) {
      const int error = written < 0 ? errno : ENOSPC;
      if (is_regular_ && done > 0 && ftruncate(fd_, num_bytes_) != 0) {
        LOG(ERROR) << path_ << " ends with a part of a line: " << strerror(errno);
      }
      return WriteError(path_, error);
    }
    done += static_cast<size_t>(written);
  }
  num_bytes_ += static_cast<int64_t>(total);
  return absl::OkStatus();
}

absl::Status ResultWriter::Close() {
  if (fd_ < 0) return absl::OkStatus();
  const int fd = std::exchange(fd_, -1);
  int error = 0;
  if (is_regular_ && fsync(fd) != 0) error = errno;
  if (close(fd) != 0 && error == 0 && errno != EINTR) error = errno;
  return error == 0 ? absl::OkStatus() : WriteError(path_, error);
}

}  // namespace zipage
