#include "worker/compression_policy.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "glog/logging.h"

namespace zipage {
namespace {

// The steps that policies share.
class PolicySteps : public CompressionPolicy {
 public:
  explicit PolicySteps(const Config& config) : config_(config) {}

  int64_t NumRaised(int64_t, int64_t) const override { return 0; }

 protected:
  const Config& config() const { return config_; }

  int SinkLen() const { return config_.use_attention_sink ? config_.sink_len : 0; }

  PolicyNeeds ScoreNeeds() const {
    return {.queries = true,
            .stored_scores = config_.use_global_score,
            .scratch_arrays = config_.enable_pooling ? 2 : 1};
  }

  // Steps 1 to 3 of DESIGN 5 in scratch[0] and [1]; returns the array that holds the result.
  float* AttentionScores(const PolicyInput& in, Backend* backend) const {
    float* const score = in.scratch[0];
    backend->WindowScores({.shape = in.shape,
                           .key = in.key,
                           .query_window = in.query_window,
                           .query_slot = in.query_slot,
                           .score = score,
                           .key_layer_stride = in.key_layer_stride,
                           .window_layer_stride = in.window_layer_stride,
                           .window = config_.query_cache_len,
                           .q_heads = in.q_heads,
                           .head_dim = in.head_dim,
                           .dtype = in.dtype});
    if (config_.use_global_score || config_.max_norm) {
      backend->GlobalScores({.shape = in.shape,
                             .score = score,
                             .stored = in.stored_scores,
                             .compressed = in.compressed,
                             .first_block = in.first_block,
                             .stored_layer_stride = in.stored_layer_stride,
                             .decay = static_cast<float>(config_.decay_factor),
                             .max_norm = config_.max_norm,
                             .use_stored = config_.use_global_score});
    }
    if (!config_.enable_pooling) return score;
    backend->PoolScores({.shape = in.shape,
                         .score = score,
                         .out = in.scratch[1],
                         .pools = in.pools,
                         .width = config_.pooling_size});
    return in.scratch[1];
  }

  // in.kept = the num_kept slots that are kept in any case or score highest.
  void SelectBy(const float* score, const int32_t* num_kept, const PolicyInput& in,
                Backend* backend) const {
    backend->SelectSlots({.shape = in.shape,
                          .score = score,
                          .num_pinned = in.num_pinned,
                          .num_kept = num_kept,
                          .kept = in.kept,
                          .max_kept = in.max_kept,
                          .sink_len = SinkLen(),
                          .window = config_.query_cache_len});
  }

  // `score` = draws, higher for the slots that are in in.kept already if there are any.
  void Draw(const PolicyInput& in, float* score, Backend* backend) const {
    backend->RandomScores({.shape = in.shape,
                           .score = score,
                           .seed = in.seed,
                           .sample_index = in.sample_index,
                           .round = in.round,
                           .raised = in.kept,
                           .num_raised = in.num_raised,
                           .max_raised = in.max_kept,
                           .first_layer = in.first_layer,
                           .first_kv_head = in.first_kv_head});
  }

 private:
  const Config config_;
};

class PaperPolicy final : public PolicySteps {
 public:
  using PolicySteps::PolicySteps;

  PolicyNeeds needs() const override {
    PolicyNeeds needs = ScoreNeeds();
    if (config().use_similarity) needs.scratch_arrays = 3;
    return needs;
  }

  void Select(const PolicyInput& in, Backend* backend) const override {
    float* const score = AttentionScores(in, backend);
    if (config().use_similarity) {
      float* const row_sum = score == in.scratch[0] ? in.scratch[1] : in.scratch[0];
      backend->KeySimilarity({.shape = in.shape,
                              .key = in.key,
                              .row_sum = row_sum,
                              .similarity = in.scratch[2],
                              .key_layer_stride = in.key_layer_stride,
                              .head_dim = in.head_dim,
                              .temperature = static_cast<float>(config().similarity_temperature),
                              .lightning = config().lightning_similarity,
                              .max_norm = config().max_norm,
                              .dtype = in.dtype});
      backend->CombineScores({.shape = in.shape,
                              .score = score,
                              .similarity = in.scratch[2],
                              .lambda = static_cast<float>(config().similarity_lambda)});
    }
    SelectBy(score, in.num_kept, in, backend);
  }
};

class PinnedScorePolicy final : public PolicySteps {
 public:
  using PolicySteps::PolicySteps;

  PolicyNeeds needs() const override { return ScoreNeeds(); }

  int64_t NumRaised(int64_t num_kept, int64_t num_pinned) const override {
    const int64_t always = std::max<int64_t>(num_pinned, SinkLen()) + config().query_cache_len;
    return always + std::llround(config().score_share * static_cast<double>(num_kept - always));
  }

  void Select(const PolicyInput& in, Backend* backend) const override {
    float* const score = AttentionScores(in, backend);
    SelectBy(score, in.num_raised, in, backend);
    Draw(in, score, backend);
    SelectBy(score, in.num_kept, in, backend);
  }
};

class PinnedRandomPolicy final : public PolicySteps {
 public:
  using PolicySteps::PolicySteps;

  PolicyNeeds needs() const override { return {.scratch_arrays = 1}; }

  void Select(const PolicyInput& in, Backend* backend) const override {
    Draw(in, in.scratch[0], backend);
    SelectBy(in.scratch[0], in.num_kept, in, backend);
  }
};

class RecencyPolicy final : public PolicySteps {
 public:
  using PolicySteps::PolicySteps;

  PolicyNeeds needs() const override { return {}; }

  void Select(const PolicyInput& in, Backend* backend) const override {
    SelectBy(nullptr, in.num_kept, in, backend);
  }
};

}  // namespace

std::unique_ptr<CompressionPolicy> MakeCompressionPolicy(const Config& config) {
  const std::string policy = ResolveCompression(config).compression_policy;
  if (policy == "none") return nullptr;
  if (policy == "paper") return std::make_unique<PaperPolicy>(config);
  if (policy == "pinned_score") return std::make_unique<PinnedScorePolicy>(config);
  if (policy == "pinned_random") return std::make_unique<PinnedRandomPolicy>(config);
  CHECK_EQ(policy, "recency") << "a policy that Validate lets through is not built";
  return std::make_unique<RecencyPolicy>(config);
}

}  // namespace zipage
