#pragma once
// The paged keys and values of one rank, and how many blocks of them fit. Allocated once, after the
// scheduler has said how many blocks every rank has; only the kernels write to it.

#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"
#include "proto/config.h"
#include "proto/status.h"
#include "worker/backend.h"

namespace zipage {

struct KvShape {
  int num_layers = 0;
  int block_size = 0;  // positions
  int kv_heads = 0;    // of this rank
  int head_dim = 0;
  DType dtype = DType::kFloat32;

  // Keys and values of one block in one layer, each.
  size_t plane_bytes() const {
    return static_cast<size_t>(block_size) * kv_heads * head_dim * DTypeSize(dtype);
  }
  // Of one block over all layers, keys and values.
  size_t block_bytes() const { return size_t{2} * num_layers * plane_bytes(); }
};

// Blocks that fit on this rank: num_kvcache_blocks or kv_cache_memory_gb (of this rank) if given,
// else half of the available memory, shared by the tp ranks of this host, but not over 4 GiB for
// all ranks nor over what max_num_seqs sequences of max_model_len positions fill. Call with the
// weights loaded. kResourceExhausted, with the numbers and the smallest change, if fewer than two
// blocks fit or the given number does not.
absl::StatusOr<int64_t> CountKvBlocks(const Config& config, const KvShape& shape,
                                      int64_t max_model_len, const Backend& backend);

class KvPool {
 public:
  static absl::StatusOr<KvPool> Create(const KvShape& shape, int64_t num_blocks, Backend* backend);

  const KvShape& shape() const { return shape_; }
  int64_t num_blocks() const { return num_blocks_; }
  // Device, [num_blocks, block_size, kv_heads, head_dim] of shape().dtype.
  void* key(int layer) const { return Plane(int64_t{2} * layer); }
  void* value(int layer) const { return Plane(int64_t{2} * layer + 1); }

 private:
  KvPool(const KvShape& shape, int64_t num_blocks, DeviceMemory memory)
      : shape_(shape), num_blocks_(num_blocks), memory_(std::move(memory)) {}
  void* Plane(int64_t index) const {
    return memory_.as<uint8_t>() + index * num_blocks_ * shape_.plane_bytes();
  }

  KvShape shape_;
  int64_t num_blocks_;
  DeviceMemory memory_;
};

}  // namespace zipage
