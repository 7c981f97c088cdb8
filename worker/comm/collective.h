#pragma once
// What tensor-parallel ranks do together. One object per rank; every rank makes the same calls in
// the same order, from one thread. A call that waits longer than the timeout returns
// kDeadlineExceeded and names the call and the ranks that did not come; a peer that is gone gives
// kUnavailable.

#include <cstddef>
#include <cstdint>

#include "proto/status.h"

namespace zipage {

class Collective {
 public:
  virtual ~Collective() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // data[i] becomes the sum over ranks. The order of summation is rank 0, 1, … for every element,
  // so the result is the same on every rank, bit for bit. [count] float32, in place.
  virtual absl::Status AllReduceSum(float* data, size_t count) = 0;
  // Rank 0 receives `bytes` from every rank, in rank order, at `out` [size() * bytes]; `out` is
  // ignored on the other ranks.
  virtual absl::Status Gather(const void* data, size_t bytes, void* out) = 0;
  // Every rank receives rank 0's bytes.
  virtual absl::Status Broadcast(void* data, size_t bytes) = 0;
};

}  // namespace zipage
