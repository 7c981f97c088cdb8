#include "worker/cuda_backend.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "glog/logging.h"
#include "kernels/device_sample.h"
#include "kernels/round.h"
#include "kernels/tokens.h"
#include "worker/cuda_matmul.h"
#include "worker/cuda_memory.h"

namespace zipage {
namespace {

// A matrix as the checkpoint has it, row-major.
class CudaLinear : public Linear {
 public:
  CudaLinear(int64_t out_features, int64_t in_features, DType dtype, DeviceMemory weight)
      : out_features_(out_features),
        in_features_(in_features),
        dtype_(dtype),
        weight_(std::move(weight)) {}
  size_t bytes() const override {
    return static_cast<size_t>(out_features_ * in_features_) * DTypeSize(dtype_);
  }
  // cuBLASLt adds a bias of the result's type, so both types are kept.
  void SetBias(DeviceMemory float_bias, DeviceMemory bias) {
    float_bias_ = std::move(float_bias);
    bias_ = std::move(bias);
  }
  CudaProduct Product(const void* x, void* y, int64_t rows, DType out_dtype) const {
    const DeviceMemory& bias =
        out_dtype == DType::kFloat32 && dtype_ != DType::kFloat32 ? float_bias_ : bias_;
    return {.weight = weight_.as(),
            .bias = bias.as(),
            .x = x,
            .y = y,
            .out_features = out_features_,
            .in_features = in_features_,
            .rows = rows,
            .dtype = dtype_,
            .out_dtype = out_dtype};
  }

