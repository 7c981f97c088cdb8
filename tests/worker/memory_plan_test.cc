#include "worker/memory_plan.h"

#include <algorithm>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace zipage {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kGiB = 1 << 30;

ModelConfig MakeModel() {
  ModelConfig model;
  model.path = "/models/m";
  model.architecture = "LlamaForCausalLM";
  model.hidden_size = 256;
  model.intermediate_size = 512;
  model.num_layers = 4;
  model.num_heads = 8;
  model.num_kv_heads = 4;
  model.head_dim = 32;
  model.vocab_size = 1000;
  model.max_position = 1 << 20;
  return model;
}

// Blocks of 256 positions are 1 MiB and, with stored scores, 16 KiB more. A query window is
// 4 layers * 16 * 8 * 32 * 4 bytes = 64 KiB.
MemoryRequest MakeRequest(int64_t available) {
  MemoryRequest request;
  request.config.model = "/models/m";
  request.config.compression_policy = "pinned_score";
  request.config.max_num_seqs = 64;
  request.config.max_num_batched_tokens = 256;
  request.config.swap_space_gb = 0.25;
  request.model = MakeModel();
  request.max_model_len = 8192;
  request.available = available;
  return request;
}

TEST(MemoryPlanTest, EveryPartIsCountedFromTheShapes) {
  MemoryRequest request = MakeRequest(kGiB);
  request.config.num_kvcache_blocks = 500;
  const MemoryPlan plan = *PlanMemory(request);
  // Embedding and output, four layers of q, k, v, o and the MLP, norms, rope.
  const int64_t matrices = 2 * 1000 * 256 + 4 * 256 * (256 + 2 * 128 + 256 + 3 * 512);
  EXPECT_EQ(plan.weights, 4 * (matrices + (4 * 2 + 1) * 256 + 8192 * 32));
  EXPECT_EQ(plan.kv.block_bytes(), kMiB + 4 * 256 * 4 * 4);
  EXPECT_EQ(plan.windows.slot_bytes(), 64 << 10);
  EXPECT_EQ(plan.score_bytes(), plan.num_blocks * (16 << 10));
  // Hidden states three times, q, k and v, attention, gate and up, the MLP, logits.
  const int64_t activations = 256 * (3 * 256 + 512 + 256 + 3 * 512) + 128 * 1000;
  EXPECT_GT(plan.activations, 4 * activations);
  EXPECT_LT(plan.activations, 4 * activations + (256 * 8 + 64 * 60) * 4);
  // Two arrays of scores and one of slots for 16 sequences of nine blocks, in four layers.
  const int64_t scores = int64_t{4} * 16 * 9 * 256 * 4 * sizeof(float);
  EXPECT_GT(plan.scratch, 3 * scores);
  EXPECT_LT(plan.scratch, 3 * scores + 16 * 1024);
  EXPECT_EQ(plan.num_query_slots, 500 / 9);
  EXPECT_EQ(plan.num_host_blocks, kGiB / 4 / static_cast<int64_t>(plan.kv.block_bytes()));
  EXPECT_LE(plan.total(), kGiB);
}

TEST(MemoryPlanTest, AutomaticallyTakesTheShareThatIsLeft) {
  for (double utilization : {0.25, 0.9, 1.0}) {
    MemoryRequest request = MakeRequest(kGiB);
    request.config.gpu_memory_utilization = utilization;
    request.config.max_num_seqs = 200;  // which 25'600 blocks would fill
    request.config.max_model_len = request.max_model_len = 32'768;
    const MemoryPlan plan = *PlanMemory(request);
    const double left =
        utilization * static_cast<double>(kGiB - plan.weights - plan.activations - plan.scratch);
    const auto pool = static_cast<double>(plan.kv_bytes() + plan.window_bytes());
    EXPECT_LE(pool, left) << utilization;
    const int64_t more = plan.kv.block_bytes() + plan.windows.slot_bytes();
    EXPECT_GT(pool + static_cast<double>(more), left) << utilization;
  }
}

