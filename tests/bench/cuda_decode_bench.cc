// A whole decode step of Qwen3-8B's shape on a CUDA device, against what it must read.
//   build/cuda/bin/cuda_decode_bench [--layers 36] [--steps 20] [--sizes 1x1024,110x900]
// Runs the worker's own model runner on step plans, without other processes. Weights and cached
// keys and values are noise. Prints milliseconds a step and the floor: bytes of the matrices and of
// the sequences' keys and values over the rate at which this device copies memory in the same run
// (counting reads and writes).

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <random>
#include <string>
#include <vector>

#include "glog/logging.h"
#include "kernels/rope.h"
#include "worker/comm/single.h"
#include "worker/cuda_backend.h"
#include "worker/model_runner.h"

namespace zipage {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename T>
T Get(absl::StatusOr<T> value) {
  CHECK(value.ok()) << value.status();
  return *std::move(value);
}

ModelConfig Qwen3(int layers) {
  ModelConfig model;
  model.path = "Qwen3-8B's shape";
  model.architecture = "Qwen3ForCausalLM";
  model.hidden_size = 4096;
  model.intermediate_size = 12'288;
  model.num_layers = layers;
  model.num_heads = 32;
  model.num_kv_heads = 8;
  model.head_dim = 128;
  model.vocab_size = 151'936;
  model.max_position = 40'960;
  model.qk_norm = true;
  model.rope.theta = 1e6;
  return model;
}

// Makes weights of noise on the device.
class NoiseWeights {
 public:
  NoiseWeights(const ModelConfig& model, Backend* backend)
      : model_(model), backend_(backend), noise_(size_t{1} << 25) {
    std::mt19937_64 rng(3);
    std::normal_distribution<float> normal(0, 0.02F);
    for (BFloat16& value : noise_) value = ToBFloat16(normal(rng));
  }
  Weights Make() {
    Weights weights;
    weights.shard = MakeModelShard(model_, 0, 1);
    weights.dtype = weights.embedding_dtype = DType::kBFloat16;
    weights.max_position = model_.max_position;
    const int64_t hidden = model_.hidden_size;
    const int64_t q = int64_t{model_.num_heads} * model_.head_dim;
    const int64_t kv = int64_t{model_.num_kv_heads} * model_.head_dim;
    for (int i = 0; i < model_.num_layers; ++i) {
      LayerWeights& layer = weights.layers.emplace_back();
      layer.input_norm = Ones(hidden);
      layer.post_attention_norm = Ones(hidden);
      layer.q_norm = Ones(model_.head_dim);
      layer.k_norm = Ones(model_.head_dim);
      layer.qkv = Matrix(q + 2 * kv, hidden);
      layer.o = Matrix(hidden, q);
      layer.gate_up = Matrix(2 * model_.intermediate_size, hidden);
      layer.down = Matrix(hidden, model_.intermediate_size);
    }
    weights.final_norm = Ones(hidden);
    weights.lm_head = Matrix(model_.vocab_size, hidden);
    weights.embedding =
        Get(backend_->Allocate(model_.vocab_size * hidden * sizeof(BFloat16), "embedding"));
    Fill(weights.embedding.as<uint8_t>(), weights.embedding.bytes());
    std::vector<float> table(model_.max_position * model_.head_dim);
    BuildRopeTable(RopeInverseFrequencies(model_).data(), model_.head_dim, model_.max_position, 1,
                   table.data());
    weights.rope_table = Get(backend_->Allocate(table.size() * sizeof(float), "rope table"));
    backend_->CopyToDevice(weights.rope_table.as(), table.data(), table.size() * sizeof(float));
    return weights;
  }
  // Covers device memory with noise.
  void Fill(uint8_t* to, size_t bytes) {
    for (size_t at = 0; at < bytes; at += noise_.size() * sizeof(BFloat16)) {
      backend_->CopyToDevice(to + at, noise_.data(),
                             std::min(bytes - at, noise_.size() * sizeof(BFloat16)));
    }
  }
  size_t matrix_bytes() const { return matrix_bytes_; }

 private:
  DeviceMemory Ones(int64_t count) {
    const std::vector<float> ones(count, 1.0F);
    DeviceMemory memory = Get(backend_->Allocate(count * sizeof(float), "norm"));
    backend_->CopyToDevice(memory.as(), ones.data(), count * sizeof(float));
    return memory;
  }
  std::unique_ptr<Linear> Matrix(int64_t out, int64_t in) {
    std::vector<LinearPart> parts;
    const int64_t most = static_cast<int64_t>(noise_.size()) / in;
    for (int64_t row = 0; row < out; row += most) {
      parts.push_back({.weight = noise_.data(),
                       .num_rows = std::min(most, out - row),
                       .row_stride = in,
                       .dtype = DType::kBFloat16});
    }
    std::unique_ptr<Linear> linear = Get(backend_->LoadLinear(parts, in, DType::kBFloat16));
    matrix_bytes_ += linear->bytes();
    return linear;
  }

