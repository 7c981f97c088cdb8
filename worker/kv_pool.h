#pragma once
// The paged keys, values and stored scores of one rank. Allocated once, after the scheduler has
// said how many blocks every rank has (memory_plan.h says how many fit); only the kernels and the
// swap space write to it.

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/tensor.h"
#include "proto/status.h"
#include "worker/backend.h"

namespace zipage {

struct KvShape {
  int num_layers = 0;
  int block_size = 0;  // slots
  int kv_heads = 0;    // of this rank
  int head_dim = 0;
  DType dtype = DType::kFloat32;
  bool has_scores = false;  // a score is stored for every slot and KV head (DESIGN 5, step 2)

  // Keys and values of one block in one layer, each.
  size_t plane_bytes() const {
    return static_cast<size_t>(block_size) * kv_heads * head_dim * DTypeSize(dtype);
  }
  // Stored scores of one block in one layer.
  size_t score_bytes() const {
    return has_scores ? static_cast<size_t>(block_size) * kv_heads * sizeof(float) : 0;
  }
  // Of one block over all layers: keys, values and stored scores.
  size_t block_bytes() const { return num_layers * (2 * plane_bytes() + score_bytes()); }
};

class KvPool {
 public:
  static absl::StatusOr<KvPool> Create(const KvShape& shape, int64_t num_blocks, Backend* backend);

  const KvShape& shape() const { return shape_; }
  int64_t num_blocks() const { return num_blocks_; }
  // Device, [num_blocks, block_size, kv_heads, head_dim] of shape().dtype.
  void* key(int layer) const { return Plane(int64_t{2} * layer); }
  void* value(int layer) const { return Plane(int64_t{2} * layer + 1); }
  // Device, [num_blocks, block_size, kv_heads]; null if the shape has no scores.
  float* stored_scores(int layer) const {
    if (!shape_.has_scores) return nullptr;
    return static_cast<float*>(Plane(int64_t{2} * shape_.num_layers)) +
           layer * score_layer_stride();
  }
  // Elements from one layer's keys to the next layer's, and the same for values.
  int64_t kv_layer_stride() const {
    return int64_t{2} * num_blocks_ * shape_.block_size * shape_.kv_heads * shape_.head_dim;
  }
  int64_t score_layer_stride() const { return num_blocks_ * shape_.block_size * shape_.kv_heads; }

 private:
  KvPool(const KvShape& shape, int64_t num_blocks, DeviceMemory memory)
      : shape_(shape), num_blocks_(num_blocks), memory_(std::move(memory)) {}
  void* Plane(int64_t index) const {
    return memory_.as<uint8_t>() + index * num_blocks_ * shape_.plane_bytes();
  }

  KvShape shape_;
  int64_t num_blocks_;
  // Keys and values of every layer in turn, then the scores of all layers.
  DeviceMemory memory_;
};

}  // namespace zipage
