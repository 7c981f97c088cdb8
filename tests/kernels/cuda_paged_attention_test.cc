// Attention on the device against the CPU's reference, whose sums are double.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/paged_attention.h"
#include "tests/kernels/cuda_device.h"

namespace zipage {
namespace {

using testing::DeviceArray;
using testing::Tensor;

struct Shape {
  int q_heads, kv_heads, head_dim, block_size;
  DType dtype = DType::kBFloat16;
};

// New tokens [begin, end) of sequence `seq`.
struct Chunk {
  int seq, begin, end;
};

// Sequences in a pool whose blocks are shuffled and whose unused slots are NaN, in host memory and
// on the device.
class World {
 public:
  World(const Shape& shape, std::vector<int> lengths, std::mt19937_64* rng)
      : shape_(shape), lengths_(std::move(lengths)) {
    const int slot = shape.kv_heads * shape.head_dim;
    for (int length : lengths_) {
      max_blocks_ = std::max(max_blocks_, Blocks(length) + 1);
      num_blocks_ += Blocks(length);
    }
    std::vector<int32_t> ids(num_blocks_);
    std::iota(ids.begin(), ids.end(), 0);
    std::shuffle(ids.begin(), ids.end(), *rng);
    keys_ = Tensor::Poison(shape.dtype, num_blocks_ * shape.block_size * slot);
    values_ = keys_;
    tables_.assign(lengths_.size() * max_blocks_, 1 << 30);  // nonsense past the last block
    std::normal_distribution<float> normal;
    size_t num_tokens = 0;
    for (size_t s = 0; s < lengths_.size(); ++s) {
      for (int b = 0; b < Blocks(lengths_[s]); ++b) {
        tables_[s * max_blocks_ + b] = ids.back();
        const size_t first = static_cast<size_t>(ids.back()) * shape.block_size;
        ids.pop_back();
        const int used = std::min(shape.block_size, lengths_[s] - b * shape.block_size);
        for (size_t i = first * slot; i < (first + used) * slot; ++i) {
          keys_.Set(i, normal(*rng));
          values_.Set(i, normal(*rng));
        }
      }
      first_token_.push_back(num_tokens);
      num_tokens += lengths_[s];
    }
    queries_ = Tensor::Random(shape.dtype, num_tokens * q_size(), rng, 2.0F);
    device_keys_ = std::make_unique<DeviceArray>(keys_);
    device_values_ = std::make_unique<DeviceArray>(values_);
  }

  size_t q_size() const { return static_cast<size_t>(shape_.q_heads) * shape_.head_dim; }

  // Outputs of the chunks' tokens in one call, [tokens, q_size].
  Tensor Expected(const std::vector<Chunk>& chunks) const {
    const Call call = Prepare(chunks);
    Tensor out = Tensor::Poison(shape_.dtype, call.tokens() * q_size());
    reference::PagedAttention(Params(call, call.q.data(), keys_.data(), values_.data(),
                                     call.tables.data(), call.query_start.data(),
                                     call.context_len.data(), out.data()));
    return out;
  }

  Tensor OnDevice(const std::vector<Chunk>& chunks, Stream stream) const {
    const Call call = Prepare(chunks);
    const DeviceArray q(call.q), tables(call.tables), starts(call.query_start),
        contexts(call.context_len), out(call.tokens() * q_size() * DTypeSize(shape_.dtype));
    const PagedAttentionParams p =
        Params(call, q.as(), device_keys_->as(), device_values_->as(), tables.as<int32_t>(),
               starts.as<int32_t>(), contexts.as<int32_t>(), out.as());
    const DeviceArray counters(std::vector<int32_t>(p.num_seqs * p.q_heads));
    const DeviceArray partials(cuda::NumPartials(p) * sizeof(float));
    const absl::Status status =
        cuda::PagedAttention(p, {counters.as<int32_t>(), partials.as<float>()}, stream);
    EXPECT_TRUE(status.ok()) << status;
    EXPECT_EQ(cudaStreamSynchronize(stream), cudaSuccess);
    for (int32_t counter : counters.Read<int32_t>()) EXPECT_EQ(counter, 0) << "left behind";
    return out.ReadTensor(shape_.dtype);
  }

 private:
  struct Call {
    std::vector<int32_t> tables, query_start = {0}, context_len;
    Tensor q{DType::kFloat32, 0};
    size_t tokens() const { return query_start.back(); }
  };

