// Jobs from file to file through the real processes: the right tokens whatever the engine does to
// run them, and one line for every line.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "tests/e2e/engine_fixture.h"

namespace zipage {
namespace {

class JobsTest : public EngineTest {
 protected:
  static std::vector<Json> GreedyRequests(const std::vector<GreedyCase>& cases, int copies) {
    std::vector<Json> requests;
    for (int copy = 0; copy < copies; ++copy) {
      for (size_t i = 0; i < cases.size(); ++i) {
        requests.push_back(
            TokensRequest(std::to_string(i) + "/" + std::to_string(copy), cases[i].prompt, 64));
      }
    }
    return requests;
  }
  static void ExpectGreedy(const std::vector<GreedyCase>& cases, const std::vector<Json>& output) {
    for (const Json& line : output) {
      const size_t i = std::stoul(line.at("custom_id").get<std::string>());
      ASSERT_LT(i, cases.size());
      const Json& body = line.at("response").at("body");
      EXPECT_EQ(TokenIds(line), std::vector<std::vector<int>>{cases[i].output}) << body.dump();
      EXPECT_EQ(body.at("prompt_token_ids"), cases[i].prompt);
      EXPECT_EQ(body.at("choices")[0].at("finish_reason"), "length");
      EXPECT_EQ(body.at("usage").at("completion_tokens"), 64);
    }
  }
  // "…, 12 preemptions, …" of the summary.
  static int Preemptions(const std::string& summary) {
    const size_t word = summary.find(" preemptions");
    if (word == std::string::npos) return -1;
    return std::atoi(summary.c_str() + summary.rfind(' ', word - 1));
  }
};

TEST_F(JobsTest, GreedyTokensAreTheGoldenOnesHoweverTheEngineRunsThem) {
  const std::vector<GreedyCase> cases = GreedyCases();
  const std::vector<Json> requests = GreedyRequests(cases, 4);
  const std::vector<Flags> ranks = {
      {"--tp", "1"}, {"--tp", "2", "--collective", "shm"}, {"--tp", "2", "--collective", "gloo"}};
  const std::vector<Flags> ways = {
      {"--kvcache_block_size", "16"},
      {"--kvcache_block_size", "256", "--num_kvcache_blocks", "3"},
      {"--num_kvcache_blocks", "12"},
      {"--num_kvcache_blocks", "12", "--no_enable_prefix_cache"},
      {"--max_num_seqs", "5", "--max_num_batched_tokens", "7"},
      {"--max_num_seqs", "3", "--max_num_batched_tokens", "3", "--num_kvcache_blocks", "11",
       "--no_enable_prefix_cache"},
  };
  for (const Flags& rank_flags : ranks) {
    for (size_t i = 0; i < ways.size(); ++i) {
      const Flags& way = ways[i];
      // Gloo's small messages are slow: the smallest steps and one more way are enough.
      if (rank_flags.back() == "gloo" && i != 0 && i != 4) continue;
      Flags flags = rank_flags;
      flags.insert(flags.end(), way.begin(), way.end());
      std::string trace;
      for (const std::string& flag : flags) trace += flag + " ";
      SCOPED_TRACE(trace);
      ExpectGreedy(cases, RunJob(requests, flags));
      ExpectNothingLeft();
    }
  }
}

TEST_F(JobsTest, PreemptedRequestsGetTheSameTokens) {
  const std::vector<GreedyCase> cases = GreedyCases();
  for (const char* prefix_cache : {"--enable_prefix_cache", "--no_enable_prefix_cache"}) {
    Flags flags = JobFlags("job", GreedyRequests(cases, 6));
    flags.insert(flags.end(), {"--num_kvcache_blocks", "12", prefix_cache, "--overwrite"});
    const Outcome outcome = Run("zipage-launch", flags);
    EXPECT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_GT(Preemptions(outcome.out), 0) << outcome.out;
    const std::vector<Json> output = ReadOutput(OutputPath("job"));
    EXPECT_EQ(output.size(), 6 * cases.size());
    ExpectGreedy(cases, output);
  }
}

TEST_F(JobsTest, ThreeRanksOfAModelWithOneKvHeadAgreeWithOne) {
  const std::vector<GreedyCase> cases = GreedyCases("tiny-llama");
  for (const char* tp : {"1", "3"}) {
    ExpectGreedy(cases,
                 RunJob(GreedyRequests(cases, 2), {"--model", Model("tiny-llama"), "--tp", tp}));
  }
}

TEST_F(JobsTest, SharedPrefixesAreFoundInTheCache) {
  const std::vector<GreedyCase> cases = GreedyCases();
  // One at a time, so that every later copy finds the blocks of the first.
  const Flags flags = {"--max_num_seqs", "1"};
  int64_t cached = 0;
  for (const Json& line : RunJob(GreedyRequests(cases, 2), flags)) {
    cached += line.at("response").at("body").at("usage").at("cached_tokens").get<int64_t>();
  }
  EXPECT_GE(cached, 64);
}

TEST_F(JobsTest, SeededSamplesDoNotDependOnBatchRanksOrPool) {
  Json request = TokensRequest("mine", {5, 6, 7, 8, 9}, 40);
  request["temperature"] = 1.0;
  request["n"] = 3;
  request["seed"] = 4711;
  const auto tokens = TokenIds(Find(RunJob({request}, {}), "mine"));
  ASSERT_EQ(tokens.size(), 3u);
  for (const auto& sample : tokens) EXPECT_EQ(sample.size(), 40u);
  EXPECT_NE(tokens[0], tokens[1]);
  EXPECT_NE(tokens[1], tokens[2]);

  std::vector<Json> crowd = RandomRequests(60, 60, /*seed=*/3);
  crowd.insert(crowd.begin() + 30, request);
  const std::vector<Flags> ways = {{},
                                   {"--tp", "2"},
                                   {"--num_kvcache_blocks", "40", "--no_enable_prefix_cache"},
                                   {"--seed", "9"}};
  std::vector<std::vector<Json>> outputs;
  for (const Flags& way : ways) {
    SCOPED_TRACE(way.empty() ? "no flags" : way[0]);
    outputs.push_back(RunJob(crowd, way));
    EXPECT_EQ(TokenIds(Find(outputs.back(), "mine")), tokens);
  }
  // A seed of its own fixes a request; without one the engine's seed and the id do.
  int num_changed = 0;
  for (const Json& other : crowd) {
    const std::string id = other.at("id");
    const auto first = TokenIds(Find(outputs[0], id));
    EXPECT_EQ(first.size(), other.value("n", 1u));
    EXPECT_EQ(TokenIds(Find(outputs[1], id)), first) << other.dump();
    EXPECT_EQ(TokenIds(Find(outputs[2], id)), first) << other.dump();
    const auto reseeded = TokenIds(Find(outputs[3], id));
    if (other.contains("seed") || other.at("temperature") == 0.0) {
      EXPECT_EQ(reseeded, first) << other.dump();
    } else {
      num_changed += reseeded != first ? 1 : 0;
    }
  }
  EXPECT_GT(num_changed, 10);
}

TEST_F(JobsTest, ChatAndCompletionsInOpenAiFormAreAnsweredInKind) {
  const Json chat = {{"custom_id", "chat"},
                     {"method", "POST"},
                     {"url", "/v1/chat/completions"},
                     {"body",
                      {{"messages", {{{"role", "user"}, {"content", "Why is the sky blue?"}}}},
                       {"max_tokens", 5},
                       {"ignore_eos", true}}}};
  const Json text = {{"custom_id", "text"},
                     {"method", "POST"},
                     {"url", "/v1/completions"},
                     {"body", {{"prompt", "The sky"}, {"max_tokens", 5}, {"logprobs", 2}}}};
  const std::vector<Json> output = RunJob({chat, text}, {});
  const Json chat_body = Find(output, "chat").at("response").at("body");
  EXPECT_EQ(chat_body.at("object"), "chat.completion");
  EXPECT_TRUE(chat_body.at("choices")[0].at("message").at("content").is_string());
  EXPECT_EQ(chat_body.at("usage").at("completion_tokens"), 5);
  const Json text_body = Find(output, "text").at("response").at("body");
  EXPECT_EQ(text_body.at("object"), "text_completion");
  EXPECT_TRUE(text_body.at("choices")[0].at("logprobs").is_object());
}

TEST_F(JobsTest, BadLinesAreAnsweredWithTheirNumbersAndTheRestRuns) {
  const std::string good = TokensRequest("good", {1, 2, 3}, 4).dump();
  const std::string too_long = TokensRequest("long", std::vector<int>(513, 1), 4).dump();
  // What never fits into 20 blocks of 16, though the model has positions for it.
  const std::string too_big = TokensRequest("big", std::vector<int>(400, 1), 4).dump();
  std::string text = "\xef\xbb\xbf" + good + "\r\n";  // 1
  text += "\n";                                       // 2: blank
  text += "{\"id\": \"x\", \"prompt\": \n";           // 3: not JSON
  text += "   \t \r\n";                               // 4: blank
  text += R"({"id": "y", "prompt": "a", "temprature": 1})"
          "\n";             // 5: unknown field
  text += too_long + "\n";  // 6
  text += R"({"id": "z", "prompt": "a", "max_tokens": "7"})"
          "\r\n";      // 7: wrong type
  text += "[1, 2]\n";  // 8: no object
  text += R"({"id": "w", "prompt_token_ids": [512]})"
          "\n";            // 9: no such token
  text += too_big + "\n";  // 10
  text += R"({"id": "v", "prompt": "a", "temperature": -1})"
          "\n";  // 11: out of range
  text += R"({"id": "u", "prompt": "\ud800 caf)"
          "\xff"
          R"("})"
          "\n";  // 12: broken UTF-8
  text += good;  // 13: no final newline
  WriteText(dir_ / "job.jsonl", text);
  const Outcome outcome = Run("zipage-launch", {"--job", dir_ / "job.jsonl", "--output",
                                                OutputPath("job"), "--num_kvcache_blocks", "20"});
  EXPECT_EQ(outcome.status, 3) << outcome.err;
  EXPECT_NE(outcome.out.find("2 of 11 lines succeeded, 9 failed"), std::string::npos)
      << outcome.out;
  std::vector<int> failed;
  int num_good = 0;
  for (const Json& line : ReadOutput(OutputPath("job"))) {
    if (line.at("response").at("status_code") == 200) {
      EXPECT_EQ(line.at("custom_id"), "good");
      ++num_good;
      continue;
    }
    EXPECT_EQ(line.at("response").at("status_code"), 400);
    EXPECT_TRUE(line.at("error").is_null());
    const Json& error = line.at("response").at("body").at("error");
    const int number = line.at("line");
    EXPECT_EQ(error.at("line"), number);
    EXPECT_EQ(error.at("message").get<std::string>().rfind("line " + std::to_string(number), 0), 0u)
        << error.dump();
    failed.push_back(number);
  }
  std::sort(failed.begin(), failed.end());
  EXPECT_EQ(num_good, 2);
  EXPECT_EQ(failed, (std::vector<int>{3, 5, 6, 7, 8, 9, 10, 11, 12}));
}

