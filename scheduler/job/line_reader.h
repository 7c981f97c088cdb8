#pragma once
// Streams the lines of a JSON Lines file (or named pipe). Owns the file descriptor and at most one
// line plus one buffer, so memory does not grow with the file. Scheduler thread only.
//
// What counts as a line: bytes up to "\n"; one "\r" before it is dropped; a missing last newline is
// fine; a UTF-8 byte-order mark at the start of the file is dropped. Lines of spaces and tabs only
// are skipped but counted, so that numbers (from 1) are those an editor shows. NUL bytes and broken
// UTF-8 pass through: the request parser refuses them with the line's number.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "proto/status.h"

namespace zipage {

class LineReader {
 public:
  enum class Kind {
    kLine,
    // The line is longer than the limit. It has been skipped; `text` holds its first kKeptPrefix
    // bytes (for the error record's custom_id) and `num_bytes` its whole length.
    kOverlong,
    // No line yet: the pipe is empty, or this call has read its share (kMaxBytesPerCall), so that a
    // giant line never holds up the scheduler. Call again later.
    kPending,
    kEnd,
  };
  struct Line {
    Kind kind = Kind::kEnd;
    int64_t number = 0;          // From 1. 0 for kPending and kEnd.
    std::string_view text = {};  // Without its line ending. Valid until the next call of Next.
    int64_t num_bytes = 0;       // Of the whole line, without its line ending.
  };
  static constexpr size_t kKeptPrefix = 4096;
  static constexpr int64_t kMaxBytesPerCall = int64_t{16} << 20;

  // Opens `path`, a regular file or a named pipe. `max_line_bytes` counts without the line ending.
  // Errors: kNotFound, kPermissionDenied, kInvalidArgument (a directory or a device).
  static absl::StatusOr<LineReader> Open(const std::string& path, size_t max_line_bytes,
                                         size_t buffer_bytes = size_t{64} << 10);

  LineReader(LineReader&& other) noexcept;
  LineReader& operator=(LineReader&& other) noexcept;
  ~LineReader();

  // The next line that is not blank. After kEnd every further call gives kEnd. Errors: kDataLoss
  // for a read error or a regular file that shrank while it was read; the reader is then at its
  // end.
  absl::StatusOr<Line> Next();

 private:
  LineReader(std::string path, int fd, bool is_pipe, int64_t file_bytes, size_t max_line_bytes,
             size_t buffer_bytes);
  enum class Fill { kData, kPending, kEnd };
  absl::StatusOr<Fill> FillBuffer();
  void TakeBytes(std::string_view piece);
  Line FinishLine();
  void DropByteOrderMark();
  bool LineIsBlank() const;
  void ClearLine();

  std::string path_;
  int fd_ = -1;
  bool is_pipe_ = false;
  int64_t file_bytes_ = 0;  // size when it was opened; 0 for a pipe
  size_t max_line_bytes_ = 0;
  std::string buffer_;  // buffer_[begin_, end_) has been read but not consumed
  size_t begin_ = 0;
  size_t end_ = 0;
  std::string line_;        // the line so far, or its prefix once it is over-long
  int64_t line_bytes_ = 0;  // of the whole line so far, "\r" included
  bool last_is_cr_ = false;
  bool line_done_ = false;  // line_ has been handed out and is cleared by the next call
  bool at_end_ = false;
  int64_t bytes_read_ = 0;
  int64_t line_number_ = 0;
};

}  // namespace zipage