  int Blocks(int length) const { return (length + shape_.block_size - 1) / shape_.block_size; }
  // As in the fused product's rows.
  size_t Stride() const { return q_size() + size_t{2} * shape_.kv_heads * shape_.head_dim; }

  Call Prepare(const std::vector<Chunk>& chunks) const {
    Call call;
    for (const Chunk& c : chunks) {
      const auto row = tables_.begin() + static_cast<int64_t>(c.seq) * max_blocks_;
      call.tables.insert(call.tables.end(), row, row + max_blocks_);
      call.query_start.push_back(call.query_start.back() + c.end - c.begin);
      call.context_len.push_back(c.end);
    }
    call.q = Tensor::Poison(shape_.dtype, call.tokens() * Stride());
    size_t t = 0;
    for (const Chunk& c : chunks) {
      for (int j = c.begin; j < c.end; ++j, ++t) {
        for (size_t i = 0; i < q_size(); ++i) {
          call.q.Set(t * Stride() + i, queries_.Get((first_token_[c.seq] + j) * q_size() + i));
        }
      }
    }
    return call;
  }

  PagedAttentionParams Params(const Call& call, const void* q, const void* keys, const void* values,
                              const int32_t* tables, const int32_t* query_start,
                              const int32_t* context_len, void* out) const {
    return {.q = q,
            .key_cache = keys,
            .value_cache = values,
            .block_tables = tables,
            .query_start = query_start,
            .context_len = context_len,
            .out = out,
            .q_stride = static_cast<int64_t>(Stride()),
            .num_blocks = num_blocks_,
            .num_seqs = static_cast<int>(call.context_len.size()),
            .max_blocks = max_blocks_,
            .block_size = shape_.block_size,
            .q_heads = shape_.q_heads,
            .kv_heads = shape_.kv_heads,
            .head_dim = shape_.head_dim,
            .scale = 1.0F / std::sqrt(static_cast<float>(shape_.head_dim)),
            .dtype = shape_.dtype,
            .num_tokens = static_cast<int64_t>(call.tokens())};
  }

