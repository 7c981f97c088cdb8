// Sampling on the device gives the CPU's tokens and log-probabilities, bit by bit.

#include <algorithm>
#include <cmath>
#include <memory>
#include <set>
#include <tuple>

#include "kernels/device_sample.h"
#include "tests/kernels/cuda_device.h"

namespace zipage {
namespace {

using testing::DeviceArray;

struct Outcome {
  std::vector<cuda::SampleDraw> draws;
  std::vector<SampleResult> sampled;
  std::vector<SampleLogprob> top;  // [rows, max_logprobs]
  std::vector<int32_t> tokens;
};

class CudaSampleTest : public testing::CudaTest {
 protected:
  Outcome Sample(const std::vector<float>& logits, const std::vector<SampleRow>& rows,
                 int max_logprobs) {
    const auto num_rows = static_cast<int64_t>(rows.size());
    const auto vocab = static_cast<int64_t>(logits.size()) / num_rows;
    const cuda::SamplePlan plan = cuda::PlanSample(rows.data(), num_rows, vocab);
    const auto num_seen = static_cast<int64_t>(plan.seen.size());
    const auto num_banned = static_cast<int64_t>(plan.banned.size());
    const DeviceArray device_logits(logits), device_rows(plan.rows), seen(plan.seen),
        banned(plan.banned), draws(num_rows * sizeof(cuda::SampleDraw)), tokens(num_rows * 4),
        top(num_rows * max_logprobs * sizeof(SampleLogprob)),
        scratch(cuda::SampleScratchBytes(num_rows, vocab, num_seen, num_banned));
    Finish(cuda::Sample({.logits = device_logits.as<float>(),
                         .rows = device_rows.as<cuda::DeviceSampleRow>(),
                         .seen = seen.as<SeenToken>(),
                         .banned = banned.as<int32_t>(),
                         .draws = draws.as<cuda::SampleDraw>(),
                         .tokens = tokens.as<int32_t>(),
                         .top = top.as<SampleLogprob>(),
                         .scratch = scratch.as(),
                         .num_rows = num_rows,
                         .vocab = vocab,
                         .logits_stride = vocab,
                         .num_seen = num_seen,
                         .num_banned = num_banned,
                         .max_logprobs = max_logprobs,
                         .draws_any = plan.draws,
                         .reports_any = plan.reports},
                        stream_));
    const std::vector<float> after = device_logits.Read<float>();
    EXPECT_EQ(std::memcmp(after.data(), logits.data(), logits.size() * sizeof(float)), 0)
        << "logits were not restored";
    Outcome outcome = {
        draws.Read<cuda::SampleDraw>(), {}, top.Read<SampleLogprob>(), tokens.Read<int32_t>()};
    for (int64_t r = 0; r < num_rows; ++r) {
      const cuda::SampleDraw& draw = outcome.draws[r];
      constexpr int32_t kBad = cuda::SampleDraw::kNotNumbers | cuda::SampleDraw::kNoToken;
      outcome.sampled.push_back((draw.flags & kBad) != 0
                                    ? SampleResult{}
                                    : cuda::FinishSample(draw, rows[r].num_logprobs, vocab,
                                                         outcome.top.data() + r * max_logprobs));
    }
    return outcome;
  }

