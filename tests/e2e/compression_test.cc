// KV compression through the real processes: whatever else runs, a request gets the tokens that it
// gets alone under the same policy, and its memory stays within its budget.

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/e2e/engine_fixture.h"

namespace zipage {
namespace {

constexpr int kBlock = 16;
constexpr int kBudgetBlocks = 2;
const char* const kPolicies[] = {"paper", "pinned_score", "pinned_random", "recency"};

using Tokens = std::map<std::string, std::vector<std::vector<int>>>;

class CompressionTest : public EngineTest {
 protected:
  static Flags Join(Flags flags, const Flags& more) {
    flags.insert(flags.end(), more.begin(), more.end());
    return flags;
  }
  static Flags Policy(const std::string& policy) {
    return {"--compression_policy",       policy,
            "--max_cache_blocks_per_seq", std::to_string(kBudgetBlocks),
            "--query_cache_len",          "8"};
  }
  // One request after the other, in a pool that never runs out, without shared blocks.
  static Flags Alone() {
    return {"--max_num_seqs", "1", "--no_enable_prefix_cache", "--no_enable_async_compress"};
  }
  static Tokens TokensOf(const std::vector<Json>& output) {
    Tokens tokens;
    for (const Json& line : output) tokens[line.at("custom_id")] = TokenIds(line);
    return tokens;
  }
  static const Json& Usage(const Json& line) { return line.at("response").at("body").at("usage"); }
  // Every other one greedy, the others sampled with a seed; each begins with one of three prefixes
  // of two blocks; lengths of every remainder by the block size.
  static std::vector<Json> Requests(int n, int max_tokens) {
    std::mt19937 random(11);
    const auto below = [&random](int limit) { return static_cast<int>(random() % limit); };
    std::vector<std::vector<int>> prefixes(3);
    for (auto& prefix : prefixes) {
      for (int i = 0; i < 2 * kBlock; ++i) prefix.push_back(below(200));
    }
    std::vector<Json> requests;
    for (int i = 0; i < n; ++i) {
      std::vector<int> prompt = prefixes[i % 3];
      for (int k = 0; k <= i % (2 * kBlock); ++k) prompt.push_back(below(200));
      Json request = TokensRequest(std::to_string(i), prompt, max_tokens - i % 7);
      if (i % 2 == 1) {
        request["temperature"] = 1.0;
        request["seed"] = i;
        if (i % 10 == 1) request["n"] = 2;
      }
      requests.push_back(std::move(request));
    }
    return requests;
  }
  // A number of the summary: "…, 12 WORD, …".
  static int Count(const std::string& summary, const std::string& word) {
    const size_t end = summary.find(" " + word);
    if (end == std::string::npos) return -1;
    return std::atoi(summary.c_str() + summary.rfind(' ', end - 1));
  }
  int64_t Compressions() const {
    int64_t sum = 0;
    for (const Json& line : ReadOutput(OutputPath("job"))) {
      sum += Usage(line).at("compressions").get<int64_t>();
    }
    return sum;
  }
  // Runs the job, expects every line to succeed with these tokens; what the launcher printed.
  std::string ExpectTokens(const std::vector<Json>& requests, const Tokens& expected,
                           const Flags& flags) {
    std::string trace;
    for (const std::string& flag : flags) trace += flag + " ";
    SCOPED_TRACE(trace);
    const Outcome outcome =
        Run("zipage-launch", Join(Join(flags, JobFlags("job", requests)), {"--overwrite"}));
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    const Tokens tokens = TokensOf(ReadOutput(OutputPath("job")));
    EXPECT_EQ(tokens.size(), expected.size());
    int num_different = 0;
    for (const auto& [id, choices] : tokens) num_different += choices == expected.at(id) ? 0 : 1;
    EXPECT_EQ(num_different, 0) << "of " << tokens.size() << " requests";
    return outcome.out;
  }
};

TEST_F(CompressionTest, AHundredRequestsGetTheTokensOfEachAlone) {
  const std::vector<Json> requests = Requests(100, 100);
  int preemptions = 0;
  for (const char* policy : kPolicies) {
    for (const std::string tp : {"1", "2"}) {
      const Flags flags = Join(Policy(policy), {"--tp", tp});
      const Tokens alone = TokensOf(RunJob(requests, Join(flags, Alone())));
      const Flags together =
          Join(flags, {"--max_num_seqs", "100", "--max_num_batched_tokens", "300"});
      ExpectTokens(requests, alone, together);
      EXPECT_GT(Compressions(), 300);
      // Young requests beyond the guaranteed ones are preempted, right before and right after their
      // first compression among others.
      const Flags tight = Join(together, {"--num_kvcache_blocks", "34"});
      preemptions += Count(ExpectTokens(requests, alone, tight), "preemptions");
      if (tp == "2") continue;
      ExpectTokens(requests, alone, Join(tight, {"--swap_space_gb", "0"}));
      ExpectTokens(requests, alone,
                   Join(tight, {"--no_enable_hybrid_engine", "--no_enable_prefix_cache"}));
      ExpectTokens(requests, alone, Join(together, {"--no_enable_async_compress"}));
    }
  }
  EXPECT_GT(preemptions, 20);
}

TEST_F(CompressionTest, PromptsOfEveryLengthAroundTheBlocksGetTheTokensOfEachAlone) {
  std::vector<Json> requests;
  std::mt19937 random(5);
  for (int blocks = 1; blocks <= 6; ++blocks) {
    for (int length = blocks * kBlock - 9; length <= blocks * kBlock + 2; ++length) {
      std::vector<int> prompt(length);
      for (int& token : prompt) token = static_cast<int>(random() % 200);
      requests.push_back(TokensRequest(std::to_string(length), prompt, 70));
    }
  }
  for (const char* policy : kPolicies) {
    for (const char* prefill : {"--compress_prefill", "--no_compress_prefill"}) {
      const Flags flags = Join(Policy(policy), {prefill});
      const std::vector<Json> output = RunJob(requests, Join(flags, Alone()));
      for (const Json& line : output) {
        const int length = std::stoi(line.at("custom_id").get<std::string>());
        const bool in_prefill = std::string(prefill) == "--compress_prefill";
        const int first =
            std::max(kBudgetBlocks + 1, in_prefill ? 0 : (length + kBlock - 1) / kBlock) * kBlock;
        // The last token is never computed.
        const int computed = length + 70 - 1;
        const int compressions = computed > first ? (computed - first - 1) / kBlock + 1 : 0;
        EXPECT_EQ(Usage(line).at("compressions"), compressions) << length;
        EXPECT_EQ(Usage(line).at("kv_tokens_peak"), std::min(first, computed)) << length;
      }
      ExpectTokens(requests, TokensOf(output),
                   Join(flags, {"--max_num_seqs", "64", "--max_num_batched_tokens", "100",
                                "--num_kvcache_blocks", "60"}));
    }
  }
}

TEST_F(CompressionTest, BudgetsOfRequestsHoldAndSwappedOnesComeBackAsTheyWere) {
  std::vector<Json> requests = Requests(60, 150);
  for (size_t i = 0; i < requests.size(); ++i) {
    if (i % 3 != 0) requests[i]["kv_budget"] = static_cast<int>(8 + 40 * (i % 3) + i);
  }
  const Tokens alone = TokensOf(RunJob(requests, Join(Policy("pinned_score"), Alone())));
  const Flags tight = Join(Policy("pinned_score"), {"--max_num_seqs", "60", "--num_kvcache_blocks",
                                                    "34", "--max_num_batched_tokens", "200"});
  const std::string summary = ExpectTokens(requests, alone, tight);
  EXPECT_GT(Count(summary, "swaps"), 0) << summary;
  for (const Json& line : ReadOutput(OutputPath("job"))) {
    const size_t i = std::stoul(line.at("custom_id").get<std::string>());
    const int budget = requests[i].value("kv_budget", kBudgetBlocks * kBlock);
    const int blocks = (budget + kBlock - 1) / kBlock;
    const auto prompt = static_cast<int>(requests[i].at("prompt_token_ids").size());
    const int peak = std::max(blocks + 1, (prompt + kBlock - 1) / kBlock) * kBlock;
    EXPECT_LE(Usage(line).at("kv_tokens_peak"), peak);
    const Json& kept = Usage(line).at("kv_tokens_kept");
    if (Usage(line).at("compressions") == 0) {
      EXPECT_TRUE(kept.is_null()) << kept;
    } else {
      EXPECT_NEAR(kept.at("prompt").get<double>() + kept.at("output").get<double>(),
                  blocks * kBlock, 0.11);
      EXPECT_GE(kept.at("prompt").get<double>(), std::min(prompt, blocks * kBlock / 2)) << "pinned";
    }
  }
}

TEST_F(CompressionTest, AnAdaptiveBudgetKeepsTheFullCacheWhileBlocksAreFree) {
  const std::vector<Json> requests = Requests(30, 150);
  const Tokens full = TokensOf(RunJob(requests, Join(Alone(), {"--compression_policy", "none"})));
  const Flags adaptive = Join(Policy("paper"), {"--adaptive_kv_budget", "--max_num_seqs", "30"});
  ExpectTokens(requests, full, adaptive);
  EXPECT_EQ(Compressions(), 0);
  // Under pressure all end too, and some were compressed.
  for (const Json& line : RunJob(requests, Join(adaptive, {"--num_kvcache_blocks", "40"}))) {
    EXPECT_EQ(line.at("response").at("body").at("choices")[0].at("finish_reason"), "length");
  }
  EXPECT_GT(Compressions(), 0);
}

TEST_F(CompressionTest, EveryOptionOfAPolicyChangesWhatIsKept) {
  const std::vector<Json> requests = Requests(20, 100);
  const auto tokens = [&](const std::string& policy, const Flags& more) {
    return TokensOf(RunJob(requests, Join(Policy(policy), more)));
  };
  const Tokens paper = tokens("paper", {});
  for (const Flags& more : std::vector<Flags>{{"--no_use_global_score"},
                                              {"--decay_factor", "0.1"},
                                              {"--max_norm"},
                                              {"--no_enable_pooling"},
                                              {"--continues_pooling"},
                                              {"--pooling_size", "9"},
                                              {"--no_use_similarity"},
                                              {"--no_lightning_similarity"},
                                              {"--similarity_lambda", "0.9"},
                                              {"--similarity_temperature", "0.01"},
                                              {"--use_attention_sink"},
                                              {"--use_attention_sink", "--sink_len", "12"},
                                              {"--query_cache_len", "4"},
                                              {"--max_cache_blocks_per_seq", "3"},
                                              {"--compress_prefill"},
                                              {"--pin_prompt", "on"}}) {
    EXPECT_NE(tokens("paper", more), paper) << more[0];
  }
  const Tokens scored = tokens("pinned_score", {});
  EXPECT_NE(scored, paper);
  EXPECT_NE(tokens("pinned_score", {"--score_share", "1"}), scored);
  EXPECT_NE(tokens("pinned_score", {"--pin_prompt", "off"}), scored);
  // Without a share by score nothing but the draws is left.
  EXPECT_EQ(tokens("pinned_score", {"--score_share", "0"}), tokens("pinned_random", {}));
  // These change how it is done, not what comes out.
  EXPECT_EQ(tokens("paper", {"--layer_stride", "1"}), paper);
  EXPECT_EQ(tokens("paper", {"--no_enable_async_compress"}), paper);
  EXPECT_EQ(tokens("paper", {"--no_enable_hybrid_engine"}), paper);
}

TEST_F(CompressionTest, AnOutputThatRepeatsItselfEndsWhenAsked) {
  // The tiny model loops under greedy sampling; the guard is off by default.
  Json looping = TokensRequest("looping", GreedyCases()[0].prompt, 400);
  Json guarded = looping;
  guarded["id"] = "guarded";
  guarded["repetition_ngram_size"] = 4;
  guarded["repetition_ngram_count"] = 3;
  const std::vector<Json> output = RunJob(
      {looping, guarded}, {"--compression_policy", "recency", "--max_cache_blocks_per_seq", "1"});
  const Json choice = Find(output, "guarded").at("response").at("body").at("choices")[0];
  EXPECT_EQ(choice.at("finish_reason"), "repetition");
  const auto tokens = TokenIds(Find(output, "guarded"))[0];
  EXPECT_LT(tokens.size(), 400u);
  const auto all = TokenIds(Find(output, "looping"))[0];
  EXPECT_EQ(all.size(), 400u);
  EXPECT_TRUE(std::equal(tokens.begin(), tokens.end(), all.begin()));
}

TEST_F(CompressionTest, RefusesABudgetThatCannotBe) {
  Json large = TokensRequest("large", {1, 2, 3}, 5);
  large["kv_budget"] = 100'000;
  Json good = TokensRequest("good", {1, 2, 3}, 5);
  const Flags flags = Join(Policy("auto"), {"--num_kvcache_blocks", "20"});
  const Outcome outcome = Run("zipage-launch", Join(flags, JobFlags("job", {large, good})));
  EXPECT_EQ(outcome.status, 3) << outcome.err;
  const std::vector<Json> output = ReadOutput(OutputPath("job"));
  const Json refused = Find(output, "large").at("response");
  EXPECT_EQ(refused.at("status_code"), 400);
  EXPECT_NE(refused.dump().find("kv_budget"), std::string::npos) << refused;
  EXPECT_EQ(Find(output, "good").at("response").at("status_code"), 200);
}

}  // namespace
}  // namespace zipage
