// The compressor against loops over sequences, layers and heads: only the scores come from the
// kernels, for one sequence and layer at a time.

#include "worker/compressor.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "glog/logging.h"
#include "gtest/gtest.h"
#include "worker/comm/shared_memory.h"
#include "worker/comm/single.h"
#include "worker/cpu_backend.h"
#include "worker/memory_plan.h"

namespace zipage {
namespace {

constexpr int kLayers = 5;
constexpr int kBlockSize = 16;
constexpr int kKvHeads = 4;
constexpr int kGroup = 2;
constexpr int kHeadDim = 64;
constexpr int kNumBlocks = 64;
constexpr int kNumQuerySlots = 8;
constexpr int kNumSeqs = 8;

Config MakeConfig(const std::string& policy) {
  Config config;
  config.compression_policy = policy;
  config.kvcache_block_size = kBlockSize;
  config.query_cache_len = 8;
  config.max_cache_blocks_per_seq = 3;
  config.max_num_seqs = kNumSeqs;
  config.layer_stride = 2;
  return config;
}

ModelConfig MakeModel() {
  ModelConfig model;
  model.num_layers = kLayers;
  model.num_heads = kKvHeads * kGroup;
  model.num_kv_heads = kKvHeads;
  model.head_dim = kHeadDim;
  model.intermediate_size = model.vocab_size = 64;
  return model;
}

// A pool and a compressor of one rank, filled with random numbers that are the same for every
// number of ranks: those of a head depend on the seed and on the head's place in the model.
struct TestRank {
  TestRank(const Config& config, Collective* collective, uint32_t seed,
           const CompressorLimits& limits = {kNumSeqs, 7})
      : backend(1) {
    const ModelShard shard = MakeModelShard(MakeModel(), collective->rank(), collective->size());
    first_kv_head = static_cast<int>(shard.kv_heads.begin);
    first_q_head = static_cast<int>(shard.heads.begin);
    auto made = KvPool::Create(MakeKvShape(config, MakeModel(), shard, DType::kFloat32), kNumBlocks,
                               &backend);
    CHECK(made.ok());
    pool = std::make_unique<KvPool>(*std::move(made));
    auto compressor_made =
        Compressor::Create(config, limits, pool.get(),
                           MakeQueryWindowShape(config, MakeModel(), shard, DType::kFloat32),
                           kNumQuerySlots, first_kv_head, collective, &backend);
    CHECK(compressor_made.ok()) << compressor_made.status();
    compressor = *std::move(compressor_made);
    Fill(seed);
  }

  void Fill(uint32_t seed) {
    const int heads = pool->shape().kv_heads;
    for (int layer = 0; layer < kLayers; ++layer) {
      FillPlane(static_cast<float*>(pool->key(layer)), kNumBlocks * kBlockSize, heads, kHeadDim,
                first_kv_head, seed + 10 * layer);
      FillPlane(static_cast<float*>(pool->value(layer)), kNumBlocks * kBlockSize, heads, kHeadDim,
                first_kv_head, seed + 10 * layer + 1);
      if (pool->stored_scores(layer) != nullptr) {
        FillPlane(pool->stored_scores(layer), kNumBlocks * kBlockSize, heads, 1, first_kv_head,
                  seed + 10 * layer + 2);
      }
      if (compressor->windows().shape().window == 0) continue;
      FillPlane(static_cast<float*>(compressor->windows().layer(layer)),
                kNumQuerySlots * compressor->windows().shape().window,
                compressor->windows().shape().q_heads, kHeadDim, first_q_head,
                seed + 10 * layer + 3);
    }
  }

  static void FillPlane(float* plane, int rows, int heads, int width, int first_head,
                        uint32_t seed) {
    for (int h = 0; h < heads; ++h) {
      std::minstd_rand random(seed * 1000 + first_head + h + 1);
      for (int r = 0; r < rows; ++r) {
        for (int i = 0; i < width; ++i) {
          // In [-2, 2). Stored scores are no larger than scores.
          const float value = static_cast<float>(random()) / 0x1p29F - 2.0F;
          plane[(int64_t{r} * heads + h) * width + i] = width == 1 ? std::abs(value) / 64 : value;
        }
      }
    }
  }