 private:
  int64_t out_features_;
  int64_t in_features_;
  DType dtype_;
  DeviceMemory weight_;
  DeviceMemory float_bias_;
  DeviceMemory bias_;
};

float ElementOf(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kFloat32:
      return static_cast<const float*>(data)[i];
    case DType::kBFloat16:
      return ToFloat(static_cast<const BFloat16*>(data)[i]);
    case DType::kFloat16:
      return ToFloat(static_cast<const Float16*>(data)[i]);
  }
  return 0;
}

// count elements to float32 or bf16.
void Convert(const void* from, DType from_dtype, int64_t count, void* to, DType to_dtype) {
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(count) * DTypeSize(to_dtype));
    return;
  }
  for (int64_t i = 0; i < count; ++i) {
    const float value = ElementOf(from, from_dtype, i);
    if (to_dtype == DType::kFloat32) {
      static_cast<float*>(to)[i] = value;
    } else {
      static_cast<BFloat16*>(to)[i] = ToBFloat16(value);
    }
  }
}

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(int device) : device_(device) {}
  ~CudaBackend() override {
    matmul_.reset();
    if (stream_ != nullptr) cudaStreamSynchronize(stream_);
    // The stream outlives the copier, which waits for it.
  }
  absl::Status Start();

  std::string Description() const override {
    return absl::StrCat("cuda:", device_, " ", properties_.name);
  }
  absl::StatusOr<DType> ResolveDType(const std::string& requested, DType checkpoint) const override;
  absl::StatusOr<size_t> AvailableMemory() const override;
  absl::StatusOr<DeviceMemory> Allocate(size_t bytes, const std::string& what) override {
    return AllocateCuda(bytes, what, stream_);
  }
  void CopyToDevice(void* device, const void* host, size_t bytes) override {
    Note(copier_.ToDevice(device, host, bytes));
  }
  void CopyToHost(void* host, const void* device, size_t bytes) override {
    Note(copier_.ToHost(host, device, bytes));
  }
  void CopyRows(void* to, size_t to_stride, const void* from, size_t from_stride, size_t row_bytes,
                int64_t rows) override {
    if (rows == 0 || row_bytes == 0) return;
    Note(CudaStatus(cudaMemcpy2DAsync(to, to_stride, from, from_stride, row_bytes, rows,
                                      cudaMemcpyDeviceToDevice, stream_),
                    "cannot copy rows"));
  }

  absl::StatusOr<std::unique_ptr<Linear>> LoadLinear(const std::vector<LinearPart>& parts,
                                                     int64_t in_features, DType dtype) override;
  absl::Status Multiply(Linear* linear, const void* x, void* y, int64_t rows,
                        DType out_dtype) override {
    ZIPAGE_RETURN_IF_ERROR(status_);
    return matmul_->Run(static_cast<CudaLinear*>(linear)->Product(x, y, rows, out_dtype), stream_);
  }

  void Embedding(const EmbeddingParams& p) override { Note(cuda::Embedding(p, stream_)); }
  void RmsNorm(const RmsNormParams& p) override { Note(cuda::RmsNorm(p, stream_)); }
  void RopeAndCache(const RopeAndCacheParams& p) override { Note(cuda::RopeAndCache(p, stream_)); }
  void PagedAttention(const PagedAttentionParams& p) override { Note(Attend(p)); }
  void SiluMul(const SiluMulParams& p) override { Note(cuda::SiluMul(p, stream_)); }
  void StoreQueries(const StoreQueriesParams& p) override { Note(cuda::StoreQueries(p, stream_)); }
  void WindowScores(const WindowScoresParams& /*p*/) override { RefuseCompression(); }
  void GlobalScores(const GlobalScoresParams& /*p*/) override { RefuseCompression(); }
  void PoolScores(const PoolScoresParams& /*p*/) override { RefuseCompression(); }
  void KeySimilarity(const KeySimilarityParams& /*p*/) override { RefuseCompression(); }
  void CombineScores(const CombineScoresParams& /*p*/) override { RefuseCompression(); }
  void RandomScores(const RandomScoresParams& /*p*/) override { RefuseCompression(); }
  void SelectSlots(const SelectSlotsParams& /*p*/) override { RefuseCompression(); }
  void PackSlots(const PackSlotsParams& /*p*/) override { RefuseCompression(); }
  void RoundToBFloat16(const float* in, BFloat16* out, int64_t count) override {
    Note(cuda::RoundToBFloat16(in, out, count, stream_));
  }
  absl::Status Sample(float* logits, int64_t vocab, const std::vector<SampleRow>& rows,
                      int32_t* tokens, SampleOutput* output) override;
  void GatherTokens(const int32_t* in, const int32_t* index, int32_t* out, int64_t count) override {
    Note(cuda::GatherTokens(in, index, out, count, stream_));
  }
  void ScatterTokens(const int32_t* in, const int32_t* index, int32_t* out,
                     int64_t count) override {
    Note(cuda::ScatterTokens(in, index, out, count, stream_));
  }

 private:
  // Keeps the first failure of an operation that cannot report it, for the next one that can.
  void Note(const absl::Status& status) {
    if (status_.ok() && !status.ok()) status_ = status;
  }
  void RefuseCompression() {
    Note(absl::UnimplementedError(
        "device cuda does not compress the KV cache; use compression_policy none or device cpu"));
  }
  absl::Status Attend(const PagedAttentionParams& p);
  // Launches sampling of the plan's rows and copies what it found to the host.
  absl::Status RunSample(float* logits, int64_t vocab, const cuda::SamplePlan& plan,
                         int32_t* tokens, std::vector<SampleLogprob>* top);

  // Owns a stream; the first member, so that it is destroyed last.
  struct StreamOwner {
    cudaStream_t stream = nullptr;
    ~StreamOwner() {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
  } stream_owner_;
  const int device_;
  cudaDeviceProp properties_ = {};
  cudaStream_t stream_ = nullptr;
  absl::Status status_;
  CudaCopier copier_;
  DeviceMemory matmul_workspace_;
  std::unique_ptr<CudaMatmul> matmul_;
  CudaScratch attention_counters_{"attention counters"};
  CudaScratch attention_partials_{"attention scratch"};
  CudaScratch sample_inputs_{"sampling inputs"};
  CudaScratch sample_scratch_{"sampling scratch"};
  CudaScratch sample_outputs_{"sampling outputs"};
  std::vector<cuda::SampleDraw> draws_;
};