TEST_F(JobsTest, AJobOfBadLinesOnlyFailsAndAnEmptyOneIsComplete) {
  WriteText(dir_ / "bad.jsonl", "{}\nnull\n{\"prompt\": 5}\n");
  const Outcome bad =
      Run("zipage-launch", {"--job", dir_ / "bad.jsonl", "--output", OutputPath("bad")});
  EXPECT_EQ(bad.status, 1) << bad.err;
  EXPECT_EQ(ReadOutput(OutputPath("bad")).size(), 3u);

  WriteText(dir_ / "empty.jsonl", "\n \n");
  const Outcome empty =
      Run("zipage-launch", {"--job", dir_ / "empty.jsonl", "--output", OutputPath("empty")});
  EXPECT_EQ(empty.status, 0) << empty.err;
  EXPECT_EQ(ReadText(OutputPath("empty")), "");
}

// Peak of the resident memory of a process, KiB; 0 once it has ended.
int64_t PeakMemoryKib(pid_t pid) {
  const std::string status = ReadText("/proc/" + std::to_string(pid) + "/status");
  const size_t at = status.find("VmHWM:");
  return at == std::string::npos ? 0 : std::atoll(status.c_str() + at + 6);
}

TEST_F(JobsTest, MemoryDoesNotGrowWithTheJobFile) {
  constexpr int kNumLines = 200'000;
  {
    std::ofstream file(dir_ / "job.jsonl");
    for (int i = 0; i < kNumLines; ++i) {
      file << R"({"id":")" << i << R"(","prompt_token_ids":[)" << i % 500 << ",1,2],"
           << R"("max_tokens":1,"metadata":"text that nobody reads"})" << '\n';
    }
  }
  auto launch = Launch({"--job", dir_ / "job.jsonl", "--output", OutputPath("job")});
  const pid_t scheduler = SchedulerPid();
  int64_t peak_kib = 0;
  EXPECT_TRUE(Eventually(
      [&] {
        peak_kib = std::max(peak_kib, PeakMemoryKib(scheduler));
        return IsGone(scheduler);
      },
      std::chrono::seconds(600)));
  EXPECT_EQ(launch->Wait(), 0) << launch->err();
  const std::string output = ReadText(OutputPath("job"));
  EXPECT_EQ(CountLines(output), kNumLines);
  EXPECT_GT(peak_kib, 0);
#ifndef ZIPAGE_SANITIZE
  EXPECT_LT(peak_kib, 400 << 10);
#endif
  RecordProperty("scheduler_peak_mib", static_cast<int>(peak_kib >> 10));
}

}  // namespace
}  // namespace zipage