  const ModelConfig& model_;
  Backend* backend_;
  std::vector<BFloat16> noise_;
  size_t matrix_bytes_ = 0;
};

// Bytes read and written per second by a copy of 4 GiB; the best of five.
double CopyRate(Backend* backend) {
  const size_t bytes = size_t{4} << 30;
  const DeviceMemory from = Get(backend->Allocate(bytes, "copy"));
  const DeviceMemory to = Get(backend->Allocate(bytes, "copy"));
  double best = 0;
  uint8_t byte = 0;
  for (int i = 0; i < 5; ++i) {
    backend->CopyToHost(&byte, to.as(), 1);
    const double start = Now();
    backend->CopyRows(to.as(), bytes, from.as(), bytes, bytes, 1);
    backend->CopyToHost(&byte, to.as(), 1);
    best = std::max(best, 2.0 * static_cast<double>(bytes) / (Now() - start));
  }
  return best;
}

struct Size {
  int batch;
  int context;
};

// Adds sequences whose contexts are cached already, one token each, then times decode steps.
double SecondsPerStep(ModelRunner* runner, const Size& size, int steps, int blocks_each) {
  StepPlan plan;
  static uint64_t step = 0;
  plan.step = ++step;
  for (int slot = 0; slot < size.batch; ++slot) {
    NewSequence& sequence = plan.new_sequences.emplace_back();
    sequence.sequence_slot = slot;
    for (int i = 0; i < size.context; ++i) sequence.tokens.push_back((slot * 7919 + i) % 100'000);
    sequence.num_prompt_tokens = size.context;
    sequence.num_cached_tokens = size.context - 1;
    for (int b = 0; b < blocks_each; ++b) sequence.block_table.push_back(slot * blocks_each + b);
    sequence.sampling.temperature = 0;
    sequence.sampling.max_tokens = 1 << 20;
    plan.chunks.push_back({slot, size.context - 1, 1, true});
  }
  const auto run = [&] {
    const auto result = runner->Run(plan);
    CHECK(result.ok()) << result.status();
    CHECK(result->corrupted.empty());
  };
  run();
  plan.new_sequences.clear();
  plan.chunks.clear();
  plan.num_decoding = size.batch;
  double start = 0;
  for (int i = 0; i < steps + 2; ++i) {
    if (i == 2) start = Now();
    plan.step = ++step;
    run();
  }
  const double seconds = (Now() - start) / steps;
  plan.step = ++step;
  plan.num_decoding = 0;
  for (int slot = 0; slot < size.batch; ++slot) plan.released.push_back(slot);
  run();
  return seconds;
}

int Main(int argc, char** argv) {
  CLI::App app("A decode step of Qwen3-8B's shape on a CUDA device.");
  int layers = 36;
  int steps = 20;
  std::vector<std::string> texts = {"1x1024",  "32x1024",  "64x900",
                                    "110x900", "128x2048", "256x640"};
  app.add_option("--layers", layers, "Layers")->check(CLI::PositiveNumber);
  app.add_option("--steps", steps, "Steps to time")->check(CLI::PositiveNumber);
  app.add_option("--sizes", texts, "BATCHxCONTEXT")->delimiter(',');
  CLI11_PARSE(app, argc, argv);
  std::vector<Size> sizes;
  Config config;
  config.compression_policy = "none";
  config.swap_space_gb = 0;
  config.max_num_seqs = 1;
  for (const std::string& text : texts) {
    Size& size = sizes.emplace_back();
    if (std::sscanf(text.c_str(), "%dx%d", &size.batch, &size.context) != 2) {
      std::fprintf(stderr, "%s is no size; give BATCHxCONTEXT\n", text.c_str());
      return 2;
    }
    config.max_num_seqs = std::max(config.max_num_seqs, size.batch);
    const int blocks = (size.context + steps + 4) / config.kvcache_block_size + 1;
    config.num_kvcache_blocks = std::max(config.num_kvcache_blocks, int64_t{blocks} * size.batch);
  }
  config.max_num_batched_tokens = std::max(config.max_num_seqs, 512);
  const std::unique_ptr<Backend> backend = Get(MakeCudaBackend(0));
  const double rate = CopyRate(backend.get());
  const ModelConfig model = Qwen3(layers);
  SingleCollective collective;
  NoiseWeights noise(model, backend.get());
  const double start = Now();
  Weights weights = noise.Make();
  const KvShape shape{.num_layers = layers,
                      .block_size = config.kvcache_block_size,
                      .kv_heads = model.num_kv_heads,
                      .head_dim = model.head_dim,
                      .dtype = DType::kBFloat16};
  Transformer transformer = Get(Transformer::Create(
      model, std::move(weights), config.max_num_batched_tokens, &collective, backend.get()));
  KvPool pool = Get(KvPool::Create(shape, config.num_kvcache_blocks, backend.get()));
  noise.Fill(static_cast<uint8_t*>(pool.key(0)), config.num_kvcache_blocks * shape.block_bytes());
  const std::unique_ptr<ModelRunner> runner =
      Get(ModelRunner::Create(config, std::move(transformer), std::move(pool),
                              /*num_query_slots=*/0, &collective, backend.get()));
  std::printf("%s: copies %.0f GB/s; %.2f GB of matrices, made and uploaded in %.1f s\n",
              backend->Description().c_str(), rate * 1e-9,
              static_cast<double>(noise.matrix_bytes()) * 1e-9, Now() - start);
  for (const Size& size : sizes) {
    const int blocks = (size.context + steps + 4) / config.kvcache_block_size + 1;
    const double seconds = SecondsPerStep(runner.get(), size, steps, blocks);
    const double kv_bytes = static_cast<double>(shape.block_bytes()) / shape.block_size *
                            size.batch * (size.context + steps / 2.0);
    const double floor = (static_cast<double>(noise.matrix_bytes()) + kv_bytes) / rate;
    std::printf("decode %4d x %5d  %8.2f ms a step  %9.0f tokens/s  floor %7.2f ms  %5.1f %%\n",
                size.batch, size.context, seconds * 1e3, size.batch / seconds, floor * 1e3,
                100 * floor / seconds);
    std::fflush(stdout);
  }
  return 0;
}

}  // namespace
}  // namespace zipage

int main(int argc, char** argv) { return zipage::Main(argc, argv); }
