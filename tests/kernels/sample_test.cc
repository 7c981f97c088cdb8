#include "kernels/sample.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <memory>
#include <set>
#include <tuple>

#include "tests/kernels/random_data.h"

namespace zipage {
namespace {

struct Outcome {
  absl::Status status;
  std::vector<SampleResult> sampled;
  std::vector<SampleLogprob> top;
};

Outcome RunSample(decltype(&cpu::Sample) function, std::vector<float>* logits,
                  const std::vector<SampleRow>& rows, int max_logprobs = 0) {
  const auto num_rows = static_cast<int64_t>(rows.size());
  const auto vocab = static_cast<int64_t>(logits->size()) / num_rows;
  Outcome outcome;
  outcome.sampled.resize(rows.size());
  outcome.top.resize(rows.size() * max_logprobs, SampleLogprob{-7, 0});
  outcome.status = function({logits->data(), rows.data(), outcome.sampled.data(),
                             outcome.top.data(), num_rows, vocab, vocab, max_logprobs});
  return outcome;
}

int32_t SampleOne(std::vector<float> logits, const SampleRow& row) {
  const Outcome outcome = RunSample(&cpu::Sample, &logits, {row});
  EXPECT_TRUE(outcome.status.ok()) << outcome.status;
  return outcome.sampled[0].token;
}

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
      banned = {static_cast<int32_t>((*rng)() % vocab), -1, static_cast<int32_t>(vocab)};
      row.banned = banned.data();
      row.num_banned = 3;
    }
    row.seed = (*rng)();
    row.sample_index = static_cast<uint32_t>((*rng)() % 4);
    row.position = (*rng)() % 5000;
    row.num_logprobs = static_cast<int32_t>((*rng)() % 8) - 1;
  }
};

TEST(SampleTest, EqualsTheReferenceExactly) {
  std::mt19937_64 rng(testing::FreshSeed());
  for (int round = 0; round < 400; ++round) {
    const int64_t vocab = round % 40 == 0 ? 30'000 : 2 + static_cast<int64_t>(rng() % 700);
    const size_t num_rows = 1 + rng() % 4;
    std::vector<float> logits = testing::RandomFloats(num_rows * vocab, &rng, 4.0F);
    // Coarse logits, so that ties are everywhere; sometimes tokens that cannot be.
    if (round % 3 == 0) {
      for (float& z : logits) z = std::round(z);
    }
    if (round % 7 == 0) {
      for (float& z : logits) z = rng() % 4 == 0 ? -INFINITY : z;
      for (size_t r = 0; r < num_rows; ++r) logits[r * vocab] = logits[r * vocab + 1] = 0.5F;
    }
    std::vector<std::unique_ptr<RandomRow>> owned;
    std::vector<SampleRow> rows;
    for (size_t r = 0; r < num_rows; ++r) {
      owned.push_back(std::make_unique<RandomRow>(vocab, &rng));
      rows.push_back(owned.back()->row);
    }
    const std::vector<float> untouched = logits;
    const Outcome got = RunSample(&cpu::Sample, &logits, rows, 8);
    ASSERT_TRUE(std::equal(logits.begin(), logits.end(), untouched.begin())) << "not restored";
    const Outcome expected = RunSample(&reference::Sample, &logits, rows, 8);
    ASSERT_EQ(got.status.ok(), expected.status.ok()) << got.status << expected.status;
    if (!got.status.ok()) continue;
    for (size_t r = 0; r < num_rows; ++r) {
      ASSERT_EQ(got.sampled[r].token, expected.sampled[r].token) << "round " << round;
      ASSERT_EQ(got.sampled[r].logprob, expected.sampled[r].logprob);
    }
    for (size_t i = 0; i < got.top.size(); ++i) {
      ASSERT_EQ(got.top[i].token, expected.top[i].token);
      ASSERT_EQ(got.top[i].logprob, expected.top[i].logprob);
    }
  }
}

