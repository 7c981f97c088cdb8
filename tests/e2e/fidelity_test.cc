// zipage-fidelity as a program, against what the engine does.

#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "tests/e2e/engine_fixture.h"

namespace zipage {
namespace {

class FidelityToolTest : public EngineTest {
 protected:
  static Flags Compression() {
    return {
        "--kvcache_block_size", "16", "--max_cache_blocks_per_seq", "2", "--query_cache_len", "8",
        "--cpu_threads",        "1"};
  }
  Outcome Fidelity(const std::string& input, const Flags& flags) {
    Flags all = {"--model", Model(), "--dtype", "float32", "--input", input};
    all.insert(all.end(), flags.begin(), flags.end());
    return Run("zipage-fidelity", all);
  }
  // One line on standard error, and nothing else.
  void ExpectRefused(const Outcome& outcome, int status, const std::string& message) {
    EXPECT_EQ(outcome.status, status) << message;
    EXPECT_EQ(outcome.out, "") << message;
    EXPECT_EQ(CountLines(outcome.err), 1) << outcome.err;
    EXPECT_NE(outcome.err.find(message), std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.err.find("zipage-fidelity: "), 0) << outcome.err;
  }
};

TEST_F(FidelityToolTest, PredictsEveryTokenThatTheEngineWroteUnderTheSameSetting) {
  std::mt19937 random(9);
  std::vector<Json> requests;
  for (int i = 0; i < 12; ++i) {
    std::vector<int> prompt(1 + random() % 70);
    for (int& token : prompt) token = static_cast<int>(random() % 200);
    requests.push_back(TokensRequest(std::to_string(i), prompt, 100 + i));
    requests.back()["seed"] = i;
  }
  const std::vector<std::string> policies = {"paper", "pinned_score", "pinned_random", "recency"};
  Flags settings;
  for (const std::string& policy : policies) {
    settings.push_back("--setting");
    settings.push_back(policy + ":compression_policy=" + policy);
  }
  for (const std::string& policy : policies) {
    Flags flags = Compression();
    flags.insert(flags.end(), {"--compression_policy", policy});
    std::vector<Json> cases;
    int64_t compressions = 0;
    for (const Json& line : RunJob(requests, flags)) {
      const Json& body = line.at("response").at("body");
      compressions += body.at("usage").at("compressions").get<int64_t>();
      cases.push_back({{"id", line.at("custom_id")},
                       {"prompt_token_ids", body.at("prompt_token_ids")},
                       {"output_token_ids", body.at("choices")[0].at("token_ids")},
                       {"seed", std::stoi(line.at("custom_id").get<std::string>())}});
    }
    Flags tool = Compression();
    tool.insert(tool.end(), settings.begin(), settings.end());
    tool.insert(tool.end(), {"--json", dir_ / "report.json"});
    const Outcome outcome = Fidelity(WriteJob("cases", cases), tool);
    ASSERT_EQ(outcome.status, 0) << outcome.err;
    EXPECT_NE(outcome.out.find(policy), std::string::npos);
    const Json report = Json::parse(ReadText(dir_ / "report.json"));
    for (size_t i = 0; i < policies.size(); ++i) {
      const Json& setting = report.at("settings")[i];
      const double accuracy = setting.at("all").at("accuracy").get<double>();
      if (policies[i] == policy) {
        EXPECT_EQ(accuracy, 1.0) << policy;
        EXPECT_EQ(setting.at("compressions"), compressions) << policy;
        EXPECT_LT(setting.at("all").at("full_accuracy").get<double>(), 1.0) << policy;
      } else {
        EXPECT_LT(accuracy, 1.0) << policies[i] << " on the text of " << policy;
      }
    }
  }
}

TEST_F(FidelityToolTest, TakesAnEnginesOutputFileAsItIs) {
  const std::vector<Json> output = RunJob(SimpleRequests(5, 80), Compression());
  ASSERT_EQ(output.size(), 5);
  const Outcome outcome = Fidelity(OutputPath("job"), Compression());
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  // Without a setting, what auto stands for.
  EXPECT_NE(outcome.out.find("\npaper "), std::string::npos) << outcome.out;
}

TEST_F(FidelityToolTest, RefusesWhatIsWrongInOneLine) {
  const std::string good =
      WriteJob("good", {{{"prompt_token_ids", {1}}, {"output_token_ids", {2}}}});
  const std::string bad = WriteJob("bad", {{{"prompt_token_ids", {1}}}});
  ExpectRefused(Run("zipage-fidelity", {}), 2, "model is missing");
  ExpectRefused(Run("zipage-fidelity", {"--model", Model()}), 2, "input is missing");
  ExpectRefused(Run("zipage-fidelity", {"--model", "/nowhere", "--input", good}), 1, "/nowhere");
  ExpectRefused(Fidelity("/nowhere.jsonl", {}), 1, "/nowhere.jsonl");
  ExpectRefused(Fidelity(bad, {}), 1, "line 1: output_token_ids is missing");
  ExpectRefused(Fidelity(good, {"--tp", "2"}), 2, "tp is 2");
  ExpectRefused(Fidelity(good, {"--inptu", "x"}), 2, "did you mean --input");
  ExpectRefused(Fidelity(good, {"--setting", "a:polcy=x"}), 2, "setting a: unknown option");
  ExpectRefused(Fidelity(good, {"--setting", "a", "--setting", "a"}), 2, "given twice");
  ExpectRefused(Fidelity(good, {"--setting", "a:tp=2"}), 2, "same for all settings");
  ExpectRefused(Fidelity(good, {"--json", "/nowhere/x.json"}), 2, "cannot be written");
  ExpectRefused(Fidelity(good, {"--device", "cuda"}), 1, "device is cuda");
}

TEST_F(FidelityToolTest, HelpNamesEveryFlagAndTheFormOfItsInput) {
  const Outcome outcome = Run("zipage-fidelity", {"--help"});
  EXPECT_EQ(outcome.status, 0);
  for (const char* word : {"--input", "--json", "--setting", "--compression_policy",
                           "output_token_ids", "recall_tokens", "Exit status"}) {
    EXPECT_NE(outcome.out.find(word), std::string::npos) << word;
  }
}

}  // namespace
}  // namespace zipage
