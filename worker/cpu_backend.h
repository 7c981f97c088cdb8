#pragma once
// The CPU as a device: host memory, oneDNN products and the kernels of kernels/cpu on OpenMP
// threads. Every call returns when its work is done. Thread: the one that made it, because the
// number of OpenMP threads is that thread's.

#include <memory>
#include <string>
#include <vector>

#include "worker/backend.h"

namespace zipage {

class CpuBackend : public Backend {
 public:
  // num_threads: OpenMP threads of the operations, at least 1.
  explicit CpuBackend(int num_threads);

  // Threads for one of `tp` ranks of this host: OMP_NUM_THREADS if it is set, else the CPUs this
  // process may use (affinity and the control group's quota) divided by tp, at least 1.
  static int DefaultThreads(int tp);

  std::string Description() const override;
  absl::StatusOr<DType> ResolveDType(const std::string& requested, DType checkpoint) const override;
  absl::StatusOr<size_t> AvailableMemory() const override;
  absl::StatusOr<DeviceMemory> Allocate(size_t bytes, const std::string& what) override;
  void CopyToDevice(void* device, const void* host, size_t bytes) override;
  void CopyToHost(void* host, const void* device, size_t bytes) override;
  void CopyRows(void* to, size_t to_stride, const void* from, size_t from_stride, size_t row_bytes,
                int64_t rows) override;
  absl::StatusOr<std::unique_ptr<Linear>> LoadLinear(const std::vector<LinearPart>& parts,
                                                     int64_t in_features, DType dtype) override;
  absl::Status Multiply(Linear* linear, const void* x, void* y, int64_t rows,
                        DType out_dtype) override;
  void Embedding(const EmbeddingParams& p) override;
  void RmsNorm(const RmsNormParams& p) override;
  void RopeAndCache(const RopeAndCacheParams& p) override;
  void PagedAttention(const PagedAttentionParams& p) override;
  void SiluMul(const SiluMulParams& p) override;
  void StoreQueries(const StoreQueriesParams& p) override;
  void WindowScores(const WindowScoresParams& p) override;
  void GlobalScores(const GlobalScoresParams& p) override;
  void PoolScores(const PoolScoresParams& p) override;
  void KeySimilarity(const KeySimilarityParams& p) override;
  void CombineScores(const CombineScoresParams& p) override;
  void RandomScores(const RandomScoresParams& p) override;
  void SelectSlots(const SelectSlotsParams& p) override;
  void PackSlots(const PackSlotsParams& p) override;
  void RoundToBFloat16(const float* in, BFloat16* out, int64_t count) override;
  absl::Status Sample(float* logits, int64_t vocab, const std::vector<SampleRow>& rows,
                      int32_t* tokens, SampleOutput* output) override;
  void GatherTokens(const int32_t* in, const int32_t* index, int32_t* out, int64_t count) override;
  void ScatterTokens(const int32_t* in, const int32_t* index, int32_t* out, int64_t count) override;

 private:
  int num_threads_;
};

}  // namespace zipage