TEST(SampleTest, EqualsTheReferenceOnALargeVocabulary) {
  std::mt19937_64 rng(testing::FreshSeed());
  const int64_t vocab = 151'936;
  std::vector<float> logits = testing::RandomFloats(vocab, &rng, 3.0F);
  for (const float temperature : {0.6F, 1.0F, 8.0F}) {
    for (const auto& [top_k, top_p, min_p] : {std::tuple<int, float, float>{0, 1.0F, 0.0F},
                                              {0, 0.95F, 0.0F},
                                              {0, 0.999F, 0.0F},
                                              {20, 0.95F, 0.0F},
                                              {100'000, 1.0F, 0.0F},
                                              {0, 1.0F, 0.05F},
                                              {50, 0.9F, 0.01F}}) {
      SampleRow row;
      row.temperature = temperature;
      row.top_k = top_k;
      row.top_p = top_p;
      row.min_p = min_p;
      row.seed = rng();
      row.num_logprobs = 20;
      const Outcome got = RunSample(&cpu::Sample, &logits, {row}, 20);
      const Outcome expected = RunSample(&reference::Sample, &logits, {row}, 20);
      ASSERT_TRUE(got.status.ok());
      ASSERT_EQ(got.sampled[0].token, expected.sampled[0].token)
          << temperature << " " << top_k << " " << top_p << " " << min_p;
      for (size_t i = 0; i < 20; ++i) ASSERT_EQ(got.top[i].token, expected.top[i].token);
    }
  }
}

// Upper 1e-6 quantile of chi-square with n degrees of freedom (Wilson and Hilferty, 1931).
double ChiSquareLimit(double n) {
  const double a = 2 / (9 * n);
  return n * std::pow(1 - a + 4.753 * std::sqrt(a), 3);
}

TEST(SampleTest, DrawsFollowTheDistribution) {
  const std::vector<float> z = {0.3F, -1.0F, 2.0F, 1.9F, -0.5F, 0.0F, 1.0F, -3.0F};
  for (const float temperature : {0.5F, 1.0F, 2.0F}) {
    std::vector<double> p(z.size());
    double sum = 0;
    for (size_t i = 0; i < z.size(); ++i) sum += p[i] = std::exp(z[i] / temperature);
    const int draws = 200'000;
    std::map<int32_t, int> count;
    for (int i = 0; i < draws; ++i) {
      SampleRow row;
      row.temperature = temperature;
      row.seed = 1234;
      row.position = static_cast<uint64_t>(i) / 4;
      row.sample_index = static_cast<uint32_t>(i) % 4;
      ++count[SampleOne(z, row)];
    }
    double chi_square = 0;
    for (size_t i = 0; i < z.size(); ++i) {
      const double expected = draws * p[i] / sum;
      chi_square += std::pow(count[static_cast<int32_t>(i)] - expected, 2) / expected;
    }
    EXPECT_LT(chi_square, ChiSquareLimit(7)) << temperature;
    EXPECT_GT(chi_square, 0.05) << "too good to be independent draws";
  }
}

std::set<int32_t> TokensDrawn(const std::vector<float>& z, SampleRow row) {
  std::set<int32_t> tokens;
  for (row.position = 0; row.position < 3000; ++row.position) tokens.insert(SampleOne(z, row));
  return tokens;
}

TEST(SampleTest, FiltersKeepTheTokensTheyPromise) {
  const std::vector<float> z = {1.0F, 3.0F, 2.0F, 3.0F, 2.0F, 0.0F};
  SampleRow row;
  row.top_k = 3;
  EXPECT_EQ(TokensDrawn(z, row), (std::set<int32_t>{1, 2, 3})) << "of the equal 2 and 4, the lower";
  row = {};
  row.min_p = 0.3F;  // exp(-1) = 0.37, exp(-2) = 0.14
  EXPECT_EQ(TokensDrawn(z, row), (std::set<int32_t>{1, 2, 3, 4}));
  row.min_p = 1.0F;
  EXPECT_EQ(TokensDrawn(z, row), (std::set<int32_t>{1, 3}));
  row = {};
  row.top_p = 0.3F;  // token 1 has 0.337
  EXPECT_EQ(TokensDrawn(z, row), (std::set<int32_t>{1}));
  row.top_p = 0.7F;  // 1 and 3 have 0.674
  EXPECT_EQ(TokensDrawn(z, row), (std::set<int32_t>{1, 2, 3}));
  row.top_k = 2;  // top_p is of what top_k left: 1 alone has half of it
  EXPECT_EQ(TokensDrawn(z, row), (std::set<int32_t>{1, 3}));
  row.top_p = 0.5F;
  EXPECT_EQ(TokensDrawn(z, row), (std::set<int32_t>{1}));
}

TEST(SampleTest, GreedyTakesTheLowestIdAmongEquals) {
  std::vector<float> z(5000, -1.0F);
  z[4321] = z[1234] = z[4999] = 7.0F;
  SampleRow row;
  row.temperature = 0;
  EXPECT_EQ(SampleOne(z, row), 1234);
  const int32_t banned[] = {1234, 99'999, -5};
  row.banned = banned;
  row.num_banned = 3;
  EXPECT_EQ(SampleOne(z, row), 4321);
}

TEST(SampleTest, PenaltiesFollowTheirFormulas) {
  const std::vector<float> z = {2.0F, -1.0F, 1.5F};
  SampleRow row;
  row.temperature = 0;
  const SeenToken prompt_only[] = {{0, 0}};
  row.seen = prompt_only;
  row.num_seen = 1;
  row.presence_penalty = 2.0F;
  row.frequency_penalty = 2.0F;
  EXPECT_EQ(SampleOne(z, row), 0) << "presence and frequency look at the output only";
  row.repetition_penalty = 1.5F;  // 2 / 1.5 = 1.33
  EXPECT_EQ(SampleOne(z, row), 2);
  const SeenToken output[] = {{0, 2}, {2, 1}};
  row = {};
  row.temperature = 0;
  row.seen = output;
  row.num_seen = 2;
  row.frequency_penalty = 0.3F;  // 1.4, -1, 1.2
  EXPECT_EQ(SampleOne(z, row), 0);
  row.frequency_penalty = 0.6F;  // 0.8, -1, 0.9
  EXPECT_EQ(SampleOne(z, row), 2);
  row.frequency_penalty = 0.0F;
  row.repetition_penalty = 0.25F;  // negative logits are multiplied: nothing to see here; 8, -1, 6
  row.presence_penalty = 1.0F;
  EXPECT_EQ(SampleOne(z, row), 0);
}

TEST(SampleTest, ARowDependsOnItsOwnNameOnly) {
  std::mt19937_64 rng(testing::FreshSeed());
  const int64_t vocab = 999;
  const size_t num_rows = 64;
  std::vector<float> logits = testing::RandomFloats(num_rows * vocab, &rng, 2.0F);
  std::vector<SampleRow> rows(num_rows);
  for (size_t r = 0; r < num_rows; ++r) {
    rows[r].seed = rng();
    rows[r].position = r;
    rows[r].top_p = r % 2 == 0 ? 1.0F : 0.9F;
  }
  const Outcome batch = RunSample(&cpu::Sample, &logits, rows);
  std::set<int32_t> distinct;
  for (size_t r = 0; r < num_rows; ++r) {
    const auto begin = logits.begin() + static_cast<int64_t>(r) * vocab;
    EXPECT_EQ(SampleOne({begin, begin + vocab}, rows[r]), batch.sampled[r].token);
    distinct.insert(batch.sampled[r].token);
  }
  EXPECT_GT(distinct.size(), 10U);
}

TEST(SampleTest, NamesTheFirstRowThatCannotBeSampled) {
  std::mt19937_64 rng(testing::FreshSeed());
  const int64_t vocab = 500;
  for (const float poison : {NAN, INFINITY}) {
    for (const int64_t at : {0, 250, 499}) {
      std::vector<float> logits = testing::RandomFloats(6 * vocab, &rng);
      logits[3 * vocab + at] = poison;
      logits[5 * vocab + at] = poison;
      for (const float temperature : {0.0F, 1.0F}) {
        std::vector<SampleRow> rows(6);
        for (SampleRow& row : rows) row.temperature = temperature;
        const absl::Status status = RunSample(&cpu::Sample, &logits, rows).status;
        EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
        EXPECT_NE(status.message().find("row 3 of 6"), absl::string_view::npos) << status;
      }
    }
  }
  std::vector<float> one = {1.0F};
  const int32_t banned = 0;
  SampleRow row;
  row.banned = &banned;
  row.num_banned = 1;
  EXPECT_EQ(RunSample(&cpu::Sample, &one, {row}).status.code(), absl::StatusCode::kInternal);
  EXPECT_EQ(one[0], 1.0F) << "restored after an error too";
}

TEST(SampleTest, ATinyTemperatureIsGreedy) {
  std::mt19937_64 rng(testing::FreshSeed());
  const std::vector<float> z = testing::RandomFloats(300, &rng);
  const auto best = std::max_element(z.begin(), z.end()) - z.begin();
  for (const float temperature : {1e-45F, 1e-30F, 1e-8F}) {
    SampleRow row;
    row.temperature = temperature;
    for (row.position = 0; row.position < 20; ++row.position) EXPECT_EQ(SampleOne(z, row), best);
  }
}

}  // namespace
}  // namespace zipage
