// The CUDA backend by itself, and the golden models on it.

#include "worker/cuda_backend.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "tests/worker/golden.h"
#include "worker/comm/single.h"
#include "worker/model/checkpoint.h"
#include "worker/model_runner.h"

namespace zipage {
namespace {

std::unique_ptr<Backend> NewBackend() {
  auto backend = MakeCudaBackend(0);
  EXPECT_TRUE(backend.ok()) << backend.status();
  return backend.ok() ? *std::move(backend) : nullptr;
}

class CudaBackendTest : public testing::Test {
 protected:
  void SetUp() override {
    if (NumCudaDevices() == 0) {
      GTEST_SKIP() << "NO CUDA DEVICE: THE CUDA BACKEND IS NOT TESTED HERE";
    }
    backend_ = NewBackend();
    ASSERT_NE(backend_, nullptr);
  }
  DeviceMemory Upload(const void* data, size_t bytes) {
    auto memory = backend_->Allocate(bytes, "test");
    EXPECT_TRUE(memory.ok()) << memory.status();
    backend_->CopyToDevice(memory->as(), data, bytes);
    return *std::move(memory);
  }

  std::mt19937_64 rng_{std::random_device{}()};
  std::unique_ptr<Backend> backend_;
};

TEST(NoCudaDeviceTest, ADeviceThatIsNotThereIsRefused) {
  const auto backend = MakeCudaBackend(1000);
  EXPECT_EQ(backend.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(backend.status().message().find("1000"), absl::string_view::npos);
}

TEST_F(CudaBackendTest, NewMemoryIsZeroAndCopiesOfAnySizeArrive) {
  for (const size_t bytes : {size_t{1}, size_t{4099}, (size_t{9} << 20) + 3, size_t{70} << 20}) {
    std::vector<uint8_t> sent(bytes), received(bytes, 7);
    auto memory = backend_->Allocate(bytes, "test");
    ASSERT_TRUE(memory.ok()) << memory.status();
    backend_->CopyToHost(received.data(), memory->as(), bytes);
    ASSERT_EQ(received, sent);
    for (uint8_t& byte : sent) byte = static_cast<uint8_t>(rng_());
    const std::vector<uint8_t> copy = sent;
    backend_->CopyToDevice(memory->as(), sent.data(), bytes);
    std::fill(sent.begin(), sent.end(), 0);  // may be reused as soon as the call is back
    backend_->CopyToHost(received.data(), memory->as(), bytes);
    ASSERT_EQ(received, copy) << bytes;
  }
}

TEST_F(CudaBackendTest, ManySmallCopiesKeepTheirOrder) {
  const DeviceMemory memory = Upload("", 1);
  auto numbers = backend_->Allocate(100'000 * sizeof(int32_t), "test");
  ASSERT_TRUE(numbers.ok());
  for (int32_t i = 0; i < 100'000; ++i) {
    backend_->CopyToDevice(numbers->as<int32_t>() + i % 1000, &i, sizeof(i));
  }
  std::vector<int32_t> got(1000);
  backend_->CopyToHost(got.data(), numbers->as(), got.size() * sizeof(int32_t));
  for (int32_t i = 0; i < 1000; ++i) ASSERT_EQ(got[i], 99'000 + i);
}

TEST_F(CudaBackendTest, RowsAreCopiedBetweenStrides) {
  std::vector<int32_t> from(40 * 10);
  std::iota(from.begin(), from.end(), 0);
  const DeviceMemory source = Upload(from.data(), from.size() * 4);
  const DeviceMemory target = Upload(std::vector<int32_t>(30 * 10, -1).data(), 30 * 10 * 4);
  backend_->CopyRows(target.as<int32_t>() + 3, 30 * 4, source.as<int32_t>() + 5, 40 * 4, 20 * 4,
                     10);
  std::vector<int32_t> got(30 * 10);
  backend_->CopyToHost(got.data(), target.as(), got.size() * 4);
  for (int i = 0; i < 300; ++i) {
    const int column = i % 30 - 3;
    ASSERT_EQ(got[i], column >= 0 && column < 20 ? i / 30 * 40 + column + 5 : -1);
  }
}

// `value` rounded to the type and back.
float Round(float value, DType dtype) {
  if (dtype == DType::kBFloat16) return ToFloat(ToBFloat16(value));
  return dtype == DType::kFloat16 ? ToFloat(ToFloat16(value)) : value;
}

std::vector<uint8_t> Encode(const std::vector<float>& values, DType dtype) {
  std::vector<uint8_t> bytes(values.size() * DTypeSize(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    if (dtype == DType::kFloat32) reinterpret_cast<float*>(bytes.data())[i] = values[i];
    if (dtype == DType::kBFloat16) {
      reinterpret_cast<BFloat16*>(bytes.data())[i] = ToBFloat16(values[i]);
    }
    if (dtype == DType::kFloat16) {
      reinterpret_cast<Float16*>(bytes.data())[i] = ToFloat16(values[i]);
    }
  }
  return bytes;
}

TEST_F(CudaBackendTest, ProductsOfStackedPartsFollowTheFormula) {
  std::normal_distribution<float> normal;
  const auto noise = [&](int64_t count, DType dtype) {
    std::vector<float> values(count);
    for (float& value : values) value = Round(normal(rng_), dtype);
    return values;
  };
  struct Case {
    int64_t first_rows, second_rows, in;
    DType stored, dtype, out_dtype;
    bool bias;
  };
  constexpr DType kF32 = DType::kFloat32, kBf16 = DType::kBFloat16, kF16 = DType::kFloat16;
  for (const Case& c :
       {Case{64, 32, 96, kF32, kF32, kF32, true}, Case{50, 14, 64, kBf16, kF32, kF32, false},
        Case{256, 128, 320, kBf16, kBf16, kBf16, true},
        Case{256, 120, 320, kF32, kBf16, kF32, true}, Case{128, 64, 64, kF16, kBf16, kBf16, false},
        Case{512, 7, 128, kBf16, kBf16, kF32, false}}) {
    const int64_t out = c.first_rows + c.second_rows;
    const int64_t stride = c.in + 24;  // a shard of columns
    const std::vector<float> w = noise(out * stride, c.stored);
    const std::vector<float> bias = noise(out, kF32);
    const std::vector<uint8_t> stored = Encode(w, c.stored);
    std::vector<LinearPart> parts;
    for (const auto& [begin, rows] :
         {std::pair{int64_t{0}, c.first_rows}, std::pair{c.first_rows, c.second_rows}}) {
      parts.push_back({.weight = stored.data() + begin * stride * DTypeSize(c.stored),
                       .num_rows = rows,
                       .row_stride = stride,
                       .bias = c.bias ? bias.data() + begin : nullptr,
                       .dtype = c.stored});
    }
    auto linear = backend_->LoadLinear(parts, c.in, c.dtype);
    ASSERT_TRUE(linear.ok()) << linear.status();
    EXPECT_EQ((*linear)->bytes(), out * c.in * DTypeSize(c.dtype));
    for (const int64_t rows : {1, 3, 33, 130}) {
      const std::vector<float> x = noise(rows * c.in, c.dtype);
      const std::vector<uint8_t> encoded = Encode(x, c.dtype);
      const DeviceMemory device_x = Upload(encoded.data(), encoded.size());
      std::vector<uint8_t> y(rows * out * DTypeSize(c.out_dtype), 0xFF);
      const DeviceMemory device_y = Upload(y.data(), y.size());
      const absl::Status status =
          backend_->Multiply(linear->get(), device_x.as(), device_y.as(), rows, c.out_dtype);
      ASSERT_TRUE(status.ok()) << status;
      backend_->CopyToHost(y.data(), device_y.as(), y.size());
      for (int64_t i = 0; i < rows * out; ++i) {
        double expected = c.bias ? Round(bias[i % out], c.out_dtype) : 0;
        for (int64_t k = 0; k < c.in; ++k) {
          expected += double{x[i / out * c.in + k]} * Round(w[i % out * stride + k], c.dtype);
        }
        const float got = c.out_dtype == kF32 ? reinterpret_cast<const float*>(y.data())[i]
                                              : ToFloat(reinterpret_cast<BFloat16*>(y.data())[i]);
        ASSERT_NEAR(got, expected, c.out_dtype == kF32 ? 2e-4 : 1e-2 * (1 + std::abs(expected)) / 2)
            << rows << " rows, " << out << " x " << c.in << " at " << i;
      }
    }
  }
}

TEST_F(CudaBackendTest, AFailureOfAnOperationWithoutAStatusComesWithTheNextOne) {
  backend_->RmsNorm({.rows = 1, .hidden = 1 << 20, .dtype = DType::kBFloat16});
  std::vector<SampleRow> rows(1);
  SampleOutput output;
  EXPECT_EQ(backend_->Sample(nullptr, 10, rows, nullptr, &output).code(),
            absl::StatusCode::kUnimplemented);
}

// A golden model on the device, whose blocks are full of NaN.
struct DeviceModel {
  Config config;
  std::unique_ptr<Backend> backend = NewBackend();
  SingleCollective collective;
  std::unique_ptr<ModelRunner> runner;
  int64_t vocab = 0;
  std::vector<BlockId> free_blocks;

  DeviceModel(const GoldenModel& golden, int block_size, const std::string& dtype, uint64_t seed) {
    config.model = golden.dir;
    config.dtype = dtype;
    config.compression_policy = "none";
    config.kvcache_block_size = block_size;
    config.num_kvcache_blocks = 8192 / block_size;
    config.max_num_seqs = 16;
    config.max_num_batched_tokens = 2048;
    config.swap_space_gb = 0;
    auto model = LoadModelConfig(config.model);
    EXPECT_TRUE(model.ok()) << model.status();
    auto checkpoint = OpenCheckpoint(config.model, *model);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    const DType type = dtype == "bfloat16" ? DType::kBFloat16 : DType::kFloat32;
    auto weights = LoadWeights(*model, *checkpoint, 0, 1, type, model->max_position, backend.get());
    EXPECT_TRUE(weights.ok()) << weights.status();
    vocab = model->vocab_size;
    const KvShape shape{.num_layers = model->num_layers,
                        .block_size = block_size,
                        .kv_heads = model->num_kv_heads,
                        .head_dim = model->head_dim,
                        .dtype = type};
    auto transformer = Transformer::Create(
        *model, *std::move(weights), config.max_num_batched_tokens, &collective, backend.get());
    EXPECT_TRUE(transformer.ok()) << transformer.status();
    auto pool = KvPool::Create(shape, config.num_kvcache_blocks, backend.get());
    EXPECT_TRUE(pool.ok()) << pool.status();
    const std::vector<uint8_t> poison(config.num_kvcache_blocks * shape.block_bytes(), 0xFF);
    backend->CopyToDevice(pool->key(0), poison.data(), poison.size());
    auto made = ModelRunner::Create(config, *std::move(transformer), *std::move(pool),
                                    /*num_query_slots=*/0, &collective, backend.get());
    EXPECT_TRUE(made.ok()) << made.status();
    runner = *std::move(made);
    free_blocks.resize(config.num_kvcache_blocks);
    std::iota(free_blocks.begin(), free_blocks.end(), 0);
    std::shuffle(free_blocks.begin(), free_blocks.end(), std::mt19937_64(seed));
  }
};

// A prompt that runs in chunks, then decodes.
struct Sequence {
  const GoldenPrompt* prompt;
  int64_t chunk;
  int64_t num_prefilled = 0;
  std::vector<TokenId> output;
  std::vector<float> logits;  // [prompt tokens, vocab]
  bool done = false;
};

// Runs all sequences together until each has its golden number of outputs.
void RunAll(DeviceModel* model, std::vector<Sequence>* sequences) {
  StepPlan plan;
  const int64_t block_size = model->config.kvcache_block_size;
  for (size_t s = 0; s < sequences->size(); ++s) {
    const GoldenPrompt& prompt = *(*sequences)[s].prompt;
    NewSequence added;
    added.sequence_slot = static_cast<SequenceSlot>(s);
    added.tokens = prompt.ids;
    added.num_prompt_tokens = static_cast<uint32_t>(prompt.ids.size());
    const auto slots = static_cast<int64_t>(prompt.ids.size() + prompt.greedy.size());
    for (int64_t b = 0; b < (slots + block_size) / block_size; ++b) {
      added.block_table.push_back(model->free_blocks.back());
      model->free_blocks.pop_back();
    }
    added.sampling.temperature = 0;
    added.sampling.max_tokens = static_cast<int32_t>(prompt.greedy.size());
    plan.new_sequences.push_back(added);
    (*sequences)[s].logits.resize(prompt.ids.size() * model->vocab);
  }
  const LogitsSink sink = [&](SequenceSlot slot, int64_t position, const float* logits) {
    Sequence& sequence = (*sequences)[slot];
    if (position >= static_cast<int64_t>(sequence.prompt->ids.size())) return;
    std::copy_n(logits, model->vocab, sequence.logits.begin() + position * model->vocab);
  };
  const auto unfinished = [](const Sequence& s) { return !s.done; };
  while (std::any_of(sequences->begin(), sequences->end(), unfinished)) {
    ++plan.step;
    plan.num_decoding = 0;
    plan.chunks.clear();
    for (size_t s = 0; s < sequences->size(); ++s) {
      Sequence& sequence = (*sequences)[s];
      if (sequence.done) continue;
      const auto length = static_cast<int64_t>(sequence.prompt->ids.size());
      if (sequence.num_prefilled == length) {
        ++plan.num_decoding;
        continue;
      }
      const int64_t count = std::min(sequence.chunk, length - sequence.num_prefilled);
      plan.chunks.push_back(
          {static_cast<SequenceSlot>(s), static_cast<int32_t>(sequence.num_prefilled),
           static_cast<int32_t>(count), sequence.num_prefilled + count == length});
      sequence.num_prefilled += count;
    }
    const auto result = model->runner->Run(plan, sink);
    ASSERT_TRUE(result.ok()) << result.status();
    ASSERT_TRUE(result->corrupted.empty());
    for (const SampledToken& sampled : result->sampled) {
      (*sequences)[sampled.sequence_slot].output.push_back(sampled.token);
    }
    plan.new_sequences.clear();
    plan.released.clear();
    for (size_t s = 0; s < sequences->size(); ++s) {
      Sequence& sequence = (*sequences)[s];
      if (sequence.done || sequence.output.size() < sequence.prompt->greedy.size()) continue;
      sequence.done = true;
      plan.released.push_back(static_cast<SequenceSlot>(s));
    }
  }
}

class CudaGoldenModelsTest : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    if (NumCudaDevices() == 0) GTEST_SKIP() << "NO CUDA DEVICE: GOLDEN MODELS ARE NOT RUN ON ONE";
  }
};

struct Difference {
  double max = 0;
  double rms = 0;
};

Difference Compare(const std::vector<float>& a, const std::vector<float>& b) {
  EXPECT_EQ(a.size(), b.size());
  Difference difference;
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) {
    const double d = std::abs(double{a[i]} - b[i]);
    if (!(d <= difference.max)) difference.max = d;  // also takes a NaN
    difference.rms += d * d;
  }
  difference.rms = std::sqrt(difference.rms / static_cast<double>(a.size()));
  return difference;
}

std::vector<Sequence> AllPrompts(const GoldenModel& golden, const std::vector<int64_t>& chunks) {
  std::vector<Sequence> sequences;
  for (const int64_t chunk : chunks) {
    for (const GoldenPrompt& prompt : golden.prompts) sequences.push_back({&prompt, chunk});
  }
  return sequences;
}

TEST_P(CudaGoldenModelsTest, InFloat32LogitsAndGreedyTokensAreTheGoldenOnes) {
  const GoldenModel golden = LoadGoldenModel(GetParam());
  for (const int block_size : {16, 256}) {
    DeviceModel model(golden, block_size, "float32", 1);
    std::vector<Sequence> sequences = AllPrompts(golden, {1 << 20, 13, 1});
    RunAll(&model, &sequences);
    for (const Sequence& sequence : sequences) {
      EXPECT_LE(Compare(sequence.logits, sequence.prompt->logits).max, 1e-3)
          << "chunks of " << sequence.chunk << ", blocks of " << block_size;
      EXPECT_EQ(sequence.output, sequence.prompt->greedy)
          << "chunks of " << sequence.chunk << ", blocks of " << block_size;
    }
  }
}

TEST_P(CudaGoldenModelsTest, InBFloat16LogitsAreAsCloseAsTorchs) {
  const GoldenModel golden = LoadGoldenModel(GetParam());
  for (const int block_size : {16, 256}) {
    DeviceModel model(golden, block_size, "bfloat16", 2);
    std::vector<Sequence> sequences = AllPrompts(golden, {1 << 20, 33, 1});
    RunAll(&model, &sequences);
    for (const Sequence& sequence : sequences) {
      const Difference difference = Compare(sequence.logits, sequence.prompt->logits);
      EXPECT_LE(difference.max, 2 * sequence.prompt->bf16_max_abs_diff) << sequence.chunk;
      EXPECT_LE(difference.rms, 1.5 * sequence.prompt->bf16_rms_diff) << sequence.chunk;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(All, CudaGoldenModelsTest, testing::ValuesIn(GoldenModelNames()),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) c = std::isalnum(c) ? c : '_';
                           return name;
                         });

}  // namespace
}  // namespace zipage
