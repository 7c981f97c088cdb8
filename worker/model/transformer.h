#pragma once
// The forward pass of the Llama family on one rank's shard, on any backend. Owns the weights and
// the activations; the KV pool is the caller's. Every rank makes the same calls with the same
// batch. Worker thread only.
//
// Activations and the residual stream have the weights' type; with several ranks partial sums are
// added in float32.

#include <cstdint>
#include <vector>

#include "proto/status.h"
#include "worker/backend.h"
#include "worker/comm/collective.h"
#include "worker/kv_pool.h"
#include "worker/model/model_config.h"
#include "worker/model/weights.h"
#include "worker/query_windows.h"

namespace zipage {

// The tokens of one step, packed: sequence s has tokens [query_start[s], query_start[s + 1]). All
// pointers are device memory.
struct Batch {
  const int32_t* ids = nullptr;           // [num_tokens]
  const int32_t* positions = nullptr;     // [num_tokens]
  const int64_t* slot_mapping = nullptr;  // [num_tokens] where keys and values go
  const int32_t* query_start = nullptr;   // [num_seqs + 1]
  const int32_t* context_len = nullptr;   // [num_seqs] cached slots after this step
  const int32_t* block_tables = nullptr;  // [num_seqs, max_blocks]
  const int32_t* logit_rows = nullptr;    // [num_logit_rows] tokens whose logits are wanted
  const int32_t* query_tokens = nullptr;  // [num_queries] tokens whose queries are kept
  const int64_t* window_rows = nullptr;   // [num_queries] where: query slot * window + place
  int64_t num_tokens = 0;
  int num_seqs = 0;
  int max_blocks = 0;
  int64_t num_logit_rows = 0;
  int64_t num_queries = 0;
};

class Transformer {
 public:
  // Rows that Logits computes at once.
  static constexpr int64_t kMaxLogitRows = 128;

  // max_tokens: of a batch. kResourceExhausted if memory is short.
  static absl::StatusOr<Transformer> Create(const ModelConfig& config, Weights weights,
                                            int64_t max_tokens, Collective* collective,
                                            Backend* backend);

  // Bytes of activations of one rank.
  static size_t ActivationBytes(const ModelConfig& config, const ModelShard& shard, DType dtype,
                                int64_t max_tokens, int rank, int tp);

  // Runs all layers; keys and values of the new tokens go to the pool, the rotated queries of
  // query_tokens to the windows (null: none are kept). The final hidden states of logit_rows stay
  // for Logits. REQUIRES: batch.num_tokens in [1, max_tokens].
  absl::Status Forward(const Batch& batch, const KvPool& pool,
                       const QueryWindows* windows = nullptr);

  // Logits of entries [first, first + count) of the last batch's logit_rows: device, [count,
  // vocab_size] float32 on rank 0, null on others. Valid until the next call; may be overwritten.
  // REQUIRES: 1 <= count <= kMaxLogitRows.
  absl::StatusOr<float*> Logits(int64_t first, int64_t count);

  const Weights& weights() const { return weights_; }
  const ModelConfig& config() const { return config_; }

 private:
  Transformer(const ModelConfig& config, Weights weights, Collective* collective, Backend* backend)
      : config_(config), weights_(std::move(weights)), collective_(collective), backend_(backend) {}

  // A buffer of the activations and its size.
  struct Activation {
    DeviceMemory Transformer::*memory;
    size_t bytes;
  };
  static std::vector<Activation> Activations(const ModelConfig& config, const ModelShard& shard,
                                             DType dtype, int64_t max_tokens, int rank, int tp);
  // residual = embeddings of the batch's tokens.
  absl::Status Embed(const Batch& batch);
  // x = attention(x), x = mlp(x); both summed over ranks.
  absl::Status Attention(int layer, const Batch& batch, const KvPool& pool,
                         const QueryWindows* windows);
  void StoreQueries(int layer, const Batch& batch, const QueryWindows& windows);
  absl::Status Mlp(const LayerWeights& layer, int64_t tokens);
  // x = sum over ranks of linear * in.
  absl::Status MultiplyAndReduce(Linear* linear, const void* in, int64_t tokens);
  // Where a rank's partial sums for `out` go before SumRanks.
  float* Partial(const DeviceMemory& out) const;
  // out = sum over ranks of Partial(out).
  absl::Status SumRanks(const DeviceMemory& out, int64_t tokens);
  void Norm(const DeviceMemory& weight, bool add_residual, int64_t tokens);

  ModelConfig config_;
  Weights weights_;
  Collective* collective_;
  Backend* backend_;

  // Activations, [max_tokens, …] of the weights' type.
  DeviceMemory x_;          // [hidden] input and output of every block
  DeviceMemory residual_;   // [hidden]
  DeviceMemory qkv_;        // [(heads + 2 * kv_heads) * head_dim]
  DeviceMemory attention_;  // [heads * head_dim]
  DeviceMemory gate_up_;    // [2 * intermediate]
  DeviceMemory mlp_;        // [intermediate]
  DeviceMemory final_;      // [hidden] normed hidden states of logit_rows
  DeviceMemory partial_;    // [hidden] float32; only for bf16 on several ranks

  DeviceMemory logits_;        // [kMaxLogitRows, vocab_size] float32; rank 0
  DeviceMemory shard_logits_;  // [kMaxLogitRows, vocab shard] float32; only with several ranks
  DeviceMemory all_logits_;    // [tp, kMaxLogitRows, largest vocab shard] float32; the same, rank 0
};

}  // namespace zipage
