#pragma once
// How the memory of one rank is divided: arithmetic over the options and the shape of the model,
// without a device. The worker plans with it before it loads anything, a dry run prints the plan.

#include <cstddef>
#include <cstdint>

#include "kernels/tensor.h"
#include "proto/config.h"
#include "proto/status.h"
#include "worker/compressor.h"
#include "worker/kv_pool.h"
#include "worker/model/model_config.h"
#include "worker/model/weights.h"
#include "worker/query_windows.h"

namespace zipage {

// Shapes and limits that follow from the options.
KvShape MakeKvShape(const Config& config, const ModelConfig& model, const ModelShard& shard,
                    DType dtype);
QueryWindowShape MakeQueryWindowShape(const Config& config, const ModelConfig& model,
                                      const ModelShard& shard, DType dtype);
CompressorLimits MakeCompressorLimits(const Config& config, int64_t max_model_len);
// Blocks of swapped sequences that swap_space_gb takes; their query windows come on top.
int64_t NumHostBlocks(const Config& config, const KvShape& shape);

struct MemoryRequest {
  Config config;
  ModelConfig model;
  int rank = 0;
  DType dtype = DType::kFloat32;         // of weights, activations and KV
  DType stored_dtype = DType::kFloat32;  // of the embedding table
  int64_t max_model_len = 0;             // positions of a sequence
  // Bytes that all ranks of the host may take together, before anything is loaded.
  int64_t available = 0;
};

// Of one rank, in bytes.
struct MemoryPlan {
  int64_t share = 0;  // of the available memory
  int64_t weights = 0;
  int64_t activations = 0;  // and the inputs of a step
  int64_t scratch = 0;      // of compression
  KvShape kv;
  QueryWindowShape windows;
  int64_t num_blocks = 0;
  int64_t num_query_slots = 0;  // 0 without compression
  int64_t num_host_blocks = 0;

  int64_t kv_bytes() const { return num_blocks * static_cast<int64_t>(kv.block_bytes()); }
  // The part of kv_bytes that stored scores are.
  int64_t score_bytes() const {
    return num_blocks * kv.num_layers * static_cast<int64_t>(kv.score_bytes());
  }
  int64_t window_bytes() const {
    return num_query_slots * static_cast<int64_t>(windows.slot_bytes());
  }
  int64_t total() const { return weights + activations + scratch + kv_bytes() + window_bytes(); }
};

// The number of blocks is num_kvcache_blocks, or what kv_cache_memory_gb takes; else the query
// windows and blocks get gpu_memory_utilization of what the rest leaves of a rank's share, but for
// all ranks together not over 4 GiB, and not more blocks than max_num_seqs sequences of
// max_model_len positions fill. With N = max_cache_blocks_per_seq there are
// clamp(blocks / (N + 1), 1, max_num_seqs) query slots. Swapped sequences get swap_space_gb, as far
// as it is left: on the CPU it is the same memory.
// kResourceExhausted, with what is missing and the smallest change that fits, if memory is short;
// kInvalidArgument if the pool cannot hold the N + 1 blocks of a sequence.
absl::StatusOr<MemoryPlan> PlanMemory(const MemoryRequest& request);

// Blocks of a sequence of max_model_len positions: with the full cache, and with at most
// max_cache_blocks_per_seq + 1.
int64_t FullBlocks(const MemoryRequest& request);
int64_t CompressedBlocks(const MemoryRequest& request);
// Sequences of so many blocks that run at once in the plan's pool.
int64_t Concurrency(const MemoryPlan& plan, const MemoryRequest& request,
                    int64_t blocks_per_sequence);

// What compression gains at most while the KV cache is what a step reads and what limits the batch:
// in the same memory a full cache runs 1 / (mean context) sequences and compression
// 1 / (budget + b), so the ceiling of the speed-up is
//   (prompt + output / 2) / ((max_cache_blocks_per_seq + 1) * kvcache_block_size).
double SpeedUpCeiling(const Config& config, int64_t prompt, int64_t output);
// The output length at which that is 1: shorter ones are faster with the full cache.
int64_t BreakEvenOutput(const Config& config, int64_t prompt);

}  // namespace zipage
