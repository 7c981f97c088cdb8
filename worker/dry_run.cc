#include "worker/dry_run.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "worker/memory_plan.h"
#include "worker/open_model.h"

namespace zipage {
namespace {

double ToGiB(int64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }
double ToMiB(size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

std::string Row(const char* what, int64_t bytes, const std::string& remark = "") {
  return absl::StrFormat("  %-20s %9.3f GiB%s%s\n", what, ToGiB(bytes), remark.empty() ? "" : "   ",
                         remark);
}

std::string MemoryTable(const MemoryPlan& plan, const MemoryRequest& request) {
  const Config& config = request.config;
  std::string text =
      absl::StrFormat("Memory of one of %d ranks: %s of %s in %s, %.3f GiB of %.3f GiB available\n",
                      config.tp, request.model.architecture, request.model.path,
                      DTypeName(request.dtype), ToGiB(plan.share), ToGiB(request.available));
  text += Row("weights", plan.weights);
  text += Row("activations", plan.activations,
              absl::StrFormat("max_num_batched_tokens %d", config.max_num_batched_tokens));
  text += Row("KV cache", plan.kv_bytes() - plan.score_bytes(),
              absl::StrFormat("%d blocks of %d positions, %.3f MiB each", plan.num_blocks,
                              config.kvcache_block_size, ToMiB(plan.kv.block_bytes())));
  text += Row("stored scores", plan.score_bytes(), "part of the blocks");
  text += Row(
      "query windows", plan.window_bytes(),
      absl::StrFormat("%d of %.3f MiB", plan.num_query_slots, ToMiB(plan.windows.slot_bytes())));
  text += Row("compression scratch", plan.scratch,
              absl::StrFormat("layer_stride %d", config.layer_stride));
  text += Row("total", plan.total());
  text += Row("swap space", plan.num_host_blocks * static_cast<int64_t>(plan.kv.block_bytes()),
              absl::StrFormat("%d blocks in host memory, when needed", plan.num_host_blocks));
  return text;
}

std::string Gain(const MemoryRequest& request, const std::string& policy) {
  const Config& config = request.config;
  const int64_t slots = int64_t{config.max_cache_blocks_per_seq} * config.kvcache_block_size;
  const int64_t output = BreakEvenOutput(config, 0);
  std::string text = absl::StrFormat(
      "Compression (%s, budget %d slots) wins where prompt + output / 2 is over %d, budget and one "
      "block:\n",
      policy, slots, slots + config.kvcache_block_size);
  if (output >= request.max_model_len) {
    return text + absl::StrFormat(
                      "  never within max_model_len %d; lower max_cache_blocks_per_seq or give "
                      "compression_policy none\n",
                      request.max_model_len);
  }
  text += absl::StrFormat("  outputs of over %d tokens after a short prompt", output);
  const int64_t long_prompt = slots / 4;
  text += absl::StrFormat(", over %d after one of %d\n", BreakEvenOutput(config, long_prompt),
                          long_prompt);
  text += absl::StrFormat("  ceiling of the speed-up at max_model_len %d: %.1f times\n",
                          request.max_model_len, SpeedUpCeiling(config, 0, request.max_model_len));
  return text;
}

}  // namespace

absl::StatusOr<std::string> DryRun(const Config& config, const Backend& backend) {
  ZIPAGE_ASSIGN_OR_RETURN(const OpenedModel model,
                          OpenModel(config, backend, /*needs_checkpoint=*/false));
  MemoryRequest request{.config = config,
                        .model = model.config,
                        .dtype = model.dtype,
                        .stored_dtype = model.stored_dtype,
                        .max_model_len = model.max_model_len};
  ZIPAGE_ASSIGN_OR_RETURN(request.available, backend.AvailableMemory());
  ZIPAGE_ASSIGN_OR_RETURN(const MemoryPlan plan, PlanMemory(request));
  std::string text = MemoryTable(plan, request);
  MemoryRequest full = request;
  full.config.compression_policy = "none";
  ZIPAGE_ASSIGN_OR_RETURN(const MemoryPlan full_plan, PlanMemory(full));
  text += absl::StrFormat("Sequences of max_model_len %d at once:\n", request.max_model_len);
  const auto add = [&text](const char* what, const MemoryPlan& of, const MemoryRequest& with,
                           int64_t blocks) {
    text += absl::StrFormat("  %-20s %6d   in %d blocks, %d each\n", what,
                            Concurrency(of, with, blocks), of.num_blocks, blocks);
  };
  add("full cache", full_plan, full, FullBlocks(full));
  const std::string policy = ResolveCompression(config).compression_policy;
  if (policy == "none") return text;
  add("compressed", plan, request, CompressedBlocks(request));
  return text + Gain(request, policy);
}

}  // namespace zipage