TEST(MemoryPlanTest, AutomaticallyTakesNoMoreThanFourGiBOfAllRanksNorThanSequencesFill) {
  MemoryRequest request = MakeRequest(100 * kGiB);
  request.config.max_num_seqs = 4096;
  request.config.max_num_batched_tokens = 4096;
  const MemoryPlan one = *PlanMemory(request);
  EXPECT_LE(one.kv_bytes() + one.window_bytes(), 4 * kGiB);
  EXPECT_GT(one.kv_bytes() + one.window_bytes(), 4 * kGiB - 2 * kMiB);
  request.config.tp = 2;
  const MemoryPlan two = *PlanMemory(request);
  EXPECT_EQ(two.share, 50 * kGiB);
  EXPECT_LE(two.kv_bytes() + two.window_bytes(), 2 * kGiB);
  EXPECT_GT(two.num_blocks, one.num_blocks - 10) << "a rank has half of every block";
  request.config.tp = 1;
  request.config.max_num_seqs = 10;
  request.max_model_len = 300;
  EXPECT_EQ(PlanMemory(request)->num_blocks, 20);
  request.config.max_num_seqs = 1;
  request.max_model_len = 16;
  const MemoryPlan small = *PlanMemory(request);
  EXPECT_EQ(small.num_blocks, 2);
  EXPECT_EQ(small.num_query_slots, 1);
}

TEST(MemoryPlanTest, QuerySlotsFollowTheBlocksAndNeedNoWindowsWithoutQueries) {
  MemoryRequest request = MakeRequest(10 * kGiB);
  request.config.num_kvcache_blocks = 100;
  for (const char* policy : {"paper", "pinned_score", "pinned_random", "recency"}) {
    request.config.compression_policy = policy;
    const bool scores = std::string(policy) == "paper" || std::string(policy) == "pinned_score";
    const MemoryPlan plan = *PlanMemory(request);
    EXPECT_EQ(plan.num_blocks, 100) << policy;
    EXPECT_EQ(plan.num_query_slots, 11) << policy;
    EXPECT_EQ(plan.window_bytes(), scores ? 11 * (64 << 10) : 0) << policy;
    EXPECT_EQ(plan.score_bytes(), scores ? 100 * (16 << 10) : 0) << policy;
  }
  request.config.compression_policy = "pinned_score";
  request.config.use_global_score = false;
  EXPECT_EQ(PlanMemory(request)->score_bytes(), 0);
  request.config.max_num_seqs = 5;
  EXPECT_EQ(PlanMemory(request)->num_query_slots, 5);
  request.config.max_cache_blocks_per_seq = 99;
  EXPECT_EQ(PlanMemory(request)->num_query_slots, 1);
  request.config.compression_policy = "none";
  const MemoryPlan none = *PlanMemory(request);
  EXPECT_EQ(none.num_query_slots, 0);
  EXPECT_EQ(none.window_bytes() + none.score_bytes() + none.scratch, 0);
}

TEST(MemoryPlanTest, GivenSizesWinAndAreCheckedWithTheirWindows) {
  MemoryRequest request = MakeRequest(kGiB);
  request.config.num_kvcache_blocks = 77;
  EXPECT_EQ(PlanMemory(request)->num_blocks, 77);
  // Exactly enough, then one byte less.
  request.available = PlanMemory(request)->total();
  EXPECT_EQ(PlanMemory(request)->num_blocks, 77);
  EXPECT_EQ(PlanMemory(request)->num_host_blocks, 0) << "swap space is what is left";
  --request.available;
  const absl::Status blocks = PlanMemory(request).status();
  EXPECT_EQ(blocks.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(blocks.message()),
              AllOf(HasSubstr("num_kvcache_blocks is 77"), HasSubstr("give at most 76")));
  request.config.num_kvcache_blocks = 76;
  EXPECT_TRUE(PlanMemory(request).ok());

  request = MakeRequest(kGiB);
  request.config.kv_cache_memory_gb = 0.5;
  const MemoryPlan plan = *PlanMemory(request);
  EXPECT_EQ(plan.num_blocks, kGiB / 2 / static_cast<int64_t>(plan.kv.block_bytes()));
  request.available = plan.total() - 1;
  const absl::Status memory = PlanMemory(request).status();
  EXPECT_EQ(memory.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(memory.message()),
              AllOf(HasSubstr("kv_cache_memory_gb is 0.5"), HasSubstr("give at most 0.49")));
  request.config.kv_cache_memory_gb = 0.49;
  EXPECT_TRUE(PlanMemory(request).ok());
  request.config.kv_cache_memory_gb = 0.001;
  const absl::Status tiny = PlanMemory(request).status();
  EXPECT_THAT(std::string(tiny.message()), HasSubstr("give 0.002 or more"));
}

