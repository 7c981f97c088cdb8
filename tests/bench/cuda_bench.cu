// Time of the CUDA kernels at the shape of Qwen3-8B (32 query and 8 KV heads of 128, hidden 4096,
// MLP 12288, vocabulary 151936), against floors measured in the same run: bytes over the rate at
// which this device reads memory, flops over what its largest bf16 product reaches.
//   build/cuda/bin/cuda_bench [part of a name]
// Launches run back to back in a CUDA graph, on inputs that rotate through more than the L2 cache.

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "glog/logging.h"
#include "kernels/device_sample.h"
#include "kernels/paged_attention.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/silu_mul.h"
#include "worker/cuda_matmul.h"

namespace zipage {
namespace {

constexpr int kQHeads = 32, kKvHeads = 8, kHeadDim = 128, kBlockSize = 256;
constexpr int64_t kHidden = 4096, kIntermediate = 12288, kVocab = 151'936;
// Bytes that repeated launches go through before they come back to the first.
constexpr int64_t kColdBytes = int64_t{256} << 20;

void Check(cudaError_t error) { CHECK_EQ(error, cudaSuccess) << cudaGetErrorString(error); }
void Check(const absl::Status& status) { CHECK(status.ok()) << status; }

// Noise in [-1, 1) of either type; never zeros, which are faster than what a model computes with.
template <typename T>
__global__ void __launch_bounds__(256) FillKernel(T* data, int64_t count, float scale) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += stride) {
    uint64_t h = static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15U;
    h = (h ^ (h >> 29)) * 0xBF58476D1CE4E5B9U;
    const float value = scale * (static_cast<float>((h >> 40) & 0xFFFFU) / 32768.0F - 1.0F);
    if constexpr (sizeof(T) == 2) {
      data[i] = {static_cast<uint16_t>(__float_as_uint(value) >> 16)};
    } else {
      data[i] = value;
    }
  }
}

__global__ void __launch_bounds__(512)
    ReadKernel(const uint4* data, int64_t count, uint32_t* sink) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  uint32_t sum = 0;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 3 * stride < count; i += 4 * stride) {
    uint4 v[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) v[k] = __ldcs(data + i + k * stride);
#pragma unroll
    for (int k = 0; k < 4; ++k) sum ^= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (sum == 0x12345678U) *sink = sum;  // keeps the loads
}

template <typename T>
class Array {
 public:
  explicit Array(int64_t count, float scale = 1) : count_(count) {
    Check(cudaMalloc(&data_, count * sizeof(T)));
    if constexpr (std::is_same_v<T, float> || std::is_same_v<T, BFloat16>) {
      FillKernel<<<2048, 256, 0, cudaStreamPerThread>>>(data_, count, scale);
      Check(cudaStreamSynchronize(cudaStreamPerThread));
    } else {
      Check(cudaMemset(data_, 0, count * sizeof(T)));
    }
  }
  explicit Array(const std::vector<T>& values) : Array(static_cast<int64_t>(values.size())) {
    Check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* get() const { return data_; }
  int64_t size() const { return count_; }

 private:
  T* data_ = nullptr;
  int64_t count_;
};

class Bench {
 public:
  explicit Bench(std::string wanted) : wanted_(std::move(wanted)) {
    Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    Check(cudaEventCreate(&begin_));
    Check(cudaEventCreate(&end_));
    MeasureCeilings();
  }
  ~Bench() {
    cudaEventDestroy(begin_);
    cudaEventDestroy(end_);
    cudaStreamDestroy(stream_);
  }

  bool Wants(const std::string& name) const { return name.find(wanted_) != std::string::npos; }
  Stream stream() const { return stream_; }

