#pragma once
// One rank's share of a model's weights in the backend's form: attention heads, MLP width and
// vocabulary are split over the ranks, norms are whole on every rank. Immutable after loading.

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/tensor.h"
#include "proto/status.h"
#include "worker/backend.h"
#include "worker/model/checkpoint.h"
#include "worker/model/model_config.h"

namespace zipage {

// Part [begin, end) of something split over ranks.
struct Shard {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t size() const { return end - begin; }
};

// The rank's part of `total` things in order; parts differ by one at most.
Shard EvenShard(int64_t total, int rank, int tp);

// What one rank holds of every layer. With fewer KV heads than ranks, neighbours hold the same
// head.
struct ModelShard {
  Shard heads;         // of num_heads
  Shard kv_heads;      // of num_kv_heads
  Shard intermediate;  // of intermediate_size
  Shard vocab;         // of vocab_size
};

// REQUIRES: CheckTensorParallel(config, tp) is OK.
ModelShard MakeModelShard(const ModelConfig& config, int rank, int tp);

struct LayerWeights {
  DeviceMemory input_norm;           // [hidden] float32
  std::unique_ptr<Linear> qkv;       // [(heads + 2 * kv_heads) * head_dim, hidden]: q, k, v
  DeviceMemory q_norm;               // [head_dim] float32; empty without q/k norm
  DeviceMemory k_norm;               // the same
  std::unique_ptr<Linear> o;         // [hidden, heads * head_dim]; its bias on rank 0 only
  DeviceMemory post_attention_norm;  // [hidden] float32
  std::unique_ptr<Linear> gate_up;   // [2 * intermediate, hidden]: gate, up
  std::unique_ptr<Linear> down;      // [hidden, intermediate]; its bias on rank 0 only
};

struct Weights {
  ModelShard shard;
  DType dtype = DType::kFloat32;  // of the matrices, activations and KV

  DeviceMemory embedding;  // [vocab shard, hidden] of embedding_dtype, as the checkpoint has it
  DType embedding_dtype = DType::kFloat32;
  std::vector<LayerWeights> layers;
  DeviceMemory final_norm;          // [hidden] float32
  std::unique_ptr<Linear> lm_head;  // [vocab shard, hidden]
  DeviceMemory rope_table;          // [max_position, head_dim] float32 (BuildRopeTable)
  int64_t max_position = 0;

  size_t bytes = 0;  // of all of the above
};

// Bytes of a rank's weights in memory, from the shapes alone; what the device's own form of the
// matrices adds is not counted. max_position: rows of the rope table.
size_t WeightBytes(const ModelConfig& config, const ModelShard& shard, DType dtype,
                   DType embedding_dtype, int64_t max_position);

// Loads rank's share of the `tp` ranks, one matrix at a time, so that the peak is the result and
// two copies of the largest matrix. max_position: rows of the rope table. kResourceExhausted, with
// the numbers, if memory is short. REQUIRES: CheckTensorParallel(config, tp) is OK.
absl::StatusOr<Weights> LoadWeights(const ModelConfig& config, const Checkpoint& checkpoint,
                                    int rank, int tp, DType dtype, int64_t max_position,
                                    Backend* backend);

}  // namespace zipage
