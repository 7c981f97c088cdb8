#pragma once
// Collectives between ranks of one host over one shared mapping: each rank copies its data into its
// own slot, a barrier of atomics and futexes follows, and every rank reads the slots in rank order.
//
// Layout, version 1; a mapping full of zeros is a valid fresh one, so whoever creates it (the
// launcher, by memfd_create and ftruncate) need not know it:
//   0     u32 magic, u32 version, u32 ranks, u64 bytes: each 0 or what every rank expects
//   128   per rank 128 bytes: process id, arrivals, sleepers, the last two calls
//   then  two banks of one slot per rank, used in turn, so that a call needs one barrier only
// One mapping serves one epoch.

#include <chrono>
#include <cstddef>
#include <memory>

#include "proto/status.h"
#include "worker/comm/collective.h"

namespace zipage {

// A mapping shared by all ranks: over a file descriptor for processes, or anonymous, which threads
// and forked children share.
class SharedMemory {
 public:
  // Maps all of `fd`, which stays the caller's. kInvalidArgument if it cannot be mapped.
  static absl::StatusOr<std::shared_ptr<SharedMemory>> Map(int fd);
  static absl::StatusOr<std::shared_ptr<SharedMemory>> Anonymous(size_t bytes);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  SharedMemory(void* data, size_t bytes) : data_(data), bytes_(bytes) {}

  void* data_;
  size_t bytes_;
};

// Attaches `rank` of `size`; returns at once, the first call waits for the others. Data of any size
// goes through in pieces as large as a slot. kInvalidArgument if the mapping is too small,
// kFailedPrecondition if it is laid out for other ranks or `rank` is attached already. A rank whose
// process ends is noticed within a second (kUnavailable); one that stops, after `timeout`.
absl::StatusOr<std::unique_ptr<Collective>> MakeSharedMemoryCollective(
    std::shared_ptr<SharedMemory> memory, int rank, int size, std::chrono::milliseconds timeout);

}  // namespace zipage
