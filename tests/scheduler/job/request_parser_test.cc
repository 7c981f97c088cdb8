#include "scheduler/job/request_parser.h"

#include <gtest/gtest.h>

#include <string>
#include <variant>
#include <vector>

namespace zipage {
namespace {

ParsedRequest Good(const std::string& line) {
  ParseResult result = ParseRequest(line, 7);
  if (const auto* error = std::get_if<RequestError>(&result)) {
    ADD_FAILURE() << line << "\n  refused: " << error->message;
    return {};
  }
  return std::get<ParsedRequest>(std::move(result));
}

RequestError Bad(const std::string& line) {
  ParseResult result = ParseRequest(line, 7);
  if (std::holds_alternative<ParsedRequest>(result)) {
    ADD_FAILURE() << line << "\n  accepted";
    return {};
  }
  RequestError error = std::get<RequestError>(std::move(result));
  EXPECT_EQ(error.line, 7);
  EXPECT_EQ(error.status_code, 400);
  EXPECT_FALSE(error.message.empty());
  EXPECT_EQ(error.message.find('\n'), std::string::npos) << error.message;
  EXPECT_LT(error.message.size(), 600U) << error.message;
  return error;
}

// A chat line with `members` in its body, and a short form with a prompt.
std::string Chat(const std::string& members) {
  return R"({"custom_id":"c","method":"POST","url":"/v1/chat/completions","body":{"messages":)"
         R"([{"role":"user","content":"hi"}])" +
         (members.empty() ? "" : "," + members) + "}}";
}
std::string Messages(const std::string& messages) {
  return R"({"id":"c","messages":)" + messages + "}";
}
std::string Short(const std::string& members) {
  return R"({"id":"s","prompt":"hi")" + (members.empty() ? "" : "," + members) + "}";
}

TEST(RequestParserTest, ReadsEveryFieldOfABatchLine) {
  const ParsedRequest r = Good(
      Chat(R"("model":"m","temperature":0.5,"top_p":0.9,"top_k":40,"min_p":0.05,)"
           R"("repetition_penalty":1.1,"presence_penalty":-2,"frequency_penalty":2,"seed":-3,)"
           R"("max_tokens":9,"max_completion_tokens":8,"min_tokens":2,"n":3,"best_of":3,)"
           R"("stop":["a","b"],"stop_token_ids":[5,6],"ignore_eos":true,"logprobs":true,)"
           R"("top_logprobs":4,"include_stop_str_in_output":true,"skip_special_tokens":false,)"
           R"("return_token_ids":true,"kv_budget":2048,"repetition_ngram_size":12,)"
           R"("repetition_ngram_count":5,"chat_template_kwargs":{"enable_thinking":false},)"
           R"("tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto",)"
           R"("add_generation_prompt":false,"add_special_tokens":true,"stream":false,"echo":false,)"
           R"("response_format":{"type":"text"},"logit_bias":{},"user":"u","metadata":{"x":[1]})"));
  EXPECT_EQ(r.line, 7);
  EXPECT_EQ(r.custom_id, "c");
  EXPECT_TRUE(r.is_chat);
  EXPECT_FALSE(r.is_short_form);
  EXPECT_EQ(r.model, "m");
  EXPECT_EQ(r.messages.dump(), R"([{"role":"user","content":"hi"}])");
  EXPECT_FALSE(r.prompt.has_value() || r.prompt_token_ids.has_value());
  EXPECT_FLOAT_EQ(*r.temperature, 0.5);
  EXPECT_FLOAT_EQ(*r.top_p, 0.9);
  EXPECT_EQ(r.top_k, 40);
  EXPECT_FLOAT_EQ(*r.min_p, 0.05);
  EXPECT_FLOAT_EQ(*r.repetition_penalty, 1.1);
  EXPECT_FLOAT_EQ(r.presence_penalty, -2);
  EXPECT_FLOAT_EQ(r.frequency_penalty, 2);
  EXPECT_EQ(r.seed, -3);
  EXPECT_EQ(r.max_tokens, 8);
  EXPECT_EQ(r.min_tokens, 2);
  EXPECT_EQ(r.n, 3);
  EXPECT_EQ(r.stop, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(r.stop_token_ids, (std::vector<int32_t>{5, 6}));
  EXPECT_TRUE(r.ignore_eos);
  EXPECT_EQ(r.num_logprobs, 4);
  EXPECT_TRUE(r.include_stop_str_in_output);
  EXPECT_FALSE(r.skip_special_tokens);
  EXPECT_TRUE(r.return_token_ids);
  EXPECT_EQ(r.kv_budget, 2048);
  EXPECT_EQ(r.repetition_ngram_size, 12);
  EXPECT_EQ(r.repetition_ngram_count, 5);
  EXPECT_EQ(r.chat_template_kwargs.dump(), R"({"enable_thinking":false})");
  EXPECT_EQ(r.tools.size(), 1U);
  EXPECT_FALSE(r.add_generation_prompt);
  EXPECT_EQ(r.add_special_tokens, true);
}

TEST(RequestParserTest, LeavesAbsentFieldsAbsent) {
  for (const std::string& line :
       {Chat(""), Short(""),
        Chat(R"("temperature":null,"top_p":null,"top_k":null,"min_p":null,"seed":null,"stop":null,)"
             R"("max_tokens":null,"logprobs":null,"top_logprobs":null,"tools":null,"n":null,)"
             R"("repetition_penalty":null,"stream_options":null,"guided_json":null,)"
             R"("kv_budget":null,"repetition_ngram_size":null,"repetition_ngram_count":null)")}) {
    const ParsedRequest r = Good(line);
    EXPECT_FALSE(r.temperature || r.top_p || r.top_k || r.min_p || r.repetition_penalty || r.seed ||
                 r.max_tokens || r.num_logprobs || r.model || r.add_special_tokens || r.kv_budget ||
                 r.repetition_ngram_size || r.repetition_ngram_count);
    EXPECT_EQ(r.n, 1);
    EXPECT_TRUE(r.tools.is_null() && r.chat_template_kwargs.is_null());
    EXPECT_TRUE(r.add_generation_prompt && r.skip_special_tokens);
  }
}

TEST(RequestParserTest, ReadsTheShortForm) {
  const ParsedRequest text = Good(R"({"id":"a","prompt":"hello","max_tokens":5,"logprobs":0})");
  EXPECT_EQ(text.custom_id, "a");
  EXPECT_TRUE(text.is_short_form);
  EXPECT_FALSE(text.is_chat);
  EXPECT_EQ(text.prompt, "hello");
  EXPECT_EQ(text.num_logprobs, 0);
  EXPECT_EQ(Good(R"({"prompt":"hello"})").custom_id, "line-7");
  EXPECT_EQ(Good(R"({"id":null,"prompt":"hello"})").custom_id, "line-7");
  EXPECT_EQ(Good(R"({"id":42,"prompt":"hello"})").custom_id, "42");
  EXPECT_EQ(Good(R"({"id":18446744073709551615,"prompt":"h"})").custom_id, "18446744073709551615");
  const ParsedRequest chat = Good(Messages(R"([{"role":"user","content":"x"}])"));
  EXPECT_TRUE(chat.is_chat && chat.is_short_form);
  EXPECT_EQ(Good(R"({"id":"a","prompt_token_ids":[0,7]})").prompt_token_ids,
            (std::vector<int32_t>{0, 7}));
  EXPECT_EQ(Good(R"({"id":"a","messages":null,"prompt":"p"})").prompt, "p");
}

TEST(RequestParserTest, ReadsEverySpellingOfOnePrompt) {
  const auto prompt = [](const std::string& json) {
    return R"({"custom_id":"p","method":"POST","url":"/v1/completions","body":{"prompt":)" + json +
           "}}";
  };
  EXPECT_EQ(Good(prompt(R"("x")")).prompt, "x");
  EXPECT_EQ(Good(prompt(R"(["x"])")).prompt, "x");
  EXPECT_EQ(Good(prompt(R"("")")).prompt, "");
  EXPECT_EQ(Good(prompt("[1,2]")).prompt_token_ids, (std::vector<int32_t>{1, 2}));
  EXPECT_EQ(Good(prompt("[3]")).prompt_token_ids, (std::vector<int32_t>{3}));
  EXPECT_EQ(Good(prompt("[[1,2]]")).prompt_token_ids, (std::vector<int32_t>{1, 2}));
  EXPECT_FALSE(Good(prompt("[1]")).is_short_form);
  for (const char* bad :
       {R"(["x","y"])", "[[1],[2]]", "[]", "[[]]", "7", "true", "{}", R"([1,"x"])", "[1,-2]",
        "[1.5]", "[2147483648]", R"([["x"]])", "[[[1]]]", "[{}]"}) {
    EXPECT_EQ(Bad(prompt(bad)).field.substr(0, 6), "prompt") << bad;
  }
  EXPECT_NE(Bad(prompt(R"(["x","y"])")).message.find("one prompt per line"), std::string::npos);
  EXPECT_EQ(Bad(prompt("[1,-2]")).field, "prompt[1]");
}

TEST(RequestParserTest, TakesNumbersAsUsersWriteThem) {
  EXPECT_EQ(Good(Short(R"("n":2.0)")).n, 2);
  EXPECT_EQ(Good(Short(R"("max_tokens":1e3)")).max_tokens, 1000);
  EXPECT_EQ(Good(Short(R"("top_k":-1)")).top_k, 0);
  EXPECT_EQ(Good(Short(R"("top_k":0)")).top_k, 0);
  EXPECT_EQ(Good(Short(R"("temperature":-0.0)")).temperature, 0.0F);
  EXPECT_EQ(Good(Short(R"("temperature":-0)")).temperature, 0.0F);
  EXPECT_EQ(Good(Short(R"("temperature":2)")).temperature, 2.0F);
  EXPECT_EQ(Good(Short(R"("temperature":1e-400)")).temperature, 0.0F);
  EXPECT_EQ(Good(Short(R"("seed":-0)")).seed, 0);
  EXPECT_EQ(Good(Short(R"("seed":9223372036854775807)")).seed, INT64_MAX);
  EXPECT_EQ(Good(Short(R"("seed":-9223372036854775808)")).seed, INT64_MIN);
  EXPECT_EQ(Good(Short(R"("n":128)")).n, 128);
  EXPECT_EQ(Good(Short(R"("kv_budget":1)")).kv_budget, 1);
  EXPECT_EQ(Good(Short(R"("kv_budget":512.0)")).kv_budget, 512);
  EXPECT_EQ(Good(Short(R"("kv_budget":2147483647)")).kv_budget, 2147483647);
  EXPECT_EQ(Good(Short(R"("repetition_ngram_size":0)")).repetition_ngram_size, 0);
  EXPECT_EQ(Good(Short(R"("repetition_ngram_size":1024)")).repetition_ngram_size, 1024);
  EXPECT_EQ(Good(Short(R"("repetition_ngram_count":2)")).repetition_ngram_count, 2);
}

TEST(RequestParserTest, NamesFieldValueAndRangeOfEveryBadValue) {
  struct Case {
    const char* members;
    const char* field;
    const char* message;  // a part of it
  };
  const Case cases[] = {
      {R"("temperature":-1)", "temperature", "temperature is -1; give a number from 0 to 100"},
      {R"("temperature":1e308)", "temperature", "1e+308"},
      {R"("temperature":"1")", "temperature", "is \"1\"; give a number"},
      {R"("temperature":true)", "temperature", "is true"},
      {R"("top_p":0)", "top_p", "top_p is 0; give a number above 0, at most 1"},
      {R"("top_p":1e-60)", "top_p", "above 0"},
      {R"("top_p":1.01)", "top_p", "1.01"},
      {R"("top_k":-2)", "top_k", "give an integer from -1"},
      {R"("top_k":1.5)", "top_k", "1.5"},
      {R"("min_p":1.5)", "min_p", "from 0 to 1"},
      {R"("repetition_penalty":0)", "repetition_penalty", "from 0.01 to 100"},
      {R"("presence_penalty":2.5)", "presence_penalty", "from -2 to 2"},
      {R"("frequency_penalty":-3)", "frequency_penalty", "from -2 to 2"},
      {R"("seed":1.5)", "seed", "1.5"},
      {R"("seed":9223372036854775808)", "seed", "9223372036854775808"},
      {R"("seed":1e300)", "seed", "1e+300"},
      {R"("max_tokens":0)", "max_tokens", "max_tokens is 0; give an integer from 1 to 2147483647"},
      {R"("max_tokens":-5)", "max_tokens", "-5"},
      {R"("max_tokens":2147483648)", "max_tokens", "2147483648"},
      {R"("max_completion_tokens":"9")", "max_completion_tokens", "\"9\""},
      {R"("min_tokens":-1)", "min_tokens", "-1"},
      {R"("min_tokens":9,"max_tokens":3)", "min_tokens", "at most max_tokens, which is 3"},
      {R"("n":0)", "n", "n is 0; give an integer from 1 to 128"},
      {R"("n":129)", "n", "129"},
      {R"("n":true)", "n", "true"},
      {R"("n":2,"best_of":3)", "best_of", "best_of is 3"},
      {R"("kv_budget":0)", "kv_budget", "kv_budget is 0; give an integer from 1 to 2147483647"},
      {R"("kv_budget":-256)", "kv_budget", "-256"},
      {R"("kv_budget":255.5)", "kv_budget", "255.5"},
      {R"("kv_budget":"2k")", "kv_budget", "\"2k\""},
      {R"("kv_budget":2147483648)", "kv_budget", "2147483648"},
      {R"("repetition_ngram_size":-1)", "repetition_ngram_size", "from 0 to 1024"},
      {R"("repetition_ngram_size":1025)", "repetition_ngram_size", "1025"},
      {R"("repetition_ngram_size":true)", "repetition_ngram_size", "true"},
      {R"("repetition_ngram_count":1)", "repetition_ngram_count", "from 2 to 1000000"},
      {R"("repetition_ngram_count":1000001)", "repetition_ngram_count", "1000001"},
      {R"("stop":"")", "stop", "empty"},
      {R"("stop":["a",""])", "stop[1]", "empty"},
      {R"("stop":["a",5])", "stop[1]", "5"},
      {R"("stop":7)", "stop", "7"},
      {R"("stop_token_ids":5)", "stop_token_ids", "array"},
      {R"("stop_token_ids":[1,-1])", "stop_token_ids[1]", "-1"},
      {R"("ignore_eos":1)", "ignore_eos", "true or false"},
      {R"("stream":true)", "stream", "true"},
      {R"("echo":true)", "echo", "true"},
      {R"("logit_bias":{"5":1})", "logit_bias", "not supported"},
      {R"("guided_json":{})", "guided_json", "not supported"},
      {R"("response_format":{"type":"json_object"})", "response_format.type", "json_object"},
      {R"("response_format":"text")", "response_format", "text"},
      {R"("model":5)", "model", "5"},
      {R"("temprature":1)", "temprature", "did you mean temperature?"},
      {R"("max_token":1)", "max_token", "did you mean max_tokens?"},
      {R"("kv_buget":1)", "kv_buget", "did you mean kv_budget?"},
      {R"("answer_key_of_mine":1)", "answer_key_of_mine", "metadata"},
      {R"("prompt_logprobs":1)", "prompt_logprobs", "not supported"},
  };
  for (const Case& c : cases) {
    for (const std::string& line : {Chat(c.members), Short(c.members)}) {
      const RequestError error = Bad(line);
      EXPECT_EQ(error.field, c.field);
      EXPECT_NE(error.message.find(c.message), std::string::npos) << error.message;
      EXPECT_EQ(error.message.rfind(c.field, 0), 0U) << error.message;
      EXPECT_TRUE(error.custom_id.has_value());
    }
  }
}

TEST(RequestParserTest, KeepsTheFieldsOfTheTwoKindsApart) {
  EXPECT_EQ(Bad(Chat(R"("logprobs":5)")).field, "logprobs");
  EXPECT_EQ(Bad(Short(R"("logprobs":true)")).field, "logprobs");
  EXPECT_EQ(Bad(Short(R"("logprobs":21)")).field, "logprobs");
  EXPECT_EQ(Bad(Chat(R"("top_logprobs":3)")).field, "top_logprobs");
  EXPECT_EQ(Bad(Chat(R"("logprobs":true,"top_logprobs":21)")).field, "top_logprobs");
  EXPECT_EQ(Bad(Chat(R"("logprobs":false,"top_logprobs":2)")).field, "top_logprobs");
  EXPECT_FALSE(Good(Chat(R"("logprobs":false,"top_logprobs":0)")).num_logprobs.has_value());
  EXPECT_EQ(Good(Chat(R"("logprobs":true)")).num_logprobs, 0);
  EXPECT_EQ(Bad(Short(R"("top_logprobs":3)")).field, "top_logprobs");
  EXPECT_EQ(Bad(Chat(R"("prompt":"x")")).field, "prompt");
  EXPECT_EQ(Bad(Short(R"("messages":[{"role":"user","content":"x"}])")).field, "prompt");
  EXPECT_EQ(Bad(Short(R"("prompt_token_ids":[1])")).field, "prompt");
  EXPECT_EQ(Bad(Short(R"("tools":[])")).field, "tools");
  EXPECT_EQ(Bad(R"({"id":"x"})").field, "prompt");
  EXPECT_EQ(Bad(R"({"id":"x","prompt_token_ids":[]})").field, "prompt_token_ids");
}

TEST(RequestParserTest, ReadsMessagesAsTemplatesTakeThem) {
  const auto dump = [](const std::string& json) { return Good(Messages(json)).messages.dump(); };
  EXPECT_EQ(dump(R"([{"role":"user","content":[{"type":"text","text":"a"},"b"],"name":"N"}])"),
            R"([{"role":"user","content":"a\nb","name":"N"}])");
  EXPECT_EQ(dump(R"([{"content":"late role","role":"user","zeta":1,"alpha":{"b":2,"a":1}}])"),
            R"([{"content":"late role","role":"user","zeta":1,"alpha":{"b":2,"a":1}}])");
  EXPECT_EQ(dump(R"([{"role":"assistant","content":null,"tool_calls":[{"type":"function",)"
                 R"("function":{"name":"f","arguments":"{\"b\":1,\"a\":2}"}}]}])"),
            R"([{"role":"assistant","content":"","tool_calls":[{"type":"function",)"
            R"("function":{"name":"f","arguments":{"b":1,"a":2}}}]}])");
  EXPECT_EQ(dump(R"([{"role":"user","content":[]}])"), R"([{"role":"user","content":""}])");
  const std::pair<const char*, const char*> bad[] = {
      {"[]", "messages"},
      {R"("hi")", "messages"},
      {"{}", "messages"},
      {"[5]", "messages[0]"},
      {R"([{"content":"x"}])", "messages[0].role"},
      {R"([{"role":5,"content":"x"}])", "messages[0].role"},
      {R"([{"role":"","content":"x"}])", "messages[0].role"},
      {R"([{"role":"user"}])", "messages[0].content"},
      {R"([{"role":"user","content":null}])", "messages[0].content"},
      {R"([{"role":"user","content":5}])", "messages[0].content"},
      {R"([{"role":"user","content":"a"},{"role":"user","content":[{"type":"image_url"}]}])",
       "messages[1].content[0].type"},
      {R"([{"role":"user","content":[{"text":"a"}]}])", "messages[0].content[0]"},
      {R"([{"role":"user","content":[{"type":"text"}]}])", "messages[0].content[0]"},
      {R"([{"role":"user","content":[{"type":"text","text":1}]}])", "messages[0].content[0].text"},
      {R"([{"role":"user","content":[7]}])", "messages[0].content[0]"},
      {R"([{"role":"assistant","tool_calls":[]}])", "messages[0].content"},
      {R"([{"role":"assistant","tool_calls":{}}])", "messages[0].tool_calls"},
      {R"([{"role":"assistant","tool_calls":[{}]}])", "messages[0].tool_calls[0]"},
      {R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"{"}}]}])",
       "messages[0].tool_calls[0].function.arguments"},
      {R"([{"role":"assistant","tool_calls":[{"function":{"name":"f","arguments":"3"}}]}])",
       "messages[0].tool_calls[0].function.arguments"},
  };
  for (const auto& [messages, field] : bad) {
    EXPECT_EQ(Bad(Messages(messages)).field, field) << messages;
  }
  EXPECT_NE(Bad(Messages(R"([{"role":"user","content":[{"type":"image_url"}]}])"))
                .message.find("image_url"),
            std::string::npos);
  EXPECT_EQ(Bad(Chat(R"("tools":{})")).field, "tools");
  EXPECT_EQ(Bad(Chat(R"("tools":[{"type":"web"}])")).field, "tools[0].type");
  EXPECT_EQ(Bad(Chat(R"("tools":[{"type":"function"}])")).field, "tools[0]");
  EXPECT_EQ(Bad(Chat(R"("tool_choice":"required")")).field, "tool_choice");
  EXPECT_EQ(Bad(Chat(R"("chat_template_kwargs":[])")).field, "chat_template_kwargs");
  EXPECT_EQ(Bad(Chat(R"("chat_template_kwargs":{"tools":1})")).field, "chat_template_kwargs.tools");
  EXPECT_TRUE(Good(Chat(R"("tools":[])")).tools.is_null());
}