  std::vector<uint8_t> Bytes() const {
    const auto* begin = static_cast<const uint8_t*>(pool->key(0));
    return {begin, begin + kNumBlocks * pool->shape().block_bytes()};
  }

  CpuBackend backend;
  int first_kv_head = 0;
  int first_q_head = 0;
  std::unique_ptr<KvPool> pool;
  std::unique_ptr<Compressor> compressor;
};

// The slow way: what `work` does to the pool, one sequence and layer after the other.
class Reference {
 public:
  Reference(const Config& config, TestRank* rank)
      : config_(ResolveCompression(config)), rank_(*rank), shape_(rank->pool->shape()) {}

  void Compress(const CompressionWork& work, std::vector<int32_t>* prompt_slots) {
    for (int layer = 0; layer < kLayers; ++layer) {
      const std::vector<std::vector<int32_t>> kept = Kept(work, layer);
      for (int h = 0; h < shape_.kv_heads; ++h) {
        Pack(work, layer, h, kept[h]);
        int32_t& slots = (*prompt_slots)[layer * shape_.kv_heads + h];
        slots = static_cast<int32_t>(
            std::count_if(kept[h].begin(), kept[h].end(), [&](int32_t j) { return j < slots; }));
      }
    }
  }

 private:
  std::vector<std::vector<int32_t>> Kept(const CompressionWork& work, int layer) {
    table_ = work.source_table;
    table_len_ = static_cast<int32_t>(table_.size());
    slots_ = int64_t{table_len_} * kBlockSize;
    in_.block_table = table_.data();
    in_.table_len = &table_len_;
    in_.layers = in_.batch = 1;
    in_.kv_heads = shape_.kv_heads;
    in_.max_blocks = table_len_;
    in_.block_size = kBlockSize;
    const auto num_kept = static_cast<int64_t>(work.target_table.size() - 1) * kBlockSize;
    const std::string& policy = config_.compression_policy;
    std::vector<float> score(shape_.kv_heads * slots_, 0.0F);
    std::vector<std::vector<int32_t>> raised(shape_.kv_heads);
    if (policy == "paper" || policy == "pinned_score") score = Scores(work, layer);
    if (policy == "paper" && config_.use_similarity) Combine(layer, &score);
    if (policy == "pinned_score") {
      const int64_t always = Always(work);
      const auto by_score =
          std::lround(config_.score_share * static_cast<double>(num_kept - always));
      raised = Best(score, always + by_score, work);
    }
    if (policy == "pinned_score" || policy == "pinned_random") {
      score = Draws(work, layer);
      for (int h = 0; h < shape_.kv_heads; ++h) {
        for (int32_t j : raised[h]) score[h * slots_ + j] = 2;
      }
    }
    return Best(score, num_kept, work);
  }

  int64_t Sinks() const { return config_.use_attention_sink ? config_.sink_len : 0; }
  int64_t Always(const CompressionWork& work) const {
    return std::max(work.num_pinned, Sinks()) + config_.query_cache_len;
  }

  std::vector<float> Scores(const CompressionWork& work, int layer) {
    std::vector<float> score(shape_.kv_heads * slots_);
    const int32_t query_slot = work.query_slot;
    cpu::WindowScores({.shape = in_,
                       .key = rank_.pool->key(layer),
                       .query_window = rank_.compressor->windows().layer(layer),
                       .query_slot = &query_slot,
                       .score = score.data(),
                       .key_layer_stride = 0,
                       .window_layer_stride = 0,
                       .window = config_.query_cache_len,
                       .q_heads = shape_.kv_heads * kGroup,
                       .head_dim = kHeadDim,
                       .dtype = DType::kFloat32});
    const bool pools = config_.enable_pooling && (work.round == 0 || config_.continues_pooling);
    for (int h = 0; h < shape_.kv_heads; ++h) {
      float* s = score.data() + h * slots_;
      if (config_.max_norm) {
        const float max = *std::max_element(s, s + slots_);
        for (int64_t j = 0; j < slots_; ++j) s[j] /= max;
      }
      for (int64_t j = 0; config_.use_global_score && j < slots_; ++j) {
        if (j / kBlockSize < work.num_pinned / kBlockSize) continue;
        float& f = rank_.pool->stored_scores(
            layer)[(table_[j / kBlockSize] * kBlockSize + j % kBlockSize) * shape_.kv_heads + h];
        const bool last_block = j >= slots_ - kBlockSize;
        if (work.round > 0 && !last_block) {
          s[j] = std::max(s[j], static_cast<float>(config_.decay_factor) * f);
        }
        f = s[j];
      }
      if (!pools) continue;
      const std::vector<float> flat(s, s + slots_);
      const int64_t half = config_.pooling_size / 2;
      for (int64_t j = 0; j < slots_; ++j) {
        for (int64_t i = std::max<int64_t>(0, j - half); i < std::min(slots_, j + half + 1); ++i) {
          s[j] = std::max(s[j], flat[i]);
        }
      }
    }
    return score;
  }

