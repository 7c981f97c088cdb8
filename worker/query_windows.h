#pragma once
// The query-window pool of one rank: for every query slot and layer the rotated queries of the last
// `window` positions of a block (DESIGN 5). The forward pass writes it, compression reads it, the
// swap space does both. Allocated once.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/tensor.h"
#include "proto/status.h"
#include "worker/backend.h"

namespace zipage {

struct QueryWindowShape {
  int num_layers = 0;
  int window = 0;   // w; 0: the policy needs no queries, none are kept
  int q_heads = 0;  // of this rank
  int head_dim = 0;
  DType dtype = DType::kFloat32;
  // Ranks that hold the same KV heads, this one included: with fewer KV heads than ranks the query
  // heads of one KV head are spread over neighbours.
  int num_sharers = 1;

  // Of one query slot in one layer.
  size_t plane_bytes() const {
    return static_cast<size_t>(window) * q_heads * head_dim * DTypeSize(dtype);
  }
  // Of one query slot over all layers.
  size_t slot_bytes() const { return num_layers * plane_bytes(); }
};

class QueryWindows {
 public:
  static absl::StatusOr<QueryWindows> Create(const QueryWindowShape& shape, int64_t num_slots,
                                             Backend* backend) {
    ZIPAGE_ASSIGN_OR_RETURN(DeviceMemory memory,
                            backend->Allocate(num_slots * shape.slot_bytes(), "query windows"));
    return QueryWindows(shape, num_slots, std::move(memory));
  }

  const QueryWindowShape& shape() const { return shape_; }
  int64_t num_slots() const { return num_slots_; }
  // Device, [num_slots, window, q_heads, head_dim] of shape().dtype.
  void* layer(int index) const {
    return memory_.as<uint8_t>() + index * num_slots_ * shape_.plane_bytes();
  }
  // Elements from one layer to the next.
  int64_t layer_stride() const {
    return num_slots_ * shape_.window * shape_.q_heads * shape_.head_dim;
  }

 private:
  QueryWindows(const QueryWindowShape& shape, int64_t num_slots, DeviceMemory memory)
      : shape_(shape), num_slots_(num_slots), memory_(std::move(memory)) {}

  QueryWindowShape shape_;
  int64_t num_slots_;
  DeviceMemory memory_;
};

}  // namespace zipage
