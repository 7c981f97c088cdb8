#include "scheduler/response.h"

#include <gtest/gtest.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "scheduler/text/tokenizer.h"

namespace zipage {
namespace {

using Json = nlohmann::json;

const Tokenizer& TinyTokenizer() {
  static const Tokenizer* tokenizer =
      Tokenizer::Load(ZIPAGE_SOURCE_DIR "/tests/golden/tokenizer/tiny").value().release();
  return *tokenizer;
}

// A request of `n` samples whose sequences the test fills as the scheduler would.
class ResponseTest : public testing::Test {
 protected:
  void Start(int n, std::vector<std::string> stop = {}) {
    const std::vector<TokenId> prompt = *TinyTokenizer().Encode("a question", false);
    BuiltRequest built;
    built.custom_id = "q";
    built.n = n;
    built.stop = std::move(stop);
    built.sampling.max_tokens = 100;
    request_ = std::make_unique<Request>(1, 1, prompt, built.sampling, n);
    response_ = std::make_unique<Response>(std::move(built), &TinyTokenizer());
  }
  // Generates `text`; true if a stop string was found in it.
  bool Generate(int sample, const std::string& text) {
    Sequence& sequence = request_->sequences[static_cast<size_t>(sample)];
    const std::vector<TokenId> tokens = *TinyTokenizer().Encode(text, false);
    for (const TokenId token : tokens) {
      sequence.tokens.push_back(token);
      if (response_->AddToken({&sequence, token, {}, /*in_text=*/true})) return true;
    }
    return false;
  }
  void Finish(int sample, FinishReason reason) {
    Sequence& sequence = request_->sequences[static_cast<size_t>(sample)];
    sequence.state = SequenceState::kFinished;
    sequence.finish_reason = reason;
  }
  Json Body() {
    return Json::parse(response_->FormatSuccess(*request_, "r", 5)).at("response").at("body");
  }

  std::unique_ptr<Request> request_;
  std::unique_ptr<Response> response_;
};

TEST_F(ResponseTest, ARepetitionIsAFinishReasonOfItsOwnAndKeepsTheText) {
  Start(2, {"never"});
  EXPECT_FALSE(Generate(0, "so and so and so and nev"));
  Finish(0, FinishReason::kRepetition);
  EXPECT_FALSE(Generate(1, "done"));
  Finish(1, FinishReason::kLength);
  const Json choices = Body().at("choices");
  EXPECT_EQ(choices[0]["finish_reason"], "repetition");
  EXPECT_EQ(choices[0]["stop_reason"], nullptr);
  EXPECT_EQ(choices[0]["text"], "so and so and so and nev") << "what was held back belongs to it";
  EXPECT_EQ(choices[1]["finish_reason"], "length");
}

TEST_F(ResponseTest, AStopStringWinsOverARepetitionAtTheSameToken) {
  Start(1, {"so"});
  EXPECT_TRUE(Generate(0, "and so"));
  Finish(0, FinishReason::kRepetition);
  const Json choice = Body().at("choices")[0];
  EXPECT_EQ(choice["finish_reason"], "stop");
  EXPECT_EQ(choice["stop_reason"], "so");
  EXPECT_EQ(choice["text"], "and ");
}

TEST_F(ResponseTest, UsageSaysNothingWasKeptOfWhatWasNeverCompressed) {
  Start(2);
  for (int sample = 0; sample < 2; ++sample) Finish(sample, FinishReason::kLength);
  request_->sequences[0].peak_slots = 7;
  request_->sequences[1].peak_slots = 9;
  const Json usage = Body().at("usage");
  EXPECT_EQ(usage["compressions"], 0);
  EXPECT_EQ(usage["kv_tokens_peak"], 9);
  EXPECT_TRUE(usage.contains("kv_tokens_kept"));
  EXPECT_EQ(usage["kv_tokens_kept"], nullptr);
}

TEST_F(ResponseTest, UsageSumsCompressionsAndAveragesWhatCompressedSamplesKept) {
  Start(3);
  for (int sample = 0; sample < 3; ++sample) Finish(sample, FinishReason::kLength);
  std::vector<Sequence>& sequences = request_->sequences;
  sequences[0].num_compressions = 4;
  sequences[0].peak_slots = 48;
  sequences[0].kept_slots = 32;
  sequences[0].prompt_tokens_kept = 10.26F;
  sequences[1].peak_slots = 20;  // It ended too early.
  sequences[2].num_compressions = 1;
  sequences[2].peak_slots = 47;
  sequences[2].kept_slots = 32;
  sequences[2].prompt_tokens_kept = 6;
  const Json usage = Body().at("usage");
  EXPECT_EQ(usage["compressions"], 5);
  EXPECT_EQ(usage["kv_tokens_peak"], 48);
  EXPECT_EQ(usage["kv_tokens_kept"].dump(), R"({"output":23.9,"prompt":8.1})");
}

TEST_F(ResponseTest, UsageLeavesOutACompressionThatWasNeverReported) {
  Start(1);
  Finish(0, FinishReason::kStopToken);
  request_->sequences[0].num_compressions = 1;
  const Json usage = Body().at("usage");
  EXPECT_EQ(usage["compressions"], 1);
  EXPECT_EQ(usage["kv_tokens_kept"], nullptr);
}

}  // namespace
}  // namespace zipage
