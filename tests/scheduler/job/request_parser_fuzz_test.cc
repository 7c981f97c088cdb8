// Seeded mutations of valid lines: whatever comes out, it is parsed or refused in one printable
// line, and its result line is valid JSON. ZIPAGE_FUZZ_ITERATIONS sets how many.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "scheduler/job/request_parser.h"
#include "scheduler/job/result.h"
#include "scheduler/text/utf8.h"

namespace zipage {
namespace {

const std::vector<std::string>& Corpus() {
  static const auto* corpus = new std::vector<std::string>{
      R"({"custom_id":"c","method":"POST","url":"/v1/chat/completions","body":{"model":"m",)"
      R"("messages":[{"role":"system","content":"s"},{"role":"user","content":[{"type":"text",)"
      R"("text":"x"}]}],"temperature":0.7,"top_p":0.9,"logprobs":true,"top_logprobs":2}})",
      R"({"custom_id":"p","method":"POST","url":"/v1/completions","body":{"prompt":["a"],)"
      R"("max_tokens":16,"stop":["\n","\u4f60"],"seed":-1,"n":2,"logit_bias":{}}})",
      R"({"id":"t","prompt_token_ids":[1,2,3,99999],"stop_token_ids":[2],"min_tokens":1,)"
      R"("kv_budget":64,"repetition_ngram_size":3,"repetition_ngram_count":2})",
      R"({"id":12,"messages":[{"role":"assistant","content":null,"tool_calls":[{"type":"function",)"
      R"("function":{"name":"f","arguments":"{\"a\":[1,{\"b\":2}]}"}}]},{"role":"tool",)"
      R"("content":"4"}],"tools":[{"type":"function","function":{"name":"f"}}]})",
      "{\"prompt\":\"\xF0\x9F\x98\x80 caf\xC3\xA9\",\"top_k\":-1,\"min_p\":0.1,\"user\":\"u\"}",
  };
  return *corpus;
}

std::string Mutate(std::mt19937_64* random) {
  static const std::vector<std::string> kTokens = {"{",
                                                   "}",
                                                   "[",
                                                   "]",
                                                   ",",
                                                   ":",
                                                   "\"",
                                                   "\\",
                                                   "null",
                                                   "true",
                                                   "NaN",
                                                   "-0",
                                                   "1e999",
                                                   "1e-400",
                                                   "9223372036854775808",
                                                   "-1",
                                                   "0",
                                                   "1.5",
                                                   "\"\"",
                                                   "\\ud800",
                                                   "\\u0000",
                                                   "\xFF",
                                                   "\xE4\xBD",
                                                   "\r",
                                                   "\n",
                                                   "\xEF\xBB\xBF",
                                                   "[[[[[[[[",
                                                   "{\"a\":",
                                                   "\"body\":",
                                                   "\"custom_id\":",
                                                   "\"n\":",
                                                   "\"messages\":",
                                                   "\"stop\":",
                                                   "\"prompt\":",
                                                   "{}",
                                                   "[]",
                                                   "\"content\":"};
  const auto below = [random](size_t n) { return static_cast<size_t>((*random)() % n); };
  std::string line = Corpus()[below(Corpus().size())];
  for (size_t i = below(5) + 1; i > 0 && !line.empty(); --i) {
    const size_t at = below(line.size());
    switch (below(7)) {
      case 0:
        line[at] = static_cast<char>(below(256));
        break;
      case 1:
        line.erase(at, below(8) + 1);
        break;
      case 2:
        line.insert(at, kTokens[below(kTokens.size())]);
        break;
      case 3:
        line.resize(at);
        break;
      case 4:
        line.insert(at, line.substr(below(line.size()), below(40)));
        break;
      case 5: {
        const std::string& other = Corpus()[below(Corpus().size())];
        line.replace(at, below(20), other, below(other.size()), below(40));
        break;
      }
      default: {
        // Swap a value for a token, so that the line often stays JSON.
        const size_t colon = line.find(':', at);
        if (colon == std::string::npos) break;
        const size_t end = line.find_first_of(",}", colon);
        if (end == std::string::npos) break;
        line.replace(colon + 1, end - colon - 1, kTokens[below(kTokens.size())]);
      }
    }
  }
  return line;
}

TEST(RequestParserFuzzTest, ParsesOrRefusesEveryLineInOneLine) {
  const char* setting = std::getenv("ZIPAGE_FUZZ_ITERATIONS");
  const int64_t iterations = setting != nullptr ? std::atoll(setting) : 50000;
  std::mt19937_64 random(20260308);
  int64_t num_parsed = 0;
  for (int64_t i = 0; i < iterations; ++i) {
    const std::string line = Mutate(&random);
    const ParseResult result = ParseRequest(line, i + 1);
    if (const auto* parsed = std::get_if<ParsedRequest>(&result)) {
      ++num_parsed;
      ASSERT_FALSE(parsed->custom_id.empty()) << line;
      ASSERT_EQ(parsed->is_chat, parsed->messages.is_array()) << line;
      ASSERT_EQ(parsed->is_chat + parsed->prompt.has_value() + parsed->prompt_token_ids.has_value(),
                1)
          << line;
      ASSERT_TRUE(parsed->n >= 1 && parsed->n <= 128) << line;
      ASSERT_TRUE(parsed->max_tokens.value_or(1) >= 1) << line;
      ASSERT_TRUE(parsed->temperature.value_or(0) >= 0) << line;
      ASSERT_TRUE(parsed->top_p.value_or(1) > 0 && parsed->top_p.value_or(1) <= 1) << line;
      continue;
    }
    const auto& error = std::get<RequestError>(result);
    ASSERT_FALSE(error.message.empty()) << line;
    ASSERT_TRUE(IsValidUtf8(error.message)) << line;
    ASSERT_TRUE(std::all_of(error.message.begin(), error.message.end(), [](char c) {
      return static_cast<unsigned char>(c) >= 0x20;
    })) << line;
    const std::string output = FormatRefusal(error, "r");
    ASSERT_EQ(output.find('\n'), std::string::npos);
    ASSERT_EQ(nlohmann::json::parse(output)["line"], i + 1);
  }
  // The mutations reach both sides.
  EXPECT_GT(num_parsed, iterations / 100);
  EXPECT_LT(num_parsed, iterations * 9 / 10);
}

}  // namespace
}  // namespace zipage
