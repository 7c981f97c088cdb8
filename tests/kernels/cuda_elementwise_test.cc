// The CUDA kernels that go over rows once, against the CPU's.

#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/embedding.h"
#include "kernels/query_window.h"
#include "kernels/rms_norm.h"
#include "kernels/rope.h"
#include "kernels/round.h"
#include "kernels/silu_mul.h"
#include "kernels/tokens.h"
#include "tests/kernels/cuda_device.h"

namespace zipage {
namespace {

using testing::DeviceArray;
using testing::Tensor;

class CudaElementwiseTest : public testing::CudaTest {
 protected:
  // Both are NaN, or their difference is within `factor` roundings of the type.
  static void ExpectNear(const Tensor& got, const Tensor& expected, float factor) {
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i) {
      const float e = expected.Get(i);
      if (std::isnan(e)) {
        ASSERT_TRUE(std::isnan(got.Get(i))) << i;
        continue;
      }
      ASSERT_NEAR(got.Get(i), e, factor * testing::RoundingOf(got.dtype()) * (1e-2F + std::abs(e)))
          << i;
    }
  }
};

constexpr DType kActivations[] = {DType::kFloat32, DType::kBFloat16};

TEST_F(CudaElementwiseTest, EmbeddingsAreTheShardsRows) {
  for (const DType dtype : kActivations) {
    for (const DType table_dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      for (const int64_t hidden : {19, 64, 4096, 5124}) {
        const int64_t rows = 23;
        const Tensor table = Tensor::Random(table_dtype, rows * hidden, &rng_);
        std::vector<int32_t> ids(301);
        for (int32_t& id : ids) id = static_cast<int32_t>(rng_() % 40);
        const auto tokens = static_cast<int64_t>(ids.size());
        Tensor expected = Tensor::Poison(dtype, tokens * hidden);
        EmbeddingParams p = {ids.data(),      table.data(), expected.data(), tokens, hidden,
                             /*first_row=*/9, rows,         table_dtype,     dtype};
        cpu::Embedding(p);
        const DeviceArray device_ids(ids);
        const DeviceArray device_table(table);
        const DeviceArray out(expected.size() * DTypeSize(dtype));
        p.ids = device_ids.as<int32_t>();
        p.table = device_table.as();
        p.out = out.as();
        Finish(cuda::Embedding(p, stream_));
        ASSERT_TRUE(out.ReadTensor(dtype).SameBits(0, expected, 0, expected.size())) << hidden;
      }
    }
  }
}

TEST_F(CudaElementwiseTest, RmsNormAgreesForEveryWidthAndUse) {
  for (const DType dtype : kActivations) {
    for (const int64_t hidden : {1, 15, 64, 333, 896, 4096, 5120, 12288, 16384}) {
      for (const bool with_residual : {false, true}) {
        for (const bool with_index : {false, true}) {
          const int64_t sources = 7;
          const Tensor x = Tensor::Random(dtype, sources * hidden, &rng_, 3.0F);
          Tensor residual = Tensor::Random(dtype, sources * hidden, &rng_);
          const std::vector<float> weight = testing::RandomFloats(hidden, &rng_);
          const std::vector<int32_t> index = {5, 0, 6};
          const int64_t rows = with_index ? 3 : sources;
          const DeviceArray device_x(x), device_residual(residual), device_weight(weight),
              device_index(index), out(rows * hidden * DTypeSize(dtype));
          Tensor expected = Tensor::Poison(dtype, rows * hidden);
          RmsNormParams p = {x.data(),
                             with_residual ? residual.data() : nullptr,
                             with_index ? index.data() : nullptr,
                             weight.data(),
                             expected.data(),
                             rows,
                             hidden,
                             1e-5F,
                             dtype};
          cpu::RmsNorm(p);
          p = {device_x.as(),
               with_residual ? device_residual.as() : nullptr,
               with_index ? device_index.as<int32_t>() : nullptr,
               device_weight.as<float>(),
               out.as(),
               rows,
               hidden,
               1e-5F,
               dtype};
          Finish(cuda::RmsNorm(p, stream_));
          ExpectNear(out.ReadTensor(dtype), expected, 4);
          ASSERT_TRUE(device_residual.ReadTensor(dtype).SameBits(0, residual, 0, residual.size()))
              << hidden;
        }
      }
    }
  }
}

TEST_F(CudaElementwiseTest, RmsNormMayWriteOverItsInput) {
  const int64_t hidden = 2048, rows = 40;
  Tensor x = Tensor::Random(DType::kBFloat16, rows * hidden, &rng_);
  const std::vector<float> weight = testing::RandomFloats(hidden, &rng_);
  const DeviceArray device_x(x), device_weight(weight);
  Finish(cuda::RmsNorm({device_x.as(), nullptr, nullptr, device_weight.as<float>(), device_x.as(),
                        rows, hidden, 1e-6F, DType::kBFloat16},
                       stream_));
  cpu::RmsNorm(
      {x.data(), nullptr, nullptr, weight.data(), x.data(), rows, hidden, 1e-6F, DType::kBFloat16});
  ExpectNear(device_x.ReadTensor(DType::kBFloat16), x, 4);
}

TEST_F(CudaElementwiseTest, SiluMulAgreesToTheEndsOfTheRange) {
  for (const DType dtype : kActivations) {
    for (const int64_t n : {1, 17, 96, 4097, 12288}) {
      const int64_t tokens = 9;
      Tensor gate_up = Tensor::Random(dtype, tokens * 2 * n, &rng_, 8.0F);
      const float ends[] = {1000.0F, -1000.0F, -87.5F, 0.0F, -3e38F, NAN};
      for (size_t i = 0; n > 6 && i < std::size(ends); ++i) gate_up.Set(i, ends[i]);
      Tensor expected = Tensor::Poison(dtype, tokens * n);
      cpu::SiluMul({gate_up.data(), expected.data(), tokens, n, dtype});
      const DeviceArray in(gate_up), out(tokens * n * DTypeSize(dtype));
      Finish(cuda::SiluMul({in.as(), out.as(), tokens, n, dtype}, stream_));
      ExpectNear(out.ReadTensor(dtype), expected, 3);
    }
  }
}

TEST_F(CudaElementwiseTest, RopeRotatesAndWritesExactlyItsSlots) {
  struct Case {
    int q_heads, kv_heads, head_dim;
  };
  for (const DType dtype : kActivations) {
    for (const Case c : {Case{32, 8, 128}, Case{14, 2, 64}, Case{9, 3, 64}, Case{6, 2, 96},
                         Case{4, 1, 256}, Case{2, 2, 80}, Case{3, 1, 6}}) {
      for (const bool norm : {false, true}) {
        const int64_t d = c.head_dim, tokens = 37, num_slots = 90, max_position = 500;
        const int64_t row = (c.q_heads + 2 * c.kv_heads) * d;
        Tensor qkv = Tensor::Random(dtype, tokens * row, &rng_);
        std::vector<float> table(max_position * d);
        const std::vector<float> inv_freq = testing::RandomFloats(d / 2, &rng_, 0.3F);
        BuildRopeTable(inv_freq.data(), c.head_dim, max_position, 1.1F, table.data());
        std::vector<int64_t> slots(num_slots);
        std::iota(slots.begin(), slots.end(), 0);
        std::shuffle(slots.begin(), slots.end(), rng_);
        std::vector<int32_t> positions(tokens);
        for (int32_t& position : positions) {
          position = static_cast<int32_t>(rng_() % max_position);
        }
        const std::vector<float> qw = testing::RandomFloats(d, &rng_);
        const std::vector<float> kw = testing::RandomFloats(d, &rng_);
        Tensor keys = Tensor::Poison(dtype, num_slots * c.kv_heads * d);
        Tensor values = keys;
        const DeviceArray device_qkv(qkv), device_table(table), device_slots(slots),
            device_positions(positions), device_qw(qw), device_kw(kw), device_keys(keys),
            device_values(values);
        RopeAndCacheParams p = {qkv.data(),
                                positions.data(),
                                slots.data(),
                                table.data(),
                                norm ? qw.data() : nullptr,
                                norm ? kw.data() : nullptr,
                                keys.data(),
                                values.data(),
                                tokens,
                                max_position,
                                num_slots,
                                c.q_heads,
                                c.kv_heads,
                                c.head_dim,
                                1e-6F,
                                dtype};
        cpu::RopeAndCache(p);
        p.qkv = device_qkv.as();
        p.positions = device_positions.as<int32_t>();
        p.slot_mapping = device_slots.as<int64_t>();
        p.rope_table = device_table.as<float>();
        p.q_norm_weight = norm ? device_qw.as<float>() : nullptr;
        p.k_norm_weight = norm ? device_kw.as<float>() : nullptr;
        p.key_cache = device_keys.as();
        p.value_cache = device_values.as();
        Finish(cuda::RopeAndCache(p, stream_));
        ExpectNear(device_qkv.ReadTensor(dtype), qkv, 50);
        ExpectNear(device_keys.ReadTensor(dtype), keys, 50);
        const Tensor got = device_values.ReadTensor(dtype);
        for (int64_t s = 0; s < tokens; ++s) {
          const size_t at = slots[s] * c.kv_heads * d;
          ASSERT_TRUE(got.SameBits(at, values, at, c.kv_heads * d)) << "values changed";
        }
        ExpectNear(got, values, 1);
      }
    }
  }
}

TEST_F(CudaElementwiseTest, QueriesGoToTheirWindowRowsAndNowhereElse) {
  for (const DType dtype : kActivations) {
    for (const int head_dim : {5, 128}) {
      const int64_t tokens = 50, count = 20, num_rows = 64;
      const int q_heads = 6;
      const int64_t stride = q_heads * head_dim + 2 * head_dim;
      const Tensor q = Tensor::Random(dtype, tokens * stride, &rng_);
      std::vector<int64_t> window_rows(num_rows);
      std::iota(window_rows.begin(), window_rows.end(), 0);
      std::shuffle(window_rows.begin(), window_rows.end(), rng_);
      std::vector<int32_t> token(count);
      for (int32_t& t : token) t = static_cast<int32_t>(rng_() % tokens);
      Tensor window = Tensor::Poison(dtype, num_rows * q_heads * head_dim);
      const DeviceArray device_q(q), device_token(token), device_rows(window_rows),
          device_window(window);
      StoreQueriesParams p = {
          q.data(), token.data(), window_rows.data(), window.data(), count, num_rows,
          stride,   q_heads,      head_dim,           dtype};
      cpu::StoreQueries(p);
      p.q = device_q.as();
      p.token = device_token.as<int32_t>();
      p.window_row = device_rows.as<int64_t>();
      p.window = device_window.as();
      Finish(cuda::StoreQueries(p, stream_));
      ExpectNear(device_window.ReadTensor(dtype), window, 0);
    }
  }
}

TEST_F(CudaElementwiseTest, TokensAreGatheredAndScattered) {
  const int64_t count = 777;
  std::vector<int32_t> index(1000), in(1000);
  std::iota(index.begin(), index.end(), 0);
  std::shuffle(index.begin(), index.end(), rng_);
  for (int32_t& token : in) token = static_cast<int32_t>(rng_());
  const DeviceArray device_in(in), device_index(index), gathered(count * 4), scattered(4000);
  Finish(cuda::GatherTokens(device_in.as<int32_t>(), device_index.as<int32_t>(),
                            gathered.as<int32_t>(), count, stream_));
  Finish(cuda::ScatterTokens(device_in.as<int32_t>(), device_index.as<int32_t>(),
                             scattered.as<int32_t>(), count, stream_));
  const std::vector<int32_t> got = gathered.Read<int32_t>();
  const std::vector<int32_t> spread = scattered.Read<int32_t>();
  for (int64_t i = 0; i < 1000; ++i) {
    if (i < count) ASSERT_EQ(got[i], in[index[i]]);
    ASSERT_EQ(spread[index[i]], i < count ? in[i] : -1);
  }
}

TEST_F(CudaElementwiseTest, RoundingIsToTheNearestAndTiesGoToEven) {
  for (const size_t count : {1, 1023, 4096}) {
    std::vector<float> in = testing::RandomFloats(count, &rng_, 1e3F);
    for (size_t i = 0; i < count; i += 3) {
      in[i] = std::bit_cast<float>((std::bit_cast<uint32_t>(in[i]) & 0xFFFF0000U) | 0x8000U);
    }
    const DeviceArray device_in(in), out(count * 2);
    Finish(cuda::RoundToBFloat16(device_in.as<float>(), out.as<BFloat16>(),
                                 static_cast<int64_t>(count), stream_));
    const std::vector<BFloat16> got = out.Read<BFloat16>();
    for (size_t i = 0; i < count; ++i) ASSERT_EQ(got[i].bits, ToBFloat16(in[i]).bits) << in[i];
  }
}

}  // namespace
}  // namespace zipage