TEST(RequestParserTest, RefusesMalformedRowsAndKeepsTheirId) {
  struct Case {
    const char* line;
    const char* field;
    const char* custom_id;  // null: unreadable
  };
  const Case cases[] = {
      {"not json", "", nullptr},
      {"", "", nullptr},
      {"[1,2]", "", nullptr},
      {R"([{"custom_id":"a"}])", "", nullptr},
      {"\"text\"", "", nullptr},
      {"null", "", nullptr},
      {R"({"custom_id":"a","prompt":"x"} trailing)", "", "a"},
      {R"({"custom_id":"a","prompt":"x"}{"custom_id":"b"})", "", "a"},
      {R"({"custom_id":"a","method":"POST")", "", "a"},
      {R"({"custom_id":"a","body":{"temperature":NaN}})", "", "a"},
      {R"({"custom_id":"a","body":{"temperature":Infinity}})", "", "a"},
      {R"({"custom_id":"a","body":{"temperature":-Infinity}})", "", "a"},
      {R"({"custom_id":"a","body":{"temperature":1e999}})", "", "a"},
      {R"({'custom_id':'a'})", "", nullptr},
      {R"({"custom_id":"a",})", "", "a"},
      {R"({"x":{"custom_id":"no"},"id":"outer",})", "", "outer"},
      {R"({"method":"POST","url":"/v1/completions","body":{"prompt":"x"}})", "custom_id", nullptr},
      {R"({"custom_id":null,"method":"POST","url":"/v1/completions","body":{}})", "custom_id",
       nullptr},
      {R"({"custom_id":5,"method":"POST","url":"/v1/completions","body":{}})", "custom_id",
       nullptr},
      {R"({"custom_id":"","method":"POST","url":"/v1/completions","body":{}})", "custom_id",
       nullptr},
      {R"({"custom_id":"a","url":"/v1/completions","body":{"prompt":"x"}})", "method", "a"},
      {R"({"custom_id":"a","method":"GET","url":"/v1/completions","body":{"prompt":"x"}})",
       "method", "a"},
      {R"({"custom_id":"a","method":5,"url":"/v1/completions","body":{}})", "method", "a"},
      {R"({"custom_id":"a","method":"POST","body":{"prompt":"x"}})", "url", "a"},
      {R"({"custom_id":"a","method":"POST","url":"/v1/embeddings","body":{}})", "url", "a"},
      {R"({"custom_id":"a","method":"POST","url":"/v1/completions"})", "body", "a"},
      {R"({"custom_id":"a","method":"POST","url":"/v1/completions","body":[]})", "body", "a"},
      {R"({"custom_id":"a","method":"POST","url":"/v1/completions","body":null})", "body", "a"},
      {R"({"custom_id":"a","method":"POST","url":"/v1/completions","body":{}})", "prompt", "a"},
      {R"({"custom_id":"a","method":"POST","url":"/v1/chat/completions","body":{}})", "messages",
       "a"},
      {R"({"custom_id":"a","method":"POST","url":"/v1/completions","body":{},"extra":1})", "extra",
       "a"},
      {R"({"id":true,"prompt":"x"})", "id", nullptr},
      {R"({"id":"","prompt":"x"})", "id", nullptr},
      {R"({"id":1.5,"prompt":"x"})", "id", nullptr},
      {"{}", "prompt", "line-7"},
      {"{\"custom_id\":\"a\",\"x\":\"tab\there\"}", "", "a"},
      {"{\"custom_id\":\"a\",\"x\":\"\xFF\"}", "", "a"},
      {"{\"custom_id\":\"a\",\"x\":\"\\ud800\"}", "", "a"},
      {"{\"custom_id\":\"a\",\"x\":\"\xED\xA0\x80\"}", "", "a"},
  };
  for (const Case& c : cases) {
    const RequestError error = Bad(c.line);
    EXPECT_EQ(error.field, c.field) << c.line;
    if (c.custom_id == nullptr) {
      EXPECT_FALSE(error.custom_id.has_value()) << c.line << " " << *error.custom_id;
    } else {
      EXPECT_EQ(error.custom_id.value_or("none"), c.custom_id) << c.line;
    }
  }
  EXPECT_EQ(Bad(std::string("{\"id\":\"a\",\"prompt\":\"x\"}\0", 24)).field, "");
  EXPECT_NE(Bad(std::string("{\"id\":\0}", 8)).message.find("NUL byte at column 7"),
            std::string::npos);
}