absl::Status CudaBackend::Start() {
  ZIPAGE_RETURN_IF_ERROR(CudaStatus(cudaSetDevice(device_), absl::StrCat("CUDA device ", device_)));
  ZIPAGE_RETURN_IF_ERROR(
      CudaStatus(cudaGetDeviceProperties(&properties_, device_), "device properties"));
  if (properties_.major < 8) {
    return absl::FailedPreconditionError(
        absl::StrCat("CUDA device ", device_, " is ", properties_.name, " of compute capability ",
                     properties_.major, ".", properties_.minor, "; 8.0 or newer is needed"));
  }
  ZIPAGE_RETURN_IF_ERROR(CudaStatus(
      cudaStreamCreateWithFlags(&stream_owner_.stream, cudaStreamNonBlocking), "no stream"));
  stream_ = stream_owner_.stream;
  ZIPAGE_RETURN_IF_ERROR(copier_.Start(stream_));
  ZIPAGE_ASSIGN_OR_RETURN(matmul_workspace_,
                          Allocate(CudaMatmul::kWorkspaceBytes, "the products' workspace"));
  ZIPAGE_ASSIGN_OR_RETURN(matmul_, CudaMatmul::Create(matmul_workspace_.as()));
  return absl::OkStatus();
}

absl::StatusOr<DType> CudaBackend::ResolveDType(const std::string& requested,
                                                DType checkpoint) const {
  if (requested == "float32") return DType::kFloat32;
  if (requested == "bfloat16") return DType::kBFloat16;
  // bf16 holds every fp16 checkpoint's range; its products are 10 times as fast as float32's.
  if (requested == "auto") {
    return checkpoint == DType::kFloat32 ? DType::kFloat32 : DType::kBFloat16;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("dtype is ", requested,
                   ", which device cuda does not compute in; use dtype auto, bfloat16 or float32"));
}

absl::StatusOr<size_t> CudaBackend::AvailableMemory() const {
  size_t free = 0;
  size_t total = 0;
  ZIPAGE_RETURN_IF_ERROR(CudaStatus(cudaMemGetInfo(&free, &total), "free device memory"));
  return free;
}

absl::StatusOr<std::unique_ptr<Linear>> CudaBackend::LoadLinear(
    const std::vector<LinearPart>& parts, int64_t in_features, DType dtype) {
  int64_t out_features = 0;
  bool has_bias = false;
  for (const LinearPart& part : parts) {
    out_features += part.num_rows;
    has_bias |= part.bias != nullptr;
  }
  const size_t row_bytes = static_cast<size_t>(in_features) * DTypeSize(dtype);
  ZIPAGE_ASSIGN_OR_RETURN(DeviceMemory weight, Allocate(out_features * row_bytes, "a matrix"));
  std::vector<float> float_bias(has_bias ? out_features : 0);
  int64_t row = 0;
  for (const LinearPart& part : parts) {
    const auto fill = [&](void* piece, size_t offset, size_t bytes) {
      const auto first = static_cast<int64_t>(offset / row_bytes);
      const auto count = static_cast<int64_t>(bytes / row_bytes);
      for (int64_t r = 0; r < count; ++r) {
        const auto* from =
            static_cast<const uint8_t*>(part.weight) +
            static_cast<size_t>((first + r) * part.row_stride) * DTypeSize(part.dtype);
        Convert(from, part.dtype, in_features, static_cast<uint8_t*>(piece) + r * row_bytes, dtype);
      }
    };
    ZIPAGE_RETURN_IF_ERROR(copier_.ToDevice(weight.as<uint8_t>() + row * row_bytes,
                                            part.num_rows * row_bytes, row_bytes, fill));
    if (part.bias != nullptr) {
      Convert(part.bias, part.bias_dtype, part.num_rows, float_bias.data() + row, DType::kFloat32);
    }
    row += part.num_rows;
  }
  auto linear = std::make_unique<CudaLinear>(out_features, in_features, dtype, std::move(weight));
  if (has_bias) {
    std::vector<uint8_t> bias(out_features * DTypeSize(dtype));
    Convert(float_bias.data(), DType::kFloat32, out_features, bias.data(), dtype);
    ZIPAGE_ASSIGN_OR_RETURN(DeviceMemory on_device, Allocate(bias.size(), "a bias"));
    ZIPAGE_ASSIGN_OR_RETURN(DeviceMemory floats_on_device,
                            Allocate(out_features * sizeof(float), "a bias"));
    ZIPAGE_RETURN_IF_ERROR(copier_.ToDevice(on_device.as(), bias.data(), bias.size()));
    ZIPAGE_RETURN_IF_ERROR(copier_.ToDevice(floats_on_device.as(), float_bias.data(),
                                            float_bias.size() * sizeof(float)));
    linear->SetBias(std::move(floats_on_device), std::move(on_device));
  }
  return linear;
}

