// Whole comparisons on tiny golden models.

#include "worker/fidelity/fidelity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/golden.h"
#include "tests/worker/test_files.h"

namespace zipage {
namespace {

using nlohmann::json;
using ::testing::HasSubstr;

constexpr int kVocab = 512;
constexpr int kBlock = 16;

class FidelityTest : public ::testing::Test {
 protected:
  static Config Base() {
    Config config;
    config.model = LoadGoldenModel("tiny-qwen2/f32").dir;
    config.dtype = "float32";
    config.cpu_threads = 1;
    config.kvcache_block_size = kBlock;
    config.max_cache_blocks_per_seq = 2;
    config.query_cache_len = 8;
    return config;
  }

  static json Line(const std::vector<TokenId>& prompt, const std::vector<TokenId>& output) {
    return {{"id", std::to_string(prompt.size())},
            {"prompt_token_ids", prompt},
            {"output_token_ids", output}};
  }

  static std::vector<TokenId> RandomTokens(size_t n, std::mt19937* random) {
    std::vector<TokenId> tokens(n);
    for (TokenId& token : tokens) token = static_cast<TokenId>((*random)() % kVocab);
    return tokens;
  }

  // Prompts and outputs of many lengths, shorter and longer than the budget.
  static std::vector<json> RandomLines(int n, uint32_t seed) {
    std::mt19937 random(seed);
    std::vector<json> lines;
    for (int i = 0; i < n; ++i) {
      const size_t prompt = 1 + random() % 90;
      const size_t output = 1 + random() % 150;
      lines.push_back(Line(RandomTokens(prompt, &random), RandomTokens(output, &random)));
      lines.back()["seed"] = random() % 1000;
    }
    return lines;
  }

  absl::StatusOr<FidelityReport> TryRun(const std::vector<json>& lines,
                                        const std::vector<std::string>& settings,
                                        const Config& base) {
    std::string text;
    for (const json& line : lines) text += line.dump() + "\n";
    dir_.Write("in.jsonl", text);
    std::vector<FidelitySetting> parsed;
    for (const std::string& setting : settings) {
      ZIPAGE_ASSIGN_OR_RETURN(parsed.emplace_back(), ParseSetting(setting, base));
    }
    return RunFidelity(base, parsed, dir_.File("in.jsonl"));
  }

  FidelityReport Run(const std::vector<json>& lines, const std::vector<std::string>& settings,
                     const Config& base = Base()) {
    absl::StatusOr<FidelityReport> report = TryRun(lines, settings, base);
    if (report.ok()) return *std::move(report);
    ADD_FAILURE() << report.status();
    return {};
  }

  static int64_t NumOutputs(const std::vector<json>& lines) {
    int64_t sum = 0;
    for (const json& line : lines) sum += static_cast<int64_t>(line["output_token_ids"].size());
    return sum;
  }

  static void ExpectExact(const FidelitySums& sums) {
    EXPECT_EQ(sums.agreed, sums.positions);
    EXPECT_EQ(sums.divergence, 0.0);
    EXPECT_EQ(sums.logprob, sums.full_logprob);
    EXPECT_EQ(sums.predicted, sums.full_predicted);
  }

