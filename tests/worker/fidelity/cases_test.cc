#include "worker/fidelity/cases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/worker/test_files.h"

namespace zipage {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr CaseLimits kLimits = {
    .vocab_size = 100, .max_model_len = 12, .max_line_bytes = 4096, .seed = 40};

absl::StatusOr<std::vector<FidelityCase>> Parse(const std::string& line) {
  std::vector<FidelityCase> cases;
  ZIPAGE_RETURN_IF_ERROR(ParseCases(line, "file line 3", kLimits, &cases));
  return cases;
}

TEST(FidelityCasesTest, ReadsTheShortForm) {
  const auto cases = Parse(
      R"({"id": "a", "prompt_token_ids": [0, 99], "output_token_ids": [7, 8, 9],
          "recall_tokens": 2, "seed": 5, "other": [[1]]})");
  ASSERT_TRUE(cases.ok()) << cases.status();
  ASSERT_EQ(cases->size(), 1);
  const FidelityCase& one = (*cases)[0];
  EXPECT_EQ(one.id, "a");
  EXPECT_THAT(one.prompt, ElementsAre(0, 99));
  EXPECT_THAT(one.output, ElementsAre(7, 8, 9));
  EXPECT_EQ(one.recall_tokens, 2);
  EXPECT_EQ(one.seed, 5);
  EXPECT_EQ(one.num_computed(), 4);
  const auto plain = Parse(R"({"prompt_token_ids": [1], "output_token_ids": [2]})");
  ASSERT_TRUE(plain.ok()) << plain.status();
  EXPECT_EQ((*plain)[0].recall_tokens, 0);
  EXPECT_EQ((*plain)[0].seed, 40);
}

TEST(FidelityCasesTest, ReadsEveryChoiceOfAnEnginesLine) {
  const auto cases = Parse(
      R"({"custom_id": "q", "error": null, "response": {"status_code": 200, "body": {
          "prompt_token_ids": [1, 2], "choices": [{"index": 0, "token_ids": [3]},
          {"index": 1, "token_ids": [4, 5]}]}}})");
  ASSERT_TRUE(cases.ok()) << cases.status();
  ASSERT_EQ(cases->size(), 2);
  EXPECT_EQ((*cases)[0].id, "q/0");
  EXPECT_THAT((*cases)[0].output, ElementsAre(3));
  EXPECT_EQ((*cases)[1].id, "q/1");
  EXPECT_THAT((*cases)[1].prompt, ElementsAre(1, 2));
  EXPECT_THAT((*cases)[1].output, ElementsAre(4, 5));
  EXPECT_NE((*cases)[0].seed, (*cases)[1].seed);
}

TEST(FidelityCasesTest, EveryMistakeIsOneLineThatNamesTheLine) {
  const std::string deep(5000, '[');
  const std::vector<std::pair<std::string, std::string>> mistakes = {
      {"{", "not JSON"},
      {"[1]", "a JSON object is needed"},
      {R"({"prompt_token_ids": [1]})", "output_token_ids is missing"},
      {R"({"output_token_ids": [1]})", "prompt_token_ids is missing"},
      {R"({"prompt_token_ids": [], "output_token_ids": [1]})", "one token id or more"},
      {R"({"prompt_token_ids": [1], "output_token_ids": []})", "one token id or more"},
      {R"({"prompt_token_ids": "1", "output_token_ids": [1]})", "prompt_token_ids is \"1\""},
      {R"({"prompt_token_ids": [1, 100], "output_token_ids": [1]})", "[1] is 100"},
      {R"({"prompt_token_ids": [-1], "output_token_ids": [1]})", "[0] is -1"},
      {R"({"prompt_token_ids": [1.0], "output_token_ids": [1]})", "[0] is 1.0"},
      {R"({"prompt_token_ids": [18446744073709551615], "output_token_ids": [1]})", "[0] is 18"},
      {R"({"prompt_token_ids": [4294967297], "output_token_ids": [1]})", "[0] is 4294967297"},
      {R"({"prompt_token_ids": [1], "output_token_ids": [true]})", "[0] is true"},
      {R"({"prompt_token_ids": [1], "output_token_ids": [1, 2], "recall_tokens": 3})",
       "recall_tokens is 3"},
      {R"({"prompt_token_ids": [1], "output_token_ids": [1], "recall_tokens": -1})",
       "recall_tokens is -1"},
      {R"({"prompt_token_ids": [1], "output_token_ids": [1], "seed": "x"})", "seed is \"x\""},
      {R"({"id": 3, "prompt_token_ids": [1], "output_token_ids": [1]})", "id is 3"},
      {R"({"prompt_token_ids": [1,1,1,1,1,1,1], "output_token_ids": [1,1,1,1,1,1]})",
       "max_model_len is 12"},
      {R"({"response": null})", "not answered"},
      {R"({"response": {"status_code": 400, "body": {"error": {}}}})", "not answered"},
      {R"({"response": {"status_code": 200}})", "response.body is no object"},
      {R"({"response": {"status_code": 200, "body": {"choices": []}}})",
       "prompt_token_ids is missing"},
      {R"({"response": {"status_code": 200, "body": {"prompt_token_ids": [1]}}})", "choices"},
      {R"({"response": {"status_code": 200, "body": {"prompt_token_ids": [1], "choices": [3]}}})",
       "choices[0] is no object"},
      {R"({"response": {"status_code": 200, "body": {"prompt_token_ids": [1],
           "choices": [{"text": "x"}]}}})",
       "return_token_ids"},
      {deep, ""},
      {R"({"a": )" + deep + std::string(5000, ']') + "}", "nested deeper"},
  };
  for (const auto& [line, message] : mistakes) {
    const auto cases = Parse(line);
    ASSERT_FALSE(cases.ok()) << line;
    EXPECT_TRUE(absl::IsInvalidArgument(cases.status())) << cases.status();
    EXPECT_THAT(std::string(cases.status().message()),
                AllOf(HasSubstr("file line 3"), HasSubstr(message), Not(HasSubstr("\n"))));
  }
}