absl::Status CudaBackend::Attend(const PagedAttentionParams& p) {
  const size_t counters = static_cast<size_t>(p.num_seqs) * p.q_heads * sizeof(int32_t);
  cuda::PagedAttentionScratch scratch = {};
  ZIPAGE_ASSIGN_OR_RETURN(void* const counter_memory,
                          attention_counters_.AtLeast(counters, stream_));
  scratch.counters = static_cast<int32_t*>(counter_memory);
  ZIPAGE_ASSIGN_OR_RETURN(void* const partials, attention_partials_.AtLeast(
                                                    cuda::NumPartials(p) * sizeof(float), stream_));
  scratch.partials = static_cast<float*>(partials);
  return cuda::PagedAttention(p, scratch, stream_);
}

absl::Status CudaBackend::RunSample(float* logits, int64_t vocab, const cuda::SamplePlan& plan,
                                    int32_t* tokens, std::vector<SampleLogprob>* top) {
  const auto num_rows = static_cast<int64_t>(plan.rows.size());
  const auto num_seen = static_cast<int64_t>(plan.seen.size());
  const auto num_banned = static_cast<int64_t>(plan.banned.size());
  // Rows, then seen, then banned in one buffer; rows are a multiple of 8 bytes.
  const size_t row_bytes = num_rows * sizeof(cuda::DeviceSampleRow);
  const size_t seen_bytes = num_seen * sizeof(SeenToken);
  const size_t banned_bytes = num_banned * sizeof(int32_t);
  ZIPAGE_ASSIGN_OR_RETURN(void* const inputs,
                          sample_inputs_.AtLeast(row_bytes + seen_bytes + banned_bytes, stream_));
  auto* const at = static_cast<uint8_t*>(inputs);
  ZIPAGE_RETURN_IF_ERROR(copier_.ToDevice(at, plan.rows.data(), row_bytes));
  ZIPAGE_RETURN_IF_ERROR(copier_.ToDevice(at + row_bytes, plan.seen.data(), seen_bytes));
  ZIPAGE_RETURN_IF_ERROR(
      copier_.ToDevice(at + row_bytes + seen_bytes, plan.banned.data(), banned_bytes));
  const size_t draw_bytes = num_rows * sizeof(cuda::SampleDraw);
  const size_t top_bytes = num_rows * plan.max_logprobs * sizeof(SampleLogprob);
  ZIPAGE_ASSIGN_OR_RETURN(void* const outputs,
                          sample_outputs_.AtLeast(draw_bytes + top_bytes, stream_));
  auto* const out = static_cast<uint8_t*>(outputs);
  ZIPAGE_ASSIGN_OR_RETURN(
      void* const scratch,
      sample_scratch_.AtLeast(cuda::SampleScratchBytes(num_rows, vocab, num_seen, num_banned),
                              stream_));
  ZIPAGE_RETURN_IF_ERROR(
      cuda::Sample({.logits = logits,
                    .rows = reinterpret_cast<const cuda::DeviceSampleRow*>(at),
                    .seen = reinterpret_cast<const SeenToken*>(at + row_bytes),
                    .banned = reinterpret_cast<const int32_t*>(at + row_bytes + seen_bytes),
                    .draws = reinterpret_cast<cuda::SampleDraw*>(out),
                    .tokens = tokens,
                    .top = reinterpret_cast<SampleLogprob*>(out + draw_bytes),
                    .scratch = scratch,
                    .num_rows = num_rows,
                    .vocab = vocab,
                    .logits_stride = vocab,
                    .num_seen = num_seen,
                    .num_banned = num_banned,
                    .max_logprobs = plan.max_logprobs,
                    .draws_any = plan.draws,
                    .reports_any = plan.reports},
                   stream_));
  draws_.resize(num_rows);
  top->resize(num_rows * plan.max_logprobs);
  ZIPAGE_RETURN_IF_ERROR(copier_.ToHost(draws_.data(), out, draw_bytes));
  return copier_.ToHost(top->data(), out + draw_bytes, top_bytes);
}

