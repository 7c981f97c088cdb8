// Time of every CPU kernel, and what it reaches of this machine's memory bandwidth and fp32 peak,
// both measured at the start of the same run:
//   OMP_WAIT_POLICY=passive OMP_NUM_THREADS=2 build/cpu/bin/kernels_bench
// Counters: GB/s and of_bandwidth for kernels that stream memory, GFLOP/s and of_peak for the
// others. Inputs rotate through copies larger than the last-level cache wherever memory is what is
// measured.

#include <benchmark/benchmark.h>
#include <omp.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/embedding.h"
#include "kernels/key_similarity.h"
#include "kernels/matmul.h"
#include "kernels/pack_slots.h"
#include "kernels/paged_attention.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/sample.h"
#include "kernels/select_slots.h"
#include "kernels/silu_mul.h"
#include "kernels/window_scores.h"

namespace zipage {
namespace {

// More than any last-level cache seen on the build machines (260 MiB).
constexpr size_t kColdBytes = size_t{768} << 20;

double bandwidth_bytes_per_s = 0;
double peak_flops_per_s = 0;

double SecondsNow() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Reads memory with all threads, best of several passes.
double MeasureBandwidth() {
  std::vector<float> data(kColdBytes / sizeof(float), 1.0F);
  double best = 0;
  for (int pass = 0; pass < 5; ++pass) {
    const double start = SecondsNow();
    double sum = 0;
    const auto n = static_cast<int64_t>(data.size());
#pragma omp parallel for schedule(static) reduction(+ : sum)
    for (int64_t begin = 0; begin < n; begin += 1024) {
      float lanes[64] = {};
      for (int64_t i = begin; i < begin + 1024; i += 64) {
        for (int64_t j = 0; j < 64; ++j) lanes[j] += data[static_cast<size_t>(i + j)];
      }
      for (float lane : lanes) sum += lane;
    }
    benchmark::DoNotOptimize(sum);
    best = std::max(best, static_cast<double>(kColdBytes) / (SecondsNow() - start));
  }
  return best;
}

// The best product of cached matrices stands for the peak.
double MeasurePeak() {
  const int64_t n = 1024;
  const std::vector<float> w(n * n, 0.5F);
  std::vector<float> x(n * n, 0.25F), y(n * n);
  cpu::PackedLinear linear(n, n, DType::kFloat32);
  linear.SetRows(0, n, w.data(), DType::kFloat32, n);
  if (!linear.Pack().ok()) return 0;
  double best = 0;
  for (int pass = 0; pass < 20; ++pass) {
    const double start = SecondsNow();
    if (!linear.Apply(x.data(), y.data(), n, DType::kFloat32).ok()) return 0;
    best = std::max(best, 2.0 * n * n * n / (SecondsNow() - start));
  }
  return best;
}

// Sets the counters from the wall time since `start`.
void Report(benchmark::State& state, double start, double bytes, double flops) {
  const double rate = static_cast<double>(state.iterations()) / (SecondsNow() - start);
  state.counters["GB/s"] = bytes * rate / 1e9;
  state.counters["of_bandwidth"] = bytes * rate / bandwidth_bytes_per_s;
  state.counters["GFLOP/s"] = flops * rate / 1e9;
  state.counters["of_peak"] = flops * rate / peak_flops_per_s;
}

std::vector<float> Noise(size_t n) {
  std::mt19937 rng(7);
  std::uniform_real_distribution<float> uniform(-1, 1);
  std::vector<float> values(n);
  for (float& value : values) value = uniform(rng);
  return values;
}

void Matmul(benchmark::State& state) {
  const int64_t n = state.range(0);
  const int64_t k = state.range(1);
  const int64_t rows = state.range(2);
  const auto weight_bytes = static_cast<size_t>(n * k) * sizeof(float);
  const size_t copies = std::clamp<size_t>(kColdBytes / weight_bytes, 1, 64);
  const std::vector<float> w = Noise(static_cast<size_t>(n * k));
  std::vector<cpu::PackedLinear> linears;
  for (size_t i = 0; i < copies; ++i) {
    linears.emplace_back(n, k, DType::kFloat32);
    linears.back().SetRows(0, n, w.data(), DType::kFloat32, k);
    if (!linears.back().Pack().ok()) return state.SkipWithError("no memory");
  }
  const std::vector<float> x = Noise(static_cast<size_t>(rows * k));
  std::vector<float> y(static_cast<size_t>(rows * n));
  size_t next = 0;
  const double start = SecondsNow();
  for (auto _ : state) {
    if (!linears[next++ % copies].Apply(x.data(), y.data(), rows, DType::kFloat32).ok()) {
      return state.SkipWithError("Apply failed");
    }
  }
  Report(state, start, static_cast<double>(weight_bytes), 2.0 * n * k * rows);
}
BENCHMARK(Matmul)
    ->ArgsProduct({{4864}, {896}, {1, 8, 32, 256}})
    ->ArgsProduct({{896}, {4864}, {1, 8, 32, 256}})
    ->ArgsProduct({{1152}, {896}, {1, 8, 32, 256}})
    ->ArgsProduct({{151936}, {896}, {1, 8, 32}})
    ->ArgNames({"n", "k", "rows"})
    ->UseRealTime();

// Attention of a Qwen2.5-0.5B layer: range(0) sequences of range(1) slots, range(2) new tokens
// each.
void Attention(benchmark::State& state) {
  const auto num_seqs = static_cast<int>(state.range(0));
  const auto slots = static_cast<int>(state.range(1));
  const auto new_tokens = static_cast<int>(state.range(2));
  const DType dtype = state.range(3) != 0 ? DType::kBFloat16 : DType::kFloat32;
  const int q_heads = 14, kv_heads = 2, head_dim = 64, block_size = 256;
  const int blocks = (slots + block_size - 1) / block_size;
  const size_t block_bytes = block_size * kv_heads * head_dim * DTypeSize(dtype);
  const int64_t needed = static_cast<int64_t>(num_seqs) * blocks;
  // Decode reads other blocks each time, so that they come from memory as between layers.
  const auto pool = std::max<int64_t>(
      needed, new_tokens > 1 ? 0 : static_cast<int64_t>(kColdBytes / 2 / block_bytes));
  std::vector<char> keys(static_cast<size_t>(pool) * block_bytes, 0x3C);
  std::vector<char> values = keys;
  std::vector<int32_t> table(static_cast<size_t>(needed));
  std::vector<int32_t> starts, contexts(static_cast<size_t>(num_seqs), slots);
  for (int s = 0; s <= num_seqs; ++s) starts.push_back(s * new_tokens);
  const size_t q_elements = static_cast<size_t>(num_seqs) * new_tokens * q_heads * head_dim;
  const std::vector<char> q(q_elements * DTypeSize(dtype), 0x3C);
  std::vector<char> out(q.size());
  int64_t next = 0;
  const double start = SecondsNow();
  for (auto _ : state) {
    for (int32_t& block : table) block = static_cast<int32_t>(next++ * 7919 % pool);
    cpu::PagedAttention({q.data(), keys.data(), values.data(), table.data(), starts.data(),
                         contexts.data(), out.data(), q_heads * head_dim, pool, num_seqs, blocks,
                         block_size, q_heads, kv_heads, head_dim, 0.125F, dtype});
  }
  const double visible = slots - (new_tokens - 1) / 2.0;
  Report(state, start, 2.0 * num_seqs * slots * kv_heads * head_dim * DTypeSize(dtype),
         4.0 * num_seqs * new_tokens * visible * q_heads * head_dim);
}
BENCHMARK(Attention)
    ->ArgsProduct({{1, 8, 32}, {300, 2048}, {1}, {0, 1}})
    ->Args({1, 16384, 1, 0})
    ->Args({1, 512, 512, 0})
    ->Args({4, 2048, 256, 0})
    ->ArgNames({"seqs", "slots", "new", "bf16"})
    ->UseRealTime();

void RmsNormBench(benchmark::State& state) {
  const int64_t rows = state.range(0);
  const int64_t hidden = 896;
  const std::vector<float> x = Noise(rows * hidden);
  std::vector<float> residual(x.size()), out(x.size());
  const std::vector<float> weight = Noise(hidden);
  const double start = SecondsNow();
  for (auto _ : state) {
    cpu::RmsNorm({x.data(), residual.data(), nullptr, weight.data(), out.data(), rows, hidden,
                  1e-6F, DType::kFloat32});
  }
  Report(state, start, 16.0 * rows * hidden, 4.0 * rows * hidden);
}
BENCHMARK(RmsNormBench)->Name("RmsNorm")->Arg(1)->Arg(32)->Arg(512)->UseRealTime();

void SiluMulBench(benchmark::State& state) {
  const int64_t tokens = state.range(0);
  const int64_t n = 4864;
  const std::vector<float> x = Noise(tokens * 2 * n);
  std::vector<float> out(tokens * n);
  const double start = SecondsNow();
  for (auto _ : state) cpu::SiluMul({x.data(), out.data(), tokens, n, DType::kFloat32});
  Report(state, start, 12.0 * tokens * n, 20.0 * tokens * n);
}
BENCHMARK(SiluMulBench)->Name("SiluMul")->Arg(1)->Arg(32)->Arg(512)->UseRealTime();

void EmbeddingBench(benchmark::State& state) {
  const int64_t tokens = state.range(0);
  const int64_t vocab = 151'936, hidden = 896;
  const std::vector<BFloat16> table(vocab * hidden);
  std::vector<int32_t> ids(tokens);
  std::vector<float> out(tokens * hidden);
  std::mt19937 rng(3);
  const double start = SecondsNow();
  for (auto _ : state) {
    for (int32_t& id : ids) id = static_cast<int32_t>(rng() % vocab);
    cpu::Embedding({ids.data(), table.data(), out.data(), tokens, hidden, 0, vocab,
                    DType::kBFloat16, DType::kFloat32});
  }
  Report(state, start, 6.0 * tokens * hidden, 0);
}
BENCHMARK(EmbeddingBench)->Name("Embedding")->Arg(1)->Arg(512)->UseRealTime();

void RopeBench(benchmark::State& state) {
  const int64_t tokens = state.range(0);
  const int d = 64, q_heads = 14, kv_heads = 2;
  const int64_t row = (q_heads + 2 * kv_heads) * d;
  std::vector<float> qkv = Noise(tokens * row), table(2048 * d);
  const std::vector<float> inv_freq(d / 2, 0.01F);
  BuildRopeTable(inv_freq.data(), d, 2048, 1.0F, table.data());
  std::vector<int32_t> positions(tokens);
  std::vector<int64_t> slots(tokens);
  std::iota(positions.begin(), positions.end(), 0);
  std::iota(slots.begin(), slots.end(), 0);
  std::vector<float> keys(tokens * kv_heads * d), values = keys;
  const double start = SecondsNow();
  for (auto _ : state) {
    cpu::RopeAndCache({qkv.data(), positions.data(), slots.data(), table.data(), nullptr, nullptr,
                       keys.data(), values.data(), tokens, 2048, tokens, q_heads, kv_heads, d,
                       1e-6F, DType::kFloat32});
  }
  Report(state, start, 4.0 * tokens * (2 * q_heads + 4 * kv_heads) * d,
         6.0 * tokens * (q_heads + kv_heads) * d);
}
BENCHMARK(RopeBench)->Name("RopeAndCache")->Arg(1)->Arg(32)->Arg(512)->UseRealTime();

// One row of a Qwen vocabulary. range: temperature in tenths, top_k, top_p in hundredths.
void SampleBench(benchmark::State& state) {
  const int64_t vocab = 151'936;
  std::mt19937 rng(5);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(vocab);
  for (float& z : logits) z = normal(rng);
  SampleRow row;
  row.temperature = static_cast<float>(state.range(0)) / 10;
  row.top_k = static_cast<int32_t>(state.range(1));
  row.top_p = static_cast<float>(state.range(2)) / 100;
  SampleResult sampled;
  const double start = SecondsNow();
  for (auto _ : state) {
    ++row.position;
    if (!cpu::Sample({logits.data(), &row, &sampled, nullptr, 1, vocab, vocab, 0}).ok()) {
      return state.SkipWithError("Sample failed");
    }
  }
  Report(state, start, 4.0 * vocab, 0);
}
BENCHMARK(SampleBench)
    ->Name("Sample")
    ->Args({0, 0, 100})
    ->Args({10, 0, 100})
    ->Args({6, 20, 95})
    ->Args({6, 0, 95})
    ->Args({10, 0, 95})
    ->ArgNames({"temperature10", "top_k", "top_p100"})
    ->UseRealTime();

// What one call of the compression kernels sees: some layers of full tables of nine blocks of 256
// slots, of which eight are kept. The pool holds `copies` times as many blocks.
struct FullTables {
  static constexpr int kLayers = 8, kBlocks = 9, kBlockSize = 256;
  static constexpr int kSlots = kBlocks * kBlockSize, kKept = kSlots - kBlockSize;

