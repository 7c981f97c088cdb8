// Bytes to struct. Every Read visits each pointer of the message once, so the traversal limit can
// be close to the message's own size and a message cannot unfold into something much larger.

#include <capnp/message.h>
#include <capnp/serialize.h>
#include <kj/exception.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/wire.h"
#include "proto/zipage.capnp.h"

namespace zipage::wire {
namespace {

// The field being read, for the error if Cap'n Proto throws on it.
using Field = const char*;

std::string String(capnp::Text::Reader text) { return {text.begin(), text.size()}; }

template <typename T, typename List>
std::vector<T> Vector(List list) {
  std::vector<T> values(list.size());
  for (unsigned i = 0; i < list.size(); ++i) values[i] = list[i];
  return values;
}

// Lists that run in parallel must be equally long.
absl::Status CheckSameSize(Field field, size_t size, Field partner, size_t partner_size) {
  if (size == partner_size) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s has %d entries, %s has %d", field, size, partner, partner_size));
}

absl::Status CheckFinite(Field field, double value) {
  if (std::isfinite(value)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat("%s is %g, not a finite number", field, value));
}

template <typename List>
absl::Status ReadFinite(List list, Field field, std::vector<float>* values) {
  *values = Vector<float>(list);
  for (const float value : *values) ZIPAGE_RETURN_IF_ERROR(CheckFinite(field, value));
  return absl::OkStatus();
}

// Turns an enum of the schema into ours; `last` is our greatest value.
template <typename To, typename From>
absl::Status ReadEnum(Field field, From from, To last, To* to) {
  if (static_cast<uint16_t>(from) > static_cast<uint16_t>(last)) {
    return absl::InvalidArgumentError(absl::StrFormat("%s is %d; the highest known value is %d",
                                                      field, static_cast<uint16_t>(from),
                                                      static_cast<uint16_t>(last)));
  }
  *to = static_cast<To>(from);
  return absl::OkStatus();
}

absl::Status Read(schema::Hello::Reader r, Field* at, Hello* m) {
  m->protocol_version = r.getProtocolVersion();
  m->rank = r.getRank();
  m->tp = r.getTp();
  m->epoch = r.getEpoch();
  m->config_digest = r.getConfigDigest();
  m->pid = r.getPid();
  *at = "Hello.device";
  m->device = String(r.getDevice());
  return absl::OkStatus();
}

absl::Status Read(schema::Ready::Reader r, Field* at, Ready* m) {
  m->rank = r.getRank();
  m->num_kv_blocks = r.getNumKvBlocks();
  m->weight_bytes = r.getWeightBytes();
  m->kv_block_bytes = r.getKvBlockBytes();
  *at = "Ready.computeDtype";
  m->compute_dtype = String(r.getComputeDtype());
  m->max_positions = r.getMaxPositions();
  m->vocab_size = r.getVocabSize();
  m->num_query_slots = r.getNumQuerySlots();
  m->num_host_blocks = r.getNumHostBlocks();
  return absl::OkStatus();
}

absl::Status Read(schema::Heartbeat::Reader r, Field*, Heartbeat* m) {
  m->rank = r.getRank();
  m->step = r.getStep();
  return ReadEnum("Heartbeat.phase", r.getPhase(), WorkerPhase::kRunning, &m->phase);
}

// Gives each row of log-probabilities to its sampled token. Rows follow the order of the tokens.
absl::Status ReadLogprobs(schema::StepResult::Reader r, Field* at,
                          std::vector<SampledToken>* sampled) {
  *at = "StepResult.logprobSlots";
  auto slots = r.getLogprobSlots();
  *at = "StepResult.logprobOffsets";
  auto offsets = r.getLogprobOffsets();
  *at = "StepResult.logprobTokens";
  auto tokens = r.getLogprobTokens();
  *at = "StepResult.logprobValues";
  auto values = r.getLogprobValues();
  const size_t num_offsets = slots.size() == 0 ? 0 : size_t{slots.size()} + 1;
  if (offsets.size() != num_offsets) {
    return absl::InvalidArgumentError(
        absl::StrFormat("StepResult.logprobOffsets has %d entries; %d rows need %d", offsets.size(),
                        slots.size(), num_offsets));
  }
  ZIPAGE_RETURN_IF_ERROR(CheckSameSize(*at, values.size(), "logprobTokens", tokens.size()));
  const uint32_t begin = num_offsets == 0 ? 0 : offsets[0];
  const uint32_t end = num_offsets == 0 ? 0 : offsets[slots.size()];
  if (begin != 0 || end != tokens.size()) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "StepResult.logprobOffsets covers entries %d to %d of %d", begin, end, tokens.size()));
  }
  size_t next = 0;
  for (unsigned row = 0; row < slots.size(); ++row) {
    while (next < sampled->size() && (*sampled)[next].sequence_slot != slots[row]) ++next;
    if (next == sampled->size()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("StepResult.logprobSlots row %d is of slot %d, which has no token there",
                          row, slots[row]));
    }
    if (offsets[row + 1] <= offsets[row] || offsets[row + 1] > tokens.size()) {
      return absl::InvalidArgumentError(
          absl::StrFormat("StepResult.logprobOffsets row %d is [%d, %d) of %d entries", row,
                          offsets[row], offsets[row + 1], tokens.size()));
    }
    std::vector<TokenLogprob>& entries = (*sampled)[next++].logprobs;
    entries.reserve(offsets[row + 1] - offsets[row]);
    for (uint32_t i = offsets[row]; i < offsets[row + 1]; ++i) {
      // Minus infinity is a token that the sampling parameters rule out.
      if (std::isnan(values[i])) {
        return absl::InvalidArgumentError(
            absl::StrFormat("StepResult.logprobValues entry %d is not a number", i));
      }
      entries.push_back({tokens[i], values[i]});
    }
  }
  return absl::OkStatus();
}