  // Median over replays of the time of one of `launches` launches; launch(i) enqueues the i-th.
  double Microseconds(int launches, const std::function<absl::Status(int)>& launch) {
    Check(launch(0));
    Check(cudaStreamSynchronize(stream_));
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    Check(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal));
    for (int i = 0; i < launches; ++i) Check(launch(i));
    Check(cudaStreamEndCapture(stream_, &graph));
    Check(cudaGraphInstantiate(&executable, graph, 0));
    std::vector<double> times;
    for (int replay = 0; replay < 9; ++replay) {
      Check(cudaEventRecord(begin_, stream_));
      Check(cudaGraphLaunch(executable, stream_));
      Check(cudaEventRecord(end_, stream_));
      Check(cudaStreamSynchronize(stream_));
      float ms = 0;
      Check(cudaEventElapsedTime(&ms, begin_, end_));
      if (replay > 1) times.push_back(ms * 1e3 / launches);  // the first warm up
    }
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
    return times[times.size() / 2];
  }

  void Report(const std::string& name, double us, double bytes, double flops) const {
    const double floor = std::max(bytes / read_bytes_per_s_, flops / flops_per_s_) * 1e6;
    std::printf("%-44s %9.1f us  floor %9.1f us  %5.1f %%  %7.0f GB/s %7.1f TFLOP/s\n",
                name.c_str(), us, floor, 100 * floor / us, bytes / us * 1e-3, flops / us * 1e-6);
    std::fflush(stdout);
  }

 private:
  void MeasureCeilings() {
    const Array<float> data(int64_t{1} << 30);
    const Array<uint32_t> sink(1);
    const auto bytes = static_cast<double>(data.size() * sizeof(float));
    for (int ctas = 132 * 2; ctas <= 132 * 8; ctas *= 2) {
      const double us = Microseconds(3, [&](int) {
        ReadKernel<<<ctas, 512, 0, stream_>>>(reinterpret_cast<const uint4*>(data.get()),
                                              data.size() / 4, sink.get());
        return absl::OkStatus();
      });
      read_bytes_per_s_ = std::max(read_bytes_per_s_, bytes / us * 1e6);
    }
    const int64_t n = 8192;
    const Array<BFloat16> a(n * n), b(n * n), c(n * n);
    const Array<float> workspace(CudaMatmul::kWorkspaceBytes / sizeof(float));
    auto matmul = CudaMatmul::Create(workspace.get());
    Check(matmul.status());
    const CudaProduct product = {a.get(), nullptr, b.get(),          c.get(),         n,
                                 n,       n,       DType::kBFloat16, DType::kBFloat16};
    const double us = Microseconds(10, [&](int) { return (*matmul)->Run(product, stream_); });
    flops_per_s_ = 2.0 * n * n * n / us * 1e6;
    cudaDeviceProp properties;
    Check(cudaGetDeviceProperties(&properties, 0));
    std::printf("%s: reads %.0f GB/s, multiplies %.0f TFLOP/s (bf16, 8192^3)\n", properties.name,
                read_bytes_per_s_ * 1e-9, flops_per_s_ * 1e-12);
  }

  std::string wanted_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  double read_bytes_per_s_ = 0;
  double flops_per_s_ = 0;
};

