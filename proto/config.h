#pragma once
// Every option of the engine, once: default, range, help. Flag, --help, TOML key, range check and
// digest follow from the table in config.cc. The launcher writes the resolved options to a TOML
// file that scheduler and workers read.

#include <cstdint>
#include <string>
#include <string_view>

#include "proto/status.h"

namespace CLI {
class App;
}

namespace zipage {

inline constexpr char kVersion[] = "0.1.0";

struct Config {  // NOLINT(clang-analyzer-optin.performance.Padding): in the order of --help
  // Folder of a Hugging Face model: config.json, safetensors, tokenizer.json. Required.
  std::string model;
  // The model's name in results; empty takes the name of its folder.
  std::string served_model_name;
  // Tensor-parallel ranks, one worker process each.
  int tp = 1;
  // auto (a GPU if there is one), cpu or cuda.
  std::string device = "auto";
  // Of weights and activations: auto (what the device computes fastest of what the model fits),
  // float32, bfloat16 or float16.
  std::string dtype = "auto";
  // Positions a sequence may have, prompt and output together, at least 2; 0 takes the model's own
  // limit.
  int64_t max_model_len = 0;
  // Sequences that run at once, and so rows of per-sequence state in every worker.
  int max_num_seqs = 256;
  // Tokens of one step, prefill and decode together; at least max_num_seqs.
  int max_num_batched_tokens = 2048;
  // Positions in one block of KV cache.
  int kvcache_block_size = 256;
  // Blocks of KV cache; 0 takes as many as memory holds (kv_cache_memory_gb).
  int64_t num_kvcache_blocks = 0;
  // Memory for KV cache per rank, in GiB; 0 takes a share of what the device has free.
  double kv_cache_memory_gb = 0;
  // Share of the device's memory that the engine may take: weights, activations, KV cache, query
  // windows and scratch. On the CPU it bounds the share of the free memory that the automatic KV
  // cache takes.
  double gpu_memory_utilization = 0.9;
  // Host memory per rank for the blocks of swapped sequences, in GiB; 0 recomputes instead.
  double swap_space_gb = 4;
  // Share full blocks between sequences that begin alike.
  bool enable_prefix_cache = true;

  // ---- KV compression (DESIGN 5)

  // What is evicted: auto (the best one measured), none (full cache), paper, pinned_score,
  // pinned_random or recency.
  std::string compression_policy = "auto";
  // Full blocks a sequence keeps after a compression; it never holds more than one above that. A
  // request's kv_budget replaces it.
  int max_cache_blocks_per_seq = 8;
  // Newest positions whose queries score the others and that are always kept; w of DESIGN 5.
  int query_cache_len = 16;
  // Whether the prompt, up to half the budget, is kept whatever its score: auto (as the policy does
  // it), on or off.
  std::string pin_prompt = "auto";
  // pinned_score: share of the slots left beside prompt and window that go to the highest scores;
  // the others are drawn at random.
  double score_share = 0.25;
  // Take the maximum of the attention score and decay_factor times the score stored before.
  bool use_global_score = true;
  double decay_factor = 0.8;
  // Divide the attention score (and the similarity) by its maximum.
  bool max_norm = false;
  // Spread each score over its neighbours (maximum over pooling_size slots) at the first
  // compression, with continues_pooling at every one.
  bool enable_pooling = true;
  bool continues_pooling = false;
  int pooling_size = 5;
  // paper: lower the score of keys that resemble others: similarity_lambda * score -
  // (1 - similarity_lambda) * similarity. Lightning compares keys within a block only.
  bool use_similarity = true;
  bool lightning_similarity = true;
  double similarity_lambda = 0.2;
  double similarity_temperature = 0.4;
  // Always keep the first sink_len slots.
  bool use_attention_sink = false;
  int sink_len = 4;
  // Compress prompts that are longer than the budget while they are prefilled, so that their memory
  // is bounded too; off: when the block in which the prompt ends is full.
  bool compress_prefill = false;
  // A compressing sequence sits out while the others go on; off: compressions run before the step.
  bool enable_async_compress = true;
  // Admit sequences beyond those whose blocks are guaranteed while blocks are free.
  bool enable_hybrid_engine = true;
  // Keep the full cache while blocks are free; compress only under memory pressure. Results then
  // depend on the load.
  bool adaptive_kv_budget = false;
  // Layers compressed together; bounds the scratch memory.
  int layer_stride = 8;

  // ---- Defaults of requests

  // Repetition penalty of requests that give none; 0 takes the model's own default.
  double repetition_penalty = 0;
  // A sequence ends, with finish_reason "repetition", when the last repetition_ngram_size tokens of
  // its output occurred in it repetition_ngram_count times; size 0 is off.
  int repetition_ngram_size = 0;
  int repetition_ngram_count = 8;
  // Base of the sampling seeds of requests that give none.
  int64_t seed = 0;
  // auto takes sampling defaults from the model's generation_config.json, none does not.
  std::string generation_config = "auto";
  // How CPU ranks add up: auto (shm for ranks of one host), shm (shared memory) or gloo (TCP).
  std::string collective = "auto";
  // Threads of one CPU worker; 0 divides the cores among the ranks.
  int cpu_threads = 0;
  // Seconds for workers to load weights and become ready.
  double init_timeout_s = 600;
  // Seconds without a heartbeat after which a worker counts as hung; 0 never.
  double heartbeat_timeout_s = 30;
  // Seconds that one step may take; 0 is no limit.
  double step_timeout_s = 0;
  // Seconds a rank waits for the others in a collective.
  double collective_timeout_s = 120;
  // Seconds that running requests get to finish after SIGTERM; 0 stops at once.
  double drain_timeout_s = 30;
  // Longest line of a job file, in MiB; longer ones become error records.
  double max_line_mb = 64;
  // Where jobs arrive besides the Unix socket in the run directory: ipc://PATH or
  // tcp://ADDRESS:PORT; empty is nowhere.
  std::string job_endpoint;
  // The job socket's own CURVE keys (proto/curve_keys.h); empty is no encryption.
  std::string curve_key_file;
  // Public keys of the clients that the job socket lets in, one a line.
  std::string curve_allowed_clients_file;
  // Take a tcp:// job_endpoint without CURVE keys: whoever reaches the port can run jobs.
  bool insecure_tcp = false;

  bool operator==(const Config&) const = default;
};

// Adds every option to `app` as a flag (and as a key of its TOML file), bound to `config`, with
// --config and --version.
void AddOptions(CLI::App* app, Config* config);

// Parses argv into the Config of AddOptions (which must have been called) and the app's other
// flags.
// --config FILE reads TOML; a flag wins over the file and the last of equal flags over the others.
// Dashes in flag names are taken as underscores.
// Returns kOk to go on, kCancelled if help or version was printed (exit 0), kInvalidArgument with
// the one line to print otherwise. Values are only parsed here; Validate checks them.
absl::Status ParseCommandLine(CLI::App* app, int argc, char** argv);

// Ranges, choices and contradictions; every message names option, value and cure.
absl::Status Validate(const Config& config);

// `config` with what auto stands for in its place: compression_policy auto is the best policy that
// was measured, pin_prompt auto is on for pinned_score and pinned_random and off for the others.
// The only place that says so.
Config ResolveCompression(Config config);

// TOML that ParseCommandLine reads back to an equal Config.
std::string ToToml(const Config& config);

// Levenshtein distance, to find the name that somebody meant.
size_t EditDistance(std::string_view a, std::string_view b);

// Equal for two processes whose results and shapes agree; names no file of the local run.
uint64_t Digest(const Config& config);

}  // namespace zipage
