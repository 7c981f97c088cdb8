// Struct to bytes: each Write fills the builder of one struct of zipage.capnp.

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>
#include <kj/io.h>

#include "glog/logging.h"
#include "proto/wire.h"
#include "proto/zipage.capnp.h"

namespace zipage::wire {
namespace {

// Sets a Text field: Cap'n Proto wants its length with the terminating zero behind it.
capnp::Text::Reader Text(const std::string& s) { return {s.c_str(), s.size()}; }

// Fills a list builder made by `init` unless `values` is empty: an absent list reads as an empty
// one.
template <typename T, typename Init>
void Put(const std::vector<T>& values, Init init) {
  if (values.empty()) return;
  auto list = init(static_cast<unsigned>(values.size()));
  for (unsigned i = 0; i < list.size(); ++i) list.set(i, values[i]);
}

// The same for one member of every element of a list of structs.
template <typename T, typename M, typename Init>
void PutMember(const std::vector<T>& values, M T::*member, Init init) {
  if (values.empty()) return;
  auto list = init(static_cast<unsigned>(values.size()));
  for (unsigned i = 0; i < list.size(); ++i) list.set(i, values[i].*member);
}

#define ZIPAGE_INIT(builder, Field) [&](unsigned n) { return (builder).init##Field(n); }

void Write(const Hello& m, schema::Hello::Builder b) {
  b.setProtocolVersion(m.protocol_version);
  b.setRank(m.rank);
  b.setTp(m.tp);
  b.setEpoch(m.epoch);
  b.setConfigDigest(m.config_digest);
  b.setPid(m.pid);
  b.setDevice(Text(m.device));
}

void Write(const Ready& m, schema::Ready::Builder b) {
  b.setRank(m.rank);
  b.setNumKvBlocks(m.num_kv_blocks);
  b.setWeightBytes(m.weight_bytes);
  b.setKvBlockBytes(m.kv_block_bytes);
  b.setComputeDtype(Text(m.compute_dtype));
  b.setMaxPositions(m.max_positions);
  b.setVocabSize(m.vocab_size);
  b.setNumQuerySlots(m.num_query_slots);
  b.setNumHostBlocks(m.num_host_blocks);
}

void Write(const Heartbeat& m, schema::Heartbeat::Builder b) {
  b.setRank(m.rank);
  b.setPhase(static_cast<schema::WorkerPhase>(m.phase));
  b.setStep(m.step);
}

void Write(const StepResult& m, schema::StepResult::Builder b) {
  b.setRank(m.rank);
  b.setStep(m.step);
  PutMember(m.sampled, &SampledToken::sequence_slot, ZIPAGE_INIT(b, SequenceSlots));
  PutMember(m.sampled, &SampledToken::token, ZIPAGE_INIT(b, Tokens));
  std::vector<SequenceSlot> slots;
  std::vector<uint32_t> offsets = {0};
  std::vector<TokenLogprob> entries;
  for (const SampledToken& s : m.sampled) {
    if (s.logprobs.empty()) continue;
    slots.push_back(s.sequence_slot);
    entries.insert(entries.end(), s.logprobs.begin(), s.logprobs.end());
    offsets.push_back(static_cast<uint32_t>(entries.size()));
  }
  if (!slots.empty()) {
    Put(slots, ZIPAGE_INIT(b, LogprobSlots));
    Put(offsets, ZIPAGE_INIT(b, LogprobOffsets));
    PutMember(entries, &TokenLogprob::token, ZIPAGE_INIT(b, LogprobTokens));
    PutMember(entries, &TokenLogprob::logprob, ZIPAGE_INIT(b, LogprobValues));
  }
  Put(m.corrupted, ZIPAGE_INIT(b, CorruptedSlots));
  PutMember(m.finished_compressions, &FinishedCompression::sequence_slot,
            ZIPAGE_INIT(b, FinishedCompressions));
  PutMember(m.finished_compressions, &FinishedCompression::prompt_tokens_kept,
            ZIPAGE_INIT(b, PromptTokensKept));
  b.setDeviceMicros(m.device_micros);
  b.setCompressionMicros(m.compression_micros);
}

void Write(const WorkerError& m, schema::WorkerError::Builder b) {
  b.setRank(m.rank);
  b.setStep(m.step);
  b.setCode(m.code);
  b.setMessage(Text(m.message));
}

void Write(const SamplingParams& m, schema::SamplingParams::Builder b) {
  b.setTemperature(m.temperature);
  b.setTopP(m.top_p);
  b.setTopK(m.top_k);
  b.setMinP(m.min_p);
  b.setRepetitionPenalty(m.repetition_penalty);
  b.setPresencePenalty(m.presence_penalty);
  b.setFrequencyPenalty(m.frequency_penalty);
  b.setSeed(m.seed);
  b.setMaxTokens(m.max_tokens);
  b.setMinTokens(m.min_tokens);
  Put(m.stop_token_ids, ZIPAGE_INIT(b, StopTokenIds));
  b.setNumLogprobs(m.num_logprobs);
}

void Write(const NewSequence& m, schema::NewSequence::Builder b) {
  b.setSequenceSlot(m.sequence_slot);
  Put(m.tokens, ZIPAGE_INIT(b, Tokens));
  b.setNumPromptTokens(m.num_prompt_tokens);
  b.setNumCachedTokens(m.num_cached_tokens);
  Put(m.block_table, ZIPAGE_INIT(b, BlockTable));
  b.setSampleIndex(m.sample_index);
  Write(m.sampling, b.initSampling());
}

void Write(const Compression& m, schema::Compression::Builder b) {
  b.setSequenceSlot(m.sequence_slot);
  Put(m.source_table, ZIPAGE_INIT(b, SourceTable));
  Put(m.target_table, ZIPAGE_INIT(b, TargetTable));
  b.setNumPinned(m.num_pinned);
}

void Write(const Swap& m, schema::Swap::Builder b) {
  b.setSequenceSlot(m.sequence_slot);
  b.setToHost(m.to_host);
  Put(m.device_blocks, ZIPAGE_INIT(b, DeviceBlocks));
}

void Write(const JobStatus& m, schema::JobStatus::Builder b) {
  b.setId(m.id);
  b.setName(Text(m.name));
  b.setState(static_cast<schema::JobState>(m.state));
  b.setInputPath(Text(m.input_path));
  b.setOutputPath(Text(m.output_path));
  b.setNumLines(m.num_lines);
  b.setNumRead(m.num_read);
  b.setNumSucceeded(m.num_succeeded);
  b.setNumFailed(m.num_failed);
  b.setNumRunning(m.num_running);
  b.setPromptTokens(m.prompt_tokens);
  b.setOutputTokens(m.output_tokens);
  b.setSeconds(m.seconds);
  b.setError(Text(m.error));
}

void Write(const WorkerStatus& m, schema::WorkerStatus::Builder b) {
  b.setRank(m.rank);
  b.setPid(m.pid);
  b.setPhase(static_cast<schema::WorkerPhase>(m.phase));
  b.setStep(m.step);
  b.setHeartbeatAge(m.heartbeat_age);
  b.setDevice(Text(m.device));
}

template <typename T, typename Init>
void WriteAll(const std::vector<T>& values, Init init) {
  if (values.empty()) return;
  auto list = init(static_cast<unsigned>(values.size()));
  for (unsigned i = 0; i < list.size(); ++i) Write(values[i], list[i]);
}

void Write(const StepPlan& m, schema::StepPlan::Builder b) {
  b.setStep(m.step);
  Put(m.released, ZIPAGE_INIT(b, Released));
  WriteAll(m.new_sequences, ZIPAGE_INIT(b, NewSequences));
  PutMember(m.appended_blocks, &AppendedBlock::sequence_slot, ZIPAGE_INIT(b, BlockSlots));
  PutMember(m.appended_blocks, &AppendedBlock::block, ZIPAGE_INIT(b, BlockIds));
  PutMember(m.chunks, &PrefillChunk::sequence_slot, ZIPAGE_INIT(b, ChunkSlots));
  PutMember(m.chunks, &PrefillChunk::start, ZIPAGE_INIT(b, ChunkStarts));
  PutMember(m.chunks, &PrefillChunk::num_tokens, ZIPAGE_INIT(b, ChunkTokens));
  PutMember(m.chunks, &PrefillChunk::samples, ZIPAGE_INIT(b, ChunkSamples));
  b.setNumDecoding(m.num_decoding);
  WriteAll(m.compressions, ZIPAGE_INIT(b, Compressions));
  WriteAll(m.swaps, ZIPAGE_INIT(b, Swaps));
  Put(m.paused, ZIPAGE_INIT(b, Paused));
  Put(m.resumed, ZIPAGE_INIT(b, Resumed));
  PutMember(m.query_slots, &QuerySlotGrant::sequence_slot, ZIPAGE_INIT(b, QuerySlotOwners));
  PutMember(m.query_slots, &QuerySlotGrant::query_slot, ZIPAGE_INIT(b, QuerySlots));
}

void Write(const SubmitJob& m, schema::SubmitJob::Builder b) {
  b.setName(Text(m.name));
  b.setInputPath(Text(m.input_path));
  b.setOutputPath(Text(m.output_path));
  b.setOverwrite(m.overwrite);
  b.setNumLines(m.num_lines);
}

void Write(const EngineStatus& m, schema::EngineStatus::Builder b) {
  b.setModel(Text(m.model));
  b.setReady(m.ready);
  b.setDraining(m.draining);
  b.setJobEndpoint(Text(m.job_endpoint));
  b.setUptime(m.uptime);
  b.setStep(m.step);
  b.setBlockSize(m.block_size);
  b.setNumBlocks(m.num_blocks);
  b.setNumFreeBlocks(m.num_free_blocks);
  b.setNumCachedBlocks(m.num_cached_blocks);
  b.setNumUsedBlocks(m.num_used_blocks);
  b.setNumRunning(m.num_running);
  b.setNumWaiting(m.num_waiting);
  b.setPeakRunning(m.peak_running);
  b.setNumPreemptions(m.num_preemptions);
  b.setPromptTokens(m.prompt_tokens);
  b.setCachedTokens(m.cached_tokens);
  b.setRecomputedTokens(m.recomputed_tokens);
  b.setOutputTokens(m.output_tokens);
  b.setDeviceSeconds(m.device_seconds);
  b.setNumQuerySlots(m.num_query_slots);
  b.setNumUsedQuerySlots(m.num_used_query_slots);
  b.setNumSwapped(m.num_swapped);
  b.setNumSwapsOut(m.num_swaps_out);
  b.setNumCompressions(m.num_compressions);
  b.setCompressionSeconds(m.compression_seconds);
  Put(m.running_history, ZIPAGE_INIT(b, RunningHistory));
  Put(m.block_history, ZIPAGE_INIT(b, BlockHistory));
  b.setHistorySeconds(m.history_seconds);
  WriteAll(m.workers, ZIPAGE_INIT(b, Workers));
  WriteAll(m.jobs, ZIPAGE_INIT(b, Jobs));
}

#undef ZIPAGE_INIT

void Write(const WorkerMessage& message, schema::WorkerMessage::Builder b) {
  struct Visitor {
    schema::WorkerMessage::Builder b;
    void operator()(const Hello& m) { Write(m, b.initHello()); }
    void operator()(const Ready& m) { Write(m, b.initReady()); }
    void operator()(const Heartbeat& m) { Write(m, b.initHeartbeat()); }
    void operator()(const StepResult& m) { Write(m, b.initResult()); }
    void operator()(const WorkerError& m) { Write(m, b.initError()); }
  };
  std::visit(Visitor{b}, message);
}

void Write(const SchedulerMessage& message, schema::SchedulerMessage::Builder b) {
  struct Visitor {
    schema::SchedulerMessage::Builder b;
    void operator()(const Start& m) {
      auto start = b.initStart();
      start.setNumKvBlocks(m.num_kv_blocks);
      start.setNumQuerySlots(m.num_query_slots);
    }
    void operator()(const StepPlan& m) { Write(m, b.initPlan()); }
    void operator()(const Shutdown&) { b.setShutdown(); }
  };
  std::visit(Visitor{b}, message);
}

void Write(const ClientMessage& message, schema::ClientMessage::Builder b) {
  struct Visitor {
    schema::ClientMessage::Builder b;
    void operator()(const SubmitJob& m) { Write(m, b.initSubmit()); }
    void operator()(const CancelJob& m) { b.setCancel(m.job_id); }
    void operator()(const GetStatus&) { b.setStatus(); }
  };
  std::visit(Visitor{b}, message);
}

void Write(const ClientReply& message, schema::ClientReply::Builder b) {
  struct Visitor {
    schema::ClientReply::Builder b;
    void operator()(const JobAccepted& m) { b.setAccepted(m.job_id); }
    void operator()(const JobCancelled& m) { b.setCancelled(m.job_id); }
    void operator()(const EngineStatus& m) { Write(m, b.initStatus()); }
    void operator()(const Refused& m) { b.setError(Text(m.message)); }
  };
  std::visit(Visitor{b}, message);
}

template <typename Root, typename Message>
std::string EncodeAs(const Message& message) {
  std::string bytes;
  try {
    capnp::MallocMessageBuilder builder;
    Write(message, builder.initRoot<Root>());
    bytes.resize(capnp::computeSerializedSizeInWords(builder) * sizeof(capnp::word));
    kj::ArrayOutputStream out({reinterpret_cast<kj::byte*>(bytes.data()), bytes.size()});
    capnp::writeMessage(out, builder);
  } catch (const kj::Exception& e) {
    // Only a list or text beyond Cap'n Proto's half a gigabyte gets here; the caller bounds both.
    LOG(FATAL) << "message cannot be encoded: " << e.getDescription().cStr();
  }
  return bytes;
}

}  // namespace

std::string Encode(const WorkerMessage& m) { return EncodeAs<schema::WorkerMessage>(m); }
std::string Encode(const SchedulerMessage& m) { return EncodeAs<schema::SchedulerMessage>(m); }
std::string Encode(const ClientMessage& m) { return EncodeAs<schema::ClientMessage>(m); }
std::string Encode(const ClientReply& m) { return EncodeAs<schema::ClientReply>(m); }

}  // namespace zipage::wire