  // Rows that the CPU can sample.
  void ExpectSameAsCpu(std::vector<float> logits, const std::vector<SampleRow>& rows,
                       int max_logprobs) {
    const auto num_rows = static_cast<int64_t>(rows.size());
    const auto vocab = static_cast<int64_t>(logits.size()) / num_rows;
    const Outcome got = Sample(logits, rows, max_logprobs);
    for (int64_t r = 0; r < num_rows; ++r) {
      SampleResult expected;
      std::vector<SampleLogprob> top(max_logprobs);
      const absl::Status status = cpu::Sample({logits.data() + r * vocab, &rows[r], &expected,
                                               top.data(), 1, vocab, vocab, max_logprobs});
      constexpr int32_t kBad = cuda::SampleDraw::kNotNumbers | cuda::SampleDraw::kNoToken;
      ASSERT_EQ(status.ok(), (got.draws[r].flags & kBad) == 0) << r << " " << status;
      if (!status.ok()) continue;
      const SampleRow& row = rows[r];
      ASSERT_EQ(got.sampled[r].token, expected.token)
          << "row " << r << " of " << vocab << ": temperature " << row.temperature << " top_k "
          << row.top_k << " top_p " << row.top_p << " min_p " << row.min_p;
      ASSERT_EQ(got.tokens[r], expected.token);
      if (row.num_logprobs < 0) continue;
      ASSERT_EQ(got.sampled[r].logprob, expected.logprob);
      for (int i = 0; i < std::min<int64_t>(row.num_logprobs, vocab); ++i) {
        ASSERT_EQ(got.top[r * max_logprobs + i].token, top[i].token) << i;
        ASSERT_EQ(got.top[r * max_logprobs + i].logprob, top[i].logprob) << i;
      }
    }
  }
};

// A row with each setting on at random.
struct RandomRow {
  SampleRow row;
  std::vector<SeenToken> seen;
  std::vector<int32_t> banned;