// A pool of keys and values, and what a call of attention needs, for sequences of one length.
class AttentionCase {
 public:
  AttentionCase(int num_seqs, int context, int new_tokens, const Array<BFloat16>& keys,
                const Array<BFloat16>& values)
      : num_seqs_(num_seqs),
        max_blocks_((context + kBlockSize - 1) / kBlockSize),
        q_(int64_t{num_seqs} * new_tokens * kStride, 2),
        out_(int64_t{num_seqs} * new_tokens * kQHeads * kHeadDim),
        counters_(int64_t{num_seqs} * kQHeads) {
    const int64_t pool = keys.size() / (kBlockSize * kKvHeads * kHeadDim);
    const int64_t blocks = int64_t{num_seqs} * max_blocks_;
    const int64_t block_bytes = int64_t{4} * kBlockSize * kKvHeads * kHeadDim;
    copies_ = static_cast<int>(std::clamp<int64_t>(kColdBytes / (blocks * block_bytes), 1, 64));
    std::vector<int32_t> ids(pool), tables;
    std::iota(ids.begin(), ids.end(), 0);
    std::mt19937 rng(11);
    std::shuffle(ids.begin(), ids.end(), rng);
    for (int64_t i = 0; i < blocks * copies_; ++i) tables.push_back(ids[i % pool]);
    tables_ = std::make_unique<Array<int32_t>>(tables);
    std::vector<int32_t> starts, contexts(num_seqs, context);
    for (int s = 0; s <= num_seqs; ++s) starts.push_back(s * new_tokens);
    starts_ = std::make_unique<Array<int32_t>>(starts);
    contexts_ = std::make_unique<Array<int32_t>>(contexts);
    params_ = {.q = q_.get(),
               .key_cache = keys.get(),
               .value_cache = values.get(),
               .block_tables = tables_->get(),
               .query_start = starts_->get(),
               .context_len = contexts_->get(),
               .out = out_.get(),
               .q_stride = kStride,
               .num_blocks = pool,
               .num_seqs = num_seqs,
               .max_blocks = max_blocks_,
               .block_size = kBlockSize,
               .q_heads = kQHeads,
               .kv_heads = kKvHeads,
               .head_dim = kHeadDim,
               .scale = 0.0884F,
               .dtype = DType::kBFloat16,
               .num_tokens = int64_t{num_seqs} * new_tokens};
    partials_ = std::make_unique<Array<float>>(std::max<int64_t>(cuda::NumPartials(params_), 1));
  }
  int copies() const { return copies_; }
  absl::Status Launch(int i, Stream stream) {
    PagedAttentionParams p = params_;
    p.block_tables += int64_t{i % copies_} * num_seqs_ * max_blocks_;
    return cuda::PagedAttention(p, {counters_.get(), partials_->get()}, stream);
  }

 private:
  static constexpr int64_t kStride = int64_t{kQHeads + 2 * kKvHeads} * kHeadDim;
  int num_seqs_;
  int max_blocks_;
  int copies_ = 1;
  Array<BFloat16> q_, out_;
  Array<int32_t> counters_;
  std::unique_ptr<Array<int32_t>> tables_, starts_, contexts_;
  std::unique_ptr<Array<float>> partials_;
  PagedAttentionParams params_;
};

void Attention(Bench* bench) {
  if (!bench->Wants("decode") && !bench->Wants("prefill")) return;
  const int64_t pool = int64_t{256} * 8192 * kKvHeads * kHeadDim;
  const Array<BFloat16> keys(pool), values(pool);
  for (const auto& [seqs, context] : std::vector<std::pair<int, int>>{{1, 1024},
                                                                      {1, 2048},
                                                                      {1, 8192},
                                                                      {16, 1024},
                                                                      {32, 2048},
                                                                      {32, 8192},
                                                                      {64, 1024},
                                                                      {64, 2048},
                                                                      {64, 8192},
                                                                      {110, 900},
                                                                      {128, 896},
                                                                      {128, 2048},
                                                                      {128, 8192},
                                                                      {256, 640},
                                                                      {256, 2048},
                                                                      {256, 8192}}) {
    if (!bench->Wants("decode")) break;
    AttentionCase c(seqs, context, 1, keys, values);
    const double us = bench->Microseconds(std::max(4, c.copies()),
                                          [&](int i) { return c.Launch(i, bench->stream()); });
    const double slots = static_cast<double>(seqs) * context;
    bench->Report("decode " + std::to_string(seqs) + " x " + std::to_string(context), us,
                  4.0 * slots * kKvHeads * kHeadDim + 4.0 * seqs * kQHeads * kHeadDim,
                  4.0 * slots * kQHeads * kHeadDim);
  }
  for (const auto& [seqs, context, tokens] :
       std::vector<std::tuple<int, int, int>>{{1, 2048, 2048},
                                              {4, 2048, 2048},
                                              {1, 8192, 8192},
                                              {1, 8192, 2048},
                                              {8, 4096, 512},
                                              {16, 512, 512}}) {
    if (!bench->Wants("prefill")) break;
    AttentionCase c(seqs, context, tokens, keys, values);
    const double us = bench->Microseconds(4, [&](int i) { return c.Launch(i, bench->stream()); });
    const double visible = static_cast<double>(seqs) * tokens * (context - (tokens - 1) / 2.0);
    bench->Report("prefill " + std::to_string(seqs) + " x " + std::to_string(tokens) + " of " +
                      std::to_string(context),
                  us, 4.0 * seqs * (context + tokens) * kKvHeads * kHeadDim,
                  4.0 * visible * kQHeads * kHeadDim);
  }
}

