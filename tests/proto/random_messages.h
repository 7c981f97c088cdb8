#pragma once
// Seeded random messages that fill every field, for round trips and as seeds of hostile bytes.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "proto/messages.h"

namespace zipage {

// How often a random driver repeats: ZIPAGE_FUZZ_ITERATIONS if set, else `usual`.
inline int FuzzIterations(int usual) {
  const char* text = std::getenv("ZIPAGE_FUZZ_ITERATIONS");
  return text == nullptr ? usual : std::max(1, std::atoi(text));
}

class RandomMessages {
 public:
  explicit RandomMessages(uint64_t seed) : random_(seed) {}

  uint64_t Below(uint64_t n) { return random_() % n; }

  WorkerMessage Worker() {
    switch (Below(5)) {
      case 0:
        return Hello{.protocol_version = U32(),
                     .rank = U32(),
                     .tp = U32(),
                     .epoch = U64(),
                     .config_digest = U64(),
                     .pid = static_cast<int64_t>(U64()),
                     .device = Text()};
      case 1:
        return Ready{.rank = U32(),
                     .num_kv_blocks = U64(),
                     .weight_bytes = U64(),
                     .kv_block_bytes = U64(),
                     .compute_dtype = Text(),
                     .max_positions = U64(),
                     .vocab_size = U64(),
                     .num_query_slots = U64(),
                     .num_host_blocks = U64()};
      case 2:
        return Heartbeat{.rank = U32(), .phase = Phase(), .step = U64()};
      case 3:
        return Result();
      default:
        return WorkerError{.rank = U32(),
                           .step = U64(),
                           .code = static_cast<uint32_t>(Below(17)),
                           .message = Text()};
    }
  }

  StepResult Result() {
    StepResult result;
    result.rank = U32();
    result.step = U64();
    // Slots are distinct, as in a plan: consecutive from a random start.
    SequenceSlot slot = static_cast<SequenceSlot>(Below(1000));
    for (uint64_t n = Below(6); n > 0; --n) {
      SampledToken& sampled = result.sampled.emplace_back();
      sampled.sequence_slot = slot++;
      sampled.token = I32();
      for (uint64_t k = Below(4); k > 0; --k) sampled.logprobs.push_back({I32(), Logprob()});
    }
    result.corrupted = Ints();
    for (uint64_t n = Below(3); n > 0; --n) {
      result.finished_compressions.push_back({I32(), static_cast<float>(Below(5000)) / 7});
    }
    result.device_micros = U64();
    result.compression_micros = U64();
    return result;
  }

  SchedulerMessage Scheduler() {
    switch (Below(4)) {
      case 0:
        return Start{.num_kv_blocks = U64(), .num_query_slots = U64()};
      case 1:
        return Shutdown{};
      default:
        return Plan();
    }
  }

  StepPlan Plan() {
    StepPlan plan;
    plan.step = U64();
    plan.released = Ints();
    for (uint64_t n = Below(4); n > 0; --n) {
      plan.new_sequences.push_back({.sequence_slot = I32(),
                                    .tokens = Ints(),
                                    .num_prompt_tokens = U32(),
                                    .num_cached_tokens = U32(),
                                    .block_table = Ints(),
                                    .sample_index = U32(),
                                    .sampling = Sampling()});
    }
    for (uint64_t n = Below(70); n > 0; --n) plan.appended_blocks.push_back({I32(), I32()});
    for (uint64_t n = Below(70); n > 0; --n) plan.chunks.push_back({I32(), I32(), I32(), Bool()});
    plan.num_decoding = U32();
    for (uint64_t n = Below(3); n > 0; --n) {
      plan.compressions.push_back({I32(), Ints(), Ints(), U32()});
    }
    for (uint64_t n = Below(3); n > 0; --n) {
      plan.swaps.push_back({I32(), Bool(), Ints()});
    }
    plan.paused = Ints();
    plan.resumed = Ints();
    for (uint64_t n = Below(5); n > 0; --n) plan.query_slots.push_back({I32(), I32()});
    return plan;
  }

  ClientMessage Client() {
    switch (Below(3)) {
      case 0:
        return SubmitJob{.name = Text(),
                         .input_path = Text(),
                         .output_path = Text(),
                         .overwrite = Bool(),
                         .num_lines = U64()};
      case 1:
        return CancelJob{.job_id = U64()};
      default:
        return GetStatus{};
    }
  }

  ClientReply Reply() {
    switch (Below(5)) {
      case 0:
        return JobAccepted{.job_id = U64()};
      case 1:
        return JobCancelled{.job_id = U64()};
      case 2:
        return Refused{.message = Text()};
      default:
        return Status();
    }
  }

