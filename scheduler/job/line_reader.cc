#include "scheduler/job/line_reader.h"

#include <fcntl.h>
#include <glog/logging.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"

namespace zipage {
namespace {

constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
// A line buffer above this is given back once its line has been used.
constexpr size_t kKeptCapacity = size_t{1} << 20;

absl::Status OpenError(const std::string& path, int error) {
  std::string message = absl::StrFormat("cannot read job file %s: %s; ", path, strerror(error));
  if (error == ENOENT || error == ENOTDIR) {
    return absl::NotFoundError(message + "give the path of an existing JSON Lines file");
  }
  if (error == EACCES || error == EPERM) {
    return absl::PermissionDeniedError(message + "let the engine's user read it");
  }
  return absl::UnavailableError(message + "try again or give another file");
}

}  // namespace

LineReader::LineReader(std::string path, int fd, bool is_pipe, int64_t file_bytes,
                       size_t max_line_bytes, size_t buffer_bytes)
    : path_(std::move(path)),
      fd_(fd),
      is_pipe_(is_pipe),
      file_bytes_(file_bytes),
      max_line_bytes_(max_line_bytes),
      buffer_(buffer_bytes, '\0') {}

LineReader::LineReader(LineReader&& other) noexcept { *this = std::move(other); }

LineReader& LineReader::operator=(LineReader&& other) noexcept {
  path_ = std::move(other.path_);
  std::swap(fd_, other.fd_);
  is_pipe_ = other.is_pipe_;
  file_bytes_ = other.file_bytes_;
  max_line_bytes_ = other.max_line_bytes_;
  buffer_ = std::move(other.buffer_);
  begin_ = other.begin_;
  end_ = other.end_;
  line_ = std::move(other.line_);
  line_bytes_ = other.line_bytes_;
  last_is_cr_ = other.last_is_cr_;
  line_done_ = other.line_done_;
  at_end_ = other.at_end_;
  bytes_read_ = other.bytes_read_;
  line_number_ = other.line_number_;
  return *this;
}

LineReader::~LineReader() {
  if (fd_ >= 0) close(fd_);
}

absl::StatusOr<LineReader> LineReader::Open(const std::string& path, size_t max_line_bytes,
                                            size_t buffer_bytes) {
  CHECK_GT(buffer_bytes, 0U);
  // Non-blocking, so that a pipe without a writer holds nobody up; regular files do not care.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd < 0) return OpenError(path, errno);
  struct stat info {};
  if (fstat(fd, &info) != 0) {
    const int error = errno;
    close(fd);
    return OpenError(path, error);
  }
  if (!S_ISREG(info.st_mode) && !S_ISFIFO(info.st_mode)) {
    close(fd);
    return absl::InvalidArgumentError(
        absl::StrFormat("job file %s is a %s; give a regular file or a named pipe", path,
                        S_ISDIR(info.st_mode) ? "directory" : "device or socket"));
  }
  const bool is_pipe = S_ISFIFO(info.st_mode);
  return LineReader(path, fd, is_pipe, is_pipe ? 0 : static_cast<int64_t>(info.st_size),
                    max_line_bytes, buffer_bytes);
}

absl::StatusOr<LineReader::Fill> LineReader::FillBuffer() {
  ssize_t num_read;
  do {
    num_read = read(fd_, buffer_.data(), buffer_.size());
  } while (num_read < 0 && errno == EINTR);
  if (num_read > 0) {
    begin_ = 0;
    end_ = static_cast<size_t>(num_read);
    return Fill::kData;
  }
  if (num_read < 0) {
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Fill::kPending;
    const int error = errno;
    return absl::DataLossError(absl::StrFormat(
        "cannot read job file %s after line %d: %s; check its disk and submit the job again", path_,
        line_number_, strerror(error)));
  }
  if (is_pipe_) {
    // Without a writer a pipe reads as ended; only a hang-up says that there was one and it left.
    pollfd poll_fd{fd_, POLLIN, 0};
    if (poll(&poll_fd, 1, 0) <= 0 || (poll_fd.revents & (POLLHUP | POLLERR)) == 0) {
      return Fill::kPending;
    }
    return Fill::kEnd;
  }
  struct stat info {};
  // Files of procfs claim no size, so only a size below the first one is a loss.
  if (fstat(fd_, &info) == 0 && info.st_size < std::min(bytes_read_, file_bytes_)) {
    return absl::DataLossError(absl::StrFormat(
        "job file %s shrank to %d bytes while it was read (%d bytes were); do not change it while "
        "its job runs",
        path_, static_cast<int64_t>(info.st_size), bytes_read_));
  }
  return Fill::kEnd;
}

void LineReader::TakeBytes(std::string_view piece) {
  if (piece.empty()) return;
  line_bytes_ += static_cast<int64_t>(piece.size());
  last_is_cr_ = piece.back() == '\r';
  // Four bytes above the limit are held: a byte-order mark and the "\r" of the line ending.
  if (line_bytes_ <= static_cast<int64_t>(max_line_bytes_) + 4) {
    line_.append(piece);
    return;
  }
  if (line_.size() < kKeptPrefix) line_.append(piece.substr(0, kKeptPrefix - line_.size()));
  if (line_.size() > kKeptPrefix) {
    line_.resize(kKeptPrefix);
    line_.shrink_to_fit();
  }
}

void LineReader::DropByteOrderMark() {
  if (line_number_ != 0 || !line_.starts_with(kByteOrderMark)) return;
  line_.erase(0, kByteOrderMark.size());
  line_bytes_ -= static_cast<int64_t>(kByteOrderMark.size());
}

bool LineReader::LineIsBlank() const {
  return line_.find_first_not_of(" \t\r") == std::string::npos &&
         line_bytes_ <= static_cast<int64_t>(max_line_bytes_);
}

void LineReader::ClearLine() {
  line_.clear();
  if (line_.capacity() > kKeptCapacity) line_.shrink_to_fit();
  line_bytes_ = 0;
  last_is_cr_ = false;
  line_done_ = false;
}

LineReader::Line LineReader::FinishLine() {
  ++line_number_;
  Line line;
  line.number = line_number_;
  line.num_bytes = line_bytes_ - (last_is_cr_ ? 1 : 0);
  if (line.num_bytes > static_cast<int64_t>(max_line_bytes_)) {
    line.kind = Kind::kOverlong;
    line.text = std::string_view(line_).substr(0, std::min(kKeptPrefix, max_line_bytes_));
  } else {
    line.kind = Kind::kLine;
    line.text = std::string_view(line_).substr(0, static_cast<size_t>(line.num_bytes));
  }
  line_done_ = true;
  return line;
}

absl::StatusOr<LineReader::Line> LineReader::Next() {
  if (line_done_) ClearLine();
  const int64_t last_byte = bytes_read_ + kMaxBytesPerCall;
  while (!at_end_) {
    if (begin_ == end_) {
      if (bytes_read_ >= last_byte) return Line{.kind = Kind::kPending};
      absl::StatusOr<Fill> fill = FillBuffer();
      if (!fill.ok()) {
        at_end_ = true;
        ClearLine();
        return fill.status();
      }
      if (*fill == Fill::kPending) return Line{.kind = Kind::kPending};
      if (*fill == Fill::kEnd) {
        at_end_ = true;
        break;
      }
      bytes_read_ += static_cast<int64_t>(end_ - begin_);
    }
    const std::string_view rest(buffer_.data() + begin_, end_ - begin_);
    const size_t newline = rest.find('\n');
    TakeBytes(rest.substr(0, newline));
    begin_ += newline == std::string_view::npos ? rest.size() : newline + 1;
    if (newline == std::string_view::npos) continue;
    DropByteOrderMark();
    if (!LineIsBlank()) return FinishLine();
    ++line_number_;
    ClearLine();
  }
  DropByteOrderMark();
  if (line_bytes_ > 0 && !LineIsBlank()) return FinishLine();
  return Line{.kind = Kind::kEnd};
}

}  // namespace zipage