  FullTables(int batch, int kv_heads, int head_dim, DType dtype, int copies)
      : pool_blocks(int64_t{batch} * kBlocks * copies),
        layer_stride(pool_blocks * kBlockSize * kv_heads * head_dim),
        row_bytes(static_cast<size_t>(kv_heads * head_dim) * DTypeSize(dtype)),
        table(static_cast<size_t>(batch) * kBlocks),
        table_len(static_cast<size_t>(batch), kBlocks) {
    shape = {table.data(), table_len.data(), kLayers, batch, kv_heads, kBlocks, kBlockSize};
    NextTables();
  }

  // Other blocks, shuffled.
  void NextTables() {
    for (int32_t& block : table) block = static_cast<int32_t>(next++ * 7919 % pool_blocks);
  }

  std::vector<char> RandomKeys(DType dtype, float offset) const {
    const auto size = static_cast<size_t>(kLayers * layer_stride);
    std::vector<char> keys(size * DTypeSize(dtype));
    const std::vector<float> noise = Noise(1 << 20);
    for (size_t i = 0; i < size; ++i) {
      const float key = noise[(i * 31 + i / noise.size()) % noise.size()] + offset;
      if (dtype == DType::kFloat32) {
        reinterpret_cast<float*>(keys.data())[i] = key;
      } else {
        reinterpret_cast<BFloat16*>(keys.data())[i] = ToBFloat16(key);
      }
    }
    return keys;
  }