  testing::TempDir dir_;
};

TEST_F(FidelityTest, WhatIsNeverCompressedIsExact) {
  const std::vector<json> lines = RandomLines(12, 1);
  const FidelityReport report =
      Run(lines, {"none:compression_policy=none",
                  "large:compression_policy=paper,max_cache_blocks_per_seq=20"});
  for (const FidelityReport::Entry& entry : report.entries) {
    SCOPED_TRACE(entry.setting.name);
    EXPECT_EQ(entry.statistics.num_cases(), 12);
    EXPECT_EQ(entry.statistics.all().positions, NumOutputs(lines));
    EXPECT_EQ(entry.statistics.after_compression().positions, 0);
    EXPECT_EQ(entry.statistics.num_compressions(), 0);
    ExpectExact(entry.statistics.all());
  }
}

TEST_F(FidelityTest, OnlyPositionsAfterTheFirstCompressionDiffer) {
  const std::vector<json> lines = RandomLines(12, 2);
  for (const std::string prefill : {"true", "false"}) {
    std::vector<std::string> settings;
    for (const std::string policy : {"paper", "pinned_score", "pinned_random", "recency"}) {
      settings.push_back(policy + ":compression_policy=" + policy + ",compress_prefill=" + prefill);
    }
    int64_t positions = 0;
    int64_t compressions = 0;
    for (const json& line : lines) {
      const auto prompt = static_cast<int64_t>(line["prompt_token_ids"].size());
      const auto output = static_cast<int64_t>(line["output_token_ids"].size());
      const int64_t blocks = prefill == "true" ? 0 : (prompt + kBlock - 1) / kBlock;
      const int64_t first = std::max<int64_t>(3, blocks) * kBlock;
      const int64_t end = prompt + output - 1;
      if (end <= first) continue;
      positions += end - std::max(first, prompt - 1);
      compressions += (end - first - 1) / kBlock + 1;
    }
    for (const FidelityReport::Entry& entry : Run(lines, settings).entries) {
      SCOPED_TRACE(entry.setting.name + prefill);
      const FidelitySums& all = entry.statistics.all();
      const FidelitySums& after = entry.statistics.after_compression();
      EXPECT_EQ(all.positions, NumOutputs(lines));
      EXPECT_EQ(after.positions, positions);
      EXPECT_EQ(entry.statistics.num_compressions(), compressions);
      EXPECT_GT(after.mean_divergence(), 1e-6);
      EXPECT_LT(after.agreement(), 1);
      EXPECT_NE(after.perplexity(), after.full_perplexity());
      EXPECT_EQ(all.positions - all.agreed, after.positions - after.agreed);
      EXPECT_NEAR(all.divergence, after.divergence, 1e-9 * after.divergence);
      FidelitySums buckets;
      for (const FidelitySums& bucket : entry.statistics.buckets()) {
        buckets.positions += bucket.positions;
        buckets.divergence += bucket.divergence;
      }
      EXPECT_EQ(buckets.positions, all.positions);
      EXPECT_NEAR(buckets.divergence, all.divergence, 1e-9 * all.divergence);
    }
  }
}

TEST_F(FidelityTest, ACaseDoesNotDependOnTheOthersNorASettingOnTheOthers) {
  const std::vector<json> lines = RandomLines(10, 3);
  const std::vector<std::string> settings = {
      "paper:compression_policy=paper,pin_prompt=on",
      "score:compression_policy=pinned_score,kvcache_block_size=32,max_cache_blocks_per_seq=1",
      "random:compression_policy=pinned_random,max_cache_blocks_per_seq=3"};
  const FidelityReport together = Run(lines, settings);
  for (size_t s = 0; s < settings.size(); ++s) {
    SCOPED_TRACE(settings[s]);
    FidelitySums alone;
    for (const json& line : lines) {
      const FidelityReport report = Run({line}, {settings[s]});
      const FidelitySums& sums = report.entries[0].statistics.all();
      alone.positions += sums.positions;
      alone.agreed += sums.agreed;
      alone.predicted += sums.predicted;
      alone.divergence += sums.divergence;
      alone.logprob += sums.logprob;
    }
    const FidelitySums& sums = together.entries[s].statistics.all();
    EXPECT_EQ(sums.positions, alone.positions);
    EXPECT_EQ(sums.agreed, alone.agreed);
    EXPECT_EQ(sums.predicted, alone.predicted);
    EXPECT_NEAR(sums.divergence, alone.divergence, 1e-9 * alone.divergence);
    EXPECT_NEAR(sums.logprob, alone.logprob, -1e-9 * alone.logprob);
  }
}

TEST_F(FidelityTest, TheSeedOfACaseMovesItsDraws) {
  std::vector<json> lines = RandomLines(4, 4);
  const std::vector<std::string> settings = {"random:compression_policy=pinned_random",
                                             "recency:compression_policy=recency"};
  const FidelityReport before = Run(lines, settings);
  EXPECT_EQ(Run(lines, settings).entries[0].statistics.all().divergence,
            before.entries[0].statistics.all().divergence);
  for (json& line : lines) line["seed"] = line["seed"].get<int>() + 1;
  const FidelityReport after = Run(lines, settings);
  EXPECT_NE(after.entries[0].statistics.all().divergence,
            before.entries[0].statistics.all().divergence);
  EXPECT_EQ(after.entries[1].statistics.all().divergence,
            before.entries[1].statistics.all().divergence);
}

TEST_F(FidelityTest, TheFullCacheGivesTheGoldenLogits) {
  for (const GoldenPrompt& prompt : LoadGoldenModel("tiny-qwen2/f32").prompts) {
    if (prompt.ids.size() < 2) continue;
    const size_t split = (prompt.ids.size() + 1) / 2;
    const std::vector<TokenId> head(prompt.ids.begin(), prompt.ids.begin() + split);
    const std::vector<TokenId> tail(prompt.ids.begin() + split, prompt.ids.end());
    double logprob = 0;
    for (size_t i = split; i < prompt.ids.size(); ++i) {
      const float* const row = prompt.logits.data() + (i - 1) * kVocab;
      double sum = 0;
      for (int t = 0; t < kVocab; ++t) sum += std::exp(double{row[t]});
      logprob += row[prompt.ids[i]] - std::log(sum);
    }
    const FidelityReport report = Run({Line(head, tail)}, {"none:compression_policy=none"});
    EXPECT_NEAR(report.entries[0].statistics.all().full_logprob, logprob,
                1e-5 * static_cast<double>(tail.size()));
  }
}

TEST_F(FidelityTest, CountsRecalledProbes) {
  const GoldenPrompt prompt = LoadGoldenModel("tiny-qwen2/f32").prompts[0];
  json right = Line(prompt.ids, prompt.greedy);
  right["recall_tokens"] = 5;
  json wrong = right;
  wrong["output_token_ids"].back() = (prompt.greedy.back() + 1) % kVocab;
  json unasked = right;
  unasked["recall_tokens"] = 0;
  const FidelityReport report = Run({right, wrong, unasked}, {"none:compression_policy=none"});
  const RecallSums& recall = report.entries[0].statistics.recall();
  EXPECT_EQ(recall.probes, 2);
  EXPECT_EQ(recall.recalled, 1);
  EXPECT_EQ(recall.full_recalled, 1);
  EXPECT_EQ(recall.tokens.positions, 10);
  EXPECT_EQ(recall.tokens.predicted, 9);
}

TEST_F(FidelityTest, PinnedPromptsAreKept) {
  std::mt19937 random(6);
  const json line = Line(RandomTokens(12, &random), RandomTokens(200, &random));
  const FidelityReport report = Run({line}, {"pinned:compression_policy=recency,pin_prompt=on",
                                             "lost:compression_policy=recency"});
  EXPECT_DOUBLE_EQ(report.entries[0].statistics.prompt_kept(), 1);
  EXPECT_DOUBLE_EQ(report.entries[1].statistics.prompt_kept(), 0);
}

TEST_F(FidelityTest, TheReportHoldsEveryNumber) {
  const std::vector<json> lines = RandomLines(5, 7);
  const FidelityReport report =
      Run(lines, {"first:compression_policy=paper", "none:compression_policy=none"});
  const json parsed = json::parse(ReportJson(report));
  EXPECT_EQ(parsed.at("dtype"), "float32");
  ASSERT_EQ(parsed.at("settings").size(), 2);
  const json& first = parsed["settings"][0];
  const FidelityStatistics& statistics = report.entries[0].statistics;
  EXPECT_EQ(first.at("name"), "first");
  EXPECT_EQ(first.at("options").at("compression_policy"), "paper");
  EXPECT_EQ(first.at("options").at("pin_prompt"), "off");
  EXPECT_EQ(first.at("compressions"), statistics.num_compressions());
  EXPECT_EQ(first.at("all").at("positions"), NumOutputs(lines));
  EXPECT_EQ(first.at("after_compression").at("kl").get<double>(),
            statistics.after_compression().mean_divergence());
  EXPECT_EQ(first.at("buckets").size(), statistics.buckets().size());
  EXPECT_EQ(first.at("buckets")[1].at("from"), 2 * kBlock);
  EXPECT_TRUE(parsed["settings"][1].at("after_compression").at("kl").is_null());
  EXPECT_EQ(parsed["settings"][1].at("all").at("kl"), 0.0);
  const std::string table = ReportTable(report);
  EXPECT_THAT(table, HasSubstr("first"));
  EXPECT_THAT(table, HasSubstr(std::to_string(statistics.after_compression().positions)));
}

TEST_F(FidelityTest, MistakesComeBackAsErrors) {
  Config base = Base();
  const std::vector<json> long_line = {Line(std::vector<TokenId>(300, 1), {1, 2})};
  base.max_model_len = 300;
  EXPECT_THAT(std::string(TryRun(long_line, {"a"}, base).status().message()),
              HasSubstr("max_model_len is 300"));
  base.model = dir_.path();
  EXPECT_THAT(std::string(TryRun(long_line, {"a"}, base).status().message()),
              HasSubstr("config.json"));
  EXPECT_THAT(std::string(TryRun({Line({1}, {kVocab})}, {"a"}, Base()).status().message()),
              HasSubstr("line 1: output_token_ids[0] is 512"));
}

}  // namespace
}  // namespace zipage
