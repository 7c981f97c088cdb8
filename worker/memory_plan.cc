#include "worker/memory_plan.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "absl/strings/str_format.h"
#include "worker/compression_policy.h"
#include "worker/model/transformer.h"
#include "worker/sequence_state.h"
#include "worker/step_batch.h"

namespace zipage {
namespace {

// One block is written while another is being filled; with fewer nothing can run.
constexpr int64_t kMinBlocks = 2;
// Blocks and query windows of all ranks together, unless an option asks for more.
constexpr double kAutomaticBytes = 4.0 * (int64_t{1} << 30);
constexpr double kGiB = 1 << 30;

double ToGiB(int64_t bytes) { return static_cast<double>(bytes) / kGiB; }

// Of the pool, over all layers.
int64_t BlockBytes(const MemoryPlan& plan) { return static_cast<int64_t>(plan.kv.block_bytes()); }

bool Compresses(const Config& config) {
  return ResolveCompression(config).compression_policy != "none";
}

int64_t BlocksOf(const Config& config, int64_t positions) {
  return (positions + config.kvcache_block_size - 1) / config.kvcache_block_size;
}

int64_t NumQuerySlots(const Config& config, int64_t num_blocks) {
  if (!Compresses(config)) return 0;
  return std::clamp<int64_t>(num_blocks / (int64_t{config.max_cache_blocks_per_seq} + 1), 1,
                             config.max_num_seqs);
}

// Everything but the numbers of blocks and query slots.
MemoryPlan PlanFixed(const MemoryRequest& request) {
  const Config& config = request.config;
  const ModelShard shard = MakeModelShard(request.model, request.rank, config.tp);
  MemoryPlan plan;
  plan.share = request.available / config.tp;
  plan.weights = static_cast<int64_t>(WeightBytes(request.model, shard, request.dtype,
                                                  request.stored_dtype, request.max_model_len));
  SequenceStates::Limits limits;
  limits.max_num_seqs = config.max_num_seqs;
  limits.block_size = config.kvcache_block_size;
  limits.max_position = request.max_model_len;
  limits.max_tokens = config.max_num_batched_tokens;
  plan.activations = static_cast<int64_t>(
      Transformer::ActivationBytes(request.model, shard, request.dtype,
                                   config.max_num_batched_tokens, request.rank, config.tp) +
      StepBatch::Bytes(limits));
  plan.kv = MakeKvShape(config, request.model, shard, request.dtype);
  plan.windows = MakeQueryWindowShape(config, request.model, shard, request.dtype);
  plan.scratch = static_cast<int64_t>(Compressor::ScratchBytes(
      config, MakeCompressorLimits(config, request.max_model_len), plan.kv, plan.windows));
  return plan;
}

void SetBlocks(const Config& config, int64_t num_blocks, MemoryPlan* plan) {
  plan->num_blocks = num_blocks;
  plan->num_query_slots = NumQuerySlots(config, num_blocks);
}

// Most blocks that fit in `bytes` with their query windows.
int64_t MaxBlocks(const Config& config, MemoryPlan plan, double bytes) {
  const auto fits = [&](int64_t blocks) {
    SetBlocks(config, blocks, &plan);
    return static_cast<double>(plan.kv_bytes() + plan.window_bytes()) <= bytes;
  };
  int64_t low = 0;
  int64_t high = 1 + static_cast<int64_t>(std::max(bytes, 0.0)) / BlockBytes(plan);
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    (fits(middle) ? low : high) = middle;
  }
  return low;
}

// What the automatic pool may take.
double AutomaticBytes(const Config& config, const MemoryPlan& fixed) {
  const auto free = static_cast<double>(std::max<int64_t>(fixed.share - fixed.total(), 0));
  return std::min(config.gpu_memory_utilization * free, kAutomaticBytes / config.tp);
}

// The plan if the memory suffices, else one with no blocks.
MemoryPlan TryPlan(const MemoryRequest& request) {
  const Config& config = request.config;
  MemoryPlan plan = PlanFixed(request);
  int64_t blocks = config.num_kvcache_blocks;
  if (blocks == 0 && config.kv_cache_memory_gb > 0) {
    blocks = static_cast<int64_t>(config.kv_cache_memory_gb * kGiB) / BlockBytes(plan);
    if (blocks < kMinBlocks) return plan;
  }
  if (blocks > 0) {
    MemoryPlan given = plan;
    SetBlocks(config, blocks, &given);
    return given.total() <= given.share ? given : plan;
  }
  const int64_t usable = BlocksOf(config, request.max_model_len) * config.max_num_seqs;
  blocks =
      std::min(MaxBlocks(config, plan, AutomaticBytes(config, plan)), std::max(usable, kMinBlocks));
  if (blocks >= kMinBlocks) SetBlocks(config, blocks, &plan);
  return plan;
}

// "max_num_batched_tokens to 512": the largest value below the present one that fits, of the first
// option for which there is one. Empty if there is none.
std::string SmallestChange(const MemoryRequest& request) {
  const auto largest = [&request](auto member, int64_t lowest, int64_t present) -> int64_t {
    const auto fits = [&](int64_t value) {
      MemoryRequest changed = request;
      changed.config.*member = value;
      if (changed.config.max_model_len > 0) changed.max_model_len = changed.config.max_model_len;
      return TryPlan(changed).num_blocks > 0;
    };
    if (lowest >= present || !fits(lowest)) return 0;
    int64_t low = lowest;
    int64_t high = present;
    while (high - low > 1) {
      const int64_t middle = low + (high - low) / 2;
      (fits(middle) ? low : high) = middle;
    }
    return low;
  };
  const Config& config = request.config;
  if (const int64_t value = largest(&Config::layer_stride, 1, config.layer_stride); value > 0) {
    return absl::StrFormat("layer_stride to %d", value);
  }
  if (const int64_t value = largest(&Config::max_num_batched_tokens, config.max_num_seqs,
                                    config.max_num_batched_tokens);
      value > 0) {
    return absl::StrFormat("max_num_batched_tokens to %d", value);
  }
  if (const int64_t value = largest(&Config::max_model_len, 2, request.max_model_len); value > 0) {
    return absl::StrFormat("max_model_len to %d", value);
  }
  if (const int64_t value =
          largest(&Config::kvcache_block_size, std::max(16, config.query_cache_len),
                  config.kvcache_block_size);
      value > 0) {
    return absl::StrFormat("kvcache_block_size to %d", value);
  }
  return "";
}

// Why TryPlan found no room, and what helps. `fixed` is what it returned.
absl::Status TooLittleMemory(const MemoryRequest& request, const MemoryPlan& fixed) {
  const Config& config = request.config;
  const int64_t left = fixed.share - fixed.total();
  const int64_t most = MaxBlocks(config, fixed, static_cast<double>(left));
  MemoryPlan wanted = fixed;
  SetBlocks(config, kMinBlocks, &wanted);
  if (config.num_kvcache_blocks > 0) SetBlocks(config, config.num_kvcache_blocks, &wanted);
  const int64_t pool = wanted.kv_bytes() + wanted.window_bytes();
  if (config.num_kvcache_blocks > 0 && most >= kMinBlocks) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "num_kvcache_blocks is %d, which takes %.3f GiB on each rank with its query windows; "
        "%.3f GiB are left beside the weights, so give at most %d",
        config.num_kvcache_blocks, ToGiB(pool), ToGiB(left), most));
  }
  const double block_gib = ToGiB(BlockBytes(fixed));
  if (config.kv_cache_memory_gb > 0 && config.kv_cache_memory_gb < kMinBlocks * block_gib) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "kv_cache_memory_gb is %g, but %d blocks of %d positions take %.3f GiB; give %.3f or more",
        config.kv_cache_memory_gb, kMinBlocks, config.kvcache_block_size, kMinBlocks * block_gib,
        std::ceil(kMinBlocks * block_gib * 1000) / 1000));
  }
  if (config.kv_cache_memory_gb > 0 && most >= kMinBlocks) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "kv_cache_memory_gb is %g on each rank, and its query windows come on top; %.3f GiB are "
        "left beside the weights, so give at most %.3f",
        config.kv_cache_memory_gb, ToGiB(left),
        std::floor(static_cast<double>(most) * block_gib * 1000) / 1000));
  }
  if (static_cast<double>(pool) <= config.gpu_memory_utilization * static_cast<double>(left)) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "the KV cache gets %.3f GiB on each rank unless it is asked for, but %d blocks of %d "
        "positions take %.3f GiB; give kv_cache_memory_gb %.3f or more",
        AutomaticBytes(config, fixed) / kGiB, kMinBlocks, config.kvcache_block_size,
        kMinBlocks * block_gib, std::ceil(kMinBlocks * block_gib * 1000) / 1000));
  }
  const bool automatic = config.num_kvcache_blocks == 0 && config.kv_cache_memory_gb == 0;
  const double share = automatic ? config.gpu_memory_utilization : 1;
  const double needed = static_cast<double>(fixed.total()) + static_cast<double>(pool) / share;
  const std::string change = SmallestChange(request);
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s needs %.3f GiB on each of %d ranks (weights %.3f, activations %.3f, compression scratch "
      "%.3f, %d blocks of KV cache with query windows %.3f), %.3f GiB are missing; %s",
      request.model.path, needed / kGiB, config.tp, ToGiB(fixed.weights), ToGiB(fixed.activations),
      ToGiB(fixed.scratch), wanted.num_blocks, static_cast<double>(pool) / share / kGiB,
      (needed - static_cast<double>(fixed.share)) / kGiB,
      change.empty() ? "free memory or choose a smaller model"
                     : absl::StrCat("free memory or lower ", change)));
}

}  // namespace

