#pragma once
// One interface, two devices: memory, weights and every operation that the transformer and the
// runner ask for. Pointers called "device" are only valid inside the backend's operations and
// copies; on the CPU they are ordinary memory. Operations run in the order of the calls (one
// stream) and may still be running when a call returns; CopyToHost and Sample wait for what they
// read. Thread: the one that made the backend.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/combine_scores.h"
#include "kernels/embedding.h"
#include "kernels/global_scores.h"
#include "kernels/key_similarity.h"
#include "kernels/pack_slots.h"
#include "kernels/paged_attention.h"
#include "kernels/pool_scores.h"
#include "kernels/query_window.h"
#include "kernels/random_scores.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/sample.h"
#include "kernels/select_slots.h"
#include "kernels/silu_mul.h"
#include "kernels/tensor.h"
#include "kernels/window_scores.h"
#include "proto/status.h"

namespace zipage {

// Device memory with one owner, freed with it. Zero when it is new.
class DeviceMemory {
 public:
  using Free = void (*)(void* data, size_t bytes);

  DeviceMemory() = default;
  DeviceMemory(void* data, size_t bytes, Free free) : data_(data), bytes_(bytes), free_(free) {}
  DeviceMemory(DeviceMemory&& other) noexcept { *this = std::move(other); }
  DeviceMemory& operator=(DeviceMemory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(free_, other.free_);
    return *this;
  }
  ~DeviceMemory() {
    if (free_ != nullptr) free_(data_, bytes_);
  }

  template <typename T = void>
  T* as() const {
    return static_cast<T*>(data_);
  }
  size_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Free free_ = nullptr;
};

// A matrix in the form in which the device multiplies with it; made by Backend::LoadLinear.
class Linear {
 public:
  virtual ~Linear() = default;
  // Bytes of weights that a product reads.
  virtual size_t bytes() const = 0;
};

// Consecutive rows of a matrix under construction, in host memory in checkpoint form.
struct LinearPart {
  const void* weight;  // [num_rows, in_features], rows row_stride elements apart
  int64_t num_rows;
  int64_t row_stride;          // elements
  const void* bias = nullptr;  // [num_rows] or null: none
  DType dtype;                 // of weight
  DType bias_dtype = DType::kFloat32;
};

// What Sample found out, in host memory. Kept by the caller from step to step.
struct SampleOutput {
  std::vector<SampleResult> results;    // [num_rows]
  std::vector<SampleLogprob> logprobs;  // [num_rows, max_logprobs]
  std::vector<uint8_t> corrupted;       // [num_rows] 1: the logits are no numbers; token 0
};

class Backend {
 public:
  virtual ~Backend() = default;

  // For people: "cpu, 2 threads".
  virtual std::string Description() const = 0;
  // The type of activations and KV: `requested` is option dtype, `checkpoint` the model's own type.
  // kInvalidArgument, with the cure, for one that the device cannot compute in.
  virtual absl::StatusOr<DType> ResolveDType(const std::string& requested,
                                             DType checkpoint) const = 0;

  // Bytes that could be allocated now.
  virtual absl::StatusOr<size_t> AvailableMemory() const = 0;
  // Zeros, aligned for every kernel. `what` names the purpose in the error (kResourceExhausted).
  virtual absl::StatusOr<DeviceMemory> Allocate(size_t bytes, const std::string& what) = 0;
  virtual void CopyToDevice(void* device, const void* host, size_t bytes) = 0;
  virtual void CopyToHost(void* host, const void* device, size_t bytes) = 0;
  // Copies `rows` rows of row_bytes bytes, which lie the given numbers of bytes apart. Device to
  // device.
  virtual void CopyRows(void* to, size_t to_stride, const void* from, size_t from_stride,
                        size_t row_bytes, int64_t rows) = 0;

  // Stacks the parts' rows to one matrix [sum of num_rows, in_features] of `dtype`. Either all
  // parts have a bias or none has. The parts' memory is not needed afterwards.
  virtual absl::StatusOr<std::unique_ptr<Linear>> LoadLinear(const std::vector<LinearPart>& parts,
                                                             int64_t in_features, DType dtype) = 0;
  // y[m, :] = weight * x[m, :] + bias. x: device [rows, in_features] of the matrix's type; y:
  // device [rows, out_features] of out_dtype (kFloat32 or the matrix's type).
  virtual absl::Status Multiply(Linear* linear, const void* x, void* y, int64_t rows,
                                DType out_dtype) = 0;

  // The kernels of the same names; their headers tell what they compute. Pointers are device
  // memory.
  virtual void Embedding(const EmbeddingParams& p) = 0;
  virtual void RmsNorm(const RmsNormParams& p) = 0;
  virtual void RopeAndCache(const RopeAndCacheParams& p) = 0;
  virtual void PagedAttention(const PagedAttentionParams& p) = 0;
  virtual void SiluMul(const SiluMulParams& p) = 0;
  virtual void StoreQueries(const StoreQueriesParams& p) = 0;
  virtual void WindowScores(const WindowScoresParams& p) = 0;
  virtual void GlobalScores(const GlobalScoresParams& p) = 0;
  virtual void PoolScores(const PoolScoresParams& p) = 0;
  virtual void KeySimilarity(const KeySimilarityParams& p) = 0;
  virtual void CombineScores(const CombineScoresParams& p) = 0;
  virtual void RandomScores(const RandomScoresParams& p) = 0;
  virtual void SelectSlots(const SelectSlotsParams& p) = 0;
  virtual void PackSlots(const PackSlotsParams& p) = 0;
  // out[i] = in[i] rounded to bf16. Device [count].
  virtual void RoundToBFloat16(const float* in, BFloat16* out, int64_t count) = 0;

  // Samples a token for every row (kernels/sample.h). logits: device [num_rows, vocab] float32, as
  // if untouched afterwards; rows and all they point to: host; tokens: device [num_rows], receives
  // the tokens. A row whose logits are NaN or infinite is marked as corrupted, the others are
  // sampled.
  virtual absl::Status Sample(float* logits, int64_t vocab, const std::vector<SampleRow>& rows,
                              int32_t* tokens, SampleOutput* output) = 0;

  // out[i] = in[index[i]]. Device [count]; no sampled token travels through the host to become the
  // next input.
  virtual void GatherTokens(const int32_t* in, const int32_t* index, int32_t* out,
                            int64_t count) = 0;
  // out[index[i]] = in[i], no index twice. Device [count].
  virtual void ScatterTokens(const int32_t* in, const int32_t* index, int32_t* out,
                             int64_t count) = 0;
};

}  // namespace zipage
