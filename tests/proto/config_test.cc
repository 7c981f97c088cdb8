#include "proto/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <fstream>
#include <random>

#include "proto/toml.h"
#include "tests/proto/random_messages.h"

namespace zipage {
namespace {

using ::testing::HasSubstr;

absl::Status Parse(std::vector<std::string> arguments, Config* config) {
  CLI::App app("test");
  AddOptions(&app, config);
  arguments.insert(arguments.begin(), "program");
  std::vector<char*> argv;
  for (std::string& argument : arguments) argv.push_back(argument.data());
  return ParseCommandLine(&app, static_cast<int>(argv.size()), argv.data());
}

class ConfigTest : public ::testing::Test {
 protected:
  std::string WriteToml(const std::string& text) {
    const std::string path = ::testing::TempDir() + "/config_test." + std::to_string(getpid()) +
                             "." + std::to_string(num_files_++) + ".toml";
    std::ofstream(path) << text;
    paths_.push_back(path);
    return path;
  }
  ~ConfigTest() override {
    for (const std::string& path : paths_) unlink(path.c_str());
  }

  void ExpectError(const std::vector<std::string>& arguments, const std::string& text) {
    Config config;
    const absl::Status status = Parse(arguments, &config);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(status.message()), HasSubstr(text));
    EXPECT_EQ(status.message().find('\n'), std::string::npos) << status;
  }