  int64_t pool_blocks;
  int64_t layer_stride;  // elements
  size_t row_bytes;      // of one slot's keys
  std::vector<int32_t> table, table_len;
  CompressionShape shape;
  int64_t next = 0;
};

// Window of 16. range: query heads, KV heads, head dimension, bf16.
void WindowScoresBench(benchmark::State& state) {
  const auto q_heads = static_cast<int>(state.range(0));
  const auto kv_heads = static_cast<int>(state.range(1));
  const auto head_dim = static_cast<int>(state.range(2));
  const DType dtype = state.range(3) != 0 ? DType::kBFloat16 : DType::kFloat32;
  const int window = 16;
  const FullTables tables(1, kv_heads, head_dim, dtype, 1);
  const std::vector<char> keys = tables.RandomKeys(dtype, 0);
  const std::vector<char> queries(keys.begin(),
                                  keys.begin() + FullTables::kLayers * window * q_heads * head_dim *
                                                     static_cast<int>(DTypeSize(dtype)));
  std::vector<float> score(static_cast<size_t>(tables.shape.num_scores()));
  const int32_t query_slot = 0;
  const double start = SecondsNow();
  for (auto _ : state) {
    cpu::WindowScores({tables.shape, keys.data(), queries.data(), &query_slot, score.data(),
                       tables.layer_stride, int64_t{window} * q_heads * head_dim, window, q_heads,
                       head_dim, dtype});
  }
  const double rows = 1.0 * FullTables::kLayers * FullTables::kSlots;
  Report(state, start, rows * static_cast<double>(tables.row_bytes),
         2 * rows * window * q_heads * head_dim);
}
BENCHMARK(WindowScoresBench)
    ->Name("WindowScores")
    ->ArgsProduct({{14}, {2}, {64}, {0, 1}})
    ->ArgsProduct({{32}, {8}, {128}, {0, 1}})
    ->ArgNames({"q_heads", "kv_heads", "head_dim", "bf16"})
    ->UseRealTime();

// range: KV heads, head dimension, lightning, keys that are mostly alike. Flops are those of the
// formula: with alike keys most are not needed.
void KeySimilarityBench(benchmark::State& state) {
  const auto kv_heads = static_cast<int>(state.range(0));
  const auto head_dim = static_cast<int>(state.range(1));
  const bool lightning = state.range(2) != 0;
  const FullTables tables(1, kv_heads, head_dim, DType::kFloat32, 1);
  const std::vector<char> keys =
      tables.RandomKeys(DType::kFloat32, state.range(3) != 0 ? 0.6F : 0.0F);
  std::vector<float> row_sum(static_cast<size_t>(tables.shape.num_scores()));
  std::vector<float> similarity(row_sum.size());
  const double start = SecondsNow();
  for (auto _ : state) {
    cpu::KeySimilarity({tables.shape, keys.data(), row_sum.data(), similarity.data(),
                        tables.layer_stride, head_dim, 0.4F, lightning, false, DType::kFloat32});
  }
  const double rows = 1.0 * FullTables::kLayers * FullTables::kSlots;
  const int length = lightning ? FullTables::kBlockSize : FullTables::kSlots;
  Report(state, start, rows * static_cast<double>(tables.row_bytes),
         2 * rows * length * kv_heads * head_dim);
}
BENCHMARK(KeySimilarityBench)
    ->Name("KeySimilarity")
    ->ArgsProduct({{2}, {64}, {0, 1}, {0, 1}})
    ->ArgsProduct({{8}, {128}, {0, 1}, {0}})
    ->ArgNames({"kv_heads", "head_dim", "lightning", "alike"})
    ->UseRealTime();

// Two KV heads of one sequence.
void SelectSlotsBench(benchmark::State& state) {
  const FullTables tables(1, 2, 64, DType::kFloat32, 1);
  const std::vector<float> score = Noise(static_cast<size_t>(tables.shape.num_scores()));
  std::vector<int32_t> kept(score.size());
  const int32_t num_pinned = 0;
  const auto num_kept = static_cast<int32_t>(state.range(0));
  const double start = SecondsNow();
  for (auto _ : state) {
    cpu::SelectSlots({tables.shape, score.data(), &num_pinned, &num_kept, kept.data(),
                      FullTables::kKept, 0, 16});
  }
  Report(state, start,
         4.0 * static_cast<double>(score.size()) + 4.0 * FullTables::kLayers * 2 * num_kept, 0);
}
BENCHMARK(SelectSlotsBench)
    ->Name("SelectSlots")
    ->Arg(FullTables::kKept)
    ->Arg(512)
    ->ArgName("kept")
    ->UseRealTime();

// Keeps a random eight of nine slots, in place, of blocks that come from memory. range: KV heads,
// head dimension, bf16.
void PackSlotsBench(benchmark::State& state) {
  const auto kv_heads = static_cast<int>(state.range(0));
  const auto head_dim = static_cast<int>(state.range(1));
  const DType dtype = state.range(2) != 0 ? DType::kBFloat16 : DType::kFloat32;
  const size_t table_bytes = size_t{2} * FullTables::kLayers * FullTables::kSlots *
                             static_cast<size_t>(kv_heads * head_dim) * DTypeSize(dtype);
  FullTables tables(1, kv_heads, head_dim, dtype, static_cast<int>(kColdBytes / table_bytes) + 1);
  const size_t layer_bytes = static_cast<size_t>(tables.layer_stride) * DTypeSize(dtype);
  std::vector<char> keys(FullTables::kLayers * layer_bytes, 0x3C);
  std::vector<char> values = keys;
  const int64_t stored_stride = tables.layer_stride / head_dim;
  std::vector<float> stored(static_cast<size_t>(FullTables::kLayers * stored_stride), 1.0F);
  std::vector<int32_t> kept, slots(FullTables::kSlots), kept_of_row(FullTables::kKept);
  std::iota(slots.begin(), slots.end(), 0);
  std::mt19937 rng(11);
  for (int row = 0; row < FullTables::kLayers * kv_heads; ++row) {
    std::sample(slots.begin(), slots.end(), kept_of_row.begin(), FullTables::kKept, rng);
    kept.insert(kept.end(), kept_of_row.begin(), kept_of_row.end());
  }
  std::vector<int32_t> prompt_slots(static_cast<size_t>(FullTables::kLayers * kv_heads), 100);
  const int32_t num_kept = FullTables::kKept;
  const int32_t zero = 0;
  const double start = SecondsNow();
  for (auto _ : state) {
    tables.NextTables();
    cpu::PackSlots({tables.shape, kept.data(), &num_kept, &zero, tables.table.data(), keys.data(),
                    values.data(), stored.data(), prompt_slots.data(), &zero, tables.layer_stride,
                    stored_stride, FullTables::kKept, FullTables::kBlocks, 1, head_dim, dtype});
  }
  Report(state, start,
         2.0 * FullTables::kLayers * FullTables::kKept *
             (2.0 * static_cast<double>(tables.row_bytes) + 4.0 * kv_heads),
         0);
}
BENCHMARK(PackSlotsBench)
    ->Name("PackSlots")
    ->ArgsProduct({{2}, {64}, {0, 1}})
    ->ArgsProduct({{8}, {128}, {0, 1}})
    ->ArgNames({"kv_heads", "head_dim", "bf16"})
    ->UseRealTime();

}  // namespace
}  // namespace zipage

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  zipage::bandwidth_bytes_per_s = zipage::MeasureBandwidth();
  zipage::peak_flops_per_s = zipage::MeasurePeak();
  std::printf("%d threads, %.1f GB/s read bandwidth, %.0f GFLOP/s fp32 peak\n",
              omp_get_max_threads(), zipage::bandwidth_bytes_per_s / 1e9,
              zipage::peak_flops_per_s / 1e9);
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