absl::Status CudaBackend::Sample(float* logits, int64_t vocab, const std::vector<SampleRow>& rows,
                                 int32_t* tokens, SampleOutput* output) {
  ZIPAGE_RETURN_IF_ERROR(status_);
  const auto num_rows = static_cast<int64_t>(rows.size());
  // The caller finds row r's log-probabilities at r times the largest number asked for.
  int32_t max_logprobs = 0;
  for (const SampleRow& row : rows) max_logprobs = std::max(max_logprobs, row.num_logprobs);
  const cuda::SamplePlan plan = cuda::PlanSample(rows.data(), num_rows, vocab);
  std::vector<SampleLogprob> top;
  ZIPAGE_RETURN_IF_ERROR(RunSample(logits, vocab, plan, tokens, &top));
  output->results.resize(num_rows);
  output->logprobs.resize(num_rows * max_logprobs);
  output->corrupted.assign(num_rows, 0);
  for (int64_t r = 0; r < num_rows; ++r) {
    const cuda::SampleDraw& draw = draws_[r];
    output->results[r] = {};
    if ((draw.flags & (cuda::SampleDraw::kNotNumbers | cuda::SampleDraw::kMinusInf)) != 0) {
      output->corrupted[r] = 1;
      continue;
    }
    if ((draw.flags & cuda::SampleDraw::kNoToken) != 0) {
      return absl::InternalError(
          absl::StrFormat("row %d of %d has no token to sample: all are banned", r, num_rows));
    }
    SampleLogprob* const from = top.data() + r * plan.max_logprobs;
    output->results[r] = cuda::FinishSample(draw, rows[r].num_logprobs, vocab, from);
    std::copy_n(from, std::max(plan.rows[r].num_logprobs, 0),
                output->logprobs.data() + r * max_logprobs);
  }
  return absl::OkStatus();
}

}  // namespace

int NumCudaDevices() {
  int count = 0;
  return cudaGetDeviceCount(&count) == cudaSuccess ? count : 0;
}

absl::StatusOr<std::unique_ptr<Backend>> MakeCudaBackend(int device) {
  if (const int count = NumCudaDevices(); device >= count) {
    return absl::InvalidArgumentError(
        absl::StrCat("CUDA device ", device, " is wanted, but there are ", count,
                     "; see nvidia-smi and CUDA_VISIBLE_DEVICES, or use device cpu"));
  }
  auto backend = std::make_unique<CudaBackend>(device);
  ZIPAGE_RETURN_IF_ERROR(backend->Start());
  return backend;
}

}  // namespace zipage
