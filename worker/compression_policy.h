#pragma once
// Which slots of a full block table survive a compression: what is known about the slots in, kept
// slots out. The steps are the backend's (DESIGN 5); a policy orders them. Packing, query windows,
// scratch and batches are the compressor's, when to compress is the scheduler's.

#include <cstdint>
#include <memory>

#include "kernels/compression_shape.h"
#include "kernels/tensor.h"
#include "proto/config.h"
#include "worker/backend.h"

namespace zipage {

// The full tables of some sequences in some consecutive layers, and what a policy may know about
// them. All pointers are device memory; those that a policy does not need (PolicyNeeds) are null.
struct PolicyInput {
  CompressionShape shape;
  const int32_t* num_pinned = nullptr;  // [batch] leading slots that are kept in any case
  const int32_t* num_kept = nullptr;    // [batch] slots to keep
  const int32_t* num_raised = nullptr;  // [batch] CompressionPolicy::NumRaised
  const int32_t* first_block =
      nullptr;                          // [batch] blocks before it may be shared: not to be written
  const uint8_t* compressed = nullptr;  // [batch] 1: compressed before
  const uint8_t* pools = nullptr;       // [batch] 1: scores are pooled in this round
  const uint64_t* seed = nullptr;       // [batch] of the request
  const uint32_t* sample_index = nullptr;  // [batch]
  const uint32_t* round = nullptr;         // [batch] compressions before this one
  int max_kept = 0;                        // largest num_kept

  const void* key = nullptr;     // [num_blocks, block_size, kv_heads, head_dim] of the first layer
  int64_t key_layer_stride = 0;  // elements
  float* stored_scores = nullptr;  // [num_blocks, block_size, kv_heads] of the first layer
  int64_t stored_layer_stride = 0;
  const void* query_window = nullptr;   // [query slots, window, q_heads, head_dim], first layer
  int64_t window_layer_stride = 0;      // elements
  const int32_t* query_slot = nullptr;  // [batch]
  int q_heads = 0;
  int head_dim = 0;
  DType dtype = DType::kFloat32;  // of keys and queries

  int first_layer = 0;    // of the model
  int first_kv_head = 0;  // of the model: this rank's first

  float* scratch[3] = {};   // as many arrays of shape.num_scores() as the policy needs
  int32_t* kept = nullptr;  // out: [layers, batch, kv_heads, max_kept], ascending
};

struct PolicyNeeds {
  bool queries = false;        // query windows
  bool stored_scores = false;  // remembered from one compression to the next
  int scratch_arrays = 0;      // of PolicyInput::scratch
};

// Stateless; what it keeps depends on nothing but a sequence's own input.
class CompressionPolicy {
 public:
  virtual ~CompressionPolicy() = default;

  virtual PolicyNeeds needs() const = 0;
  // Slots that are kept by their score before the others are drawn at random, what is always kept
  // among them. 0 for policies that draw none. Host code.
  virtual int64_t NumRaised(int64_t num_kept, int64_t num_pinned) const = 0;
  virtual void Select(const PolicyInput& in, Backend* backend) const = 0;
};

// The policy of the options; null for none:
//   paper          attention scores, remembered, pooled, less the similarity
//   pinned_score   score_share of what is not kept in any case by the same scores without the
//                  similarity, the rest at random
//   pinned_random  at random
//   recency        the newest
// Each keeps the pinned slots, the sinks and the newest query_cache_len slots whatever their score.
std::unique_ptr<CompressionPolicy> MakeCompressionPolicy(const Config& config);

}  // namespace zipage