void RowKernels(Bench* bench) {
  const Array<float> weight(kHidden);
  for (const int64_t rows : {1, 128, 256, 8192}) {
    const int copies =
        static_cast<int>(std::clamp<int64_t>(kColdBytes / (rows * 2 * kIntermediate), 1, 64));
    const Array<BFloat16> a(copies * rows * 2 * kIntermediate), b(copies * rows * kIntermediate);
    const std::string suffix = " " + std::to_string(rows);
    if (bench->Wants("rms_norm")) {
      const double us = bench->Microseconds(std::max(4, copies), [&](int i) {
        BFloat16* const x = a.get() + i % copies * rows * kHidden;
        return cuda::RmsNorm({x, b.get() + i % copies * rows * kHidden, nullptr, weight.get(), x,
                              rows, kHidden, 1e-6F, DType::kBFloat16},
                             bench->stream());
      });
      bench->Report("rms_norm" + suffix, us, 8.0 * rows * kHidden, 0);
    }
    if (bench->Wants("silu_mul")) {
      const double us = bench->Microseconds(std::max(4, copies), [&](int i) {
        return cuda::SiluMul(
            {a.get() + i % copies * rows * 2 * kIntermediate,
             b.get() + i % copies * rows * kIntermediate, rows, kIntermediate, DType::kBFloat16},
            bench->stream());
      });
      bench->Report("silu_mul" + suffix, us, 6.0 * rows * kIntermediate, 0);
    }
    if (bench->Wants("rope")) {
      const int64_t row = int64_t{kQHeads + 2 * kKvHeads} * kHeadDim;
      const Array<float> table(int64_t{8192} * kHeadDim);
      const Array<BFloat16> cache(copies * rows * 2 * kKvHeads * kHeadDim);
      std::vector<int32_t> positions(rows);
      std::vector<int64_t> slots(rows);
      std::iota(positions.begin(), positions.end(), 0);
      std::iota(slots.begin(), slots.end(), 0);
      const Array<int32_t> device_positions(positions);
      const Array<int64_t> device_slots(slots);
      const double us = bench->Microseconds(std::max(4, copies), [&](int i) {
        BFloat16* const keys = cache.get() + i % copies * rows * 2 * kKvHeads * kHeadDim;
        return cuda::RopeAndCache(
            {a.get() + i % copies * rows * row, device_positions.get(), device_slots.get(),
             table.get(), weight.get(), weight.get(), keys, keys + rows * kKvHeads * kHeadDim, rows,
             8192, rows, kQHeads, kKvHeads, kHeadDim, 1e-6F, DType::kBFloat16},
            bench->stream());
      });
      bench->Report("rope" + suffix, us, 2.0 * rows * (2 * kQHeads + 4 * kKvHeads) * kHeadDim, 0);
    }
  }
}