TEST(FidelityCasesTest, DamagedLinesNeverCrash) {
  const std::string line =
      R"({"custom_id": "q", "response": {"status_code": 200, "body": {"prompt_token_ids": [1, 2],)"
      R"("choices": [{"token_ids": [3, 4]}]}}, "recall_tokens": 1, "output_token_ids": [1]})";
  std::mt19937 random(3);
  int num_refused = 0;
  for (int i = 0; i < 3000; ++i) {
    std::string damaged = line;
    for (uint32_t k = 0; k <= random() % 4; ++k) {
      const size_t at = random() % damaged.size();
      if (random() % 3 == 0) {
        damaged.erase(at, 1 + random() % 9);
      } else {
        damaged[at] = R"([]{},:"0-9e.tn)"[random() % 14];
      }
      if (damaged.empty()) damaged = "x";
    }
    const auto cases = Parse(damaged);
    if (!cases.ok()) ++num_refused;
    for (const FidelityCase& one : cases.ok() ? *cases : std::vector<FidelityCase>()) {
      EXPECT_GE(one.prompt.size(), 1);
      EXPECT_GE(one.output.size(), 1);
      EXPECT_LE(one.recall_tokens, static_cast<int64_t>(one.output.size()));
    }
  }
  EXPECT_GT(num_refused, 1000);
}

class FidelityFileTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::vector<FidelityCase>> Read(const std::string& text) {
    dir_.Write("in.jsonl", text);
    return ReadCases(dir_.File("in.jsonl"), kLimits);
  }
  testing::TempDir dir_;
};

TEST_F(FidelityFileTest, SkipsBlankLinesAndTakesAnyLineEnd) {
  const std::string line = R"({"prompt_token_ids": [1], "output_token_ids": [2]})";
  const auto cases = Read("\xEF\xBB\xBF" + line + "\r\n\n  \r\n" + line);
  ASSERT_TRUE(cases.ok()) << cases.status();
  EXPECT_EQ(cases->size(), 2);
}

TEST_F(FidelityFileTest, NamesFileAndLine) {
  const std::string line = R"({"prompt_token_ids": [1], "output_token_ids": [2]})";
  EXPECT_THAT(std::string(Read(line + "\n\n{}\n").status().message()),
              HasSubstr("in.jsonl line 3: prompt_token_ids is missing"));
  EXPECT_THAT(std::string(Read(line + "\n" + std::string(5000, ' ')).status().message()),
              HasSubstr("in.jsonl line 2: 5000 bytes"));
  EXPECT_THAT(std::string(Read("\n \n").status().message()), HasSubstr("holds no line"));
  const auto missing = ReadCases(dir_.File("none.jsonl"), kLimits);
  EXPECT_TRUE(absl::IsNotFound(missing.status())) << missing.status();
}

}  // namespace
}  // namespace zipage
