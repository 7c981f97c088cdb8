#include "scheduler/job/result.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>

namespace zipage {
namespace {

using Json = nlohmann::ordered_json;

CompletionResult Chat() {
  CompletionResult result;
  result.request_id = "3-17";
  result.custom_id = "q1";
  result.model = "m";
  result.created = 1700000000;
  result.is_chat = true;
  result.prompt_token_ids = {1, 2, 3};
  CompletionChoice choice;
  choice.text = "4 \xE4\xBD\xA0";
  choice.token_ids = {7, 8};
  result.choices.push_back(choice);
  result.usage = {.prompt_tokens = 3,
                  .completion_tokens = 2,
                  .cached_tokens = 1,
                  .kv_tokens_peak = 5,
                  .compressions = 0,
                  .kv_tokens_kept = std::nullopt};
  return result;
}

TEST(ResultTest, WritesAChatCompletionFieldByField) {
  EXPECT_EQ(
      FormatResult(Chat()),
      R"({"id":"batch_req_3-17","custom_id":"q1","response":{"status_code":200,"request_id":"3-17",)"
      R"("body":{"id":"chatcmpl-3-17","object":"chat.completion","created":1700000000,"model":"m",)"
      R"("choices":[{"index":0,"message":{"role":"assistant","content":"4 )"
      "\xE4\xBD\xA0"
      R"(","refusal":null},)"
      R"("logprobs":null,"finish_reason":"stop","stop_reason":null}],)"
      R"("usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,)"
      R"("prompt_tokens_details":{"cached_tokens":1},"cached_tokens":1,"kv_tokens_peak":5,)"
      R"("compressions":0,"kv_tokens_kept":null}}},"error":null})");
}

TEST(ResultTest, WritesWhatCompressionKeptWithOneDecimal) {
  CompletionResult result = Chat();
  result.usage.compressions = 3;
  result.usage.kv_tokens_kept = KvTokensKept{.prompt = 100.0 / 3, .output = 2048 - 100.0 / 3};
  const std::string line = FormatResult(result);
  EXPECT_NE(line.find(R"("compressions":3,"kv_tokens_kept":{"prompt":33.3,"output":2014.7}}})"),
            std::string::npos)
      << line;
  result.choices[0].finish_reason = FinishReason::kRepetition;
  const Json choice = Json::parse(FormatResult(result))["response"]["body"]["choices"][0];
  EXPECT_EQ(choice["finish_reason"], "repetition");
  EXPECT_EQ(choice["stop_reason"], nullptr);
}

TEST(ResultTest, WritesATextCompletionWithTokenIds) {
  CompletionResult result = Chat();
  result.is_chat = false;
  result.return_token_ids = true;
  result.choices[0].finish_reason = FinishReason::kLength;
  result.choices.push_back(result.choices[0]);
  result.choices[1].index = 1;
  result.choices[1].stop_reason = std::string("\n\n");
  result.choices.push_back(result.choices[0]);
  result.choices[2].stop_reason = int32_t{42};
  const Json body = Json::parse(FormatResult(result))["response"]["body"];
  EXPECT_EQ(body["id"], "cmpl-3-17");
  EXPECT_EQ(body["object"], "text_completion");
  EXPECT_EQ(body["prompt_token_ids"], Json({1, 2, 3}));
  EXPECT_EQ(body["choices"][0]["text"], "4 \xE4\xBD\xA0");
  EXPECT_FALSE(body["choices"][0].contains("message"));
  EXPECT_EQ(body["choices"][0]["finish_reason"], "length");
  EXPECT_EQ(body["choices"][0]["token_ids"], Json({7, 8}));
  EXPECT_EQ(body["choices"][0]["stop_reason"], nullptr);
  EXPECT_EQ(body["choices"][1]["index"], 1);
  EXPECT_EQ(body["choices"][1]["stop_reason"], "\n\n");
  EXPECT_EQ(body["choices"][2]["stop_reason"], 42);
}

// "你" cut into two tokens, then "a".
std::vector<TokenTextLogprobs> SplitCharacter() {
  return {{{"\xE4\xBD", -0.5F}, {{"\xE4\xBD", -0.5F}, {"x", -2.0F}}},
          {{"\xA0", -0.25F}, {}},
          {{"a", -std::numeric_limits<float>::infinity()}, {{"b", -1.0F}}}};
}