TEST(MemoryPlanTest, TooLittleMemorySaysWhatIsMissingAndTheSmallestChangeThatFits) {
  MemoryRequest request = MakeRequest(kGiB);
  const MemoryPlan plan = *PlanMemory(request);
  const int64_t fixed = plan.weights + plan.activations + plan.scratch;

  // A smaller layer_stride needs less scratch memory.
  request.available = fixed;
  absl::Status status = PlanMemory(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("/models/m needs "), HasSubstr("are missing"),
                    HasSubstr("lower layer_stride to 2")));
  request.config.layer_stride = 3;
  EXPECT_EQ(PlanMemory(request).status().code(), absl::StatusCode::kResourceExhausted);
  // Then the pool is too small for the budget, which is another matter.
  request.config.layer_stride = 2;
  EXPECT_EQ(PlanMemory(request).status().code(), absl::StatusCode::kInvalidArgument);

  // Without compression the activations give way, and no further than needed.
  request.config.compression_policy = "none";
  request.available = plan.weights + plan.activations;
  status = PlanMemory(request).status();
  const std::string message(status.message());
  const size_t at = message.find("lower max_num_batched_tokens to ");
  ASSERT_NE(at, std::string::npos) << message;
  const int tokens = std::stoi(message.substr(at + 32));
  EXPECT_THAT(message, Not(HasSubstr("layer_stride")));
  request.config.max_num_batched_tokens = tokens;
  EXPECT_TRUE(PlanMemory(request).ok());
  request.config.max_num_batched_tokens = tokens + 1;
  EXPECT_FALSE(PlanMemory(request).ok());

  // The weights alone are too much.
  request.available = plan.weights / 2;
  EXPECT_THAT(std::string(PlanMemory(request).status().message()),
              HasSubstr("choose a smaller model"));
}

TEST(MemoryPlanTest, ABlockAboveTheAutomaticLimitMustBeAskedFor) {
  MemoryRequest request = MakeRequest(4000 * kGiB);
  request.config.compression_policy = "none";
  request.model.num_kv_heads = request.model.num_heads = 16'384;
  const absl::Status status = PlanMemory(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("give kv_cache_memory_gb 8.000 or more"));
  request.config.kv_cache_memory_gb = 8;
  EXPECT_EQ(PlanMemory(request)->num_blocks, 2);
}

TEST(MemoryPlanTest, APoolTooSmallForABudgetThatIsNeededIsAnError) {
  MemoryRequest request = MakeRequest(kGiB);
  request.config.num_kvcache_blocks = 8;
  const absl::Status status = PlanMemory(request).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("max_cache_blocks_per_seq is 8"), HasSubstr("has 8"),
                    HasSubstr("lower max_cache_blocks_per_seq to 7 or max_model_len to 2048, or "
                              "give num_kvcache_blocks 9 or more")));
  request.config.max_cache_blocks_per_seq = 7;
  EXPECT_TRUE(PlanMemory(request).ok());
  request.config.max_cache_blocks_per_seq = 8;
  request.max_model_len = 2048;
  EXPECT_TRUE(PlanMemory(request).ok());
  request.max_model_len = 2049;
  EXPECT_FALSE(PlanMemory(request).ok());
  request.config.compression_policy = "none";
  EXPECT_TRUE(PlanMemory(request).ok());
}

TEST(MemoryPlanTest, ConcurrencyAndCeiling) {
  MemoryRequest request = MakeRequest(kGiB);
  request.config.num_kvcache_blocks = 200;
  const MemoryPlan plan = *PlanMemory(request);
  EXPECT_EQ(FullBlocks(request), 32);
  EXPECT_EQ(CompressedBlocks(request), 9);
  EXPECT_EQ(Concurrency(plan, request, 32), 6);
  EXPECT_EQ(Concurrency(plan, request, 9), 22);
  request.config.max_num_seqs = 10;
  EXPECT_EQ(Concurrency(plan, request, 9), 10);
  request.max_model_len = 257;
  EXPECT_EQ(FullBlocks(request), 2);
  EXPECT_EQ(CompressedBlocks(request), 2);

  EXPECT_EQ(BreakEvenOutput(request.config, 0), 2 * 9 * 256);
  EXPECT_EQ(BreakEvenOutput(request.config, 300), 2 * (9 * 256 - 300));
  EXPECT_EQ(BreakEvenOutput(request.config, 5000), 0);
  EXPECT_DOUBLE_EQ(SpeedUpCeiling(request.config, 300, BreakEvenOutput(request.config, 300)), 1);
  EXPECT_DOUBLE_EQ(SpeedUpCeiling(request.config, 0, 9 * 256 * 8), 4);
}

}  // namespace
}  // namespace zipage
