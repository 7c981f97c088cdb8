#include "scheduler/job/request_builder.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>

#include "scheduler/text/chat_template.h"
#include "scheduler/text/tokenizer.h"

namespace zipage {
namespace {

const Tokenizer& TinyTokenizer() {
  static const Tokenizer* tokenizer =
      Tokenizer::Load(ZIPAGE_SOURCE_DIR "/tests/golden/tokenizer/tiny").value().release();
  return *tokenizer;
}

const ChatTemplate& TinyTemplate() {
  static const auto* chat_template =
      new ChatTemplate(ChatTemplate::Parse(*TinyTokenizer().chat_template(false)).value());
  return *chat_template;
}

RequestBuilder::Options TinyOptions() {
  RequestBuilder::Options options;
  options.served_names = {"tiny", "small"};
  options.default_name = "/models/tiny";
  options.max_model_len = 64;
  options.vocab_size = 512;
  options.eos_token_ids = {509, 511};
  options.engine_seed = 1;
  return options;
}

BuildResult Build(const std::string& line, const RequestBuilder::Options& options) {
  ParseResult parsed = ParseRequest(line, 7);
  if (auto* error = std::get_if<RequestError>(&parsed)) {
    ADD_FAILURE() << line << "\n  not parsed: " << error->message;
    return *error;
  }
  const RequestBuilder builder(&TinyTokenizer(),
                               {.chat = &TinyTemplate(), .tools = &TinyTemplate()}, options);
  return builder.Build(std::get<ParsedRequest>(std::move(parsed)));
}

BuiltRequest Good(const std::string& line, const RequestBuilder::Options& options = TinyOptions()) {
  BuildResult built = Build(line, options);
  if (auto* error = std::get_if<RequestError>(&built)) {
    ADD_FAILURE() << line << "\n  refused: " << error->message;
    return {};
  }
  return std::get<BuiltRequest>(std::move(built));
}

RequestError Bad(const std::string& line, const RequestBuilder::Options& options = TinyOptions()) {
  BuildResult built = Build(line, options);
  if (std::holds_alternative<BuiltRequest>(built)) {
    ADD_FAILURE() << line << "\n  accepted";
    return {};
  }
  RequestError error = std::get<RequestError>(std::move(built));
  EXPECT_EQ(error.line, 7);
  EXPECT_TRUE(error.custom_id.has_value());
  EXPECT_EQ(error.message.find('\n'), std::string::npos) << error.message;
  return error;
}

bool Says(const RequestError& error, const std::string& part) {
  if (error.message.find(part) != std::string::npos) return true;
  ADD_FAILURE() << error.message << "\n  lacks: " << part;
  return false;
}

std::string Ids(int count) {
  std::string ids = "[5";
  for (int i = 1; i < count; ++i) ids += ",5";
  return ids + "]";
}

TEST(RequestBuilderTest, TokenizesPromptsAndRenderedMessages) {
  const BuiltRequest text = Good(R"({"id":"a","prompt":"hello world"})");
  EXPECT_EQ(text.prompt_token_ids, *TinyTokenizer().Encode("hello world", true));
  EXPECT_EQ(text.custom_id, "a");
  EXPECT_EQ(text.line, 7);
  EXPECT_FALSE(text.is_chat);
  const BuiltRequest chat = Good(R"({"id":"a","messages":[{"role":"user","content":"hi"}]})");
  EXPECT_EQ(
      chat.prompt_token_ids,
      *TinyTokenizer().Encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", false));
  EXPECT_EQ(chat.prompt_token_ids[0], 510);
  EXPECT_TRUE(chat.is_chat);
  const BuiltRequest bare = Good(
      R"({"id":"a","messages":[{"role":"user","content":"hi"}],"add_generation_prompt":false})");
  EXPECT_EQ(bare.prompt_token_ids,
            *TinyTokenizer().Encode("<|im_start|>user\nhi<|im_end|>\n", false));
  EXPECT_EQ(Good(R"({"prompt_token_ids":[0,511]})").prompt_token_ids,
            (std::vector<int32_t>{0, 511}));
}

TEST(RequestBuilderTest, RendersRequestsWithToolsByTheTemplateForTools) {
  const ChatTemplate tools = *ChatTemplate::Parse("{{ tools[0].function.name }}!");
  const std::string plain = R"({"id":"a","messages":[{"role":"user","content":"hi"}]})";
  const std::string with_tools = R"({"id":"a","messages":[{"role":"user","content":"hi"}],)"
                                 R"("tools":[{"type":"function","function":{"name":"get time"}}]})";
  const auto build = [&](const std::string& line, RequestBuilder::Templates templates) {
    return RequestBuilder(&TinyTokenizer(), templates, TinyOptions())
        .Build(std::get<ParsedRequest>(ParseRequest(line, 7)));
  };
  const RequestBuilder::Templates both = {.chat = &TinyTemplate(), .tools = &tools};
  EXPECT_EQ(std::get<BuiltRequest>(build(with_tools, both)).prompt_token_ids,
            *TinyTokenizer().Encode("get time!", false));
  EXPECT_EQ(std::get<BuiltRequest>(build(plain, both)).prompt_token_ids,
            Good(plain).prompt_token_ids);
  const BuildResult refused = build(plain, {.tools = &tools});
  EXPECT_TRUE(Says(std::get<RequestError>(refused), "has no chat template"));
}

TEST(RequestBuilderTest, RefusesPromptsThatAreEmptyOrOutsideTheVocabulary) {
  EXPECT_EQ(Bad(R"({"id":"a","prompt":""})").field, "prompt");
  EXPECT_TRUE(Says(Bad(R"({"id":"a","prompt_token_ids":[1,512]})"),
                   "prompt_token_ids[1] is 512; give ids from 0 to 511"));
  EXPECT_TRUE(Says(Bad(R"({"id":"a","prompt":"x","stop_token_ids":[3,600]})"),
                   "stop_token_ids[1] is 600; give ids from 0 to 511"));
  std::string all = "0";
  for (int id = 1; id < 512; ++id) all += "," + std::to_string(id);
  all = R"({"prompt":"x","stop_token_ids":[)" + all + R"(],"min_tokens":)";
  EXPECT_TRUE(Says(Bad(all + "1}"), "stop_token_ids holds all 512 ids of the vocabulary"));
  EXPECT_EQ(Good(all + "0}").sampling.stop_token_ids.size(), 512U);
  RequestBuilder::Options small = TinyOptions();
  small.vocab_size = 510;
  EXPECT_TRUE(Says(Bad(R"({"id":"a","messages":[{"role":"user","content":"x"}]})", small), "510"));
}

TEST(RequestBuilderTest, FitsPromptAndOutputIntoTheContext) {
  const auto ids = [](int count, const std::string& more) {
    return R"({"id":"a","prompt_token_ids":)" + Ids(count) + more + "}";
  };
  EXPECT_EQ(Good(ids(63, "")).sampling.max_tokens, 1);
  EXPECT_EQ(Good(ids(60, "")).sampling.max_tokens, 4);
  EXPECT_EQ(Good(ids(60, R"(,"max_tokens":4)")).sampling.max_tokens, 4);
  const RequestError full = Bad(ids(64, ""));
  EXPECT_EQ(full.field, "prompt_token_ids");
  EXPECT_EQ(full.status_code, 400);
  EXPECT_TRUE(Says(full, "has 64 tokens; the context is 64 tokens, and a prompt may have 63"));
  EXPECT_TRUE(Says(Bad(ids(60, R"(,"max_tokens":5)")), "give at most 4"));
  EXPECT_TRUE(Says(Bad(ids(60, R"(,"min_tokens":5)")), "at most max_tokens, which is 4"));
  std::string words;
  for (int i = 0; i < 100; ++i) words += "9 ";
  EXPECT_TRUE(Says(Bad(R"({"id":"a","prompt":")" + words + "\"}"), "has 200 tokens"));
  EXPECT_TRUE(Says(Bad(R"({"id":"a","prompt":")" + std::string(8000000, '9') + "\"}"),
                   "has more than 1152 tokens; the context is 64"));
}

TEST(RequestBuilderTest, GivesSixteenTokensToCompletionsAndTheRestToOthers) {
  const auto batch = [](const std::string& prompt) {
    return R"({"custom_id":"a","method":"POST","url":"/v1/completions","body":{"prompt":)" +
           prompt + "}}";
  };
  EXPECT_EQ(Good(batch("[1,2]")).sampling.max_tokens, 16);
  EXPECT_EQ(Good(batch(Ids(60))).sampling.max_tokens, 4);
  EXPECT_EQ(Good(R"({"prompt":[1,2]})").sampling.max_tokens, 62);
}

TEST(RequestBuilderTest, FillsGapsFromTheModelsDefaultsOnly) {
  RequestBuilder::Options options = TinyOptions();
  options.defaults.temperature = 0.6F;
  options.defaults.top_k = 20;
  options.defaults.top_p = 0.95F;
  options.defaults.min_p = 0.1F;
  options.defaults.repetition_penalty = 1.05F;
  const SamplingParams from_model = Good(R"({"id":"a","prompt":"x"})", options).sampling;
  EXPECT_EQ(from_model.temperature, 0.6F);
  EXPECT_EQ(from_model.top_k, 20);
  EXPECT_EQ(from_model.top_p, 0.95F);
  EXPECT_EQ(from_model.min_p, 0.1F);
  EXPECT_EQ(from_model.repetition_penalty, 1.05F);
  const SamplingParams from_request =
      Good(R"({"id":"a","prompt":"x","temperature":0,"top_k":-1,"top_p":1,"min_p":0,)"
           R"("repetition_penalty":1,"presence_penalty":0.5,"frequency_penalty":-0.5,)"
           R"("min_tokens":3,"logprobs":5,"seed":-1})",
           options)
          .sampling;
  EXPECT_EQ(from_request.temperature, 0.0F);
  EXPECT_EQ(from_request.top_k, 0);
  EXPECT_EQ(from_request.top_p, 1.0F);
  EXPECT_EQ(from_request.min_p, 0.0F);
  EXPECT_EQ(from_request.repetition_penalty, 1.0F);
  EXPECT_EQ(from_request.presence_penalty, 0.5F);
  EXPECT_EQ(from_request.frequency_penalty, -0.5F);
  EXPECT_EQ(from_request.min_tokens, 3);
  EXPECT_EQ(from_request.num_logprobs, 5);
  EXPECT_EQ(from_request.seed, ~uint64_t{0});
  const SamplingParams plain = Good(R"({"id":"a","prompt":"x"})").sampling;
  EXPECT_EQ(plain.temperature, 1.0F);
  EXPECT_EQ(plain.num_logprobs, -1);
  EXPECT_EQ(Good(R"({"prompt":"x","temperature":1e-6})").sampling.temperature, 0.0F);
}

TEST(RequestBuilderTest, PutsTheEnginesPenaltyBetweenRequestAndModel) {
  const auto penalty = [](float by_engine, std::optional<float> by_model, const char* more) {
    RequestBuilder::Options options = TinyOptions();
    options.repetition_penalty = by_engine;
    options.defaults.repetition_penalty = by_model;
    const std::string line = R"({"id":"a","prompt":"x")" + std::string(more) + "}";
    return Good(line, options).sampling.repetition_penalty;
  };
  EXPECT_EQ(penalty(0, std::nullopt, ""), 1.0F);
  EXPECT_EQ(penalty(0, 1.05F, ""), 1.05F);
  EXPECT_EQ(penalty(1.2F, 1.05F, ""), 1.2F);
  EXPECT_EQ(penalty(1, 1.05F, ""), 1.0F) << "1 turns the model's penalty off";
  EXPECT_EQ(penalty(1.2F, 1.05F, R"(,"repetition_penalty":1)"), 1.0F);
  EXPECT_EQ(penalty(1.2F, std::nullopt, R"(,"repetition_penalty":null)"), 1.2F);
}

RequestBuilder::Options CompressingOptions() {
  RequestBuilder::Options options = TinyOptions();
  options.compresses = true;
  options.block_size = 16;
  options.num_blocks = 10;
  options.num_always_kept = 20;
  return options;
}

TEST(RequestBuilderTest, RoundsTheBudgetUpToBlocks) {
  const auto blocks = [](const std::string& budget) {
    return Good(R"({"prompt":"x","kv_budget":)" + budget + "}", CompressingOptions())
        .options.max_cache_blocks;
  };
  EXPECT_EQ(blocks("null"), std::nullopt);
  EXPECT_EQ(blocks("17"), 2);
  EXPECT_EQ(blocks("32"), 2);
  EXPECT_EQ(blocks("33"), 3);
  EXPECT_EQ(blocks("144"), 9);
}

TEST(RequestBuilderTest, RefusesBudgetsThatTheEngineCannotGive) {
  const auto bad = [](const std::string& budget, const RequestBuilder::Options& options) {
    const RequestError error = Bad(R"({"prompt":"x","kv_budget":)" + budget + "}", options);
    EXPECT_EQ(error.field, "kv_budget");
    EXPECT_EQ(error.status_code, 400);
    return error;
  };
  const RequestBuilder::Options options = CompressingOptions();
  EXPECT_TRUE(Says(bad("512", TinyOptions()),
                   "kv_budget is 512, but the engine keeps the full cache (compression_policy "
                   "none); leave it out"));
  EXPECT_TRUE(Says(bad("16", options),
                   "kv_budget is 16, but the query window and the attention sinks keep 20 tokens; "
                   "give at least that"));
  EXPECT_TRUE(Says(bad("145", options),
                   "kv_budget is 145, which takes 10 blocks of 16 and one to fill, but the KV "
                   "cache has 10; give at most 144"));
  EXPECT_TRUE(Says(bad("2147483647", options), "takes 134217728 blocks of 16"));
  RequestBuilder::Options one_block = options;
  one_block.num_blocks = 1;
  EXPECT_TRUE(Says(bad("32", one_block), "leave it out"));
}

TEST(RequestBuilderTest, TakesTheGuardOfTheRequestBeforeTheEngines) {
  const auto guard = [](int size, int count, const char* more) {
    RequestBuilder::Options options = TinyOptions();
    options.repetition_ngram_size = size;
    options.repetition_ngram_count = count;
    const RequestOptions built =
        Good(R"({"id":"a","prompt":"x")" + std::string(more) + "}", options).options;
    return std::pair(built.repetition_ngram_size, built.repetition_ngram_count);
  };
  EXPECT_EQ(guard(0, 8, "").first, 0);
  EXPECT_EQ(guard(20, 8, ""), std::pair(20, 8));
  EXPECT_EQ(guard(20, 8, R"(,"repetition_ngram_size":5)"), std::pair(5, 8));
  EXPECT_EQ(guard(20, 8, R"(,"repetition_ngram_count":3)"), std::pair(20, 3));
  EXPECT_EQ(guard(20, 8, R"(,"repetition_ngram_size":0)").first, 0);
  EXPECT_EQ(guard(0, 8, R"(,"repetition_ngram_size":5,"repetition_ngram_count":3)"),
            std::pair(5, 3));
  const RequestError alone = Bad(R"({"prompt":"x","repetition_ngram_count":3})");
  EXPECT_EQ(alone.field, "repetition_ngram_count");
  EXPECT_TRUE(Says(alone, "repetition_ngram_count is 3 without repetition_ngram_size; give both"));
}

TEST(RequestBuilderTest, DerivesTheSameSeedAfterARestart) {
  const auto seed = [](const std::string& id, uint64_t engine_seed) {
    RequestBuilder::Options options = TinyOptions();
    options.engine_seed = engine_seed;
    return Good(R"({"id":")" + id + R"(","prompt":"x"})", options).sampling.seed;
  };
  EXPECT_EQ(seed("a", 1), seed("a", 1));
  EXPECT_NE(seed("a", 1), seed("b", 1));
  EXPECT_NE(seed("a", 1), seed("a", 2));
}

TEST(RequestBuilderTest, TellsReportedStopTokensFromEndOfSequence) {
  const BuiltRequest both = Good(R"({"prompt":"x","stop_token_ids":[9,511,3,9]})");
  EXPECT_EQ(both.sampling.stop_token_ids, (std::vector<int32_t>{3, 9, 509, 511}));
  EXPECT_EQ(both.reported_stop_token_ids, (std::vector<int32_t>{3, 9}));
  const BuiltRequest ignoring = Good(R"({"prompt":"x","stop_token_ids":[511],"ignore_eos":true})");
  EXPECT_EQ(ignoring.sampling.stop_token_ids, (std::vector<int32_t>{511}));
  EXPECT_EQ(ignoring.reported_stop_token_ids, (std::vector<int32_t>{511}));
  RequestBuilder::Options padded = TinyOptions();
  padded.eos_token_ids = {511, 100000, -1};
  EXPECT_EQ(Good(R"({"prompt":"x"})", padded).sampling.stop_token_ids, (std::vector<int32_t>{511}));
}

TEST(RequestBuilderTest, AnswersForItsServedNamesOnly) {
  EXPECT_EQ(Good(R"({"prompt":"x"})").model, "tiny");
  const std::string prefix = R"({"custom_id":"a","method":"POST","url":"/v1/completions","body":{)";
  EXPECT_EQ(Good(prefix + R"("prompt":"x","model":"small"}})").model, "small");
  const RequestError other = Bad(prefix + R"("prompt":"x","model":"gpt-4"}})");
  EXPECT_EQ(other.status_code, 404);
  EXPECT_EQ(other.field, "model");
  EXPECT_TRUE(Says(other, "model \"gpt-4\" is not served here; give \"tiny\" or \"small\""));
  RequestBuilder::Options any = TinyOptions();
  any.served_names.clear();
  EXPECT_EQ(Good(prefix + R"("prompt":"x","model":"gpt-4"}})", any).model, "gpt-4");
  EXPECT_EQ(Good(R"({"prompt":"x"})", any).model, "/models/tiny");
}

TEST(RequestBuilderTest, RefusesChatWithoutATemplate) {
  const RequestBuilder builder(&TinyTokenizer(), {}, TinyOptions());
  ParseResult parsed = ParseRequest(R"({"messages":[{"role":"user","content":"x"}]})", 1);
  const BuildResult built = builder.Build(std::get<ParsedRequest>(std::move(parsed)));
  ASSERT_TRUE(std::holds_alternative<RequestError>(built));
  EXPECT_TRUE(Says(std::get<RequestError>(built), "no chat template"));
}

class GenerationDefaultsTest : public testing::Test {
 protected:
  GenerationDefaultsTest() {
    char name[] = "/tmp/zipage_generation_defaults_XXXXXX";
    dir_ = mkdtemp(name);
  }
  ~GenerationDefaultsTest() override { (void)std::system(("rm -rf " + dir_).c_str()); }
  absl::StatusOr<GenerationDefaults> Read(const std::string& json) {
    std::ofstream(dir_ + "/generation_config.json", std::ios::trunc) << json;
    return ReadGenerationDefaults(dir_);
  }
  std::string dir_;
};

TEST_F(GenerationDefaultsTest, ReadsWhatVllmReads) {
  absl::StatusOr<GenerationDefaults> none = ReadGenerationDefaults(dir_);
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_FALSE(none->temperature || none->top_p || none->top_k || none->min_p ||
               none->repetition_penalty);
  absl::StatusOr<GenerationDefaults> all =
      Read(R"({"do_sample":false,"temperature":0.7,"top_p":0.8,"top_k":20,"min_p":null,)"
           R"("repetition_penalty":1.1,"eos_token_id":[1,2],"max_new_tokens":5})");
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_FLOAT_EQ(*all->temperature, 0.7);
  EXPECT_FLOAT_EQ(*all->top_p, 0.8);
  EXPECT_EQ(all->top_k, 20);
  EXPECT_FALSE(all->min_p.has_value());
  EXPECT_FLOAT_EQ(*all->repetition_penalty, 1.1);
}

TEST_F(GenerationDefaultsTest, NamesFileAndFieldOfABadDefault) {
  for (const char* bad : {R"({"temperature":-1})", R"({"top_p":2})", R"({"top_k":"20"})",
                          R"({"min_p":-0.1})", R"({"repetition_penalty":0})", "[]", "{", "7"}) {
    const absl::Status status = Read(bad).status();
    EXPECT_FALSE(status.ok()) << bad;
    EXPECT_NE(status.message().find("generation_config.json"), absl::string_view::npos) << status;
    EXPECT_EQ(status.message().find('\n'), absl::string_view::npos) << status;
  }
}

}  // namespace
}  // namespace zipage