  void Combine(int layer, std::vector<float>* score) {
    std::vector<float> row_sum(score->size());
    std::vector<float> similarity(score->size());
    cpu::KeySimilarity({.shape = in_,
                        .key = rank_.pool->key(layer),
                        .row_sum = row_sum.data(),
                        .similarity = similarity.data(),
                        .key_layer_stride = 0,
                        .head_dim = kHeadDim,
                        .temperature = static_cast<float>(config_.similarity_temperature),
                        .lightning = config_.lightning_similarity,
                        .max_norm = config_.max_norm,
                        .dtype = DType::kFloat32});
    cpu::CombineScores({.shape = in_,
                        .score = score->data(),
                        .similarity = similarity.data(),
                        .lambda = static_cast<float>(config_.similarity_lambda)});
  }

  std::vector<float> Draws(const CompressionWork& work, int layer) {
    std::vector<float> score(shape_.kv_heads * slots_);
    const int32_t none = 0;
    cpu::RandomScores({.shape = in_,
                       .score = score.data(),
                       .seed = &work.seed,
                       .sample_index = &work.sample_index,
                       .round = &work.round,
                       .raised = &none,
                       .num_raised = &none,
                       .max_raised = 0,
                       .first_layer = layer,
                       .first_kv_head = rank_.first_kv_head});
    return score;
  }

  // The best `count` slots of every head, ascending.
  std::vector<std::vector<int32_t>> Best(const std::vector<float>& score, int64_t count,
                                         const CompressionWork& work) const {
    std::vector<std::vector<int32_t>> best(shape_.kv_heads);
    for (int h = 0; h < shape_.kv_heads; ++h) {
      const auto before = [&](int32_t a, int32_t b) {
        const bool keeps_a = IsAlwaysKept(a, work);
        if (keeps_a != IsAlwaysKept(b, work)) return keeps_a;
        const float score_a = score[h * slots_ + a];
        const float score_b = score[h * slots_ + b];
        return score_a != score_b ? score_a > score_b : a > b;
      };
      std::vector<int32_t>& slots = best[h];
      for (int32_t j = 0; j < slots_; ++j) slots.push_back(j);
      std::sort(slots.begin(), slots.end(), before);
      slots.resize(count);
      std::sort(slots.begin(), slots.end());
    }
    return best;
  }

  bool IsAlwaysKept(int64_t slot, const CompressionWork& work) const {
    return slot < std::max(work.num_pinned, Sinks()) || slot >= slots_ - config_.query_cache_len;
  }

  void Pack(const CompressionWork& work, int layer, int head, const std::vector<int32_t>& kept) {
    const auto move = [&](void* plane, int64_t width) {
      if (plane == nullptr) return;
      const auto at = [&](BlockId block, int64_t offset) {
        return static_cast<float*>(plane) +
               ((block * kBlockSize + offset) * shape_.kv_heads + head) * width;
      };
      std::vector<float> rows;
      for (int32_t j : kept) {
        const float* row = at(work.source_table[j / kBlockSize], j % kBlockSize);
        rows.insert(rows.end(), row, row + width);
      }
      const int64_t first = work.num_pinned / kBlockSize * kBlockSize;
      for (auto i = first; i < static_cast<int64_t>(kept.size()); ++i) {
        std::copy_n(rows.begin() + i * width, width,
                    at(work.target_table[i / kBlockSize], i % kBlockSize));
      }
    };
    move(rank_.pool->key(layer), kHeadDim);
    move(rank_.pool->value(layer), kHeadDim);
    move(rank_.pool->stored_scores(layer), 1);
  }