TEST(ResultTest, WritesChatLogprobsWithBytes) {
  CompletionResult result = Chat();
  result.has_logprobs = true;
  result.choices[0].logprobs = SplitCharacter();
  const Json content =
      Json::parse(FormatResult(result))["response"]["body"]["choices"][0]["logprobs"]["content"];
  ASSERT_EQ(content.size(), 3U);
  EXPECT_EQ(content[0]["bytes"], Json({0xE4, 0xBD}));
  EXPECT_EQ(content[0]["token"], "\xEF\xBF\xBD");
  EXPECT_EQ(content[0]["logprob"], -0.5);
  EXPECT_EQ(content[0]["top_logprobs"][1].dump(), R"({"token":"x","logprob":-2.0,"bytes":[120]})");
  EXPECT_EQ(content[1]["top_logprobs"], Json::array());
  EXPECT_EQ(content[2]["logprob"], -9999.0);
}

TEST(ResultTest, WritesCompletionLogprobsWithOffsetsInCharacters) {
  CompletionResult result = Chat();
  result.is_chat = false;
  result.has_logprobs = true;
  result.choices[0].logprobs = SplitCharacter();
  const Json logprobs =
      Json::parse(FormatResult(result))["response"]["body"]["choices"][0]["logprobs"];
  EXPECT_EQ(logprobs["tokens"], Json({"bytes:\\xe4\\xbd", "bytes:\\xa0", "a"}));
  EXPECT_EQ(logprobs["token_logprobs"], Json({-0.5, -0.25, -9999.0}));
  EXPECT_EQ(logprobs["text_offset"], Json({0, 0, 1}));
  EXPECT_EQ(logprobs["top_logprobs"][0].dump(), R"({"bytes:\\xe4\\xbd":-0.5,"x":-2.0})");
  EXPECT_EQ(logprobs["top_logprobs"][1].dump(), R"({"bytes:\\xa0":-0.25})");
  EXPECT_EQ(logprobs["top_logprobs"][2].dump(), R"({"b":-1.0,"a":-9999.0})");
}

TEST(ResultTest, ReplacesNaNAndBrokenTextByWhatJsonCanSay) {
  CompletionResult result = Chat();
  result.has_logprobs = true;
  result.custom_id = std::string("a\0\xFF\n", 4);
  result.model = "\xC0\xAF";
  result.choices[0].text = "ok\xF0\x9F\x98";
  result.choices[0].logprobs = {{{"\xED\xA0\x80", std::nanf("")}, {}}};
  const std::string line = FormatResult(result);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  const Json json = Json::parse(line);
  EXPECT_EQ(json["response"]["body"]["choices"][0]["message"]["content"], "ok\xEF\xBF\xBD");
  EXPECT_EQ(json["response"]["body"]["choices"][0]["logprobs"]["content"][0]["logprob"], -9999.0);
}

TEST(ResultTest, WritesARefusalAsOpenAiDoes) {
  RequestError error{.line = 7,
                     .custom_id = "q",
                     .field = "temperature",
                     .message = "temperature is -1; give a number from 0 to 100"};
  EXPECT_EQ(
      FormatRefusal(error, "3-7"),
      R"({"id":"batch_req_3-7","custom_id":"q","response":{"status_code":400,"request_id":"3-7",)"
      R"("body":{"error":{"message":"line 7: temperature is -1; give a number from 0 to 100",)"
      R"("type":"invalid_request_error","param":"temperature","code":"invalid_value","line":7}}},)"
      R"("error":null,"line":7})");
  error.custom_id.reset();
  error.field.clear();
  error.status_code = 404;
  const Json json = Json::parse(FormatRefusal(error, "3-7"));
  EXPECT_EQ(json["custom_id"], nullptr);
  EXPECT_EQ(json["response"]["status_code"], 404);
  EXPECT_EQ(json["response"]["body"]["error"]["param"], nullptr);
  EXPECT_EQ(json["response"]["body"]["error"]["code"], "model_not_found");
}

TEST(ResultTest, WritesAFailureWithoutAResponse) {
  EXPECT_EQ(FormatFailure("3-9", "q", 9, "cancelled", "the job was cancelled"),
            R"({"id":"batch_req_3-9","custom_id":"q","response":null,"error":{"code":"cancelled",)"
            R"("message":"line 9: the job was cancelled"},"line":9})");
}

}  // namespace
}  // namespace zipage