  Shape shape_;
  std::vector<int> lengths_;
  int max_blocks_ = 1;
  int64_t num_blocks_ = 0;
  std::vector<int32_t> tables_;
  std::vector<size_t> first_token_;
  Tensor keys_{DType::kFloat32, 0}, values_{DType::kFloat32, 0}, queries_{DType::kFloat32, 0};
  std::unique_ptr<DeviceArray> device_keys_, device_values_;
};

class CudaPagedAttentionTest : public testing::CudaTest {
 protected:
  static void ExpectClose(const Tensor& got, const Tensor& expected) {
    const float rounding = testing::RoundingOf(got.dtype());
    double difference = 0, norm = 0;
    for (size_t i = 0; i < got.size(); ++i) {
      const float e = expected.Get(i);
      ASSERT_NEAR(got.Get(i), e, 2 * rounding * (2 + std::abs(e))) << "at " << i;
      difference += std::pow(got.Get(i) - e, 2);
      norm += std::pow(e, 2);
    }
    EXPECT_LT(std::sqrt(difference / norm), rounding);
  }
};

const std::vector<Shape>& Shapes() {
  static const auto* shapes = new std::vector<Shape>{{32, 8, 128, 256},
                                                     {14, 2, 64, 16},
                                                     {8, 8, 128, 48},
                                                     {16, 1, 128, 64},
                                                     {40, 1, 64, 32},
                                                     {6, 2, 96, 256},
                                                     {4, 2, 256, 256},
                                                     {71, 1, 64, 16},
                                                     {3, 1, 80, 32},
                                                     {4, 2, 32, 16},
                                                     {7, 1, 128, 256},
                                                     {10, 2, 64, 16, DType::kFloat32},
                                                     {4, 1, 128, 256, DType::kFloat32}};
  return *shapes;
}

TEST_F(CudaPagedAttentionTest, DecodeMatchesTheReference) {
  for (const Shape& shape : Shapes()) {
    SCOPED_TRACE(::testing::Message() << shape.q_heads << "/" << shape.kv_heads << " x "
                                      << shape.head_dim << ", blocks of " << shape.block_size);
    const std::vector<int> lengths = {1, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300, 700};
    const World world(shape, lengths, &rng_);
    std::vector<Chunk> chunks;
    for (int s = 0; s < static_cast<int>(lengths.size()); ++s) {
      chunks.push_back({s, lengths[s] - 1, lengths[s]});
    }
    ExpectClose(world.OnDevice(chunks, stream_), world.Expected(chunks));
  }
}

TEST_F(CudaPagedAttentionTest, DecodeOfLongSequencesMatchesTheReference) {
  const std::vector<int> lengths = {4095, 4096, 4097, 9001, 20'000};
  const World world({8, 2, 128, 256}, lengths, &rng_);
  std::vector<Chunk> chunks;
  for (int s = 0; s < static_cast<int>(lengths.size()); ++s) {
    chunks.push_back({s, lengths[s] - 1, lengths[s]});
  }
  ExpectClose(world.OnDevice(chunks, stream_), world.Expected(chunks));
}

TEST_F(CudaPagedAttentionTest, ChunksMatchTheReference) {
  for (const Shape& shape : Shapes()) {
    SCOPED_TRACE(::testing::Message() << shape.q_heads << "/" << shape.kv_heads << " x "
                                      << shape.head_dim << ", blocks of " << shape.block_size);
    const World world(shape, {2, 33, 128, 130, 400}, &rng_);
    const std::vector<Chunk> chunks = {{0, 0, 2},   {1, 0, 33},    {2, 0, 128},
                                       {3, 1, 130}, {4, 300, 400}, {4, 70, 201},
                                       {1, 32, 33}, {4, 399, 400}, {3, 127, 129}};
    ExpectClose(world.OnDevice(chunks, stream_), world.Expected(chunks));
  }
}

TEST_F(CudaPagedAttentionTest, TheBatchDoesNotChangeABit) {
  const Shape shape = {32, 8, 128, 256};
  const std::vector<int> lengths = {5, 256, 700, 1500, 300, 64};
  const World world(shape, lengths, &rng_);
  std::vector<Chunk> all;
  for (int s = 0; s < static_cast<int>(lengths.size()); ++s) {
    all.push_back({s, lengths[s] - 1, lengths[s]});
    all.push_back({s, lengths[s] / 2, lengths[s]});
  }
  std::shuffle(all.begin(), all.end(), rng_);
  const Tensor together = world.OnDevice(all, stream_);
  size_t token = 0;
  for (const Chunk& chunk : all) {
    const Tensor alone = world.OnDevice({chunk}, stream_);
    ASSERT_TRUE(together.SameBits(token * world.q_size(), alone, 0, alone.size()))
        << "sequence " << chunk.seq << " from " << chunk.begin;
    token += chunk.end - chunk.begin;
  }
}

TEST_F(CudaPagedAttentionTest, CuttingAPromptDoesNotChangeABit) {
  const World world({32, 8, 128, 256}, {611}, &rng_);
  const Tensor whole = world.OnDevice({{0, 0, 611}}, stream_);
  for (int size : {2, 7, 64, 100}) {
    for (int begin = 0; begin + size <= 611; begin += size) {
      const Tensor part = world.OnDevice({{0, begin, begin + size}}, stream_);
      ASSERT_TRUE(whole.SameBits(begin * world.q_size(), part, 0, part.size()))
          << size << " tokens from " << begin;
    }
  }
}

TEST_F(CudaPagedAttentionTest, RepeatedCallsGiveTheSameBits) {
  const World world({16, 2, 128, 256}, {3000, 1000}, &rng_);
  const std::vector<Chunk> chunks = {{0, 2999, 3000}, {1, 999, 1000}};
  const Tensor first = world.OnDevice(chunks, stream_);
  for (int i = 0; i < 20; ++i) {
    ASSERT_TRUE(world.OnDevice(chunks, stream_).SameBits(0, first, 0, first.size())) << i;
  }
}

TEST_F(CudaPagedAttentionTest, AHeadDimensionThatIsTooLargeIsRefused) {
  PagedAttentionParams p = {};
  p.num_seqs = p.q_heads = p.kv_heads = 1;
  p.num_tokens = 1;
  p.head_dim = 320;
  p.block_size = 16;
  p.dtype = DType::kBFloat16;
  EXPECT_EQ(cuda::PagedAttention(p, {}, stream_).code(), absl::StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace zipage
