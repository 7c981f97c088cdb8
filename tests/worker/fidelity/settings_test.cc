#include "worker/fidelity/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

namespace zipage {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

Config Base() {
  Config config;
  config.model = "somewhere";
  config.kvcache_block_size = 32;
  config.max_cache_blocks_per_seq = 4;
  return config;
}

TEST(FidelitySettingsTest, ChangesTheBaseAndNothingElse) {
  const auto setting = ParseSetting(
      "half:compression_policy=paper,similarity_lambda=0.5,use_global_score=false,pin_prompt=on,"
      "max-cache-blocks-per-seq=8",
      Base());
  ASSERT_TRUE(setting.ok()) << setting.status();
  EXPECT_EQ(setting->name, "half");
  Config expected = Base();
  expected.compression_policy = "paper";
  expected.similarity_lambda = 0.5;
  expected.use_global_score = false;
  expected.pin_prompt = "on";
  expected.max_cache_blocks_per_seq = 8;
  EXPECT_EQ(setting->config, expected);
}

TEST(FidelitySettingsTest, ANameAloneIsTheBaseWithWhatAutoStandsFor) {
  for (const char* text : {"base", "base:"}) {
    const auto setting = ParseSetting(text, Base());
    ASSERT_TRUE(setting.ok()) << setting.status();
    EXPECT_EQ(setting->name, "base");
    EXPECT_EQ(setting->config, ResolveCompression(Base()));
    EXPECT_NE(setting->config.compression_policy, "auto");
    EXPECT_NE(setting->config.pin_prompt, "auto");
  }
}

TEST(FidelitySettingsTest, EveryMistakeIsOneLineThatNamesTheSetting) {
  const std::vector<std::pair<std::string, std::string>> mistakes = {
      {"", "give NAME:key=value"},
      {":compression_policy=paper", "give NAME:key=value"},
      {"compression_policy=paper", "give NAME:key=value"},
      {"a:compression_policy", "setting a: \"compression_policy\" is no option"},
      {"a:=3", "setting a: \"=3\" is no option"},
      {"a:sink_len=4,,", "\"\" is no option"},
      {"a:--sink_len=4", "is no option"},
      {"a:compression_polcy=paper", "did you mean --compression_policy"},
      {"a:help=1", "unknown option --help"},
      {"a:version=1", "unknown option --version"},
      {"a:config=/dev/null", "unknown option --config"},
      {"a:compression_policy=best", "compression_policy is \"best\""},
      {"a:similarity_lambda=2", "similarity_lambda is 2"},
      {"a:similarity_lambda=x", "similarity_lambda is \"x\""},
      {"a:similarity_lambda=", "similarity_lambda is \"\""},
      {"a:pooling_size=4", "odd number"},
      {"a:query_cache_len=64", "query_cache_len is 64"},
      {"a:compression_policy=none,pin_prompt=on", "does nothing"},
      {"a:model=other", "model is the same for all settings"},
      {"a:dtype=float32", "dtype is the same for all settings"},
      {"a:device=cpu", "device is the same for all settings"},
      {"a:tp=2", "tp is the same for all settings"},
      {"a:max_model_len=100", "max_model_len is the same for all settings"},
      {"a:adaptive_kv_budget=true", "adaptive_kv_budget is on"},
  };
  for (const auto& [text, message] : mistakes) {
    const auto setting = ParseSetting(text, Base());
    ASSERT_FALSE(setting.ok()) << text;
    EXPECT_TRUE(absl::IsInvalidArgument(setting.status())) << setting.status();
    EXPECT_THAT(std::string(setting.status().message()),
                AllOf(HasSubstr("setting"), HasSubstr(message), Not(HasSubstr("\n"))));
  }
}

}  // namespace
}  // namespace zipage