 private:
  int num_files_ = 0;
  std::vector<std::string> paths_;
};

Config Unusual() {
  Config config;
  config.model = "/models/with \"quotes\", #hash = [x] \\ \xE4\xBD\xA0 \t\n'";
  config.served_model_name = "[a, b]";
  config.tp = 4;
  config.device = "cpu";
  config.dtype = "float32";
  config.max_model_len = 1 << 30;
  config.max_num_seqs = 17;
  config.max_num_batched_tokens = 333;
  config.kvcache_block_size = 32;
  config.num_kvcache_blocks = 2147483647;
  config.kv_cache_memory_gb = 0.1;
  config.gpu_memory_utilization = 0.55;
  config.swap_space_gb = 1e-9;
  config.enable_prefix_cache = false;
  config.compression_policy = "paper";
  config.max_cache_blocks_per_seq = 3;
  config.query_cache_len = 64;
  config.pin_prompt = "on";
  config.score_share = 1.0 / 7;
  config.use_global_score = false;
  config.decay_factor = 0;
  config.max_norm = true;
  config.enable_pooling = false;
  config.continues_pooling = true;
  config.pooling_size = 255;
  config.use_similarity = false;
  config.lightning_similarity = false;
  config.similarity_lambda = 0.5;
  config.similarity_temperature = 1e-3;
  config.use_attention_sink = true;
  config.sink_len = 65536;
  config.compress_prefill = true;
  config.enable_async_compress = false;
  config.enable_hybrid_engine = false;
  config.adaptive_kv_budget = true;
  config.layer_stride = 1;
  config.repetition_penalty = 1.05;
  config.repetition_ngram_size = 20;
  config.repetition_ngram_count = 1000000;
  config.seed = -9223372036854775807 - 1;
  config.generation_config = "none";
  config.collective = "gloo";
  config.cpu_threads = 3;
  config.init_timeout_s = 1e-3;
  config.heartbeat_timeout_s = 1.0 / 3;
  config.step_timeout_s = 5;
  config.collective_timeout_s = 7.25;
  config.drain_timeout_s = 0;
  config.max_line_mb = 1e2;
  config.job_endpoint = "tcp://127.0.0.1:*";
  config.curve_key_file = "true";
  config.curve_allowed_clients_file = "0x10";
  config.insecure_tcp = true;
  return config;
}

TEST_F(ConfigTest, ReadsBackItsOwnToml) {
  for (const Config& config : {Config(), Unusual()}) {
    Config back = Unusual();
    back.tp = 64;
    ASSERT_TRUE(Parse({"--config", WriteToml(ToToml(config))}, &back).ok());
    EXPECT_TRUE(back == config) << ToToml(config) << "\nbecame\n" << ToToml(back);
  }
}

TEST_F(ConfigTest, ReadsBackTomlOfAnyString) {
  std::mt19937_64 random(4);
  for (int i = 0; i < FuzzIterations(300); ++i) {
    Config config;
    for (std::string* field : {&config.model, &config.job_endpoint}) {
      field->resize(random() % 40);
      for (char& c : *field) c = static_cast<char>(1 + random() % 255);
    }
    config.kv_cache_memory_gb =
        std::ldexp(static_cast<double>(random()), int(random() % 200) - 150);
    const auto entries = ParseToml(ToToml(config));
    ASSERT_TRUE(entries.ok()) << entries.status();
    Config back;
    const std::string path = WriteToml(ToToml(config));
    ASSERT_TRUE(Parse({"--config", path}, &back).ok());
    ASSERT_TRUE(back == config) << ToToml(config);
    unlink(path.c_str());
  }
}

TEST_F(ConfigTest, TakesEveryOptionAsAFlag) {
  const Config config = Unusual();
  const auto entries = ParseToml(ToToml(config));
  ASSERT_TRUE(entries.ok()) << entries.status();
  ASSERT_EQ(entries->size(), 53U) << "an option was added: extend Unusual()";
  std::vector<std::string> separate;
  std::vector<std::string> joined;
  for (const TomlEntry& entry : *entries) {
    joined.push_back("--" + entry.key + "=" + entry.value);
    if (entry.value == "true" && entry.key != "curve_key_file") {
      separate.push_back("--" + entry.key);
    } else if (entry.value == "false") {
      separate.push_back("--no_" + entry.key);
    } else {
      separate.push_back("--" + entry.key);
      separate.push_back(entry.value);
    }
  }
  for (const auto& arguments : {separate, joined}) {
    Config back;
    const absl::Status status = Parse(arguments, &back);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_TRUE(back == config) << ToToml(back);
  }
}

TEST_F(ConfigTest, TakesDashesForUnderscoresInNamesOnly) {
  Config config;
  ASSERT_TRUE(Parse({"--max-num-seqs", "8", "--served-model-name=a-b", "--no-enable-prefix-cache",
                     "--model", "some-model"},
                    &config)
                  .ok());
  EXPECT_EQ(config.max_num_seqs, 8);
  EXPECT_EQ(config.served_model_name, "a-b");
  EXPECT_FALSE(config.enable_prefix_cache);
  EXPECT_EQ(config.model, "some-model");
}

TEST_F(ConfigTest, TakesBoolsInEverySpelling) {
  const std::pair<std::string, bool> spellings[] = {{"--enable_prefix_cache", true},
                                                    {"--no_enable_prefix_cache", false},
                                                    {"--enable_prefix_cache=true", true},
                                                    {"--enable_prefix_cache=false", false},
                                                    {"--enable-prefix-cache=false", false}};
  for (const auto& [flag, expected] : spellings) {
    for (const bool before : {false, true}) {
      Config config;
      config.enable_prefix_cache = before;
      ASSERT_TRUE(Parse({flag}, &config).ok()) << flag;
      EXPECT_EQ(config.enable_prefix_cache, expected) << flag;
    }
  }
  Config config;
  EXPECT_FALSE(Parse({"--enable_prefix_cache=maybe"}, &config).ok());
}

TEST_F(ConfigTest, LetsTheLastFlagWinAndAnyFlagOverTheFile) {
  const std::string path = WriteToml("tp = 4\nmax_num_seqs = 9\nenable_prefix_cache = false\n");
  Config config;
  ASSERT_TRUE(Parse({"--tp", "1", "--tp", "2", "--config", path}, &config).ok());
  EXPECT_EQ(config.tp, 2);
  EXPECT_EQ(config.max_num_seqs, 9);
  EXPECT_FALSE(config.enable_prefix_cache);
  ASSERT_TRUE(Parse({"--no_enable_prefix_cache", "--enable_prefix_cache"}, &config).ok());
  EXPECT_TRUE(config.enable_prefix_cache);
}

TEST_F(ConfigTest, TakesEmptyAndNegativeValues) {
  Config config = Unusual();
  ASSERT_TRUE(Parse({"--job_endpoint=", "--seed", "-5", "--served_model_name", ""}, &config).ok());
  EXPECT_EQ(config.job_endpoint, "");
  EXPECT_EQ(config.served_model_name, "");
  EXPECT_EQ(config.seed, -5);
}

TEST_F(ConfigTest, NamesWhatItDoesNotUnderstand) {
  ExpectError({"--max_num_seq", "3"}, "unknown option --max_num_seq; did you mean --max_num_seqs?");
  ExpectError({"--max-num-seq=3"}, "unknown option --max_num_seq; did you mean --max_num_seqs?");
  ExpectError({"--frobnicate_everything"}, "unknown option --frobnicate_everything; --help");
  ExpectError({"--no_enable_prefix_cach"}, "did you mean --no_enable_prefix_cache?");
  ExpectError({"--continuous_pooling"}, "did you mean --continues_pooling?");
  ExpectError({"--query_cache_length=8"}, "did you mean --query_cache_len?");
  ExpectError({"--max-cache-blocks", "8"}, "did you mean --max_cache_blocks_per_seq?");
  ExpectError({"--no_use_similarty"}, "did you mean --no_use_similarity?");
  ExpectError({"--kv_budget=512"}, "unknown option --kv_budget; --help");
  ExpectError({"--repetition_ngram=4"}, "unknown option --repetition_ngram; --help");  // Two.
  ExpectError({"stray"}, "unexpected argument \"stray\"");
  ExpectError({"--tp", "two"}, "tp is \"two\"; give a whole number");
  ExpectError({"--tp=1.5"}, "tp is \"1.5\"");
  ExpectError({"--tp", "99999999999"}, "tp is \"99999999999\"");
  ExpectError({"--tp="}, "tp is \"\"");
  ExpectError({"--max_line_mb", "64MB"}, "max_line_mb is \"64MB\"; give a number");
  ExpectError({"--tp"}, "tp");
}

TEST_F(ConfigTest, NamesFileLineAndKeyOfWrongToml) {
  const std::pair<std::string, std::string> table[] = {
      {"tp = 1\nmax_num_seq = 3\n", "line 2: unknown key max_num_seq; did you mean max_num_seqs?"},
      {"config = \"x\"\n", "line 1: unknown key config"},
      {"help = true\n", "line 1: unknown key help"},
      {"tp = 1\ntp = 2\n", "line 2: tp is given twice"},
      {"[engine]\ntp = 1\n", "line 1: tables are not used"},
      {"dtype = auto\n", "\"auto\" is neither a number nor true or false"},
      {"model = \"a\n", "no closing quote"},
      {"model = \"a\" b\n", "nothing but a comment"},
      {"model = \"\\q\"\n", "\\q is no escape"},
      {"model = \"\\uD800\"\n", "is no character"},
      {"model = \"\\u12\"\n", "4 hexadecimal digits"},
      {"model\n", "expected key = value"},
      {"a.b = 1\n", "expected key = value"},
      {"tp = [1, 2]\n", "is neither a number"},
      {"tp =\n", "is neither a number"},
      {"model = \"\"\"\nx\n\"\"\"\n", "nothing but a comment"}};
  for (const auto& [toml, error] : table) {
    const std::string path = WriteToml(toml);
    ExpectError({"--config", path}, error);
    ExpectError({"--config", path}, path);
  }
  ExpectError({"--config", WriteToml("tp = \"x\"\n")}, "tp is \"x\"");
  ExpectError({"--config", "/no/such/file.toml"}, "/no/such/file.toml");
  ExpectError({"--config", "/"}, "cannot be read");
}

TEST_F(ConfigTest, TakesCommentsLiteralStringsAndSpacing) {
  Config config;
  const std::string path = WriteToml(
      "\xEF\xBB\xBF# head\r\n\r\n  model='a # b, c' # d\r\nmax-num-batched-tokens = 8_192\r\n"
      "kv_cache_memory_gb = 2.5e0 # GiB\nserved_model_name = "
      "\"\\u00e9\\U0001F600\"\ninsecure_tcp=true");
  const absl::Status status = Parse({"--config", path}, &config);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_EQ(config.model, "a # b, c");
  EXPECT_EQ(config.max_num_batched_tokens, 8192);
  EXPECT_EQ(config.kv_cache_memory_gb, 2.5);
  EXPECT_EQ(config.served_model_name, "\xC3\xA9\xF0\x9F\x98\x80");
  EXPECT_TRUE(config.insecure_tcp);
}

TEST_F(ConfigTest, SurvivesHostileToml) {
  RandomMessages random(/*seed=*/5);
  const std::string seed_text = ToToml(Unusual()) + "# comment\nx = 'y'\nz = \"\\U0001F600\"\n";
  int accepted = 0;
  for (int i = 0; i < FuzzIterations(20'000); ++i) {
    accepted += ParseToml(random.Mutated(seed_text)).ok() ? 1 : 0;
  }
  EXPECT_GT(accepted, 0);
}

TEST_F(ConfigTest, PrintsVersionAndHelp) {
  Config config;
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(Parse({"--version"}, &config).code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(::testing::internal::GetCapturedStdout(), "zipage 0.1.0\n");
  ::testing::internal::CaptureStdout();
  EXPECT_EQ(Parse({"--help"}, &config).code(), absl::StatusCode::kCancelled);
  const std::string help = ::testing::internal::GetCapturedStdout();
  const auto entries = ParseToml(ToToml(config));
  ASSERT_TRUE(entries.ok());
  for (const TomlEntry& entry : *entries) EXPECT_THAT(help, HasSubstr("--" + entry.key));
  EXPECT_THAT(help, HasSubstr("begin alike. Default: on."));
  EXPECT_THAT(help, HasSubstr("first sink_len slots. Default: off."));
}

Config Valid() {
  Config config;
  config.model = "/m";
  return config;
}

TEST_F(ConfigTest, ChecksEveryRangeAtBothEnds) {
  struct Row {
    std::string name;
    std::vector<std::string> good, bad;
  };
  const Row table[] = {
      {"tp", {"1", "64"}, {"0", "65", "-1"}},
      {"device", {"auto", "cpu", "cuda"}, {"gpu", "", "CPU"}},
      {"dtype", {"auto", "float32", "bfloat16", "float16"}, {"half", "bf16"}},
      {"max_model_len", {"0", "2", "1073741824"}, {"-1", "1", "1073741825"}},
      {"max_num_seqs", {"1", "2048"}, {"0", "65537", "-3"}},
      {"max_num_batched_tokens", {"256", "1048576"}, {"0", "1048577"}},
      {"kvcache_block_size", {"16", "256"}, {"15", "257"}},
      {"num_kvcache_blocks", {"0", "2147483647"}, {"-1", "2147483648"}},
      {"kv_cache_memory_gb", {"0", "1048576"}, {"-0.1", "1048577", "nan", "inf"}},
      {"gpu_memory_utilization", {"0.01", "1"}, {"0", "0.009", "1.01", "-1", "nan"}},
      {"swap_space_gb", {"0", "1048576"}, {"-0.1", "1048577", "nan", "inf"}},
      {"compression_policy",
       {"auto", "none", "paper", "pinned_score", "pinned_random", "recency"},
       {"", "None", "snapkv", "pinned"}},
      {"max_cache_blocks_per_seq", {"1", "65536"}, {"0", "65537", "-1"}},
      {"query_cache_len", {"1", "64"}, {"0", "65", "-1"}},
      {"pin_prompt", {"auto", "on", "off"}, {"true", ""}},
      {"score_share", {"0", "1"}, {"-0.001", "1.001", "nan"}},
      {"decay_factor", {"0", "1"}, {"-0.001", "1.001", "nan"}},
      {"pooling_size", {"1", "3", "255"}, {"0", "-1", "256", "257", "2", "254"}},
      {"similarity_lambda", {"0", "1"}, {"-0.001", "1.001", "nan"}},
      {"similarity_temperature", {"0.001", "1000"}, {"0", "0.0009", "1001", "nan"}},
      {"sink_len", {"1", "65536"}, {"0", "65537", "-1"}},
      {"layer_stride", {"1", "1024"}, {"0", "1025", "-1"}},
      {"repetition_penalty", {"0", "0.01", "1", "100"}, {"-0.1", "0.009", "100.1", "nan"}},
      {"repetition_ngram_size", {"0", "1", "1024"}, {"-1", "1025"}},
      {"repetition_ngram_count", {"2", "1000000"}, {"1", "0", "1000001"}},
      {"generation_config", {"auto", "none"}, {"vllm"}},
      {"collective", {"auto", "shm", "gloo"}, {"nccl"}},
      {"cpu_threads", {"0", "1024"}, {"-1", "1025"}},
      {"init_timeout_s", {"0.001", "86400"}, {"0", "86401", "nan"}},
      {"heartbeat_timeout_s", {"0", "86400"}, {"-1", "86401", "nan"}},
      {"step_timeout_s", {"0", "86400"}, {"-1", "inf"}},
      {"collective_timeout_s", {"0.001", "86400"}, {"0", "-1"}},
      {"drain_timeout_s", {"0", "86400"}, {"-1", "86401"}},
      {"max_line_mb", {"0.001", "1024"}, {"0", "1025"}},
      {"seed", {"-9223372036854775808", "9223372036854775807"}, {}},
  };
  for (const Row& row : table) {
    for (const std::string& value : row.good) {
      Config config = Valid();
      ASSERT_TRUE(Parse({"--" + row.name + "=" + value}, &config).ok()) << row.name << value;
      EXPECT_TRUE(Validate(config).ok()) << Validate(config);
    }
    for (const std::string& value : row.bad) {
      Config config = Valid();
      ASSERT_TRUE(Parse({"--" + row.name, value}, &config).ok()) << row.name << value;
      const absl::Status status = Validate(config);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << row.name << " " << value;
      EXPECT_THAT(std::string(status.message()), HasSubstr(row.name + " is "));
      EXPECT_THAT(std::string(status.message()), HasSubstr("; give "));
    }
  }
}

TEST_F(ConfigTest, RefusesContradictions) {
  struct Row {
    std::vector<std::string> arguments;
    std::string error;  // Empty: accepted.
  };
  const Row table[] = {
      {{"--model="}, "model is missing"},
      {{"--max_num_seqs=4096"}, "max_num_batched_tokens is 2048, but 4096 sequences"},
      {{"--max_num_seqs=4096", "--max_num_batched_tokens=4096"}, ""},
      {{"--num_kvcache_blocks=5", "--kv_cache_memory_gb=1"}, "give one"},
      {{"--job_endpoint=/tmp/x"}, "give ipc://PATH or tcp://ADDRESS:PORT"},
      {{"--job_endpoint=ipc:///tmp/x"}, ""},
      {{"--job_endpoint=tcp://127.0.0.1:1"}, "insecure_tcp to accept everyone"},
      {{"--job_endpoint=tcp://127.0.0.1:1", "--insecure_tcp"}, ""},
      {{"--job_endpoint=tcp://127.0.0.1:1", "--curve_key_file=k"}, "CURVE needs both"},
      {{"--curve_allowed_clients_file=c"}, "CURVE needs both"},
      {{"--job_endpoint=tcp://a:1", "--curve_key_file=k", "--curve_allowed_clients_file=c"}, ""},
      {{"--insecure_tcp", "--curve_key_file=k", "--curve_allowed_clients_file=c"}, "contradicts"},
  };
  for (const Row& row : table) {
    Config config = Valid();
    ASSERT_TRUE(Parse(row.arguments, &config).ok());
    const absl::Status status = Validate(config);
    EXPECT_EQ(status.ok(), row.error.empty()) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(row.error));
  }
}

TEST_F(ConfigTest, RefusesSwitchesThatDoNothingWithThePolicy) {
  const std::string policies[] = {"auto",          "paper",   "pinned_score",
                                  "pinned_random", "recency", "none"};
  const std::pair<std::string, size_t> switches[] = {
      // How many of the policies, from the first, have a use for it.
      {"compress_prefill", 5},       {"adaptive_kv_budget", 5}, {"pin_prompt=on", 5},
      {"use_attention_sink", 5},     {"max_norm", 3},           {"continues_pooling", 3},
      {"no_use_similarity", 6},      {"no_enable_pooling", 6},  {"pin_prompt=off", 6},
      {"no_enable_hybrid_engine", 6}};
  for (const auto& [flag, num_policies] : switches) {
    for (size_t i = 0; i < std::size(policies); ++i) {
      Config config = Valid();
      ASSERT_TRUE(Parse({"--compression_policy=" + policies[i], "--" + flag}, &config).ok());
      const absl::Status status = Validate(config);
      EXPECT_EQ(status.ok(), i < num_policies) << flag << " " << policies[i] << " " << status;
      if (status.ok()) continue;
      const std::string name = flag.substr(0, flag.find('='));
      EXPECT_THAT(std::string(status.message()), HasSubstr(name + " is "));
      EXPECT_THAT(std::string(status.message()), HasSubstr("compression_policy " + policies[i]));
    }
  }
}

TEST_F(ConfigTest, WantsRoomForWhatEveryCompressionKeeps) {
  struct Row {
    std::vector<std::string> arguments;
    std::string error;  // Empty: accepted.
  };
  const Row table[] = {
      {{"--kvcache_block_size=16", "--query_cache_len=16"}, ""},
      {{"--kvcache_block_size=16", "--query_cache_len=17"},
       "query_cache_len is 17, but the query window lies in one block of kvcache_block_size 16"},
      {{"--kvcache_block_size=16", "--query_cache_len=17", "--compression_policy=none"}, ""},
      {{"--continues_pooling", "--no_enable_pooling"},
       "continues_pooling is on, but enable_pooling is off"},
      {{"--max_cache_blocks_per_seq=1", "--use_attention_sink", "--sink_len=240"}, ""},
      {{"--max_cache_blocks_per_seq=1", "--use_attention_sink", "--sink_len=241"},
       "query_cache_len 16 and sink_len 241 keep 257 slots, but max_cache_blocks_per_seq 1 of "
       "kvcache_block_size 256 hold 256; lower sink_len or raise max_cache_blocks_per_seq"},
      {{"--max_cache_blocks_per_seq=1", "--sink_len=241"}, ""},
      {{"--max_cache_blocks_per_seq=65536", "--use_attention_sink", "--sink_len=65536"}, ""},
  };
  for (const Row& row : table) {
    Config config = Valid();
    ASSERT_TRUE(Parse(row.arguments, &config).ok());
    const absl::Status status = Validate(config);
    EXPECT_EQ(status.ok(), row.error.empty()) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(row.error));
  }
}

TEST_F(ConfigTest, DigestsWhatRanksMustShareAndNothingLocal) {
  const auto entries = ParseToml(ToToml(Unusual()));
  ASSERT_TRUE(entries.ok());
  const std::vector<std::string> local = {"model",
                                          "served_model_name",
                                          "num_kvcache_blocks",
                                          "kv_cache_memory_gb",
                                          "gpu_memory_utilization",
                                          "swap_space_gb",
                                          "enable_prefix_cache",
                                          "cpu_threads",
                                          "init_timeout_s",
                                          "heartbeat_timeout_s",
                                          "step_timeout_s",
                                          "collective_timeout_s",
                                          "drain_timeout_s",
                                          "max_line_mb",
                                          "job_endpoint",
                                          "curve_key_file",
                                          "curve_allowed_clients_file",
                                          "insecure_tcp"};
  for (const TomlEntry& entry : *entries) {
    Config changed;
    ASSERT_TRUE(Parse({"--" + entry.key + "=" + entry.value}, &changed).ok()) << entry.key;
    ASSERT_FALSE(changed == Config()) << entry.key << " is at its default in Unusual()";
    const bool is_local = std::find(local.begin(), local.end(), entry.key) != local.end();
    EXPECT_EQ(Digest(changed) == Digest(Config()), is_local) << entry.key;
  }
}

}  // namespace
}  // namespace zipage
