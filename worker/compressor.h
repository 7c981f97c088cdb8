#pragma once
// Compresses block tables: the policy selects, then keys, values and stored scores are packed, for
// all sequences of a step together and layer_stride layers at a time (DESIGN 5). Owns the query
// windows, the scratch memory, and how many of every sequence's slots hold prompt tokens. A
// sequence's result depends on nothing but its own state: not on the others of the step, the number
// of ranks or layer_stride. Worker thread only.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "proto/config.h"
#include "proto/messages.h"
#include "proto/status.h"
#include "worker/backend.h"
#include "worker/comm/collective.h"
#include "worker/compression_policy.h"
#include "worker/group_windows.h"
#include "worker/kv_pool.h"
#include "worker/query_windows.h"
#include "worker/sequence_state.h"

namespace zipage {

// What a compressor may have to do at once; sizes its scratch memory.
struct CompressorLimits {
  int max_num_seqs = 0;
  int64_t max_table_blocks = 0;  // of one sequence
};

class Compressor {
 public:
  // first_kv_head: of the model, this rank's first. `pool` must outlive the compressor.
  // kResourceExhausted if memory is short. REQUIRES: the policy is not none.
  static absl::StatusOr<std::unique_ptr<Compressor>> Create(
      const Config& config, const CompressorLimits& limits, const KvPool* pool,
      const QueryWindowShape& windows, int64_t num_query_slots, int first_kv_head,
      Collective* collective, Backend* backend);

  // Bytes of scratch memory.
  static size_t ScratchBytes(const Config& config, const CompressorLimits& limits,
                             const KvShape& shape, const QueryWindowShape& windows);

  const QueryWindows& windows() const { return windows_; }

  // Does all of `work`, with the effect of one after the other; returns in its order what was kept
  // of the prompts (the mean over all layers and KV heads of all ranks). Every rank makes the same
  // call. REQUIRES: SequenceStates made the work.
  absl::StatusOr<std::vector<FinishedCompression>> Compress(
      const std::vector<CompressionWork>& work);

 private:
  // Arrays of one batch of compressions on the device.
  struct Arrays;

  Compressor(const Config& config, const CompressorLimits& limits, const KvPool* pool,
             QueryWindows windows, GroupWindows group_windows, int first_kv_head,
             Collective* collective, Backend* backend);

  absl::Status Allocate();
  // `work` fits the scratch memory. Adds the prompt slots that each keeps on this rank to `kept`.
  absl::Status CompressBatch(std::span<const CompressionWork> work, float* kept);
  Arrays Upload(std::span<const CompressionWork> work);
  // What the policy sees of layers [layer, layer + num_layers).
  absl::StatusOr<PolicyInput> Input(std::span<const CompressionWork> work, const Arrays& arrays,
                                    int layer, int num_layers);
  absl::Status AddQueries(std::span<const CompressionWork> work, const Arrays& arrays,
                          PolicyInput* in);
  void Pack(const Arrays& arrays, const PolicyInput& in);
  // [kv_heads] of one sequence and layer.
  int32_t* PromptSlots(SequenceSlot slot, int layer) {
    const KvShape& shape = pool_->shape();
    return prompt_slots_.data() + (int64_t{slot} * shape.num_layers + layer) * shape.kv_heads;
  }

  const Config config_;
  const CompressorLimits limits_;
  const KvPool* pool_;
  QueryWindows windows_;
  GroupWindows group_windows_;
  const int first_kv_head_;
  Collective* collective_;
  Backend* backend_;
  std::unique_ptr<CompressionPolicy> policy_;
  int64_t batch_blocks_;  // longest table times number of sequences of a batch: what scratch takes

  std::vector<int32_t> prompt_slots_;  // [max_num_seqs, layers, kv_heads]
  DeviceMemory scratch_[3];            // scores of a batch, float32
  DeviceMemory kept_;                  // slots of a batch, int32
  DeviceMemory arrays_;                // everything in Arrays
  DeviceMemory kept_sums_;             // [max_num_seqs] float32
};

}  // namespace zipage
