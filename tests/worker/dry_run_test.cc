#include "worker/dry_run.h"

#include <filesystem>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/worker/golden.h"
#include "tests/worker/test_files.h"
#include "worker/cpu_backend.h"
#include "worker/model/weights.h"

namespace zipage {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class BackendWithMemory : public CpuBackend {
 public:
  explicit BackendWithMemory(size_t bytes) : CpuBackend(1), bytes_(bytes) {}
  absl::StatusOr<size_t> AvailableMemory() const override { return bytes_; }

 private:
  size_t bytes_;
};

TEST(DryRunTest, TellsMemoryConcurrencyAndTheOutputThatPays) {
  Config config;
  config.model = LoadGoldenModel("tiny-qwen2/f32").dir;
  config.kvcache_block_size = 16;
  config.max_cache_blocks_per_seq = 3;
  config.query_cache_len = 8;
  config.num_kvcache_blocks = 64;
  const auto text = DryRun(config, BackendWithMemory(size_t{1} << 30));
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(*text, AllOf(HasSubstr("Qwen2ForCausalLM"), HasSubstr("1.000 GiB available"),
                           HasSubstr("64 blocks of 16 positions"), HasSubstr("query windows"),
                           HasSubstr("compression scratch"), HasSubstr("total")));
  // 512 positions are 32 blocks; four blocks a sequence.
  EXPECT_THAT(*text, AllOf(HasSubstr("full cache                2   in 64 blocks, 32 each"),
                           HasSubstr("compressed               16   in 64 blocks, 4 each"),
                           HasSubstr("paper, budget 48 slots"),
                           HasSubstr("outputs of over 128 tokens after a short prompt, over 104 "
                                     "after one of 12"),
                           HasSubstr("at max_model_len 512: 4.0 times")));
  config.compression_policy = "none";
  const auto none = DryRun(config, BackendWithMemory(size_t{1} << 30));
  ASSERT_TRUE(none.ok());
  EXPECT_THAT(*none, AllOf(HasSubstr("full cache"), Not(HasSubstr("compressed "))));
}

TEST(DryRunTest, SaysSoIfCompressionNeverPays) {
  Config config;
  config.model = LoadGoldenModel("tiny-qwen2/f32").dir;
  const auto text = DryRun(config, BackendWithMemory(size_t{1} << 30));
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(*text, HasSubstr("never within max_model_len 512"));
}

TEST(DryRunTest, AFolderWithConfigJsonAloneWillDoButABrokenCheckpointWillNot) {
  const ::zipage::testing::TempDir dir;
  std::filesystem::copy_file(LoadGoldenModel("tiny-qwen2/f32").dir + "/config.json",
                             dir.File("config.json"));
  Config config;
  config.model = dir.path();
  const BackendWithMemory backend(size_t{1} << 30);
  const auto text = DryRun(config, backend);
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_THAT(*text, HasSubstr("in float32"));
  dir.Write("model.safetensors", "nonsense");
  EXPECT_EQ(DryRun(config, backend).status().code(), absl::StatusCode::kDataLoss);
}

TEST(DryRunTest, ErrorsAreThoseOfTheWorker) {
  Config config;
  config.model = LoadGoldenModel("tiny-qwen2/f32").dir;
  EXPECT_EQ(DryRun(config, BackendWithMemory(1000)).status().code(),
            absl::StatusCode::kResourceExhausted);
  config.max_model_len = 1000;
  EXPECT_THAT(std::string(DryRun(config, BackendWithMemory(size_t{1} << 30)).status().message()),
              HasSubstr("max_model_len is 1000, but"));
}

// What the planner takes for weights is what loading them takes.
TEST(DryRunTest, WeightsAreAsLargeAsPlanned) {
  for (const std::string& name : GoldenModelNames()) {
    const std::string dir = LoadGoldenModel(name).dir;
    const auto model = LoadModelConfig(dir);
    ASSERT_TRUE(model.ok());
    const auto checkpoint = OpenCheckpoint(dir, *model);
    ASSERT_TRUE(checkpoint.ok());
    const DType stored = checkpoint->Get("model.embed_tokens.weight").dtype;
    CpuBackend backend(1);
    for (int tp : {1, 2}) {
      if (model->num_heads % tp != 0) continue;
      for (int rank = 0; rank < tp; ++rank) {
        const auto weights =
            LoadWeights(*model, *checkpoint, rank, tp, DType::kFloat32, 100, &backend);
        ASSERT_TRUE(weights.ok());
        const size_t planned =
            WeightBytes(*model, MakeModelShard(*model, rank, tp), DType::kFloat32, stored, 100);
        EXPECT_GE(weights->bytes, planned) << name;
        // Some kernels pad, which shows in matrices as small as these.
        EXPECT_LE(weights->bytes, planned * 6 / 5) << name;
      }
    }
  }
}

}  // namespace
}  // namespace zipage
