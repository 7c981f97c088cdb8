#include "proto/contradictions.h"

#include <cstdint>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"

namespace zipage {
namespace {

// As of a request's field of that name.
constexpr double kMinRepetitionPenalty = 0.01;

// Switches that are off by default and do nothing here: whoever turns one on expects something
// else.
absl::Status CheckCompressionSwitches(const Config& config) {
  const std::string& policy = config.compression_policy;
  const bool compresses = policy != "none";
  const bool scores = compresses && policy != "pinned_random" && policy != "recency";
  struct Switch {
    const char* name;
    bool is_on;
    bool works;
  };
  const Switch switches[] = {
      {"compress_prefill is on", config.compress_prefill, compresses},
      {"adaptive_kv_budget is on", config.adaptive_kv_budget, compresses},
      {"pin_prompt is \"on\"", config.pin_prompt == "on", compresses},
      {"use_attention_sink is on", config.use_attention_sink, compresses},
      {"max_norm is on", config.max_norm, scores},
      {"continues_pooling is on", config.continues_pooling, scores},
  };
  for (const Switch& option : switches) {
    if (!option.is_on || option.works) continue;
    return absl::InvalidArgumentError(
        absl::StrFormat("%s, but does nothing with compression_policy %s; leave it out or give "
                        "another policy",
                        option.name, policy));
  }
  if (config.continues_pooling && !config.enable_pooling) {
    return absl::InvalidArgumentError(
        "continues_pooling is on, but enable_pooling is off; turn both on or both off");
  }
  return absl::OkStatus();
}

absl::Status CheckCompression(const Config& config) {
  ZIPAGE_RETURN_IF_ERROR(CheckCompressionSwitches(config));
  if (config.pooling_size % 2 == 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("pooling_size is %d; give an odd number", config.pooling_size));
  }
  if (config.compression_policy == "none") return absl::OkStatus();
  if (config.query_cache_len > config.kvcache_block_size) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "query_cache_len is %d, but the query window lies in one block of kvcache_block_size %d; "
        "lower the one or raise the other",
        config.query_cache_len, config.kvcache_block_size));
  }
  const int64_t budget = int64_t{config.max_cache_blocks_per_seq} * config.kvcache_block_size;
  const int64_t kept = config.query_cache_len + (config.use_attention_sink ? config.sink_len : 0);
  if (kept > budget) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "query_cache_len %d and sink_len %d keep %d slots, but max_cache_blocks_per_seq %d of "
        "kvcache_block_size %d hold %d; lower sink_len or raise max_cache_blocks_per_seq",
        config.query_cache_len, config.sink_len, kept, config.max_cache_blocks_per_seq,
        config.kvcache_block_size, budget));
  }
  return absl::OkStatus();
}

absl::Status CheckJobEndpoint(const Config& config) {
  const std::string& endpoint = config.job_endpoint;
  const bool tcp = absl::StartsWith(endpoint, "tcp://");
  if (!endpoint.empty() && !tcp && !absl::StartsWith(endpoint, "ipc://")) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job_endpoint is \"%s\"; give ipc://PATH or tcp://ADDRESS:PORT", endpoint));
  }
  const bool keys = !config.curve_key_file.empty();
  if (keys == config.curve_allowed_clients_file.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is given without %s; CURVE needs both",
                        keys ? "curve_key_file" : "curve_allowed_clients_file",
                        keys ? "curve_allowed_clients_file" : "curve_key_file"));
  }
  if (keys && config.insecure_tcp) {
    return absl::InvalidArgumentError(
        "insecure_tcp contradicts curve_key_file; give one of the two");
  }
  if (tcp && !keys && !config.insecure_tcp) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job_endpoint %s is open to the network; give curve_key_file and "
                        "curve_allowed_clients_file, or insecure_tcp to accept everyone",
                        endpoint));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckContradictions(const Config& config) {
  if (config.max_model_len == 1) {
    return absl::InvalidArgumentError(
        "max_model_len is 1; give at least 2, one position of prompt and one of output, or 0");
  }
  if (config.max_num_batched_tokens < config.max_num_seqs) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "max_num_batched_tokens is %d, but %d sequences (max_num_seqs) decode one token each in a "
        "step; raise the one or lower the other",
        config.max_num_batched_tokens, config.max_num_seqs));
  }
  if (config.repetition_penalty > 0 && config.repetition_penalty < kMinRepetitionPenalty) {
    return absl::InvalidArgumentError(
        absl::StrFormat("repetition_penalty is %g; give 0 (the model's default) or %g to 100",
                        config.repetition_penalty, kMinRepetitionPenalty));
  }
  if (config.num_kvcache_blocks > 0 && config.kv_cache_memory_gb > 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "num_kvcache_blocks %d and kv_cache_memory_gb %g both size the KV cache; give one",
        config.num_kvcache_blocks, config.kv_cache_memory_gb));
  }
  ZIPAGE_RETURN_IF_ERROR(CheckCompression(config));
  return CheckJobEndpoint(config);
}

}  // namespace zipage
