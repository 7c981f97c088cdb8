#pragma once
// Sequences in host memory: the blocks (keys, values, stored scores of all layers) and the query
// window that a swapped sequence gave up, kept until they are copied back, bit for bit, or
// dropped. Owns the host memory, one buffer for each swapped sequence. Worker thread only.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "proto/messages.h"
#include "proto/status.h"
#include "worker/backend.h"
#include "worker/kv_pool.h"
#include "worker/query_windows.h"
#include "worker/sequence_state.h"

namespace zipage {

class SwapSpace {
 public:
  // Pool and windows (null: there are none) must outlive the space.
  SwapSpace(int max_num_seqs, const KvPool* pool, const QueryWindows* windows, Backend* backend)
      : pool_(pool), windows_(windows), backend_(backend), buffers_(max_num_seqs) {}

  // Does a swap that SequenceStates made. kResourceExhausted if host memory is short.
  absl::Status Run(const SwapWork& work);
  // Drops what the slot has in host memory, if anything.
  void Release(SequenceSlot slot) { buffers_[slot].reset(); }

 private:
  // Calls copy(device, host, bytes) for every piece: the window first, if there is one, so that its
  // place does not depend on the blocks.
  void ForEachPiece(const SwapWork& work, uint8_t* host,
                    const std::function<void(void*, uint8_t*, size_t)>& copy) const;
  size_t WindowBytes() const { return windows_ == nullptr ? 0 : windows_->shape().slot_bytes(); }

  const KvPool* pool_;
  const QueryWindows* windows_;
  Backend* backend_;
  std::vector<std::unique_ptr<uint8_t[]>> buffers_;  // by sequence slot
};

}  // namespace zipage