KvShape MakeKvShape(const Config& config, const ModelConfig& model, const ModelShard& shard,
                    DType dtype) {
  const std::unique_ptr<CompressionPolicy> policy = MakeCompressionPolicy(config);
  return {.num_layers = model.num_layers,
          .block_size = config.kvcache_block_size,
          .kv_heads = static_cast<int>(shard.kv_heads.size()),
          .head_dim = model.head_dim,
          .dtype = dtype,
          .has_scores = policy != nullptr && policy->needs().stored_scores};
}

QueryWindowShape MakeQueryWindowShape(const Config& config, const ModelConfig& model,
                                      const ModelShard& shard, DType dtype) {
  const std::unique_ptr<CompressionPolicy> policy = MakeCompressionPolicy(config);
  const bool needed = policy != nullptr && policy->needs().queries;
  return {.num_layers = model.num_layers,
          .window = needed ? config.query_cache_len : 0,
          .q_heads = static_cast<int>(shard.heads.size()),
          .head_dim = model.head_dim,
          .dtype = dtype,
          .num_sharers = std::max(1, config.tp / model.num_kv_heads)};
}

CompressorLimits MakeCompressorLimits(const Config& config, int64_t max_model_len) {
  return {.max_num_seqs = config.max_num_seqs, .max_table_blocks = BlocksOf(config, max_model_len)};
}