absl::Status ReadFinishedCompressions(schema::StepResult::Reader r, Field* at,
                                      std::vector<FinishedCompression>* finished) {
  *at = "StepResult.finishedCompressions";
  auto slots = r.getFinishedCompressions();
  *at = "StepResult.promptTokensKept";
  auto kept = r.getPromptTokensKept();
  ZIPAGE_RETURN_IF_ERROR(CheckSameSize(*at, kept.size(), "finishedCompressions", slots.size()));
  finished->resize(slots.size());
  for (unsigned i = 0; i < slots.size(); ++i) {
    ZIPAGE_RETURN_IF_ERROR(CheckFinite(*at, kept[i]));
    (*finished)[i] = {slots[i], kept[i]};
  }
  return absl::OkStatus();
}

absl::Status Read(schema::StepResult::Reader r, Field* at, StepResult* m) {
  m->rank = r.getRank();
  m->step = r.getStep();
  *at = "StepResult.sequenceSlots";
  auto slots = r.getSequenceSlots();
  *at = "StepResult.tokens";
  auto tokens = r.getTokens();
  ZIPAGE_RETURN_IF_ERROR(CheckSameSize(*at, tokens.size(), "sequenceSlots", slots.size()));
  m->sampled.resize(slots.size());
  for (unsigned i = 0; i < slots.size(); ++i) m->sampled[i] = {slots[i], tokens[i], {}};
  ZIPAGE_RETURN_IF_ERROR(ReadLogprobs(r, at, &m->sampled));
  *at = "StepResult.corruptedSlots";
  m->corrupted = Vector<SequenceSlot>(r.getCorruptedSlots());
  m->device_micros = r.getDeviceMicros();
  m->compression_micros = r.getCompressionMicros();
  return ReadFinishedCompressions(r, at, &m->finished_compressions);
}

absl::Status Read(schema::WorkerError::Reader r, Field* at, WorkerError* m) {
  m->rank = r.getRank();
  m->step = r.getStep();
  m->code = r.getCode();
  if (m->code > static_cast<uint32_t>(absl::StatusCode::kUnauthenticated)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("WorkerError.code is %d, which is no status code", m->code));
  }
  *at = "WorkerError.message";
  m->message = String(r.getMessage());
  return absl::OkStatus();
}

