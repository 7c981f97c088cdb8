#pragma once
// The query windows of all query heads that attend to this rank's KV heads. With fewer KV heads
// than ranks these are spread over the ranks that share a KV head; a score is a maximum over all of
// them, so that every rank keeps the slots that one rank alone would keep. Owns the memory for one
// batch. Worker thread only.

#include <cstddef>
#include <cstdint>
#include <span>

#include "proto/messages.h"
#include "proto/status.h"
#include "worker/backend.h"
#include "worker/comm/collective.h"
#include "worker/query_windows.h"

namespace zipage {

class GroupWindows {
 public:
  // max_layers, max_batch: of one Collect. kResourceExhausted if memory is short.
  static absl::StatusOr<GroupWindows> Create(const QueryWindowShape& shape, int max_layers,
                                             int max_batch, Collective* collective,
                                             Backend* backend);
  // Bytes of memory; 0 if no KV head is shared.
  static size_t Bytes(const QueryWindowShape& shape, int max_layers, int max_batch, int tp);

  // Whether KV heads are shared; if not, nothing needs to be collected.
  bool enabled() const { return shape_.window > 0 && shape_.num_sharers > 1; }
  // Query heads of the result.
  int q_heads() const { return shape_.q_heads * shape_.num_sharers; }

  // Device, [num_layers, query_slots.size(), window, q_heads(), head_dim]: those query slots of
  // layers [first_layer, first_layer + num_layers). Valid until the next call; every rank makes the
  // same. REQUIRES: enabled().
  absl::StatusOr<const void*> Collect(const QueryWindows& windows, int first_layer, int num_layers,
                                      std::span<const QuerySlot> query_slots);

 private:
  GroupWindows(const QueryWindowShape& shape, Collective* collective, Backend* backend)
      : shape_(shape), collective_(collective), backend_(backend) {}

  QueryWindowShape shape_;
  Collective* collective_;
  Backend* backend_;
  DeviceMemory own_;       // [layers, batch, window, q_heads, head_dim] of this rank
  DeviceMemory gathered_;  // the same of every rank
  DeviceMemory group_;     // what Collect returns
};

}  // namespace zipage
