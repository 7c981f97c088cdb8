#include "worker/model/model_config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "tests/worker/test_files.h"

namespace zipage {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::TempDir;
using testing::TinyConfig;

absl::StatusOr<ModelConfig> Load(const nlohmann::json& config) {
  const TempDir dir;
  dir.Write("config.json", config.dump());
  return LoadModelConfig(dir.path());
}

std::string Error(const nlohmann::json& config) {
  const absl::StatusOr<ModelConfig> loaded = Load(config);
  EXPECT_FALSE(loaded.ok());
  const std::string message(loaded.status().message());
  EXPECT_THAT(message, Not(HasSubstr("\n")));
  EXPECT_THAT(message, HasSubstr("config.json"));
  return message;
}

nlohmann::json Tiny(const nlohmann::json& changes) {
  nlohmann::json config = TinyConfig();
  config.update(changes);
  return config;
}

TEST(ModelConfigTest, EqualsTheGoldenRotationOfEveryModel) {
  const std::string golden = testing::GoldenModels();
  if (golden.empty()) GTEST_SKIP() << "NO GOLDEN MODELS: set ZIPAGE_SHARED_DIR";
  for (const std::string name :
       {"tiny-llama", "tiny-llama-linear", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-yarn"}) {
    for (const std::string dtype : {"f32", "bf16"}) {
      SCOPED_TRACE(name + "/" + dtype);
      const absl::StatusOr<ModelConfig> config = LoadModelConfig(golden + "/" + name + "/" + dtype);
      ASSERT_TRUE(config.ok()) << config.status();
      EXPECT_EQ(config->dtype, dtype == "f32" ? DType::kFloat32 : DType::kBFloat16);
      const nlohmann::json expected = nlohmann::json::parse(
          testing::ReadWhole(golden + "/" + name + "/golden_" + dtype + ".json"));
      const std::vector<float> frequencies = RopeInverseFrequencies(*config);
      const auto& golden_frequencies = expected["rope_inv_freq"];
      ASSERT_EQ(frequencies.size(), golden_frequencies.size());
      for (size_t i = 0; i < frequencies.size(); ++i) {
        EXPECT_FLOAT_EQ(frequencies[i], golden_frequencies[i].get<float>()) << i;
      }
      EXPECT_FLOAT_EQ(RopeAttentionScaling(*config),
                      expected["rope_attention_scaling"].get<float>());
    }
  }
}

TEST(ModelConfigTest, ReadsTheFourthAndTheFifthFormOfRotationAlike) {
  const nlohmann::json yarn = {{"rope_type", "yarn"},
                               {"factor", 4.0},
                               {"original_max_position_embeddings", 32},
                               {"beta_fast", 16},
                               {"truncate", false}};
  nlohmann::json parameters = yarn;
  parameters["rope_theta"] = 5e5;
  nlohmann::json old = yarn;
  old.erase("rope_type");
  old["type"] = "yarn";
  nlohmann::json fifth = Tiny({{"rope_parameters", parameters}});
  fifth.erase("rope_theta");
  const auto a = Load(Tiny({{"rope_scaling", yarn}, {"rope_theta", 5e5}}));
  const auto b = Load(fifth);
  const auto c = Load(Tiny({{"rope_scaling", old}, {"rope_theta", 5e5}}));
  ASSERT_TRUE(a.ok() && b.ok() && c.ok()) << a.status() << b.status() << c.status();
  EXPECT_EQ(a->rope.type, RopeConfig::Type::kYarn);
  EXPECT_EQ(RopeInverseFrequencies(*a), RopeInverseFrequencies(*b));
  EXPECT_EQ(RopeInverseFrequencies(*a), RopeInverseFrequencies(*c));
  EXPECT_NE(RopeInverseFrequencies(*a), RopeInverseFrequencies(*Load(TinyConfig())));
}

TEST(ModelConfigTest, BlendsLlama3FrequenciesByWavelength) {
  const auto config = Load(Tiny({{"head_dim", 32},
                                 {"rope_scaling",
                                  {{"rope_type", "llama3"},
                                   {"factor", 8.0},
                                   {"low_freq_factor", 1.0},
                                   {"high_freq_factor", 4.0},
                                   {"original_max_position_embeddings", 64}}}}));
  ASSERT_TRUE(config.ok()) << config.status();
  const std::vector<float> f = RopeInverseFrequencies(*config);
  // Values of transformers 5.17: unscaled, blended, and divided by eight.
  EXPECT_FLOAT_EQ(f[1], 0.5623413324356079F);
  EXPECT_FLOAT_EQ(f[2], 0.24438458681106567F);
  EXPECT_FLOAT_EQ(f[4], 0.013042256236076355F);
  EXPECT_FLOAT_EQ(f[8], 0.0012499999720603228F);
}

TEST(ModelConfigTest, ScalesYarnAttentionAsTheConfigSays) {
  const auto scaling = [](nlohmann::json extra) {
    nlohmann::json rope = {
        {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 64}};
    rope.update(extra);
    const auto config = Load(Tiny({{"rope_scaling", rope}}));
    EXPECT_TRUE(config.ok()) << config.status();
    return RopeAttentionScaling(*config);
  };
  EXPECT_FLOAT_EQ(scaling(nlohmann::json::object()), 1.138629436111989F);
  EXPECT_FLOAT_EQ(scaling({{"attention_factor", 0.75}}), 0.75F);
  EXPECT_FLOAT_EQ(scaling({{"mscale", 1.0}, {"mscale_all_dim", 1.0}}), 1.0F);
  EXPECT_FLOAT_EQ(scaling({{"mscale", 0.707}, {"mscale_all_dim", 1.0}}),
                  static_cast<float>((0.0707 * std::log(4.0) + 1) / (0.1 * std::log(4.0) + 1)));
  EXPECT_FLOAT_EQ(scaling({{"mscale", 2.0}}), 1.138629436111989F);  // one alone does not count
}

TEST(ModelConfigTest, KnowsTheBiasesAndNormsOfEachFamily) {
  const auto llama = Load(Tiny({{"attention_bias", true}, {"mlp_bias", true}}));
  ASSERT_TRUE(llama.ok()) << llama.status();
  EXPECT_TRUE(llama->qkv_bias && llama->o_bias && llama->mlp_bias && !llama->qk_norm);
  const auto qwen2 = Load(Tiny({{"architectures", {"Qwen2ForCausalLM"}}}));
  ASSERT_TRUE(qwen2.ok()) << qwen2.status();
  EXPECT_TRUE(qwen2->qkv_bias && !qwen2->o_bias && !qwen2->mlp_bias && !qwen2->qk_norm);
  const auto qwen3 = Load(Tiny({{"architectures", {"Qwen3ForCausalLM"}}}));
  ASSERT_TRUE(qwen3.ok()) << qwen3.status();
  EXPECT_TRUE(!qwen3->qkv_bias && !qwen3->o_bias && !qwen3->mlp_bias && qwen3->qk_norm);
  EXPECT_EQ(qwen3->head_dim, 128);
  EXPECT_EQ(qwen2->head_dim, 4);
}

TEST(ModelConfigTest, DefaultsWhatPublishedFilesLeaveOut) {
  nlohmann::json json = TinyConfig();
  for (const char* name : {"num_key_value_heads", "rms_norm_eps", "rope_theta", "torch_dtype",
                           "tie_word_embeddings", "max_position_embeddings"}) {
    json.erase(name);
  }
  json["rope_scaling"] = nullptr;
  const auto config = Load(json);
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(config->num_kv_heads, 4);
  EXPECT_FLOAT_EQ(config->rms_norm_eps, 1e-6F);
  EXPECT_EQ(config->rope.theta, 10000.0);
  EXPECT_FALSE(config->tie_word_embeddings);
  EXPECT_EQ(config->max_position, 2048);
  EXPECT_FALSE(config->dtype.has_value());
}

TEST(ModelConfigTest, TakesAnUnusedSlidingWindowAndRefusesAUsedOne) {
  const nlohmann::json qwen = {{"architectures", {"Qwen2ForCausalLM"}}, {"sliding_window", 64}};
  nlohmann::json json = Tiny(qwen);
  json["use_sliding_window"] = false;
  json["max_window_layers"] = 0;
  EXPECT_TRUE(Load(json).ok());
  json["use_sliding_window"] = true;
  EXPECT_THAT(Error(json), HasSubstr("sliding"));
  json["max_window_layers"] = 2;  // both layers attend in full
  EXPECT_TRUE(Load(json).ok());
  json["layer_types"] = {"full_attention", "sliding_attention"};
  EXPECT_THAT(Error(json), HasSubstr("layer_types"));
}

TEST(ModelConfigTest, NamesFieldAndValueOfWhatItRefuses) {
  EXPECT_THAT(Error(Tiny({{"architectures", {"MixtralForCausalLM"}}})),
              HasSubstr("MixtralForCausalLM\"]; the supported ones are LlamaForCausalLM, "
                        "Qwen2ForCausalLM, Qwen3ForCausalLM"));
  EXPECT_THAT(Error(Tiny({{"architectures", "LlamaForCausalLM"}})), HasSubstr("architectures"));
  EXPECT_THAT(Error(Tiny({{"hidden_size", "big"}})), HasSubstr("hidden_size is \"big\""));
  EXPECT_THAT(Error(Tiny({{"hidden_size", nullptr}})), HasSubstr("hidden_size is missing"));
  EXPECT_THAT(Error(Tiny({{"hidden_size", 1e300}})), HasSubstr("hidden_size is 1e+300"));
  EXPECT_THAT(Error(Tiny({{"num_hidden_layers", -1}})), HasSubstr("num_hidden_layers is -1"));
  EXPECT_THAT(Error(Tiny({{"vocab_size", 9223372036854775807}})), HasSubstr("vocab_size"));
  EXPECT_THAT(Error(Tiny({{"vocab_size", 40.5}})), HasSubstr("vocab_size is 40.5"));
  EXPECT_THAT(Error(Tiny({{"num_key_value_heads", 3}})), HasSubstr("num_key_value_heads is 3"));
  EXPECT_THAT(Error(Tiny({{"head_dim", 7}})), HasSubstr("head_dim is 7"));
  EXPECT_THAT(Error(Tiny({{"hidden_act", "gelu"}})), HasSubstr("hidden_act is \"gelu\""));
  EXPECT_THAT(Error(Tiny({{"torch_dtype", "float64"}})), HasSubstr("float64"));
  EXPECT_THAT(Error(Tiny({{"quantization_config", {{"bits", 4}}}})),
              HasSubstr("quantization_config"));
  EXPECT_THAT(Error(Tiny({{"tie_word_embeddings", 1}})), HasSubstr("tie_word_embeddings is 1"));
  EXPECT_THAT(Error(Tiny({{"partial_rotary_factor", 0.5}})), HasSubstr("partial_rotary_factor"));
  for (const char* type : {"dynamic", "longrope", "mrope", "su"}) {
    EXPECT_THAT(Error(Tiny({{"rope_scaling", {{"rope_type", type}, {"factor", 2.0}}}})),
                HasSubstr(type));
  }
  EXPECT_THAT(Error(Tiny({{"rope_scaling", {{"type", "linear"}}}})),
              HasSubstr("factor is missing"));
  EXPECT_THAT(Error(Tiny({{"rope_scaling", 4}})), HasSubstr("rope_scaling is 4"));
  EXPECT_THAT(Error(Tiny({{"rope_parameters", {{"full_attention", {{"rope_theta", 1e4}}}}}})),
              HasSubstr("full_attention"));
}

TEST(ModelConfigTest, RefusesBrokenFilesInOneLine) {
  const TempDir dir;
  absl::Status status = LoadModelConfig(dir.path()).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr(dir.path() + "/config.json"));
  for (const std::string& text :
       {std::string(), std::string("{"), std::string("[]"), std::string("null"),
        std::string("\xff\xfe{}"), std::string(100'000, '['), std::string("{\"a\":1,\"a\":2}"),
        std::string("{\"hidden_size\":1e999}"), std::string(2 << 20, ' '),
        "{\"a\":" + std::string(33, '[') + std::string(33, ']') + "}"}) {
    dir.Write("config.json", text);
    status = LoadModelConfig(dir.path()).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status << " for " << text.substr(0, 40);
    EXPECT_THAT(std::string(status.message()), Not(HasSubstr("\n")));
  }
}

TEST(ModelConfigTest, SurvivesRandomMutations) {
  nlohmann::json json = TinyConfig();
  json["rope_scaling"] = {{"rope_type", "yarn"},
                          {"factor", 4.0},
                          {"original_max_position_embeddings", 64},
                          {"beta_fast", 32}};
  const std::string text = json.dump();
  const TempDir dir;
  std::mt19937 random(11);
  int loaded = 0;
  for (int round = 0; round < 1500; ++round) {
    std::string mutated = text;
    for (uint32_t n = random() % 4 + 1; n > 0; --n) {
      static constexpr char kLikely[] = "0123456789-eE.,:\"{}[]\\u n";
      mutated[random() % mutated.size()] = random() % 4 == 0
                                               ? static_cast<char>(random())
                                               : kLikely[random() % (sizeof(kLikely) - 1)];
    }
    dir.Write("config.json", mutated);
    const absl::StatusOr<ModelConfig> config = LoadModelConfig(dir.path());
    if (!config.ok()) {
      ASSERT_FALSE(config.status().message().empty());
      continue;
    }
    ++loaded;
    ASSERT_EQ(config->num_heads % config->num_kv_heads, 0) << mutated;
    for (const float f : RopeInverseFrequencies(*config)) ASSERT_TRUE(f >= 0) << mutated;
  }
  EXPECT_GT(loaded, 0);
}

TEST(ModelConfigTest, ListsTheTensorParallelSizesThatWork) {
  ModelConfig smol;
  smol.path = "SmolLM2-135M";
  smol.num_heads = 9;
  smol.num_kv_heads = 3;
  smol.intermediate_size = 1536;  // does not divide by 9: the shares are uneven
  smol.vocab_size = 49152;
  std::vector<int> working;
  for (int tp = -1; tp <= 20; ++tp) {
    if (CheckTensorParallel(smol, tp).ok()) working.push_back(tp);
  }
  EXPECT_THAT(working, ElementsAre(1, 3, 9));
  const std::string message(CheckTensorParallel(smol, 2).message());
  EXPECT_THAT(message, HasSubstr("tp is 2, but SmolLM2-135M has 9 attention heads and 3 KV heads"));
  EXPECT_THAT(message, HasSubstr("give one of 1, 3, 9"));
  ModelConfig qwen = smol;
  qwen.num_heads = 16;
  qwen.num_kv_heads = 2;
  qwen.intermediate_size = 4096;
  working.clear();
  for (int tp = 1; tp <= 32; ++tp) {
    if (CheckTensorParallel(qwen, tp).ok()) working.push_back(tp);
  }
  EXPECT_THAT(working, ElementsAre(1, 2, 4, 8, 16));  // KV heads are replicated from 4 on
}

}  // namespace
}  // namespace zipage