absl::Status Read(schema::SamplingParams::Reader r, Field* at, SamplingParams* m) {
  m->temperature = r.getTemperature();
  m->top_p = r.getTopP();
  m->top_k = r.getTopK();
  m->min_p = r.getMinP();
  m->repetition_penalty = r.getRepetitionPenalty();
  m->presence_penalty = r.getPresencePenalty();
  m->frequency_penalty = r.getFrequencyPenalty();
  m->seed = r.getSeed();
  m->max_tokens = r.getMaxTokens();
  m->min_tokens = r.getMinTokens();
  *at = "SamplingParams.stopTokenIds";
  m->stop_token_ids = Vector<TokenId>(r.getStopTokenIds());
  m->num_logprobs = r.getNumLogprobs();
  const std::pair<Field, float> floats[] = {
      {"SamplingParams.temperature", m->temperature},
      {"SamplingParams.topP", m->top_p},
      {"SamplingParams.minP", m->min_p},
      {"SamplingParams.repetitionPenalty", m->repetition_penalty},
      {"SamplingParams.presencePenalty", m->presence_penalty},
      {"SamplingParams.frequencyPenalty", m->frequency_penalty}};
  for (const auto& [field, value] : floats) ZIPAGE_RETURN_IF_ERROR(CheckFinite(field, value));
  return absl::OkStatus();
}

absl::Status Read(schema::NewSequence::Reader r, Field* at, NewSequence* m) {
  m->sequence_slot = r.getSequenceSlot();
  *at = "NewSequence.tokens";
  m->tokens = Vector<TokenId>(r.getTokens());
  m->num_prompt_tokens = r.getNumPromptTokens();
  m->num_cached_tokens = r.getNumCachedTokens();
  *at = "NewSequence.blockTable";
  m->block_table = Vector<BlockId>(r.getBlockTable());
  m->sample_index = r.getSampleIndex();
  *at = "NewSequence.sampling";
  return Read(r.getSampling(), at, &m->sampling);
}

absl::Status Read(schema::Compression::Reader r, Field* at, Compression* m) {
  m->sequence_slot = r.getSequenceSlot();
  *at = "Compression.sourceTable";
  m->source_table = Vector<BlockId>(r.getSourceTable());
  *at = "Compression.targetTable";
  m->target_table = Vector<BlockId>(r.getTargetTable());
  m->num_pinned = r.getNumPinned();
  return absl::OkStatus();
}

absl::Status Read(schema::Swap::Reader r, Field* at, Swap* m) {
  m->sequence_slot = r.getSequenceSlot();
  m->to_host = r.getToHost();
  *at = "Swap.deviceBlocks";
  m->device_blocks = Vector<BlockId>(r.getDeviceBlocks());
  return absl::OkStatus();
}

absl::Status Read(schema::JobStatus::Reader r, Field* at, JobStatus* m) {
  m->id = r.getId();
  *at = "JobStatus.name";
  m->name = String(r.getName());
  *at = "JobStatus.inputPath";
  m->input_path = String(r.getInputPath());
  *at = "JobStatus.outputPath";
  m->output_path = String(r.getOutputPath());
  *at = "JobStatus.error";
  m->error = String(r.getError());
  m->num_lines = r.getNumLines();
  m->num_read = r.getNumRead();
  m->num_succeeded = r.getNumSucceeded();
  m->num_failed = r.getNumFailed();
  m->num_running = r.getNumRunning();
  m->prompt_tokens = r.getPromptTokens();
  m->output_tokens = r.getOutputTokens();
  m->seconds = r.getSeconds();
  ZIPAGE_RETURN_IF_ERROR(CheckFinite("JobStatus.seconds", m->seconds));
  return ReadEnum("JobStatus.state", r.getState(), JobState::kFailed, &m->state);
}

absl::Status Read(schema::WorkerStatus::Reader r, Field* at, WorkerStatus* m) {
  m->rank = r.getRank();
  m->pid = r.getPid();
  m->step = r.getStep();
  m->heartbeat_age = r.getHeartbeatAge();
  *at = "WorkerStatus.device";
  m->device = String(r.getDevice());
  ZIPAGE_RETURN_IF_ERROR(CheckFinite("WorkerStatus.heartbeatAge", m->heartbeat_age));
  return ReadEnum("WorkerStatus.phase", r.getPhase(), WorkerPhase::kRunning, &m->phase);
}

