// Every logit and every greedy token of the golden models, however the work is cut.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "tests/worker/driver.h"
#include "tests/worker/golden.h"
#include "tests/worker/ranks.h"

namespace zipage {
namespace {

// A step of one sequence whose blocks are given; plain memory is the CPU backend's device memory.
struct HandMadeBatch {
  HandMadeBatch(const std::vector<TokenId>& tokens, int64_t start, int64_t count,
                const std::vector<BlockId>& table, int64_t block_size)
      : ids(tokens.begin() + start, tokens.begin() + start + count), table(table) {
    for (int64_t i = start; i < start + count; ++i) {
      positions.push_back(static_cast<int32_t>(i));
      slots.push_back(table[i / block_size] * block_size + i % block_size);
      rows.push_back(static_cast<int32_t>(i - start));
    }
    query_start = {0, static_cast<int32_t>(count)};
    context_len = {static_cast<int32_t>(start + count)};
  }
  Batch Get() const {
    return {.ids = ids.data(),
            .positions = positions.data(),
            .slot_mapping = slots.data(),
            .query_start = query_start.data(),
            .context_len = context_len.data(),
            .block_tables = table.data(),
            .logit_rows = rows.data(),
            .num_tokens = static_cast<int64_t>(ids.size()),
            .num_seqs = 1,
            .max_blocks = static_cast<int>(table.size()),
            .num_logit_rows = static_cast<int64_t>(ids.size())};
  }
  std::vector<int32_t> ids, positions, rows, query_start, context_len;
  std::vector<int64_t> slots;
  std::vector<BlockId> table;
};

Config MakeConfig(const GoldenModel& golden, int tp, int block_size, const std::string& dtype) {
  Config config;
  config.model = golden.dir;
  config.tp = tp;
  config.dtype = dtype;
  config.kvcache_block_size = block_size;
  config.num_kvcache_blocks = 1024 / block_size + 20;
  config.max_num_seqs = 8;
  config.max_num_batched_tokens = 512;
  return config;
}

// Logits at every position of `prompt`, cut at `cuts` (ascending, the last is the length).
std::vector<float> Logits(Ranks* ranks, const GoldenPrompt& prompt,
                          const std::vector<int64_t>& cuts, uint32_t seed) {
  const int64_t block_size = ranks->config().kvcache_block_size;
  std::vector<BlockId> table(ranks->config().num_kvcache_blocks);
  std::iota(table.begin(), table.end(), 0);
  std::shuffle(table.begin(), table.end(), std::mt19937(seed));
  ranks->Poison();
  std::vector<float> logits;
  ranks->ForEach([&](int r) {
    Ranks::Rank& rank = ranks->rank(r);
    const int64_t vocab = rank.transformer->config().vocab_size;
    int64_t start = 0;
    for (int64_t end : cuts) {
      const HandMadeBatch batch(prompt.ids, start, end - start, table, block_size);
      const absl::Status status = rank.transformer->Forward(batch.Get(), *rank.pool);
      ASSERT_TRUE(status.ok()) << status;
      auto values = rank.transformer->Logits(0, end - start);
      ASSERT_TRUE(values.ok()) << values.status();
      if (r == 0) logits.insert(logits.end(), *values, *values + (end - start) * vocab);
      start = end;
    }
  });
  return logits;
}

std::vector<int64_t> Pieces(int64_t length, int64_t size) {
  std::vector<int64_t> cuts;
  for (int64_t end = size; end < length; end += size) cuts.push_back(end);
  cuts.push_back(length);
  return cuts;
}

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

std::vector<int> TensorParallelSizes(const GoldenModel& golden) {
  std::vector<int> sizes = {1};
  for (int tp : {2, 3, 4}) {
    if (golden.num_heads % tp == 0) sizes.push_back(tp);
  }
  return sizes;
}

class GoldenModelsTest : public testing::TestWithParam<std::string> {};

TEST_P(GoldenModelsTest, EveryLogitAgreesWhereverThePromptIsCut) {
  const GoldenModel golden = LoadGoldenModel(GetParam());
  uint32_t seed = 1;
  for (int tp : TensorParallelSizes(golden)) {
    for (int block_size : {16, 256}) {
      Ranks ranks(MakeConfig(golden, tp, block_size, "float32"));
      const auto check = [&](int prompt, const std::vector<int64_t>& cuts) {
        const GoldenPrompt& p = golden.prompts[prompt];
        const Difference difference = Compare(Logits(&ranks, p, cuts, ++seed), p.logits);
        EXPECT_LE(difference.max, 1e-3) << "tp " << tp << ", blocks of " << block_size
                                        << ", prompt " << prompt << ", first cut at " << cuts[0];
      };
      check(0, {1});
      for (int64_t cut = 1; cut < 17; ++cut) check(1, {cut, 17});
      check(1, {17});
      check(1, Pieces(17, 1));
      for (int64_t size : {1, 7, 16, 31, 32, 33, 64, 79, 80}) check(2, Pieces(80, size));
    }
  }
}

TEST_P(GoldenModelsTest, ComputedInBFloat16LogitsAreAsCloseAsTorchs) {
  const GoldenModel golden = LoadGoldenModel(GetParam());
  if (!CpuBackend(1).ResolveDType("bfloat16", DType::kBFloat16).ok()) {
    GTEST_SKIP() << "this CPU has no bf16 products";
  }
  for (int tp : TensorParallelSizes(golden)) {
    Ranks ranks(MakeConfig(golden, tp, 16, "bfloat16"));
    for (const GoldenPrompt& prompt : golden.prompts) {
      const auto length = static_cast<int64_t>(prompt.ids.size());
      const Difference difference =
          Compare(Logits(&ranks, prompt, Pieces(length, 33), 5), prompt.logits);
      EXPECT_LE(difference.max, 2 * prompt.bf16_max_abs_diff) << "tp " << tp << ", " << length;
      EXPECT_LE(difference.rms, 1.5 * prompt.bf16_rms_diff) << "tp " << tp << ", " << length;
    }
  }
}

TEST_P(GoldenModelsTest, GreedyTokensAreIdenticalInOneBatch) {
  const GoldenModel golden = LoadGoldenModel(GetParam());
  for (int tp : TensorParallelSizes(golden)) {
    for (int block_size : {16, 256}) {
      Ranks ranks(MakeConfig(golden, tp, block_size, "float32"));
      ranks.StartRunners();
      Driver driver(&ranks, /*seed=*/block_size + tp);
      std::vector<TestRequest> requests;
      for (int64_t chunk_size : {1 << 20, 13}) {
        for (const GoldenPrompt& prompt : golden.prompts) {
          TestRequest& request = requests.emplace_back();
          request.prompt = prompt.ids;
          request.chunk_size = chunk_size;
          request.sampling = {.temperature = 0, .max_tokens = 64, .stop_token_ids = {}};
        }
      }
      for (TestRequest& request : requests) driver.Add(&request);
      driver.RunToEnd();
      for (size_t i = 0; i < requests.size(); ++i) {
        EXPECT_EQ(requests[i].output, golden.prompts[i % golden.prompts.size()].greedy)
            << "tp " << tp << ", blocks of " << block_size << ", request " << i;
      }
    }
  }
}

TEST_P(GoldenModelsTest, GreedyTokensAreIdenticalAfterAPrefixHitAndAPreemption) {
  const GoldenModel golden = LoadGoldenModel(GetParam());
  const GoldenPrompt& prompt = golden.prompts[2];
  for (int tp : TensorParallelSizes(golden)) {
    Ranks ranks(MakeConfig(golden, tp, 16, "float32"));
    ranks.StartRunners();
    Driver driver(&ranks, /*seed=*/tp);
    TestRequest first;
    first.prompt = prompt.ids;
    first.sampling = {.temperature = 0, .max_tokens = 64, .stop_token_ids = {}};
    driver.Add(&first);
    driver.Step();

    // The first 64 and 16 tokens are in blocks that the first request is using.
    TestRequest hit = first;
    hit.output.clear();
    hit.chunk_size = 5;
    TestRequest short_hit = hit;
    hit.prefix.assign(first.table.begin(), first.table.begin() + 4);
    short_hit.prefix.assign(first.table.begin(), first.table.begin() + 1);
    driver.Add(&hit);
    driver.Add(&short_hit);
    for (int i = 0; i < 20; ++i) driver.Step();

    // Preempted while it decodes, and while it prefills; its blocks go to others.
    driver.Release(&first);
    driver.Add(&first);
    driver.Step();
    driver.Step();
    driver.Release(&short_hit);
    short_hit.prefix.clear();
    driver.Add(&short_hit);
    driver.Step();
    driver.Release(&short_hit);
    driver.Add(&short_hit);
    driver.RunToEnd();
    EXPECT_EQ(first.output, prompt.greedy) << "tp " << tp;
    EXPECT_EQ(hit.output, prompt.greedy) << "tp " << tp;
    EXPECT_EQ(short_hit.output, prompt.greedy) << "tp " << tp;
  }
}

INSTANTIATE_TEST_SUITE_P(All, GoldenModelsTest, testing::ValuesIn(GoldenModelNames()),
                         [](const auto& info) {
                           std::string name = info.param;
                           for (char& c : name) c = std::isalnum(c) ? c : '_';
                           return name;
                         });

TEST(GoldenModelsListTest, AllGoldenModelsAreThere) {
  if (!HasSharedGoldenModels()) {
    GTEST_SKIP() << "only two of ten golden checkpoints are tested: set ZIPAGE_SHARED_DIR";
  }
  EXPECT_EQ(GoldenModelNames().size(), 10);
}

}  // namespace
}  // namespace zipage
