// How close a decode step on this CPU comes to memory bandwidth.
//
//   decode_bench --model DIR [--dtype float32] [--batches 1,8,32] [--steps 32] [--context 128]
//
// Runs the worker's own model runner on step plans, without other processes. Prints for every batch
// size tokens/s, the bytes a step must read (matrices once, keys and values of every sequence), and
// the ratio of its bytes/s to the read bandwidth measured just before and after with the same
// threads.

#include <omp.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

#include "glog/logging.h"
#include "proto/config.h"
#include "worker/comm/single.h"
#include "worker/cpu_backend.h"
#include "worker/kv_pool.h"
#include "worker/model/checkpoint.h"
#include "worker/model/model_config.h"
#include "worker/model_runner.h"

namespace zipage {
namespace {

double Now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Sum of [begin, end), a multiple of eight numbers; fetches ahead as a good matrix product does.
uint64_t SumLines(const uint64_t* begin, const uint64_t* end) {
  constexpr int64_t kAhead = 256;  // numbers: 2 KiB
  uint64_t sums[8] = {};
  for (const uint64_t* line = begin; line < end; line += 8) {
    __builtin_prefetch(line + kAhead);
    for (int i = 0; i < 8; ++i) sums[i] += line[i];
  }
  return sums[0] + sums[1] + sums[2] + sums[3] + sums[4] + sums[5] + sums[6] + sums[7];
}

// Bytes per second of reading 1 GiB with the threads of the engine; the best of five.
double ReadBandwidth() {
  static const std::vector<uint64_t> data(size_t{1} << 27, 1);
  constexpr size_t kPiece = size_t{1} << 17;  // numbers: 1 MiB
  double best = 0;
  for (int round = 0; round < 5; ++round) {
    uint64_t sum = 0;
    const double start = Now();
#pragma omp parallel for reduction(+ : sum) schedule(static)
    for (size_t i = 0; i < data.size(); i += kPiece) {
      sum += SumLines(data.data() + i, data.data() + i + kPiece);
    }
    const double seconds = Now() - start;
    CHECK_EQ(sum, data.size());
    best = std::max(best, static_cast<double>(data.size() * sizeof(uint64_t)) / seconds);
  }
  return best;
}

size_t MatrixBytes(const Weights& weights) {
  size_t bytes = weights.lm_head->bytes();
  for (const LayerWeights& layer : weights.layers) {
    bytes += layer.qkv->bytes() + layer.o->bytes() + layer.gate_up->bytes() + layer.down->bytes();
  }
  return bytes;
}

struct Measurement {
  double seconds_per_step = 0;
  size_t bytes_per_step = 0;
};

absl::StatusOr<Measurement> Measure(Config config, int batch, int steps, int context) {
  config.max_num_seqs = batch;
  config.max_num_batched_tokens = std::max(batch, 512);
  const int blocks_per_sequence = (context + steps) / config.kvcache_block_size + 2;
  config.num_kvcache_blocks = static_cast<int64_t>(batch) * blocks_per_sequence;
  CpuBackend backend(config.cpu_threads > 0 ? config.cpu_threads : CpuBackend::DefaultThreads(1));
  SingleCollective collective;
  ZIPAGE_ASSIGN_OR_RETURN(const ModelConfig model, LoadModelConfig(config.model));
  ZIPAGE_ASSIGN_OR_RETURN(const Checkpoint checkpoint, OpenCheckpoint(config.model, model));
  ZIPAGE_ASSIGN_OR_RETURN(
      const DType dtype,
      backend.ResolveDType(config.dtype, checkpoint.Get("model.embed_tokens.weight").dtype));
  ZIPAGE_ASSIGN_OR_RETURN(
      Weights weights, LoadWeights(model, checkpoint, 0, 1, dtype, model.max_position, &backend));
  Measurement measured;
  measured.bytes_per_step = MatrixBytes(weights);
  const KvShape shape = {.num_layers = model.num_layers,
                         .block_size = config.kvcache_block_size,
                         .kv_heads = static_cast<int>(weights.shard.kv_heads.size()),
                         .head_dim = model.head_dim,
                         .dtype = dtype};
  measured.bytes_per_step += shape.block_bytes() * batch * (context + steps / 2) / shape.block_size;
  ZIPAGE_ASSIGN_OR_RETURN(
      Transformer transformer,
      Transformer::Create(model, std::move(weights), config.max_num_batched_tokens, &collective,
                          &backend));
  ZIPAGE_ASSIGN_OR_RETURN(KvPool pool, KvPool::Create(shape, config.num_kvcache_blocks, &backend));
  ZIPAGE_ASSIGN_OR_RETURN(auto runner,
                          ModelRunner::Create(config, std::move(transformer), std::move(pool),
                                              /*num_query_slots=*/0, &collective, &backend));
  uint64_t step = 0;
  for (int slot = 0; slot < batch; ++slot) {
    StepPlan plan;
    plan.step = ++step;
    NewSequence sequence;
    sequence.sequence_slot = slot;
    for (int i = 0; i < context; ++i) sequence.tokens.push_back((slot * 7919 + i * 31) % 1000 + 10);
    sequence.num_prompt_tokens = context;
    for (int i = 0; i < blocks_per_sequence; ++i) {
      sequence.block_table.push_back(slot * blocks_per_sequence + i);
    }
    sequence.sampling.temperature = 0;
    sequence.sampling.max_tokens = steps + batch + 2;
    plan.new_sequences.push_back(sequence);
    plan.chunks.push_back({slot, 0, context, true});
    plan.num_decoding = slot;
    ZIPAGE_RETURN_IF_ERROR(runner->Run(plan).status());
  }
  StepPlan plan;
  plan.num_decoding = batch;
  double start = 0;
  for (int i = 0; i <= steps; ++i) {
    if (i == 1) start = Now();  // The first step makes the products of this batch size.
    plan.step = ++step;
    ZIPAGE_RETURN_IF_ERROR(runner->Run(plan).status());
  }
  measured.seconds_per_step = (Now() - start) / steps;
  return measured;
}

int Main(int argc, char** argv) {
  CLI::App app("How close a decode step on this CPU comes to memory bandwidth.");
  Config config;
  config.kvcache_block_size = 32;
  std::vector<int> batches = {1, 8, 32};
  int steps = 32;
  int context = 128;
  AddOptions(&app, &config);
  app.add_option("--batches", batches, "Batch sizes")->delimiter(',');
  app.add_option("--steps", steps, "Decode steps to time")->check(CLI::PositiveNumber);
  app.add_option("--context", context, "Prompt tokens of every sequence")
      ->check(CLI::Range(1, 400));
  const absl::Status parsed = ParseCommandLine(&app, argc, argv);
  if (!parsed.ok()) {
    std::fprintf(stderr, "%s\n", std::string(parsed.message()).c_str());
    return absl::IsCancelled(parsed) ? 0 : 2;
  }
  omp_set_num_threads(config.cpu_threads > 0 ? config.cpu_threads : CpuBackend::DefaultThreads(1));
  std::printf("%6s %12s %12s %12s %12s %8s\n", "batch", "ms/step", "tokens/s", "GB/s", "read GB/s",
              "ratio");
  for (const int batch : batches) {
    const double before = ReadBandwidth();
    const absl::StatusOr<Measurement> m = Measure(config, batch, steps, context);
    if (!m.ok()) {
      std::fprintf(stderr, "%s\n", std::string(m.status().message()).c_str());
      return 1;
    }
    const double bandwidth = std::max(before, ReadBandwidth());
    const double achieved = static_cast<double>(m->bytes_per_step) / m->seconds_per_step;
    std::printf("%6d %12.2f %12.2f %12.2f %12.2f %7.0f%%\n", batch, m->seconds_per_step * 1e3,
                batch / m->seconds_per_step, achieved * 1e-9, bandwidth * 1e-9,
                100 * achieved / bandwidth);
  }
  return 0;
}

}  // namespace
}  // namespace zipage

int main(int argc, char** argv) {
  // As in an engine, threads that wait must not spin; the OpenMP library reads this when it is
  // loaded.
  if (getenv("OMP_WAIT_POLICY") == nullptr) {
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);
  }
  return zipage::Main(argc, argv);
}