  const Config config_;
  TestRank& rank_;
  const KvShape shape_;
  std::vector<BlockId> table_;
  int32_t table_len_ = 0;
  int64_t slots_ = 0;
  CompressionShape in_;
};

// Compressions of different lengths, budgets and rounds; blocks of no two sequences meet.
std::vector<CompressionWork> MakeWork(uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<BlockId> blocks(kNumBlocks);
  for (int i = 0; i < kNumBlocks; ++i) blocks[i] = i;
  std::shuffle(blocks.begin(), blocks.end(), random);
  const auto take = [&blocks] {
    const BlockId block = blocks.back();
    blocks.pop_back();
    return block;
  };
  std::vector<CompressionWork> all;
  for (SequenceSlot slot : {5, 0, 7, 2, 3}) {
    CompressionWork& work = all.emplace_back();
    const int num_target = 2 + static_cast<int>(random() % 3);
    const int num_source = num_target + static_cast<int>(random() % 3);
    work.sequence_slot = slot;
    work.query_slot = slot == 5 ? 1 : slot;
    work.num_pinned = static_cast<int64_t>(random() % ((num_target - 1) * kBlockSize - 8 + 1));
    work.round = random() % 3;
    work.new_prompt_slots = work.round > 0 ? 0 : static_cast<int64_t>(random() % 40);
    work.seed = random();
    work.sample_index = random() % 3;
    for (int i = 0; i < num_source; ++i) work.source_table.push_back(take());
    for (int i = 0; i < num_target; ++i) {
      const bool in_place = i < work.num_pinned / kBlockSize || random() % 2 == 0;
      work.target_table.push_back(in_place ? work.source_table[i] : take());
    }
  }
  return all;
}

struct Variant {
  std::string name;
  Config config;
};

std::vector<Variant> Variants() {
  std::vector<Variant> variants;
  const auto add = [&variants](const char* name, const char* policy) -> Config& {
    variants.push_back({name, MakeConfig(policy)});
    return variants.back().config;
  };
  add("paper", "paper");
  add("paper_raw", "paper").lightning_similarity = false;
  add("paper_max_norm", "paper").max_norm = true;
  add("paper_no_similarity", "paper").use_similarity = false;
  add("paper_no_global", "paper").use_global_score = false;
  add("paper_no_pooling", "paper").enable_pooling = false;
  add("paper_pools_on", "paper").continues_pooling = true;
  Config& plain = add("paper_plain", "paper");
  plain.use_similarity = plain.use_global_score = plain.enable_pooling = false;
  Config& sinks = add("paper_sinks", "paper");
  sinks.use_attention_sink = true;
  sinks.sink_len = 6;
  Config& numbers = add("paper_numbers", "paper");
  numbers.decay_factor = 0.3;
  numbers.pooling_size = 9;
  numbers.similarity_lambda = 0.7;
  numbers.similarity_temperature = 2;
  numbers.query_cache_len = 5;
  add("pinned_score", "pinned_score");
  add("pinned_score_all", "pinned_score").score_share = 1;
  add("pinned_score_none", "pinned_score").score_share = 0;
  Config& score_sinks = add("pinned_score_sinks", "pinned_score");
  score_sinks.use_attention_sink = true;
  add("pinned_random", "pinned_random");
  add("recency", "recency");
  add("recency_sinks", "recency").use_attention_sink = true;
  return variants;
}

class CompressorTest : public testing::TestWithParam<Variant> {};

TEST_P(CompressorTest, DoesWhatLoopsDoAndTouchesNothingElse) {
  const Config& config = GetParam().config;
  SingleCollective collective;
  for (uint32_t seed = 1; seed <= 4; ++seed) {
    const std::vector<CompressionWork> work = MakeWork(seed);
    TestRank rank(config, &collective, seed);
    TestRank slow(config, &collective, seed);
    ASSERT_EQ(rank.Bytes(), slow.Bytes());
    const auto finished = rank.compressor->Compress(work);
    ASSERT_TRUE(finished.ok());
    ASSERT_EQ(finished->size(), work.size());
    Reference reference(config, &slow);
    for (size_t i = 0; i < work.size(); ++i) {
      std::vector<int32_t> prompt_slots(kLayers * kKvHeads,
                                        static_cast<int32_t>(work[i].new_prompt_slots));
      reference.Compress(work[i], &prompt_slots);
      double mean = 0;
      for (int32_t slots : prompt_slots) mean += slots;
      mean /= static_cast<double>(prompt_slots.size());
      EXPECT_EQ((*finished)[i].sequence_slot, work[i].sequence_slot);
      EXPECT_FLOAT_EQ((*finished)[i].prompt_tokens_kept, static_cast<float>(mean));
    }
    EXPECT_TRUE(rank.Bytes() == slow.Bytes()) << "seed " << seed;
  }
}

// Two samples of a prompt share its blocks, and the second is packed into one that the first gives
// up.
TEST_P(CompressorTest, CompressionsOfOnePlanHaveTheEffectOfOneAfterTheOther) {
  const Config& config = GetParam().config;
  SingleCollective collective;
  for (int64_t num_pinned : {0, 16, 20}) {
    std::vector<CompressionWork> work(3);
    for (int i = 0; i < 3; ++i) {
      work[i].sequence_slot = work[i].query_slot = i;
      work[i].num_pinned = num_pinned;
      work[i].new_prompt_slots = 30;
      work[i].seed = 5;
      work[i].sample_index = i;
    }
    const BlockId first = num_pinned > 0 ? 0 : 10;
    work[0].source_table = {0, 1, 2, 3};
    work[0].target_table = {first, 11, 12};
    work[1].source_table = {0, 1, 4, 5};
    work[1].target_table = {first, 2, 13};
    if (num_pinned == 0) work[1].target_table[0] = 3;
    work[2].source_table = {20, 21, 22, 23};
    work[2].target_table = {20, 24, 25};
    TestRank rank(config, &collective, 3);
    TestRank slow(config, &collective, 3);
    const auto finished = rank.compressor->Compress(work);
    ASSERT_TRUE(finished.ok());
    Reference reference(config, &slow);
    for (const CompressionWork& one : work) {
      std::vector<int32_t> prompt_slots(kLayers * kKvHeads, 30);
      reference.Compress(one, &prompt_slots);
    }
    EXPECT_TRUE(rank.Bytes() == slow.Bytes()) << num_pinned << " pinned";
  }
}

TEST_P(CompressorTest, NeitherTheBatchNorTheLayerStrideChangesAnything) {
  const Config& config = GetParam().config;
  SingleCollective collective;
  const std::vector<CompressionWork> work = MakeWork(9);
  TestRank together(config, &collective, 9);
  ASSERT_TRUE(together.compressor->Compress(work).ok());
  for (int layer_stride : {1, 3, 100}) {
    Config other = config;
    other.layer_stride = layer_stride;
    // Scratch memory for one table only, so that every sequence is a batch of its own.
    other.max_cache_blocks_per_seq = 1;
    TestRank rank(other, &collective, 9, {.max_num_seqs = kNumSeqs, .max_table_blocks = 6});
    ASSERT_TRUE(rank.compressor->Compress(work).ok());
    EXPECT_TRUE(rank.Bytes() == together.Bytes()) << layer_stride;
  }
  TestRank alone(config, &collective, 9);
  for (auto it = work.rbegin(); it != work.rend(); ++it) {
    ASSERT_TRUE(alone.compressor->Compress({*it}).ok());
  }
  EXPECT_TRUE(alone.Bytes() == together.Bytes());
}

// Every plane of a rank, cut out of the plane of all heads.
void ExpectHeadsOf(const TestRank& whole, const TestRank& part) {
  const int heads = part.pool->shape().kv_heads;
  const auto compare = [&](void* of_whole, void* of_part, int width) {
    if (of_part == nullptr) return;
    int64_t differing = 0;
    for (int64_t row = 0; row < kNumBlocks * kBlockSize; ++row) {
      const float* a =
          static_cast<float*>(of_whole) + (row * kKvHeads + part.first_kv_head) * width;
      const float* b = static_cast<float*>(of_part) + row * heads * width;
      if (std::memcmp(a, b, heads * width * sizeof(float)) != 0) ++differing;
    }
    EXPECT_EQ(differing, 0);
  };
  for (int layer = 0; layer < kLayers; ++layer) {
    compare(whole.pool->key(layer), part.pool->key(layer), kHeadDim);
    compare(whole.pool->value(layer), part.pool->value(layer), kHeadDim);
    compare(whole.pool->stored_scores(layer), part.pool->stored_scores(layer), 1);
  }
}

TEST_P(CompressorTest, RanksKeepTheSlotsThatOneRankKeeps) {
  const Config& config = GetParam().config;
  SingleCollective single;
  const std::vector<CompressionWork> work = MakeWork(4);
  TestRank whole(config, &single, 4);
  const auto expected = whole.compressor->Compress(work);
  ASSERT_TRUE(expected.ok());
  // With eight ranks, two hold the same KV head.
  for (int tp : {2, 8}) {
    auto memory = *SharedMemory::Anonymous(1 << 20);
    std::vector<std::thread> threads;
    for (int r = 0; r < tp; ++r) {
      threads.emplace_back([&, r] {
        auto collective =
            *MakeSharedMemoryCollective(memory, r, tp, std::chrono::milliseconds(60'000));
        Config sharded = config;
        sharded.tp = tp;
        TestRank rank(sharded, collective.get(), 4);
        const auto finished = rank.compressor->Compress(work);
        ASSERT_TRUE(finished.ok()) << finished.status();
        for (size_t i = 0; i < work.size(); ++i) {
          EXPECT_FLOAT_EQ((*finished)[i].prompt_tokens_kept, (*expected)[i].prompt_tokens_kept);
        }
        ExpectHeadsOf(whole, rank);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, CompressorTest, testing::ValuesIn(Variants()),
                         [](const auto& info) { return info.param.name; });

TEST(CompressorOptionsTest, EveryOptionChangesWhatIsKept) {
  SingleCollective collective;
  const std::vector<CompressionWork> work = MakeWork(2);
  std::vector<std::vector<uint8_t>> results;
  std::vector<std::string> names;
  for (const Variant& variant : Variants()) {
    TestRank rank(variant.config, &collective, 2);
    ASSERT_TRUE(rank.compressor->Compress(work).ok());
    // Keys alone: pools with and without stored scores differ in size.
    const auto* begin = static_cast<const uint8_t*>(rank.pool->key(0));
    results.emplace_back(begin, begin + kNumBlocks * rank.pool->shape().plane_bytes());
    names.push_back(variant.name);
  }
  for (size_t i = 0; i < results.size(); ++i) {
    for (size_t j = 0; j < i; ++j) {
      // All by score, or nothing by score and so at random.
      const bool same = (names[j] == "paper_no_similarity" && names[i] == "pinned_score_all") ||
                        (names[j] == "pinned_score_none" && names[i] == "pinned_random");
      EXPECT_EQ(results[i] == results[j], same) << names[i] << " and " << names[j];
    }
  }
}

TEST(CompressorOptionsTest, ScratchMemoryIsCountedAsItIsAllocated) {
  class Counting : public CpuBackend {
   public:
    Counting() : CpuBackend(1) {}
    absl::StatusOr<DeviceMemory> Allocate(size_t bytes, const std::string& what) override {
      if (what == "compression scratch") allocated += bytes;
      return CpuBackend::Allocate(bytes, what);
    }
    size_t allocated = 0;
  };
  SingleCollective collective;
  for (const Variant& variant : Variants()) {
    Counting backend;
    const ModelShard shard = MakeModelShard(MakeModel(), 0, 1);
    const KvShape shape = MakeKvShape(variant.config, MakeModel(), shard, DType::kFloat32);
    const CompressorLimits limits{.max_num_seqs = 100, .max_table_blocks = 50};
    const auto pool = KvPool::Create(shape, 10, &backend);
    const QueryWindowShape windows =
        MakeQueryWindowShape(variant.config, MakeModel(), shard, DType::kFloat32);
    const auto compressor =
        Compressor::Create(variant.config, limits, &*pool, windows, 3, 0, &collective, &backend);
    ASSERT_TRUE(compressor.ok());
    EXPECT_EQ(backend.allocated, Compressor::ScratchBytes(variant.config, limits, shape, windows));
  }
}

}  // namespace
}  // namespace zipage