int64_t NumHostBlocks(const Config& config, const KvShape& shape) {
  return static_cast<int64_t>(config.swap_space_gb * kGiB) /
         static_cast<int64_t>(shape.block_bytes());
}

absl::StatusOr<MemoryPlan> PlanMemory(const MemoryRequest& request) {
  const Config& config = request.config;
  MemoryPlan plan = TryPlan(request);
  if (plan.num_blocks == 0) return TooLittleMemory(request, plan);
  const int64_t needed = int64_t{config.max_cache_blocks_per_seq} + 1;
  if (Compresses(config) && needed > plan.num_blocks &&
      request.max_model_len > plan.num_blocks * config.kvcache_block_size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "max_cache_blocks_per_seq is %d, so a sequence takes %d blocks, but the KV cache has %d; "
        "lower max_cache_blocks_per_seq to %d or max_model_len to %d, or give %s",
        config.max_cache_blocks_per_seq, needed, plan.num_blocks,
        std::max<int64_t>(plan.num_blocks - 1, 1), plan.num_blocks * config.kvcache_block_size,
        config.num_kvcache_blocks > 0 ? absl::StrFormat("num_kvcache_blocks %d or more", needed)
                                      : "more kv_cache_memory_gb"));
  }
  const int64_t left = plan.share - plan.total();
  plan.num_host_blocks =
      std::min(NumHostBlocks(config, plan.kv), std::max<int64_t>(left, 0) / BlockBytes(plan));
  return plan;
}

int64_t FullBlocks(const MemoryRequest& request) {
  return BlocksOf(request.config, request.max_model_len);
}

int64_t CompressedBlocks(const MemoryRequest& request) {
  return std::min(int64_t{request.config.max_cache_blocks_per_seq} + 1, FullBlocks(request));
}

int64_t Concurrency(const MemoryPlan& plan, const MemoryRequest& request,
                    int64_t blocks_per_sequence) {
  return std::min<int64_t>(plan.num_blocks / blocks_per_sequence, request.config.max_num_seqs);
}

double SpeedUpCeiling(const Config& config, int64_t prompt, int64_t output) {
  const double slots =
      (config.max_cache_blocks_per_seq + 1.0) * static_cast<double>(config.kvcache_block_size);
  return (static_cast<double>(prompt) + static_cast<double>(output) / 2) / slots;
}

int64_t BreakEvenOutput(const Config& config, int64_t prompt) {
  const int64_t slots = (int64_t{config.max_cache_blocks_per_seq} + 1) * config.kvcache_block_size;
  return 2 * std::max<int64_t>(slots - prompt, 0);
}

}  // namespace zipage
