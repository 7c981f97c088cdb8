// Wrong input to the programs: one line that says what, the documented exit status, and nothing
// left behind.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "tests/e2e/engine_fixture.h"

namespace zipage {
namespace {

namespace fs = std::filesystem;

class ErrorsTest : public EngineTest {
 protected:
  Flags Job() { return JobFlags("job", SimpleRequests(2, 2)); }
  // Launches with `flags`, and with the input and the output of Job() unless they name another, and
  // expects the status, one line on standard error that holds all of `words`, and nothing left.
  // Lines of the log do not count.
  void ExpectRefused(const Flags& flags, int status, const std::vector<std::string>& words) {
    SCOPED_TRACE(testing::PrintToString(flags));
    Flags all = flags;
    const Flags job = Job();
    for (size_t i = 0; i < job.size(); i += 2) {
      if (std::find(flags.begin(), flags.end(), job[i]) != flags.end()) continue;
      all.insert(all.end(), {job[i], job[i + 1]});
    }
    const Outcome outcome = Run("zipage-launch", all);
    EXPECT_EQ(outcome.status, status) << outcome.err;
    EXPECT_EQ(outcome.out, "");
    const std::string prefix = "zipage-launch: ";
    const size_t line = outcome.err.find(prefix);
    ASSERT_NE(line, std::string::npos) << outcome.err;
    EXPECT_EQ(outcome.err.find('\n', line), outcome.err.size() - 1) << outcome.err;
    if (status == 2) {
      EXPECT_EQ(line, 0U) << outcome.err;
    }
    for (const std::string& word : words) {
      EXPECT_NE(outcome.err.find(word, line), std::string::npos) << word << " in " << outcome.err;
    }
    ExpectNothingLeft();
  }
};

TEST_F(ErrorsTest, WrongFlagsAreRefusedBeforeAnythingStarts) {
  ExpectRefused({"--no_such_flag", "1"}, 2, {"no_such_flag"});
  ExpectRefused({"--tp", "0"}, 2, {"tp", "0", "64"});
  ExpectRefused({"--kvcache_block_size", "many"}, 2, {"kvcache_block_size", "many"});
  ExpectRefused({"--max_num_seqs", "8", "--max_num_batched_tokens", "7"}, 2,
                {"max_num_batched_tokens", "7", "8"});
  ExpectRefused({"--collective", "nccl"}, 2, {"collective", "nccl", "gloo"});
  ExpectRefused({"--config", dir_ / "missing.toml"}, 2, {"missing.toml"});
  ExpectRefused({"--job_endpoint", "tcp://127.0.0.1:*"}, 2, {"tcp://", "curve", "insecure_tcp"});
}

TEST_F(ErrorsTest, WrongJobFilesAreRefused) {
  ExpectRefused({"--job", dir_ / "missing.jsonl"}, 2, {"missing.jsonl", "No such file"});
  ExpectRefused({"--job", dir_.path()}, 2, {dir_.path(), "not a file"});
  ExpectRefused({"--output", dir_ / "job.jsonl"}, 2, {"job.jsonl", "both"});
  ExpectRefused({"--output", dir_ / "no/such/out"}, 1, {"no/such/out"});
  WriteText(OutputPath("job"), "an earlier result\n");
  ExpectRefused({}, 1, {OutputPath("job"), "overwrite"});
  EXPECT_EQ(ReadText(OutputPath("job")), "an earlier result\n");
  const Outcome replaced = Run(
      "zipage-launch", {"--job", dir_ / "job.jsonl", "--output", OutputPath("job"), "--overwrite"});
  EXPECT_EQ(replaced.status, 0) << replaced.err;
  EXPECT_EQ(ReadOutput(OutputPath("job")).size(), 2U);
}

TEST_F(ErrorsTest, WrongModelsAreNamedWithTheCure) {
  ExpectRefused({"--model", dir_ / "nowhere"}, 1, {"nowhere"});
  ExpectRefused({"--model", Model("tiny-llama"), "--tp", "2"}, 1, {"tp", "2", "1, 3"});
  ExpectRefused({"--max_model_len", "513"}, 1, {"max_model_len", "513", "512"});

  const std::string broken = dir_ / "broken";
  const std::string weights = broken + "/model.safetensors";
  fs::copy(Model(), broken);
  WriteText(weights, "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 430952\n");
  ExpectRefused({"--model", broken}, 1, {weights, "git lfs pull"});
  fs::copy_file(Model() + "/model.safetensors", weights, fs::copy_options::overwrite_existing);
  fs::resize_file(weights, fs::file_size(weights) - 4);
  ExpectRefused({"--model", broken, "--tp", "2"}, 1, {weights, "428284 bytes", "download"});
  fs::remove(weights);
  ExpectRefused({"--model", broken}, 1, {broken, "safetensors"});
  fs::copy_file(Model() + "/model.safetensors", weights);
  WriteText(broken + "/tokenizer.json", "{}");
  ExpectRefused({"--model", broken}, 1, {"tokenizer.json"});
  fs::remove(broken + "/tokenizer.json");
  ExpectRefused({"--model", broken}, 1, {"tokenizer.json"});
  fs::copy_file(Model() + "/tokenizer.json", broken + "/tokenizer.json");
  WriteText(broken + "/config.json", R"({"model_type": "mamba"})");
  ExpectRefused({"--model", broken}, 1, {"config.json"});
}

TEST_F(ErrorsTest, ClientsWithoutAnEngineSayHowToStartOne) {
  const std::string nobody = dir_ / "nobody";
  const std::vector<std::pair<std::string, Flags>> commands = {
      {"zipage-submit", Job()}, {"zipage-submit", {"--cancel", "1"}}, {"zipage-status", {}}};
  for (auto [program, flags] : commands) {
    flags.insert(flags.end(), {"--engine", nobody});
    const Outcome outcome = Run(program, flags);
    EXPECT_EQ(outcome.status, 2) << program;
    EXPECT_EQ(CountLines(outcome.err), 1) << outcome.err;
    EXPECT_NE(outcome.err.find(nobody), std::string::npos) << outcome.err;
  }
}

}  // namespace
}  // namespace zipage
