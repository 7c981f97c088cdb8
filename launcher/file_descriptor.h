#pragma once
// Owns one file descriptor and closes it.

#include <unistd.h>

#include <utility>

namespace zipage {

class FileDescriptor {
 public:
  FileDescriptor() = default;
  explicit FileDescriptor(int fd) : fd_(fd) {}
  ~FileDescriptor() { Close(); }
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    if (this != &other) {
      Close();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }

  bool is_open() const { return fd_ >= 0; }
  int get() const { return fd_; }
  void Close() {
    if (is_open()) close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

}  // namespace zipage