template <typename List, typename T>
absl::Status ReadAll(List list, Field* at, std::vector<T>* values) {
  values->resize(list.size());
  for (unsigned i = 0; i < list.size(); ++i) {
    ZIPAGE_RETURN_IF_ERROR(Read(list[i], at, &(*values)[i]));
  }
  return absl::OkStatus();
}

absl::Status Read(schema::StepPlan::Reader r, Field* at, StepPlan* m) {
  m->step = r.getStep();
  *at = "StepPlan.released";
  m->released = Vector<SequenceSlot>(r.getReleased());
  *at = "StepPlan.newSequences";
  ZIPAGE_RETURN_IF_ERROR(ReadAll(r.getNewSequences(), at, &m->new_sequences));
  *at = "StepPlan.blockSlots";
  auto block_slots = r.getBlockSlots();
  *at = "StepPlan.blockIds";
  auto block_ids = r.getBlockIds();
  ZIPAGE_RETURN_IF_ERROR(CheckSameSize(*at, block_ids.size(), "blockSlots", block_slots.size()));
  m->appended_blocks.resize(block_slots.size());
  for (unsigned i = 0; i < block_slots.size(); ++i) {
    m->appended_blocks[i] = {block_slots[i], block_ids[i]};
  }
  *at = "StepPlan.chunkSlots";
  auto slots = r.getChunkSlots();
  *at = "StepPlan.chunkStarts";
  auto starts = r.getChunkStarts();
  ZIPAGE_RETURN_IF_ERROR(CheckSameSize(*at, starts.size(), "chunkSlots", slots.size()));
  *at = "StepPlan.chunkTokens";
  auto tokens = r.getChunkTokens();
  ZIPAGE_RETURN_IF_ERROR(CheckSameSize(*at, tokens.size(), "chunkSlots", slots.size()));
  *at = "StepPlan.chunkSamples";
  auto samples = r.getChunkSamples();
  ZIPAGE_RETURN_IF_ERROR(CheckSameSize(*at, samples.size(), "chunkSlots", slots.size()));
  m->chunks.resize(slots.size());
  for (unsigned i = 0; i < slots.size(); ++i) {
    m->chunks[i] = {slots[i], starts[i], tokens[i], samples[i]};
  }
  m->num_decoding = r.getNumDecoding();
  *at = "StepPlan.compressions";
  ZIPAGE_RETURN_IF_ERROR(ReadAll(r.getCompressions(), at, &m->compressions));
  *at = "StepPlan.swaps";
  ZIPAGE_RETURN_IF_ERROR(ReadAll(r.getSwaps(), at, &m->swaps));
  *at = "StepPlan.paused";
  m->paused = Vector<SequenceSlot>(r.getPaused());
  *at = "StepPlan.resumed";
  m->resumed = Vector<SequenceSlot>(r.getResumed());
  *at = "StepPlan.querySlotOwners";
  auto owners = r.getQuerySlotOwners();
  *at = "StepPlan.querySlots";
  auto query_slots = r.getQuerySlots();
  ZIPAGE_RETURN_IF_ERROR(CheckSameSize(*at, query_slots.size(), "querySlotOwners", owners.size()));
  m->query_slots.resize(owners.size());
  for (unsigned i = 0; i < owners.size(); ++i) m->query_slots[i] = {owners[i], query_slots[i]};
  return absl::OkStatus();
}

absl::Status Read(schema::SubmitJob::Reader r, Field* at, SubmitJob* m) {
  *at = "SubmitJob.name";
  m->name = String(r.getName());
  *at = "SubmitJob.inputPath";
  m->input_path = String(r.getInputPath());
  *at = "SubmitJob.outputPath";
  m->output_path = String(r.getOutputPath());
  m->overwrite = r.getOverwrite();
  m->num_lines = r.getNumLines();
  return absl::OkStatus();
}

