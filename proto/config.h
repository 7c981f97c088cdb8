#pragma once
// Every option of the engine, once: default, range, help. Flag, --help, TOML key, range check and
// digest follow from the table in config.cc. The launcher writes the resolved options to a TOML file
// that scheduler and workers read.

#include <cstdint>
#include <string>

#include "proto/status.h"

namespace CLI {
class App;
}

namespace zipage {

struct Config {
  std::string model;
  std::string served_model_name;
  int tp = 1;
  std::string device = "auto";
  std::string dtype = "auto";
  int64_t max_model_len = 0;
  int max_num_seqs = 256;
  int max_num_batched_tokens = 2048;
  int kvcache_block_size = 256;
  int64_t num_kvcache_blocks = 0;
  double kv_cache_memory_gb = 0;
  bool enable_prefix_cache = true;
  int64_t seed = 0;
  std::string generation_config = "auto";
  std::string collective = "auto";
  int cpu_threads = 0;
  double init_timeout_s = 600;
  double heartbeat_timeout_s = 30;
  double step_timeout_s = 0;
  double collective_timeout_s = 120;
  double drain_timeout_s = 30;
  double max_line_mb = 64;
  std::string job_endpoint;
  std::string curve_key_file;
  std::string curve_allowed_clients_file;
  bool insecure_tcp = false;
};

// Adds every option to `app` as a flag (and as a key of its TOML file), bound to `config`.
void AddOptions(CLI::App* app, Config* config);

// Parses argv into `config`. --config FILE reads TOML. Dashes in flag names are taken as underscores.
// Returns kOk to go on, kCancelled if help or version was printed (exit 0), kInvalidArgument with the
// one line to print otherwise.
absl::Status ParseCommandLine(CLI::App* app, int argc, char** argv);

// Ranges, choices and contradictions; every message names option, value and cure.
absl::Status Validate(const Config& config);

// TOML that ParseCommandLine reads back to an equal Config.
std::string ToToml(const Config& config);

// Equal for two processes whose results and shapes agree; names no file of the local run.
uint64_t Digest(const Config& config);

}  // namespace zipage