TEST(RequestParserTest, AcceptsEscapedAndUnusualText) {
  EXPECT_EQ(*Good(R"({"id":"a","prompt":"\u0000\ud83d\ude00\n"})").prompt,
            std::string("\0\xF0\x9F\x98\x80\n", 6));
  EXPECT_EQ(Good("  \t{ \"id\" : \"\xE4\xBD\xA0\" , \"prompt\":\"x\" }  ").custom_id,
            "\xE4\xBD\xA0");
  // The last of two equal keys counts, as in Python.
  EXPECT_EQ(Good(Short(R"("n":500,"n":2)")).n, 2);
}

TEST(RequestParserTest, SurvivesBombs) {
  const auto nested = [](size_t depth, char open, char close) {
    return R"({"id":"deep","metadata":)" + std::string(depth, open) + std::string(depth, close) +
           R"(,"prompt":"x"})";
  };
  EXPECT_EQ(Good(nested(60, '[', ']')).custom_id, "deep");
  const RequestError deep = Bad(nested(3000000, '[', ']'));
  EXPECT_EQ(deep.custom_id, "deep");
  EXPECT_NE(deep.message.find("64"), std::string::npos);
  Bad(std::string(3000000, '{'));
  Bad(R"({"id":"a","prompt":)" + std::string(1000000, '['));

  std::string keys = R"({"id":"keys","metadata":{)";
  for (int i = 0; i < 100000; ++i) keys += "\"k" + std::to_string(i) + "\":1,";
  EXPECT_EQ(Bad(keys + R"("z":1},"prompt":"x"})").custom_id, "keys");

  std::string values = R"({"id":"values","prompt_token_ids":[1)";
  for (int i = 0; i < 3000000; ++i) values += ",1";
  EXPECT_NE(Bad(values + "]}").message.find("values"), std::string::npos);

  std::string many_stops = "\"stop\":[\"a\"";
  for (int i = 0; i < 64; ++i) many_stops += ",\"a\"";
  EXPECT_EQ(Bad(Short(many_stops + "]")).field, "stop");
  EXPECT_EQ(Bad(Short("\"stop\":\"" + std::string(2000, 's') + "\"")).field, "stop");
  Bad(R"({"id":")" + std::string(2000, 'i') + R"(","prompt":"x"})");
  Bad(R"({"id":")" + std::string(2000, 'i') + R"(","prompt":"x")");
  Bad(Short("\"" + std::string(100000, 'k') + "\":1"));
  EXPECT_EQ(Good(R"({"id":"a","prompt":")" + std::string(10000000, 'x') + "\"}").prompt->size(),
            10000000U);
}

TEST(RequestParserTest, ExplainsAnOverlongLine) {
  const RequestError error =
      OverlongLineError(R"({"custom_id":"big","method":"POST","body":{"prompt":"xxx)", 3, 200, 100);
  EXPECT_EQ(error.line, 3);
  EXPECT_EQ(error.custom_id, "big");
  EXPECT_NE(error.message.find("200 bytes"), std::string::npos);
  EXPECT_NE(error.message.find("max_line_mb"), std::string::npos);
  EXPECT_FALSE(OverlongLineError(R"({"body":")", 3, 200, 100).custom_id.has_value());
}

}  // namespace
}  // namespace zipage