absl::Status Read(schema::EngineStatus::Reader r, Field* at, EngineStatus* m) {
  *at = "EngineStatus.model";
  m->model = String(r.getModel());
  m->ready = r.getReady();
  m->draining = r.getDraining();
  *at = "EngineStatus.jobEndpoint";
  m->job_endpoint = String(r.getJobEndpoint());
  m->uptime = r.getUptime();
  m->step = r.getStep();
  m->block_size = r.getBlockSize();
  m->num_blocks = r.getNumBlocks();
  m->num_free_blocks = r.getNumFreeBlocks();
  m->num_cached_blocks = r.getNumCachedBlocks();
  m->num_used_blocks = r.getNumUsedBlocks();
  m->num_running = r.getNumRunning();
  m->num_waiting = r.getNumWaiting();
  m->peak_running = r.getPeakRunning();
  m->num_preemptions = r.getNumPreemptions();
  m->prompt_tokens = r.getPromptTokens();
  m->cached_tokens = r.getCachedTokens();
  m->recomputed_tokens = r.getRecomputedTokens();
  m->output_tokens = r.getOutputTokens();
  m->device_seconds = r.getDeviceSeconds();
  ZIPAGE_RETURN_IF_ERROR(CheckFinite("EngineStatus.uptime", m->uptime));
  ZIPAGE_RETURN_IF_ERROR(CheckFinite("EngineStatus.deviceSeconds", m->device_seconds));
  m->num_query_slots = r.getNumQuerySlots();
  m->num_used_query_slots = r.getNumUsedQuerySlots();
  m->num_swapped = r.getNumSwapped();
  m->num_swaps_out = r.getNumSwapsOut();
  m->num_compressions = r.getNumCompressions();
  m->compression_seconds = r.getCompressionSeconds();
  ZIPAGE_RETURN_IF_ERROR(CheckFinite("EngineStatus.compressionSeconds", m->compression_seconds));
  *at = "EngineStatus.runningHistory";
  ZIPAGE_RETURN_IF_ERROR(ReadFinite(r.getRunningHistory(), *at, &m->running_history));
  *at = "EngineStatus.blockHistory";
  ZIPAGE_RETURN_IF_ERROR(ReadFinite(r.getBlockHistory(), *at, &m->block_history));
  m->history_seconds = r.getHistorySeconds();
  ZIPAGE_RETURN_IF_ERROR(CheckFinite("EngineStatus.historySeconds", m->history_seconds));
  *at = "EngineStatus.workers";
  ZIPAGE_RETURN_IF_ERROR(ReadAll(r.getWorkers(), at, &m->workers));
  *at = "EngineStatus.jobs";
  return ReadAll(r.getJobs(), at, &m->jobs);
}

absl::Status UnknownKind(Field message) {
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is of a kind this version does not know", message));
}

absl::Status Read(schema::WorkerMessage::Reader r, Field* at, WorkerMessage* m) {
  switch (r.which()) {
    case schema::WorkerMessage::HELLO:
      return Read(r.getHello(), at, &m->emplace<Hello>());
    case schema::WorkerMessage::READY:
      return Read(r.getReady(), at, &m->emplace<Ready>());
    case schema::WorkerMessage::HEARTBEAT:
      return Read(r.getHeartbeat(), at, &m->emplace<Heartbeat>());
    case schema::WorkerMessage::RESULT:
      return Read(r.getResult(), at, &m->emplace<StepResult>());
    case schema::WorkerMessage::ERROR:
      return Read(r.getError(), at, &m->emplace<WorkerError>());
  }
  return UnknownKind(*at);
}

absl::Status Read(schema::SchedulerMessage::Reader r, Field* at, SchedulerMessage* m) {
  switch (r.which()) {
    case schema::SchedulerMessage::START:
      m->emplace<Start>() = {.num_kv_blocks = r.getStart().getNumKvBlocks(),
                             .num_query_slots = r.getStart().getNumQuerySlots()};
      return absl::OkStatus();
    case schema::SchedulerMessage::PLAN:
      return Read(r.getPlan(), at, &m->emplace<StepPlan>());
    case schema::SchedulerMessage::SHUTDOWN:
      m->emplace<Shutdown>();
      return absl::OkStatus();
  }
  return UnknownKind(*at);
}

