// Sampling through whole steps: seeds, penalties, stop ids, log-probabilities, corrupted rows.

#include "worker/model_runner.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/driver.h"
#include "tests/worker/golden.h"
#include "tests/worker/ranks.h"

namespace zipage {
namespace {

constexpr int kVocab = 512;

Config MakeConfig(int tp) {
  Config config;
  config.model = LoadGoldenModel("tiny-qwen2/f32").dir;
  config.tp = tp;
  config.kvcache_block_size = 16;
  config.num_kvcache_blocks = 1000;
  config.max_num_seqs = 160;
  config.max_num_batched_tokens = 8192;
  return config;
}

TestRequest SeededRequest() {
  TestRequest request;
  request.prompt = LoadGoldenModel("tiny-qwen2/f32").prompts[1].ids;
  request.sampling = {.temperature = 0.9F,
                      .top_p = 0.95F,
                      .top_k = 100,
                      .repetition_penalty = 1.1F,
                      .frequency_penalty = 0.2F,
                      .seed = 1234,
                      .max_tokens = 40,
                      .stop_token_ids = {}};
  request.sample_index = 2;
  return request;
}

std::vector<TokenId> RunAlone(int tp, TestRequest request) {
  Ranks ranks(MakeConfig(tp));
  ranks.StartRunners();
  Driver driver(&ranks, /*seed=*/3);
  driver.Add(&request);
  driver.RunToEnd();
  return request.output;
}

TEST(ModelRunnerTest, ASeedGivesTheSameTokensAloneInABatchAfterAPreemptionAndOnTwoRanks) {
  const std::vector<TokenId> alone = RunAlone(1, SeededRequest());
  ASSERT_EQ(alone.size(), 40);
  EXPECT_EQ(RunAlone(2, SeededRequest()), alone);

  Ranks ranks(MakeConfig(1));
  ranks.StartRunners();
  Driver driver(&ranks, /*seed=*/4);
  std::vector<TestRequest> others(63, SeededRequest());
  std::mt19937 random(5);
  for (TestRequest& other : others) {
    other.prompt.resize(1 + random() % 60, 17);
    for (TokenId& token : other.prompt) token = static_cast<TokenId>(random() % kVocab);
    other.chunk_size = 1 + random() % 30;
    other.sampling.seed = random();
    other.sampling.temperature = static_cast<float>(random() % 3);
    other.sampling.max_tokens = 1 + static_cast<int>(random() % 60);
  }
  TestRequest batched = SeededRequest();
  TestRequest preempted = SeededRequest();
  preempted.chunk_size = 4;
  for (int i = 0; i < 40; ++i) driver.Add(&others[i]);
  driver.Add(&batched);
  driver.Add(&preempted);
  for (int i = 40; i < 63; ++i) driver.Add(&others[i]);
  for (int i = 0; i < 15; ++i) {
    driver.Step();
    for (TestRequest& other : others) {
      const bool ended = static_cast<int32_t>(other.output.size()) == other.sampling.max_tokens;
      if (ended && other.decodes) {
        driver.Release(&other);
        other.decodes = false;
      }
    }
    if (i % 6 != 5) continue;
    driver.Release(&preempted);
    driver.Add(&preempted);
  }
  driver.RunToEnd();
  EXPECT_EQ(batched.output, alone);
  EXPECT_EQ(preempted.output, alone);
  EXPECT_NE(others[0].output, alone);
}

TEST(ModelRunnerTest, SamplesOfOneRequestDiffer) {
  TestRequest request = SeededRequest();
  const std::vector<TokenId> third = RunAlone(1, request);
  request.sample_index = 0;
  const std::vector<TokenId> first = RunAlone(1, request);
  EXPECT_NE(first, third);
  request.sampling.seed = 99;
  EXPECT_NE(RunAlone(1, request), first);
}

TEST(ModelRunnerTest, StopIdsAreNotSampledBeforeMinTokens) {
  const GoldenPrompt prompt = LoadGoldenModel("tiny-qwen2/f32").prompts[0];
  TestRequest request;
  request.prompt = prompt.ids;
  request.sampling = {.temperature = 0, .max_tokens = 12, .min_tokens = 5, .stop_token_ids = {}};
  request.sampling.stop_token_ids = prompt.greedy;
  std::sort(request.sampling.stop_token_ids.begin(), request.sampling.stop_token_ids.end());
  const auto is_stop = [&](TokenId token) {
    return std::binary_search(request.sampling.stop_token_ids.begin(),
                              request.sampling.stop_token_ids.end(), token);
  };
  const std::vector<TokenId> output = RunAlone(1, request);
  for (int i = 0; i < 5; ++i) EXPECT_FALSE(is_stop(output[i])) << i;
  // Output of before a preemption counts.
  request.output.assign(prompt.greedy.begin(), prompt.greedy.begin() + 5);
  const std::vector<TokenId> rest = RunAlone(1, request);
  EXPECT_EQ(rest[5], prompt.greedy[5]);
}

TEST(ModelRunnerTest, APresencePenaltyOfTwoChangesRepetitions) {
  TestRequest request;
  request.prompt = {1, 2, 3};
  request.sampling = {.temperature = 0,
                      .presence_penalty = 2,
                      .frequency_penalty = 2,
                      .max_tokens = 100,
                      .stop_token_ids = {}};
  const auto repeats = [](std::vector<TokenId> tokens) {
    std::sort(tokens.begin(), tokens.end());
    return tokens.end() - std::unique(tokens.begin(), tokens.end());
  };
  const auto with = repeats(RunAlone(1, request));
  request.sampling.presence_penalty = request.sampling.frequency_penalty = 0;
  EXPECT_LT(with, repeats(RunAlone(1, request)));
}

TEST(ModelRunnerTest, LogprobsAreThoseOfTheGoldenLogits) {
  const GoldenPrompt prompt = LoadGoldenModel("tiny-qwen2/f32").prompts[1];
  const float* logits = prompt.logits.data() + (prompt.ids.size() - 1) * kVocab;
  double sum = 0;
  for (int i = 0; i < kVocab; ++i) sum += std::exp(double{logits[i]});
  std::vector<float> sorted(logits, logits + kVocab);
  std::sort(sorted.rbegin(), sorted.rend());
  for (int tp : {1, 2}) {
    Ranks ranks(MakeConfig(tp));
    ranks.StartRunners();
    Driver driver(&ranks, /*seed=*/tp);
    std::vector<TestRequest> requests(4);
    const std::vector<int> counts = {-1, 0, 5, 1000};  // the last asks for more than there are
    for (size_t i = 0; i < requests.size(); ++i) {
      requests[i].prompt = prompt.ids;
      requests[i].sampling = {
          .temperature = 0.7F, .seed = i, .max_tokens = 1, .stop_token_ids = {}};
      requests[i].sampling.num_logprobs = counts[i];
      driver.Add(&requests[i]);
    }
    driver.RunToEnd();
    for (size_t i = 0; i < requests.size(); ++i) {
      ASSERT_EQ(requests[i].samples.size(), 1);
      const SampledToken& sampled = requests[i].samples[0];
      ASSERT_EQ(sampled.logprobs.size(), std::min(1 + counts[i], 1 + kVocab));
      if (counts[i] < 0) continue;
      EXPECT_EQ(sampled.logprobs[0].token, sampled.token);
      EXPECT_NEAR(sampled.logprobs[0].logprob, logits[sampled.token] - std::log(sum), 2e-3);
      for (size_t k = 1; k < sampled.logprobs.size(); ++k) {
        EXPECT_NEAR(sampled.logprobs[k].logprob, sorted[k - 1] - std::log(sum), 2e-3) << k;
      }
    }
  }
}

TEST(ModelRunnerTest, ACorruptedSequenceIsReportedAndTheOthersGoOn) {
  const GoldenModel golden = LoadGoldenModel("tiny-qwen2/f32");
  for (int tp : {1, 2}) {
    Ranks ranks(MakeConfig(tp));
    const size_t block_floats = ranks.rank(0).pool->shape().plane_bytes() / sizeof(float);
    ranks.StartRunners();
    Driver driver(&ranks, /*seed=*/tp);
    std::vector<TestRequest> requests(3);
    for (TestRequest& request : requests) {
      request.prompt = golden.prompts[1].ids;
      request.sampling = {.temperature = 0, .max_tokens = 64, .stop_token_ids = {}};
      driver.Add(&request);
    }
    for (int i = 0; i < 5; ++i) driver.Step();
    std::fill_n(ranks.rank(0).first_keys + requests[1].table[0] * block_floats, block_floats,
                std::numeric_limits<float>::quiet_NaN());
    driver.Step();
    EXPECT_TRUE(requests[1].corrupted);
    EXPECT_EQ(requests[1].output.size(), 5);
    // It still counts as decoding until it is released: the next plan may be under way.
    driver.Step();
    driver.RunToEnd();
    for (int i : {0, 2}) {
      EXPECT_FALSE(requests[i].corrupted);
      EXPECT_EQ(requests[i].output, golden.prompts[1].greedy);
    }
  }
}

TEST(ModelRunnerTest, MoreSamplesThanLogitRowsAreSampledInParts) {
  const GoldenModel golden = LoadGoldenModel("tiny-qwen2/f32");
  for (int tp : {1, 2}) {
    Ranks ranks(MakeConfig(tp));
    ranks.StartRunners();
    Driver driver(&ranks, /*seed=*/tp);
    std::vector<TestRequest> requests(Transformer::kMaxLogitRows + 20);
    for (size_t i = 0; i < requests.size(); ++i) {
      requests[i].prompt = golden.prompts[i % 2].ids;
      requests[i].sampling = {.temperature = 0, .max_tokens = 6, .stop_token_ids = {}};
      driver.Add(&requests[i]);
    }
    driver.RunToEnd();
    for (size_t i = 0; i < requests.size(); ++i) {
      const std::vector<TokenId>& greedy = golden.prompts[i % 2].greedy;
      EXPECT_TRUE(std::equal(requests[i].output.begin(), requests[i].output.end(), greedy.begin()))
          << i;
    }
  }
}

TEST(ModelRunnerTest, AnEmptyPlanIsAnsweredAndAGapIsAnError) {
  Ranks ranks(MakeConfig(1));
  ranks.StartRunners();
  StepPlan plan;
  plan.step = 1;
  const auto result = ranks.Run(plan);
  ASSERT_TRUE(result.ok());
  EXPECT_EQ(result->step, 1);
  EXPECT_TRUE(result->sampled.empty());
  plan.step = 3;
  EXPECT_EQ(ranks.Run(plan).status().code(), absl::StatusCode::kInternal);
}

}  // namespace
}  // namespace zipage