  RandomRow(int64_t vocab, std::mt19937_64* rng) {
    const auto maybe = [&] { return (*rng)() % 2 == 0; };
    const auto uniform = [&](float low, float high) {
      return std::uniform_real_distribution<float>(low, high)(*rng);
    };
    row.temperature = (*rng)() % 5 == 0 ? 0.0F : uniform(0.05F, 3.0F);
    if (maybe()) row.top_k = 1 + static_cast<int32_t>((*rng)() % (maybe() ? 50 : vocab + 5));
    if (maybe()) row.top_p = uniform(0.01F, 1.0F);
    if (maybe()) row.min_p = uniform(0.0F, maybe() ? 0.05F : 1.0F);
    if (maybe()) {
      row.repetition_penalty = uniform(0.5F, 2.0F);
      row.presence_penalty = uniform(-2, 2);
      row.frequency_penalty = uniform(-2, 2);
      std::set<int32_t> ids;
      for (int i = 0; i < 30; ++i) ids.insert(static_cast<int32_t>((*rng)() % vocab));
      for (int32_t id : ids) seen.push_back({id, static_cast<int32_t>((*rng)() % 4)});
      row.seen = seen.data();
      row.num_seen = static_cast<int32_t>(seen.size());
    }
    if (maybe()) {
      const auto id = static_cast<int32_t>((*rng)() % vocab);
      banned = {id, -1, static_cast<int32_t>(vocab), id};
      row.banned = banned.data();
      row.num_banned = 4;
    }
    row.seed = (*rng)();
    row.sample_index = static_cast<uint32_t>((*rng)() % 4);
    row.position = (*rng)() % 5000;
    row.num_logprobs = static_cast<int32_t>((*rng)() % 8) - 1;
  }
};

TEST_F(CudaSampleTest, EqualsTheCpuExactly) {
  for (int round = 0; round < 200; ++round) {
    const int64_t vocab = round % 20 == 0 ? 30'000 : 2 + static_cast<int64_t>(rng_() % 700);
    const size_t num_rows = 1 + rng_() % 6;
    std::vector<float> logits = testing::RandomFloats(num_rows * vocab, &rng_, 4.0F);
    // Coarse logits, so that ties are everywhere; sometimes tokens that cannot be.
    if (round % 3 == 0) {
      for (float& z : logits) z = std::round(z);
    }
    if (round % 7 == 0) {
      for (float& z : logits) z = rng_() % 4 == 0 ? -INFINITY : z;
      for (size_t r = 0; r < num_rows; ++r) logits[r * vocab] = logits[r * vocab + 1] = 0.5F;
    }
    std::vector<std::unique_ptr<RandomRow>> owned;
    std::vector<SampleRow> rows;
    for (size_t r = 0; r < num_rows; ++r) {
      owned.push_back(std::make_unique<RandomRow>(vocab, &rng_));
      rows.push_back(owned.back()->row);
    }
    SCOPED_TRACE(::testing::Message() << "round " << round);
    ExpectSameAsCpu(logits, rows, 8);
  }
}

TEST_F(CudaSampleTest, EqualsTheCpuOnALargeVocabulary) {
  const int64_t vocab = 151'936;
  for (const float spread : {0.1F, 3.0F}) {  // 0.1: candidates overflow, the whole row is searched
    std::vector<SampleRow> rows;
    for (const float temperature : {0.6F, 1.0F, 8.0F}) {
      for (const auto& [top_k, top_p, min_p] : {std::tuple<int, float, float>{0, 1.0F, 0.0F},
                                                {0, 0.95F, 0.0F},
                                                {0, 0.999F, 0.0F},
                                                {20, 0.95F, 0.0F},
                                                {100'000, 1.0F, 0.0F},
                                                {5'000, 0.5F, 0.0F},
                                                {0, 1.0F, 0.05F},
                                                {50, 0.9F, 0.01F}}) {
        SampleRow& row = rows.emplace_back();
        row.temperature = temperature;
        row.top_k = top_k;
        row.top_p = top_p;
        row.min_p = min_p;
        row.seed = rng_();
        row.num_logprobs = 20;
      }
    }
    ExpectSameAsCpu(testing::RandomFloats(rows.size() * vocab, &rng_, spread), rows, 20);
  }
}

TEST_F(CudaSampleTest, ExtremeTemperaturesAndEqualLogitsAreTheCpusToo) {
  const int64_t vocab = 40'001;
  std::vector<SampleRow> rows(8);
  const float temperatures[] = {1e-45F, 1e-30F, 1e-8F, 100.0F, 1e30F, 1.0F, 1.0F, 0.0F};
  for (size_t r = 0; r < rows.size(); ++r) {
    rows[r].temperature = temperatures[r];
    rows[r].seed = rng_();
    rows[r].top_p = r % 2 == 0 ? 1.0F : 0.7F;
  }
  std::vector<float> logits = testing::RandomFloats(rows.size() * vocab, &rng_);
  std::fill_n(logits.begin() + 5 * vocab, 3 * vocab, -2.5F);
  ExpectSameAsCpu(logits, rows, 0);
}

TEST_F(CudaSampleTest, ARowThatCannotBeSampledIsFlaggedAndTheOthersAreSampled) {
  const int64_t vocab = 20'000;
  std::vector<float> logits = testing::RandomFloats(6 * vocab, &rng_);
  logits[1 * vocab + 19'999] = NAN;
  logits[2 * vocab] = INFINITY;
  logits[3 * vocab + 77] = -INFINITY;
  std::fill_n(logits.begin() + 4 * vocab, vocab, -INFINITY);
  std::vector<SampleRow> rows(6);
  for (SampleRow& row : rows) row.top_p = 0.9F;
  const Outcome got = Sample(logits, rows, 0);
  using Draw = cuda::SampleDraw;
  EXPECT_EQ(got.draws[0].flags, 0);
  EXPECT_EQ(got.draws[1].flags & ~Draw::kMinusInf, Draw::kNotNumbers);
  EXPECT_EQ(got.draws[2].flags & ~Draw::kMinusInf, Draw::kNotNumbers);
  EXPECT_EQ(got.draws[3].flags, Draw::kMinusInf);
  EXPECT_EQ(got.draws[4].flags, Draw::kMinusInf | Draw::kNoToken);
  EXPECT_EQ(got.draws[5].flags, 0);
  for (const int r : {0, 3, 5}) {
    SampleResult expected;
    ASSERT_TRUE(
        cpu::Sample({logits.data() + r * vocab, &rows[r], &expected, nullptr, 1, vocab, vocab, 0})
            .ok());
    EXPECT_EQ(got.tokens[r], expected.token);
  }
}

}  // namespace
}  // namespace zipage