absl::Status Read(schema::ClientMessage::Reader r, Field* at, ClientMessage* m) {
  switch (r.which()) {
    case schema::ClientMessage::SUBMIT:
      return Read(r.getSubmit(), at, &m->emplace<SubmitJob>());
    case schema::ClientMessage::CANCEL:
      m->emplace<CancelJob>().job_id = r.getCancel();
      return absl::OkStatus();
    case schema::ClientMessage::STATUS:
      m->emplace<GetStatus>();
      return absl::OkStatus();
  }
  return UnknownKind(*at);
}

absl::Status Read(schema::ClientReply::Reader r, Field* at, ClientReply* m) {
  switch (r.which()) {
    case schema::ClientReply::ACCEPTED:
      m->emplace<JobAccepted>().job_id = r.getAccepted();
      return absl::OkStatus();
    case schema::ClientReply::CANCELLED:
      m->emplace<JobCancelled>().job_id = r.getCancelled();
      return absl::OkStatus();
    case schema::ClientReply::STATUS:
      return Read(r.getStatus(), at, &m->emplace<EngineStatus>());
    case schema::ClientReply::ERROR:
      *at = "ClientReply.error";
      m->emplace<Refused>().message = String(r.getError());
      return absl::OkStatus();
  }
  return UnknownKind(*at);
}

// The bytes as Cap'n Proto's words: where they lie if aligned, in `scratch` otherwise.
kj::ArrayPtr<const capnp::word> Words(std::string_view bytes, std::vector<uint64_t>* scratch) {
  const size_t num_words = bytes.size() / sizeof(capnp::word);
  const void* data = bytes.data();
  if (reinterpret_cast<uintptr_t>(data) % alignof(uint64_t) != 0) {
    scratch->resize(num_words);
    std::memcpy(scratch->data(), bytes.data(), num_words * sizeof(capnp::word));
    data = scratch->data();
  }
  return {static_cast<const capnp::word*>(data), num_words};
}

template <typename Root, typename Message>
absl::StatusOr<Message> DecodeAs(Field name, std::string_view bytes) {
  if (bytes.empty() || bytes.size() % sizeof(capnp::word) != 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "%s of %d bytes: the length must be a positive multiple of 8", name, bytes.size()));
  }
  Field at = name;
  try {
    std::vector<uint64_t> scratch;
    const kj::ArrayPtr<const capnp::word> words = Words(bytes, &scratch);
    capnp::ReaderOptions options;
    // A valid message is visited once; the margin pays for the root and for empty structs.
    options.traversalLimitInWords = 2 * words.size() + 64;
    options.nestingLimit = 16;
    capnp::FlatArrayMessageReader reader(words, options);
    if (reader.getEnd() != words.end()) {
      return absl::InvalidArgumentError(absl::StrFormat("%s is followed by %d other bytes", name,
                                                        (words.end() - reader.getEnd()) * 8));
    }
    Message message;
    ZIPAGE_RETURN_IF_ERROR(Read(reader.getRoot<Root>(), &at, &message));
    return message;
  } catch (const kj::Exception& e) {
    return absl::InvalidArgumentError(absl::StrFormat("%s cannot be read (%d bytes): %s", at,
                                                      bytes.size(), e.getDescription().cStr()));
  }
}

}  // namespace

absl::StatusOr<WorkerMessage> DecodeWorkerMessage(std::string_view bytes) {
  return DecodeAs<schema::WorkerMessage, WorkerMessage>("WorkerMessage", bytes);
}

absl::StatusOr<SchedulerMessage> DecodeSchedulerMessage(std::string_view bytes) {
  return DecodeAs<schema::SchedulerMessage, SchedulerMessage>("SchedulerMessage", bytes);
}

absl::StatusOr<ClientMessage> DecodeClientMessage(std::string_view bytes) {
  return DecodeAs<schema::ClientMessage, ClientMessage>("ClientMessage", bytes);
}

absl::StatusOr<ClientReply> DecodeClientReply(std::string_view bytes) {
  return DecodeAs<schema::ClientReply, ClientReply>("ClientReply", bytes);
}

}  // namespace zipage::wire
