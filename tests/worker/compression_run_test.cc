// Compression and swaps through whole steps: a sequence's tokens depend on nothing but itself.

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "glog/logging.h"
#include "gtest/gtest.h"
#include "tests/worker/driver.h"
#include "tests/worker/ranks.h"
#include "tests/worker/test_files.h"

namespace zipage {
namespace {

constexpr int kVocab = 97;
constexpr int kBlockSize = 16;
constexpr int kWindow = 6;

// A Llama with random weights whose folder lives as long as the tests. Five layers, so that they
// are compressed in uneven groups; two KV heads, which four ranks share.
std::string RandomModel() {
  static const auto* const dir = [] {
    auto* made = new testing::TempDir;
    nlohmann::json json = testing::TinyConfig();
    json["hidden_size"] = 64;
    json["intermediate_size"] = 96;
    json["num_hidden_layers"] = 5;
    json["head_dim"] = 16;
    json["vocab_size"] = kVocab;
    json["max_position_embeddings"] = 512;
    made->Write("config.json", json.dump());
    const auto config = LoadModelConfig(made->path());
    CHECK(config.ok()) << config.status();
    std::vector<testing::TestTensor> tensors = testing::RandomWeights(*config, /*seed=*/3);
    for (testing::TestTensor& tensor : tensors) {
      if (tensor.shape.size() == 1) continue;
      // Neither saturated nor flat, so that every token depends on what attention sees.
      auto* values = reinterpret_cast<float*>(tensor.bytes.data());
      for (size_t i = 0; i < tensor.bytes.size() / sizeof(float); ++i) values[i] *= 0.2F;
    }
    made->Write("model.safetensors", testing::SafetensorsBytes(tensors));
    return made;
  }();
  return dir->path();
}

Config MakeConfig(const std::string& policy) {
  Config config;
  config.model = RandomModel();
  config.compression_policy = policy;
  config.kvcache_block_size = kBlockSize;
  config.query_cache_len = kWindow;
  config.max_cache_blocks_per_seq = 3;
  config.num_kvcache_blocks = 300;
  config.max_num_seqs = 24;
  config.max_num_batched_tokens = 2048;
  config.layer_stride = 2;
  config.cpu_threads = 1;  // steps are too small for more
  return config;
}

TestRequest MakeRequest(uint32_t seed, int prompt, int output, int64_t budget) {
  std::mt19937 random(seed);
  TestRequest request;
  for (int i = 0; i < prompt; ++i) {
    request.prompt.push_back(static_cast<TokenId>(random() % kVocab));
  }
  request.sampling = {.temperature = seed % 3 == 0 ? 0.0F : 0.8F,
                      .repetition_penalty = seed % 2 == 0 ? 1.0F : 1.2F,
                      .seed = seed,
                      .max_tokens = output,
                      .stop_token_ids = {}};
  request.sample_index = seed % 4;
  request.budget = budget;
  return request;
}

// What a request gives when nothing else runs.
TestRequest RunAlone(const Config& config, TestRequest request, uint32_t seed = 1) {
  Ranks ranks(config);
  ranks.StartRunners();
  Driver driver(&ranks, seed);
  driver.Add(&request);
  driver.RunToEnd();
  EXPECT_FALSE(request.corrupted);
  return request;
}

struct Variant {
  std::string name;
  Config config;
};

std::vector<Variant> Variants() {
  std::vector<Variant> variants;
  for (const char* policy : {"paper", "pinned_score", "pinned_random", "recency"}) {
    variants.push_back({policy, MakeConfig(policy)});
  }
  variants.push_back({"paper_other", MakeConfig("paper")});
  Config& paper = variants.back().config;
  paper.lightning_similarity = false;
  paper.continues_pooling = paper.max_norm = paper.use_attention_sink = true;
  paper.pin_prompt = "on";
  paper.compress_prefill = true;
  variants.push_back({"pinned_score_prefill", MakeConfig("pinned_score")});
  variants.back().config.compress_prefill = true;
  return variants;
}

class CompressionRunTest : public ::testing::TestWithParam<Variant> {};

TEST_P(CompressionRunTest, ASequenceGivesTheSameTokensAloneAndAmongOthers) {
  const Config& config = GetParam().config;
  // Prompts of every kind of length around a block and a budget, and budgets of several sizes.
  std::vector<TestRequest> requests;
  const std::vector<std::pair<int, int64_t>> shapes = {{1, 2},  {15, 1}, {16, 3}, {17, 2},
                                                       {31, 1}, {64, 3}, {65, 3}, {95, 2},
                                                       {96, 4}, {97, 5}, {40, 0}, {47, 2}};
  for (const auto& [prompt, budget] : shapes) {
    requests.push_back(MakeRequest(static_cast<uint32_t>(requests.size()), prompt, 90, budget));
  }
  std::vector<TestRequest> alone;
  for (const TestRequest& request : requests) alone.push_back(RunAlone(config, request));
  Ranks ranks(config);
  ranks.StartRunners();
  Driver driver(&ranks, /*seed=*/2);
  for (size_t i = 0; i < requests.size(); ++i) {
    requests[i].pauses = i % 2 == 1;
    requests[i].late_query_slot = i % 3 == 1;
    requests[i].chunk_size = i % 4 == 2 ? 7 : 1 << 20;
    driver.Add(&requests[i]);
    driver.Step();
  }
  driver.RunToEnd();
  for (size_t i = 0; i < requests.size(); ++i) {
    EXPECT_EQ(requests[i].output, alone[i].output) << "prompt of " << requests[i].prompt.size();
    EXPECT_EQ(requests[i].prompt_tokens_kept, alone[i].prompt_tokens_kept);
    EXPECT_EQ(requests[i].num_compressions, alone[i].num_compressions);
    if (requests[i].budget > 0) {
      EXPECT_GE(requests[i].num_compressions, 2) << i;
      EXPECT_LE(requests[i].num_cached, (requests[i].budget + 1) * kBlockSize);
    }
  }
}

TEST_P(CompressionRunTest, CompressionMattersAndSoDoesTheBudget) {
  const Config& config = GetParam().config;
  const TestRequest full = RunAlone(config, MakeRequest(3, 40, 100, 0));
  const TestRequest wide = RunAlone(config, MakeRequest(3, 40, 100, 4));
  const TestRequest narrow = RunAlone(config, MakeRequest(3, 40, 100, 2));
  EXPECT_NE(full.output, wide.output);
  EXPECT_NE(full.output, narrow.output);
  EXPECT_NE(wide.output, narrow.output);
  // Until the first compression nothing differs.
  for (int i = 0; i < 5 * kBlockSize - 40; ++i) EXPECT_EQ(full.output[i], wide.output[i]);
}

TEST_P(CompressionRunTest, AReplayGivesTheSameTokensWhereverItWasPreempted) {
  const Config& config = GetParam().config;
  const TestRequest request = MakeRequest(5, 37, 70, 2);
  const TestRequest alone = RunAlone(config, request);
  Ranks ranks(config);
  ranks.StartRunners();
  Driver driver(&ranks, /*seed=*/6);
  // Preempted after every number of steps around the first compressions, and twice in a row.
  for (int steps = 1; steps < 45; ++steps) {
    TestRequest preempted = request;
    preempted.chunk_size = steps % 2 == 0 ? 11 : 1 << 20;
    preempted.pauses = steps % 3 == 0;
    preempted.late_query_slot = steps % 5 == 0;
    driver.Add(&preempted);
    for (int i = 0; i < steps; ++i) driver.Step();
    driver.Release(&preempted);
    preempted.prompt_tokens_kept.clear();
    driver.Add(&preempted);
    driver.Step();
    driver.Release(&preempted);
    preempted.prompt_tokens_kept.clear();
    driver.Add(&preempted);
    driver.RunToEnd();
    ASSERT_EQ(preempted.output, alone.output) << "preempted after " << steps << " steps";
    ASSERT_EQ(preempted.prompt_tokens_kept, alone.prompt_tokens_kept);
  }
}

TEST_P(CompressionRunTest, ASwapAtAnyStepChangesNothing) {
  const Config& config = GetParam().config;
  const TestRequest request = MakeRequest(7, 37, 60, 2);
  const TestRequest alone = RunAlone(config, request);
  Ranks ranks(config);
  ranks.StartRunners();
  Driver driver(&ranks, /*seed=*/8);
  // Others that overwrite what a swapped sequence gave up.
  TestRequest other = MakeRequest(4, 20, 400, 2);
  driver.Add(&other);
  for (int steps = 1; steps < 50; ++steps) {
    TestRequest swapped = request;
    swapped.pauses = steps % 2 == 0;
    driver.Add(&swapped);
    for (int i = 0; i < steps; ++i) driver.Step();
    driver.SwapOut(&swapped);
    TestRequest filler = MakeRequest(steps, 50, 3, 0);
    driver.Add(&filler);
    for (int i = 0; i < 1 + steps % 3; ++i) driver.Step();
    driver.SwapIn(&swapped);
    driver.Step();
    driver.SwapOut(&swapped);
    driver.Step();
    driver.SwapIn(&swapped);
    driver.Release(&filler);
    while (static_cast<int32_t>(swapped.output.size()) < swapped.sampling.max_tokens) driver.Step();
    driver.Release(&swapped);
    ASSERT_EQ(swapped.output, alone.output) << "swapped after " << steps << " steps";
    if (other.output.size() < 300) continue;
    driver.Release(&other);
    other.output.clear();
    driver.Add(&other);
  }
}

TEST_P(CompressionRunTest, SharedPrefixBlocksAreNeverWritten) {
  const Config& config = GetParam().config;
  // The first two blocks are one request's prompt, and the others' too.
  TestRequest owner = MakeRequest(2, 40, 150, 0);
  std::vector<TestRequest> sharers;
  for (uint32_t i = 0; i < 6; ++i) {
    TestRequest& sharer = sharers.emplace_back(MakeRequest(10 + i, 33 + 5 * i, 80, 2 + i % 2));
    std::copy_n(owner.prompt.begin(), 32, sharer.prompt.begin());
  }
  std::vector<TestRequest> alone;
  for (const TestRequest& sharer : sharers) alone.push_back(RunAlone(config, sharer));
  const TestRequest owner_alone = RunAlone(config, owner);
  Ranks ranks(config);
  ranks.StartRunners();
  Driver driver(&ranks, /*seed=*/9);
  driver.Add(&owner);
  driver.Step();
  for (TestRequest& sharer : sharers) {
    sharer.prefix.assign(owner.table.begin(), owner.table.begin() + 2);
    driver.Add(&sharer);
    driver.Step();
  }
  driver.RunToEnd();
  EXPECT_EQ(owner.output, owner_alone.output);
  for (size_t i = 0; i < sharers.size(); ++i) {
    EXPECT_EQ(sharers[i].output, alone[i].output) << i;
    EXPECT_GE(sharers[i].num_compressions, 2);
  }
}

TEST_P(CompressionRunTest, RanksAndLayerStrideChangeNothing) {
  Config config = GetParam().config;
  const TestRequest request = MakeRequest(3, 37, 100, 3);
  const TestRequest alone = RunAlone(config, request);
  EXPECT_GE(alone.num_compressions, 5);
  for (int layer_stride : {1, 5}) {
    config.layer_stride = layer_stride;
    EXPECT_EQ(RunAlone(config, request).output, alone.output) << layer_stride;
  }
  config.layer_stride = 2;
  // Four ranks share two KV heads.
  for (int tp : {2, 4}) {
    config.tp = tp;
    const TestRequest ranks = RunAlone(config, request);
    EXPECT_EQ(ranks.output, alone.output) << tp;
    ASSERT_EQ(ranks.prompt_tokens_kept.size(), alone.prompt_tokens_kept.size());
    for (size_t i = 0; i < ranks.prompt_tokens_kept.size(); ++i) {
      EXPECT_FLOAT_EQ(ranks.prompt_tokens_kept[i], alone.prompt_tokens_kept[i]) << tp;
    }
  }
}

TEST_P(CompressionRunTest, RunsInBFloat16) {
  Config config = GetParam().config;
  config.dtype = "bfloat16";
  if (!CpuBackend(1).ResolveDType("bfloat16", DType::kBFloat16).ok()) {
    GTEST_SKIP() << "this CPU has no bf16 products";
  }
  const TestRequest request = MakeRequest(6, 37, 70, 2);
  const TestRequest alone = RunAlone(config, request);
  Ranks ranks(config);
  ranks.StartRunners();
  Driver driver(&ranks, /*seed=*/3);
  TestRequest batched = request;
  TestRequest other = MakeRequest(8, 20, 100, 2);
  driver.Add(&other);
  driver.Add(&batched);
  for (int i = 0; i < 20; ++i) driver.Step();
  driver.SwapOut(&batched);
  driver.Step();
  driver.SwapIn(&batched);
  driver.RunToEnd();
  EXPECT_EQ(batched.output, alone.output);
}

// Logits by position of everything that ran.
std::map<int64_t, std::vector<float>> AllLogits(Ranks* ranks, const std::vector<StepPlan>& plans) {
  std::map<int64_t, std::vector<float>> logits;
  const LogitsSink sink = [&logits](SequenceSlot, int64_t position, const float* row) {
    logits.emplace(position, std::vector<float>(row, row + kVocab));
  };
  for (const StepPlan& plan : plans) {
    ranks->ForEach([&](int rank) {
      const auto result = ranks->rank(rank).runner->Run(plan, sink);
      ASSERT_TRUE(result.ok()) << result.status();
    });
  }
  return logits;
}

// Prompt and output again as prompt: two chunks and a compression give what decoding gave.
TEST_P(CompressionRunTest, TheSinkSeesEveryPositionsLogitsAndTeacherForcingIsDecoding) {
  for (int tp : {1, 2}) {
    Config config = GetParam().config;
    config.tp = tp;
    const int budget = 2;
    const int cut = (budget + 1) * kBlockSize;
    NewSequence added;
    added.sequence_slot = 1;
    for (int i = 0; i < 30; ++i) added.tokens.push_back((i * 31) % kVocab);
    added.num_prompt_tokens = 30;
    added.block_table = {4, 9, 2};
    added.sampling.temperature = 0;
    Compression compression{1, {4, 9, 2}, {4, 9, 7}};
    if (ResolveCompression(config).pin_prompt == "on") compression.num_pinned = 16;

    std::vector<StepPlan> plans(1);
    plans[0].step = 1;
    plans[0].new_sequences = {added};
    plans[0].query_slots = {{1, 3}};
    plans[0].chunks = {{1, 0, 30, true}};
    for (int position = 30; position < cut + 10; ++position) {
      StepPlan& plan = plans.emplace_back();
      plan.step = plans.size();
      plan.num_decoding = 1;
      if (position == cut) plan.compressions = {compression};
    }
    Ranks decoding(config);
    decoding.StartRunners();
    const auto decoded = AllLogits(&decoding, plans);
    ASSERT_EQ(decoded.size(), cut + 10);

    for (int position = 29; position < cut + 9; ++position) {
      const std::vector<float>& row = decoded.at(position);
      added.tokens.push_back(
          static_cast<TokenId>(std::max_element(row.begin(), row.end()) - row.begin()));
    }
    std::vector<StepPlan> forced(2);
    forced[0].step = 1;
    forced[0].new_sequences = {added};
    forced[0].query_slots = {{1, 0}};
    forced[0].chunks = {{1, 0, cut, false}};
    forced[1].step = 2;
    forced[1].compressions = {compression};
    forced[1].chunks = {{1, cut, 10, true}};
    Ranks replaying(config);
    replaying.StartRunners();
    EXPECT_TRUE(AllLogits(&replaying, forced) == decoded) << "tp " << tp;
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, CompressionRunTest, ::testing::ValuesIn(Variants()),
                         [](const auto& info) { return info.param.name; });

TEST(CompressionAccountingTest, RecencyForgetsThePromptSlotBySlot) {
  const TestRequest request = RunAlone(MakeConfig("recency"), MakeRequest(1, 40, 50, 2));
  // 48 slots, of which 40 are prompt; 32 are kept, then 16 more output slots push out as many.
  EXPECT_EQ(request.prompt_tokens_kept, (std::vector<float>{24, 8, 0}));
  Config sinks = MakeConfig("recency");
  sinks.use_attention_sink = true;
  const TestRequest with_sinks = RunAlone(sinks, MakeRequest(1, 40, 50, 2));
  EXPECT_EQ(with_sinks.prompt_tokens_kept, (std::vector<float>{24, 8, 4}));
  Config prefill = MakeConfig("recency");
  prefill.compress_prefill = true;
  // 32 of the first 48, then 16 more of which eight are prompt, and so on.
  const TestRequest long_prompt = RunAlone(prefill, MakeRequest(1, 56, 50, 2));
  EXPECT_EQ(long_prompt.prompt_tokens_kept, (std::vector<float>{32, 24, 8, 0}));
}

TEST(CompressionAccountingTest, PinnedPromptsStayUpToHalfTheBudget) {
  for (const char* policy : {"pinned_score", "pinned_random"}) {
    const TestRequest whole = RunAlone(MakeConfig(policy), MakeRequest(1, 15, 80, 2));
    EXPECT_EQ(whole.prompt_tokens_kept, (std::vector<float>{15, 15, 15})) << policy;
    const TestRequest half = RunAlone(MakeConfig(policy), MakeRequest(1, 40, 80, 2));
    for (float kept : half.prompt_tokens_kept) {
      EXPECT_GE(kept, 16) << policy;
      EXPECT_LT(kept, 32) << policy;
    }
  }
}

TEST(CompressionAccountingTest, RepeatedRoundsAndSamplesDrawOtherSlots) {
  const TestRequest request = MakeRequest(2, 30, 60, 2);
  TestRequest sample = request;
  sample.sample_index = 3;
  const auto kept = [](const TestRequest& r) {
    return RunAlone(MakeConfig("pinned_random"), r).prompt_tokens_kept;
  };
  EXPECT_NE(kept(request), kept(sample));
}

}  // namespace
}  // namespace zipage