void Products(Bench* bench) {
  if (!bench->Wants("product")) return;
  const Array<float> workspace(CudaMatmul::kWorkspaceBytes / sizeof(float));
  auto matmul = CudaMatmul::Create(workspace.get());
  Check(matmul.status());
  struct Matrix {
    const char* name;
    int64_t out, in;
  };
  for (const Matrix& m :
       {Matrix{"qkv", 6144, 4096}, Matrix{"o", 4096, 4096}, Matrix{"gate_up", 24'576, 4096},
        Matrix{"down", 4096, 12'288}, Matrix{"lm_head", kVocab, 4096}}) {
    const int copies = static_cast<int>(std::clamp<int64_t>(kColdBytes / (m.out * m.in * 2), 1, 8));
    const Array<BFloat16> weights(copies * m.out * m.in);
    for (const int64_t rows : {1, 64, 128, 256, 2048}) {
      const Array<BFloat16> x(rows * m.in), y(rows * m.out);
      const double us = bench->Microseconds(std::max(4, copies), [&](int i) {
        return (*matmul)->Run({weights.get() + i % copies * m.out * m.in, nullptr, x.get(), y.get(),
                               m.out, m.in, rows, DType::kBFloat16, DType::kBFloat16},
                              bench->stream());
      });
      bench->Report(std::string("product ") + m.name + " " + std::to_string(rows), us,
                    2.0 * (m.out * m.in + rows * (m.in + m.out)), 2.0 * m.out * m.in * rows);
    }
  }
}

void Sampling(Bench* bench) {
  if (!bench->Wants("sample")) return;
  struct Setting {
    const char* name;
    float temperature;
    int32_t top_k;
    float top_p;
  };
  for (const int64_t rows : {1, 128}) {
    std::mt19937 rng(5);
    std::normal_distribution<float> normal(0, 3);
    std::vector<float> host(rows * kVocab);
    for (float& z : host) z = normal(rng);
    const Array<float> logits(host);
    for (const Setting& s :
         {Setting{"greedy", 0, 0, 1}, Setting{"temperature 1", 1, 0, 1},
          Setting{"0.6, top_k 20, top_p 0.95", 0.6F, 20, 0.95F},
          Setting{"0.6, top_p 0.95", 0.6F, 0, 0.95F}, Setting{"1.0, top_p 0.95", 1.0F, 0, 0.95F}}) {
      std::vector<SampleRow> row(rows);
      for (int64_t r = 0; r < rows; ++r) {
        row[r].temperature = s.temperature;
        row[r].top_k = s.top_k;
        row[r].top_p = s.top_p;
        row[r].seed = r;
      }
      const cuda::SamplePlan plan = cuda::PlanSample(row.data(), rows, kVocab);
      const Array<cuda::DeviceSampleRow> device_rows(plan.rows);
      const Array<cuda::SampleDraw> draws(rows);
      const Array<int32_t> tokens(rows);
      const auto bytes = static_cast<int64_t>(cuda::SampleScratchBytes(rows, kVocab, 0, 0));
      const Array<uint64_t> scratch(bytes / 8 + 2);
      const double us = bench->Microseconds(4, [&](int) {
        return cuda::Sample({.logits = logits.get(),
                             .rows = device_rows.get(),
                             .draws = draws.get(),
                             .tokens = tokens.get(),
                             .scratch = scratch.get(),
                             .num_rows = rows,
                             .vocab = kVocab,
                             .logits_stride = kVocab,
                             .draws_any = plan.draws,
                             .reports_any = plan.reports},
                            bench->stream());
      });
      bench->Report("sample " + std::to_string(rows) + " (" + s.name + ")", us, 4.0 * rows * kVocab,
                    0);
    }
  }
}

}  // namespace
}  // namespace zipage

int main(int argc, char** argv) {
  zipage::Bench bench(argc > 1 ? argv[1] : "");
  zipage::Attention(&bench);
  zipage::RowKernels(&bench);
  zipage::Products(&bench);
  zipage::Sampling(&bench);
  return 0;
}