  EngineStatus Status() {
    EngineStatus status;
    status.model = Text();
    status.ready = Bool();
    status.draining = Bool();
    status.job_endpoint = Text();
    status.uptime = Double();
    status.device_seconds = Double();
    status.compression_seconds = Double();
    status.history_seconds = Double();
    for (uint64_t n = Below(5); n > 0; --n) {
      status.running_history.push_back(static_cast<float>(Below(1000)) / 3);
      status.block_history.push_back(static_cast<float>(Below(1000)) / 1000);
    }
    status.block_size = U32();
    for (uint64_t* field :
         {&status.step, &status.num_blocks, &status.num_free_blocks, &status.num_cached_blocks,
          &status.num_used_blocks, &status.num_running, &status.num_waiting, &status.peak_running,
          &status.num_preemptions, &status.prompt_tokens, &status.cached_tokens,
          &status.recomputed_tokens, &status.output_tokens, &status.num_query_slots,
          &status.num_used_query_slots, &status.num_swapped, &status.num_swaps_out,
          &status.num_compressions}) {
      *field = U64();
    }
    for (uint64_t n = Below(4); n > 0; --n) {
      status.workers.push_back({.rank = U32(),
                                .pid = static_cast<int64_t>(U64()),
                                .phase = Phase(),
                                .step = U64(),
                                .heartbeat_age = Double(),
                                .device = Text()});
    }
    for (uint64_t n = Below(4); n > 0; --n) {
      JobStatus& job = status.jobs.emplace_back();
      for (std::string* field : {&job.name, &job.input_path, &job.output_path, &job.error}) {
        *field = Text();
      }
      for (uint64_t* field :
           {&job.id, &job.num_lines, &job.num_read, &job.num_succeeded, &job.num_failed,
            &job.num_running, &job.prompt_tokens, &job.output_tokens}) {
        *field = U64();
      }
      job.state = static_cast<JobState>(Below(4));
      job.seconds = Double();
    }
    return status;
  }

  // `bytes` with some of them changed, inserted, removed or cut off.
  std::string Mutated(std::string bytes) {
    for (uint64_t n = 1 + Below(4); n > 0 && !bytes.empty(); --n) {
      const size_t at = Below(bytes.size());
      const size_t word = at / 8 * 8;
      switch (Below(8)) {
        case 0:
          bytes[at] = static_cast<char>(random_());
          break;
        case 1:
          bytes[at] = static_cast<char>(bytes[at] ^ (1 << Below(8)));
          break;
        case 2:  // A whole pointer or value.
          for (size_t i = word; i < std::min(word + 8, bytes.size()); ++i) {
            bytes[i] = static_cast<char>(Bool() ? 0xFF : random_());
          }
          break;
        case 3:
          bytes.resize(at);
          break;
        case 4:
          bytes.resize(word);
          break;
        case 5:
          bytes.insert(word, 8, static_cast<char>(random_()));
          break;
        case 6:
          bytes.erase(word, 8);
          break;
        default: {  // Another of its own words: pointers to the wrong place.
          const size_t from = Below(bytes.size()) / 8 * 8;
          for (size_t i = 0; i < 8 && std::max(word, from) + i < bytes.size(); ++i) {
            bytes[word + i] = bytes[from + i];
          }
          break;
        }
      }
    }
    return bytes;
  }

 private:
  uint64_t U64() { return Below(4) == 0 ? Below(3) : random_(); }
  uint32_t U32() { return static_cast<uint32_t>(U64()); }
  int32_t I32() { return static_cast<int32_t>(random_()); }
  bool Bool() { return Below(2) == 1; }
  double Double() { return std::ldexp(static_cast<double>(random_()), int(Below(100)) - 50); }
  float Float() { return static_cast<float>(Below(1 << 20)) / 1024.0F - 300.0F; }
  float Logprob() { return Below(5) == 0 ? -INFINITY : Float(); }
  WorkerPhase Phase() { return static_cast<WorkerPhase>(Below(5)); }

  std::vector<int32_t> Ints() {
    std::vector<int32_t> values(Below(3) == 0 ? 0 : Below(20));
    for (int32_t& value : values) value = I32();
    return values;
  }

  // Any bytes: zeros, no UTF-8, quotes.
  std::string Text() {
    std::string text(Below(3) == 0 ? 0 : Below(30), '\0');
    for (char& c : text) c = static_cast<char>(random_());
    return text;
  }

  SamplingParams Sampling() {
    return {.temperature = Float(),
            .top_p = Float(),
            .top_k = I32(),
            .min_p = Float(),
            .repetition_penalty = Float(),
            .presence_penalty = Float(),
            .frequency_penalty = Float(),
            .seed = U64(),
            .max_tokens = I32(),
            .min_tokens = I32(),
            .stop_token_ids = Ints(),
            .num_logprobs = I32()};
  }

  std::mt19937_64 random_;
};

}  // namespace zipage
