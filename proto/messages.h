#pragma once
// The messages of zipage.capnp as plain structs: what the rooms think in. proto/wire turns them
// into bytes and back. Every field is described in zipage.capnp.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "proto/sampling_params.h"

namespace zipage {

// A row of the per-sequence state that every worker keeps, in [0, max_num_seqs).
using SequenceSlot = int32_t;
// A row of the query-window pool, in [0, num_query_slots).
using QuerySlot = int32_t;
// A block of `kvcache_block_size` positions of the KV pool, in [0, num_kv_blocks).
using BlockId = int32_t;
using TokenId = int32_t;

inline constexpr uint32_t kProtocolVersion = 2;

// ---- worker to scheduler

struct Hello {
  uint32_t protocol_version = kProtocolVersion;
  uint32_t rank = 0;
  uint32_t tp = 1;
  uint64_t epoch = 1;
  uint64_t config_digest = 0;
  int64_t pid = 0;
  std::string device;
  bool operator==(const Hello&) const = default;
};

struct Ready {
  uint32_t rank = 0;
  uint64_t num_kv_blocks = 0;
  uint64_t weight_bytes = 0;
  uint64_t kv_block_bytes = 0;
  std::string compute_dtype;
  uint64_t max_positions = 0;
  uint64_t vocab_size = 0;
  uint64_t num_query_slots = 0;
  uint64_t num_host_blocks = 0;
  bool operator==(const Ready&) const = default;
};

enum class WorkerPhase : uint16_t {
  kStarting,
  kLoadingWeights,
  kWaitingForStart,
  kIdle,
  kRunning,
};

// For people.
inline const char* WorkerPhaseName(WorkerPhase phase) {
  switch (phase) {
    case WorkerPhase::kStarting:
      return "starting";
    case WorkerPhase::kLoadingWeights:
      return "loading weights";
    case WorkerPhase::kWaitingForStart:
      return "ready, waiting for the others";
    case WorkerPhase::kIdle:
      return "idle";
    case WorkerPhase::kRunning:
      return "running";
  }
  return "unknown";
}

struct Heartbeat {
  uint32_t rank = 0;
  WorkerPhase phase = WorkerPhase::kStarting;
  uint64_t step = 0;
  bool operator==(const Heartbeat&) const = default;
};

struct TokenLogprob {
  TokenId token = 0;
  float logprob = 0;
  bool operator==(const TokenLogprob&) const = default;
};

// A token sampled in a step. `logprobs` is empty unless asked for; its first entry is the token's
// own, the others are the highest in descending order.
struct SampledToken {
  SequenceSlot sequence_slot = 0;
  TokenId token = 0;
  std::vector<TokenLogprob> logprobs;
  bool operator==(const SampledToken&) const = default;
};

struct FinishedCompression {
  SequenceSlot sequence_slot = 0;
  float prompt_tokens_kept = 0;
  bool operator==(const FinishedCompression&) const = default;
};

struct StepResult {
  uint32_t rank = 0;
  uint64_t step = 0;
  std::vector<SampledToken> sampled;
  std::vector<SequenceSlot> corrupted;
  std::vector<FinishedCompression> finished_compressions;
  uint64_t device_micros = 0;
  uint64_t compression_micros = 0;
  bool operator==(const StepResult&) const = default;
};

struct WorkerError {
  uint32_t rank = 0;
  uint64_t step = 0;
  uint32_t code = 0;  // absl::StatusCode
  std::string message;
  bool operator==(const WorkerError&) const = default;
};

using WorkerMessage = std::variant<Hello, Ready, Heartbeat, StepResult, WorkerError>;

// ---- scheduler to worker

struct Start {
  uint64_t num_kv_blocks = 0;
  uint64_t num_query_slots = 0;
  bool operator==(const Start&) const = default;
};

struct NewSequence {
  SequenceSlot sequence_slot = 0;
  std::vector<TokenId> tokens;
  uint32_t num_prompt_tokens = 0;
  uint32_t num_cached_tokens = 0;
  std::vector<BlockId> block_table;
  uint32_t sample_index = 0;
  SamplingParams sampling;
  bool operator==(const NewSequence&) const = default;
};

struct AppendedBlock {
  SequenceSlot sequence_slot = 0;
  BlockId block = 0;
  bool operator==(const AppendedBlock&) const = default;
};

struct PrefillChunk {
  SequenceSlot sequence_slot = 0;
  int32_t start = 0;
  int32_t num_tokens = 0;
  bool samples = false;
  bool operator==(const PrefillChunk&) const = default;
};

struct Compression {
  SequenceSlot sequence_slot = 0;
  std::vector<BlockId> source_table;
  std::vector<BlockId> target_table;
  uint32_t num_pinned = 0;
  bool operator==(const Compression&) const = default;
};

struct Swap {
  SequenceSlot sequence_slot = 0;
  bool to_host = false;
  std::vector<BlockId> device_blocks;
  bool operator==(const Swap&) const = default;
};

struct QuerySlotGrant {
  SequenceSlot sequence_slot = 0;
  QuerySlot query_slot = 0;
  bool operator==(const QuerySlotGrant&) const = default;
};

struct StepPlan {
  uint64_t step = 0;
  std::vector<SequenceSlot> released;
  std::vector<NewSequence> new_sequences;
  std::vector<AppendedBlock> appended_blocks;
  std::vector<PrefillChunk> chunks;
  uint32_t num_decoding = 0;
  std::vector<Compression> compressions;
  std::vector<Swap> swaps;
  std::vector<SequenceSlot> paused;
  std::vector<SequenceSlot> resumed;
  std::vector<QuerySlotGrant> query_slots;
  bool operator==(const StepPlan&) const = default;
};

struct Shutdown {
  bool operator==(const Shutdown&) const = default;
};

using SchedulerMessage = std::variant<Start, StepPlan, Shutdown>;

// ---- clients and scheduler

struct SubmitJob {
  std::string name;
  std::string input_path;
  std::string output_path;
  bool overwrite = false;
  uint64_t num_lines = 0;
  bool operator==(const SubmitJob&) const = default;
};

struct CancelJob {
  uint64_t job_id = 0;
  bool operator==(const CancelJob&) const = default;
};

struct GetStatus {
  bool operator==(const GetStatus&) const = default;
};

using ClientMessage = std::variant<SubmitJob, CancelJob, GetStatus>;

enum class JobState : uint16_t { kRunning, kFinished, kCancelled, kFailed };

struct JobStatus {
  uint64_t id = 0;
  std::string name;
  JobState state = JobState::kRunning;
  std::string input_path;
  std::string output_path;
  uint64_t num_lines = 0;
  uint64_t num_read = 0;
  uint64_t num_succeeded = 0;
  uint64_t num_failed = 0;
  uint64_t num_running = 0;
  uint64_t prompt_tokens = 0;
  uint64_t output_tokens = 0;
  double seconds = 0;
  std::string error;
  bool operator==(const JobStatus&) const = default;
};

struct WorkerStatus {
  uint32_t rank = 0;
  int64_t pid = 0;
  WorkerPhase phase = WorkerPhase::kStarting;
  uint64_t step = 0;
  double heartbeat_age = 0;
  std::string device;
  bool operator==(const WorkerStatus&) const = default;
};

struct EngineStatus {
  std::string model;
  bool ready = false;
  bool draining = false;
  double uptime = 0;
  uint64_t step = 0;
  uint32_t block_size = 0;
  uint64_t num_blocks = 0;
  uint64_t num_free_blocks = 0;
  uint64_t num_cached_blocks = 0;
  uint64_t num_used_blocks = 0;
  uint64_t num_running = 0;
  uint64_t num_waiting = 0;
  uint64_t peak_running = 0;
  uint64_t num_preemptions = 0;
  uint64_t prompt_tokens = 0;
  uint64_t cached_tokens = 0;
  uint64_t recomputed_tokens = 0;
  uint64_t output_tokens = 0;
  double device_seconds = 0;
  uint64_t num_query_slots = 0;
  uint64_t num_used_query_slots = 0;
  uint64_t num_swapped = 0;
  uint64_t num_swaps_out = 0;
  uint64_t num_compressions = 0;
  double compression_seconds = 0;
  std::vector<float> running_history;
  std::vector<float> block_history;
  double history_seconds = 0;
  std::string job_endpoint;
  std::vector<WorkerStatus> workers;
  std::vector<JobStatus> jobs;
  bool operator==(const EngineStatus&) const = default;
};

struct JobAccepted {
  uint64_t job_id = 0;
  bool operator==(const JobAccepted&) const = default;
};
struct JobCancelled {
  uint64_t job_id = 0;
  bool operator==(const JobCancelled&) const = default;
};
struct Refused {
  std::string message;
  bool operator==(const Refused&) const = default;
};

using ClientReply = std::variant<JobAccepted, JobCancelled, EngineStatus, Refused>;

}  // namespace zipage
