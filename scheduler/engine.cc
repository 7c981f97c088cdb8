#include "scheduler/engine.h"

#include <algorithm>
#include <filesystem>
#include <utility>
#include <variant>

#include "absl/strings/str_format.h"
#include "glog/logging.h"
#include "proto/wire.h"

namespace zipage {
namespace {

using std::chrono::milliseconds;

// How long jobs are read between two steps: planning must not wait for long lines or many jobs. The
// line that is begun is read to its end.
constexpr milliseconds kReadingTime(2);
// Messages taken from one job socket between two steps, so that no client can hold up the others.
constexpr int kClientMessagesPerTurn = 64;
// Ended jobs that the status lists; older ones are forgotten.
constexpr int64_t kMaxEndedJobs = 1000;
// How long the loop sleeps when nothing happens; deadlines and signals are looked at this often.
constexpr milliseconds kIdleWait(100);

int64_t UnixSeconds() {
  return std::chrono::duration_cast<std::chrono::seconds>(
             std::chrono::system_clock::now().time_since_epoch())
      .count();
}

// What results and the status call the model.
std::string ModelName(const Config& config) {
  if (!config.served_model_name.empty()) return config.served_model_name;
  std::error_code error;
  std::filesystem::path folder = std::filesystem::absolute(config.model, error).lexically_normal();
  if (!folder.has_filename()) folder = folder.parent_path();  // It ended with a slash.
  return folder.has_filename() ? folder.filename().string() : config.model;
}

}  // namespace

Engine::Engine(const Parts& parts)
    : parts_(parts),
      started_(Now()),
      started_unix_(UnixSeconds()),
      workers_(parts.worker_socket, parts.config, /*epoch=*/1, started_) {}

absl::StatusOr<bool> Engine::Run(const std::atomic<bool>* stop) {
  std::vector<transport::ServerSocket*> sockets = parts_.job_sockets;
  sockets.push_back(parts_.worker_socket);
  while (true) {
    // From before the messages are taken: what a rank sent while this thread was busy or asleep is
    // not counted as silence.
    const Time now = Now();
    ZIPAGE_RETURN_IF_ERROR(HandleWorkers());
    for (transport::ServerSocket* socket : parts_.job_sockets) HandleClients(socket);
    if (*stop && !draining_) StartDraining();
    bool more_to_read = false;
    if (scheduler_ != nullptr) {
      ZIPAGE_RETURN_IF_ERROR(ApplyResults());
      ZIPAGE_RETURN_IF_ERROR(PlanSteps());
      more_to_read = ReadJobs();
      ZIPAGE_RETURN_IF_ERROR(PlanSteps());
      AnswerFinished();
      FinishJobs();
    }
    ZIPAGE_RETURN_IF_ERROR(workers_.CheckDeadlines(now));
    if (draining_ && Drained()) break;
    transport::WaitReadable(sockets, more_to_read ? milliseconds(0) : kIdleWait);
  }
  const bool all_done = EndJobs();
  workers_.SendShutdown();
  return all_done;
}

// ---------------------------------------------------------------- workers

absl::Status Engine::HandleWorkers() {
  while (std::optional<transport::Received> received = parts_.worker_socket->Receive()) {
    ZIPAGE_RETURN_IF_ERROR(workers_.Handle(*received, Now()));
  }
  if (workers_.ready() && scheduler_ == nullptr) return StartServing();
  return absl::OkStatus();
}

absl::StatusOr<SchedulerOptions> Engine::MakeSchedulerOptions() const {
  const Config config = ResolveCompression(parts_.config);
  const WorkerGroup::Capacity& capacity = workers_.capacity();
  const auto max_positions = static_cast<int64_t>(capacity.max_positions);
  SchedulerOptions options;
  options.max_num_seqs = config.max_num_seqs;
  options.max_num_batched_tokens = config.max_num_batched_tokens;
  options.block_size = config.kvcache_block_size;
  options.num_blocks = static_cast<int64_t>(capacity.num_kv_blocks);
  options.max_model_len = config.max_model_len > 0 ? config.max_model_len : max_positions;
  options.enable_prefix_cache = config.enable_prefix_cache;
  if (options.max_model_len < 2) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the model has %d positions (max_position_embeddings); a prompt and its "
                        "output need at least 2, so give another model",
                        max_positions));
  }
  if (config.compression_policy == "none") return options;
  options.compression = {.max_cache_blocks = config.max_cache_blocks_per_seq,
                         .window = config.query_cache_len,
                         .pin_prompt = config.pin_prompt == "on",
                         .compress_prefill = config.compress_prefill,
                         .async = config.enable_async_compress};
  options.num_query_slots = static_cast<int64_t>(capacity.num_query_slots);
  options.num_host_blocks = static_cast<int64_t>(capacity.num_host_blocks);
  options.enable_hybrid = config.enable_hybrid_engine;
  options.adaptive_budget = config.adaptive_kv_budget;
  return options;
}

absl::Status Engine::StartServing() {
  const Config& config = parts_.config;
  const WorkerGroup::Capacity& capacity = workers_.capacity();
  ZIPAGE_ASSIGN_OR_RETURN(const SchedulerOptions options, MakeSchedulerOptions());
  scheduler_ = std::make_unique<Scheduler>(options);

  RequestBuilder::Options build;
  if (!config.served_model_name.empty()) build.served_names = {config.served_model_name};
  build.default_name = ModelName(config);
  build.max_model_len = options.max_model_len;
  build.vocab_size = static_cast<int32_t>(capacity.vocab_size);
  build.eos_token_ids = parts_.tokenizer.eos_token_ids();
  build.engine_seed = static_cast<uint64_t>(config.seed);
  build.defaults = parts_.generation_defaults;
  build.compresses = options.compression.max_cache_blocks > 0;
  build.block_size = config.kvcache_block_size;
  build.num_blocks = options.num_blocks;
  build.num_always_kept =
      config.query_cache_len + (config.use_attention_sink ? config.sink_len : 0);
  build.repetition_penalty = static_cast<float>(config.repetition_penalty);
  build.repetition_ngram_size = config.repetition_ngram_size;
  build.repetition_ngram_count = config.repetition_ngram_count;
  builder_ =
      std::make_unique<RequestBuilder>(&parts_.tokenizer, parts_.templates, std::move(build));
  LOG(INFO) << absl::StrFormat(
      "engine is ready: %d KV blocks of %d tokens, sequences of up to %d tokens",
      options.num_blocks, options.block_size, options.max_model_len);
  return absl::OkStatus();
}

absl::Status Engine::ApplyResults() {
  for (StepResult& result : workers_.TakeResults()) {
    device_seconds_ += static_cast<double>(result.device_micros) * 1e-6;
    compression_seconds_ += static_cast<double>(result.compression_micros) * 1e-6;
    const SchedulerStats stats = scheduler_->stats();
    history_.Add(
        result.device_micros, static_cast<double>(stats.num_running),
        static_cast<double>(stats.num_used_blocks) / static_cast<double>(stats.num_blocks));
    ZIPAGE_ASSIGN_OR_RETURN(const std::vector<TokenEvent> events,
                            scheduler_->Apply(std::move(result)));
    for (const TokenEvent& event : events) {
      auto open = open_requests_.find(event.sequence->request->id);
      CHECK(open != open_requests_.end()) << "a token for request " << event.sequence->request->id;
      if (open->second.response.AddToken(event)) {
        scheduler_->FinishSequence(event.sequence, FinishReason::kStopString);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status Engine::PlanSteps() {
  while (scheduler_->num_steps_in_flight() < kMaxStepsInFlight) {
    const std::optional<StepPlan> plan = scheduler_->Schedule();
    if (!plan.has_value()) break;
    last_step_ = plan->step;
    ZIPAGE_RETURN_IF_ERROR(workers_.Broadcast(*plan, Now()));
  }
  return absl::OkStatus();
}

void Engine::AnswerFinished() {
  for (const std::unique_ptr<Request>& request : scheduler_->TakeFinished()) {
    auto node = open_requests_.extract(request->id);
    CHECK(!node.empty()) << "request " << request->id << " finished twice";
    OpenRequest& open = node.mapped();
    Job* job = open.job.get();
    if (job->state() != JobState::kRunning) continue;  // It was abandoned meanwhile.
    const bool corrupted =
        std::any_of(request->sequences.begin(), request->sequences.end(),
                    [](const Sequence& s) { return s.finish_reason == FinishReason::kCorrupted; });
    const std::string name = RequestName(request->id);
    absl::Status status;
    if (corrupted) {
      const BuiltRequest& built = open.response.request();
      status = job->AnswerFailure(FormatFailure(
          name, built.custom_id, built.line, "internal_error",
          "the model's logits are not numbers for this request; check the checkpoint and dtype"));
    } else {
      int64_t output_tokens = 0;
      for (const Sequence& s : request->sequences) {
        output_tokens += static_cast<int64_t>(s.output().size());
      }
      status = job->AnswerSuccess(open.response.FormatSuccess(*request, name, UnixSeconds()),
                                  static_cast<int64_t>(request->prompt().size()), output_tokens);
    }
    if (!status.ok()) AbandonJob(job, status);
  }
}

// ---------------------------------------------------------------- jobs

bool Engine::ReadJobs() {
  if (draining_) return false;
  const Time deadline = Now() + kReadingTime;
  bool more = false;
  const size_t first = first_to_read_;
  for (size_t i = 0; i < jobs_.size(); ++i) {
    const size_t index = (first + i) % jobs_.size();
    if (!jobs_[index]->reading()) continue;
    if (i > 0 && Now() >= deadline) {
      first_to_read_ = index;
      return true;
    }
    more |= ReadJob(jobs_[index], deadline);
  }
  return more;
}

bool Engine::ReadJob(const std::shared_ptr<Job>& job, Time deadline) {
  do {
    // As many as can run wait, so that a step never waits for input and memory does not grow with
    // the file. Samples are counted, each of which holds the prompt.
    if (scheduler_->num_waiting(job->id()) >= parts_.config.max_num_seqs) return false;
    absl::StatusOr<std::optional<ParseResult>> parsed = job->Next();
    absl::Status status = parsed.status();
    if (status.ok()) {
      if (!parsed->has_value()) return false;
      status = Accept(job, *std::move(*parsed));
    }
    if (!status.ok()) {
      AbandonJob(job.get(), status);
      return false;
    }
  } while (Now() < deadline);
  return true;
}

absl::Status Engine::Accept(const std::shared_ptr<Job>& job, ParseResult parsed) {
  const uint64_t id = next_request_id_++;
  auto* request = std::get_if<ParsedRequest>(&parsed);
  if (request == nullptr) {
    return job->AnswerFailure(FormatRefusal(std::get<RequestError>(parsed), RequestName(id)));
  }
  BuildResult built = builder_->Build(std::move(*request));
  if (const auto* error = std::get_if<RequestError>(&built)) {
    return job->AnswerFailure(FormatRefusal(*error, RequestName(id)));
  }
  auto& accepted = std::get<BuiltRequest>(built);
  absl::Status fits = scheduler_->CheckFits(static_cast<int64_t>(accepted.prompt_token_ids.size()),
                                            accepted.options);
  if (!fits.ok()) {
    RequestError error;
    error.line = accepted.line;
    error.custom_id = accepted.custom_id;
    error.field = "prompt";
    error.message = std::string(fits.message());
    return job->AnswerFailure(FormatRefusal(error, RequestName(id)));
  }
  auto queued = std::make_unique<Request>(id, job->id(), accepted.prompt_token_ids,
                                          accepted.sampling, accepted.n, accepted.options);
  accepted.prompt_token_ids = {};  // The request holds them from here on.
  open_requests_.emplace(
      id, OpenRequest{job, Response(std::move(accepted), &parts_.tokenizer), queued.get()});
  scheduler_->Submit(std::move(queued));
  return absl::OkStatus();
}

void Engine::AbandonJob(Job* job, const absl::Status& status) {
  LOG(ERROR) << absl::StrFormat("job %d failed: %s", job->id(), status.message());
  job->Abandon(std::string(status.message()), Now());
  scheduler_->CancelJob(job->id());
}

void Engine::FinishJobs() {
  for (const std::shared_ptr<Job>& job : jobs_) {
    if (!job->IsComplete()) continue;
    if (absl::Status status = job->Finish(Now()); !status.ok()) {
      LOG(ERROR) << absl::StrFormat("job %d failed: %s", job->id(), status.message());
    }
  }
}

void Engine::ForgetJobs() {
  const auto has_ended = [](const std::shared_ptr<Job>& job) {
    return job->state() != JobState::kRunning;
  };
  int64_t num_surplus = std::count_if(jobs_.begin(), jobs_.end(), has_ended) - kMaxEndedJobs;
  std::erase_if(
      jobs_, [&](const std::shared_ptr<Job>& job) { return has_ended(job) && num_surplus-- > 0; });
}

std::string Engine::RequestName(uint64_t request_id) const {
  return absl::StrFormat("%x-%d", started_unix_, request_id);
}

// ---------------------------------------------------------------- the end

void Engine::StartDraining() {
  draining_ = true;
  drain_deadline_ = Now() + std::chrono::duration_cast<std::chrono::nanoseconds>(
                                std::chrono::duration<double>(parts_.config.drain_timeout_s));
  if (scheduler_ != nullptr) scheduler_->StopAdmission();
}

bool Engine::Drained() const {
  if (scheduler_ == nullptr || Now() >= drain_deadline_) return true;
  return scheduler_->idle();
}

bool Engine::EndJobs() {
  bool all_done = true;
  for (const std::shared_ptr<Job>& job : jobs_) {
    if (job->state() != JobState::kRunning) continue;
    all_done = false;
    job->Abandon("the engine was stopped before the job was done; submit it again", Now());
  }
  return all_done;
}

// ---------------------------------------------------------------- clients

void Engine::HandleClients(transport::ServerSocket* socket) {
  for (int i = 0; i < kClientMessagesPerTurn; ++i) {
    const std::optional<transport::Received> received = socket->Receive();
    if (!received.has_value()) return;
    absl::StatusOr<ClientMessage> message = wire::DecodeClientMessage(received->bytes);
    const ClientReply reply = message.ok()
                                  ? Reply(*message)
                                  : ClientReply(Refused{std::string(message.status().message())});
    if (absl::Status status = socket->Send(received->peer, wire::Encode(reply)); !status.ok()) {
      LOG(WARNING) << "a client left before its answer: " << status.message();
    }
  }
}

ClientReply Engine::Reply(const ClientMessage& message) {
  if (const auto* submit = std::get_if<SubmitJob>(&message)) return Submit(*submit);
  if (const auto* cancel = std::get_if<CancelJob>(&message)) return Cancel(*cancel);
  return Status();
}

ClientReply Engine::Submit(const SubmitJob& submit) {
  if (draining_) return Refused{"the engine is stopping and takes no more jobs"};
  const auto max_line_bytes =
      static_cast<size_t>(parts_.config.max_line_mb * static_cast<double>(1 << 20));
  absl::StatusOr<std::unique_ptr<Job>> job = Job::Open(next_job_id_, submit, max_line_bytes, Now());
  if (!job.ok()) return Refused{std::string(job.status().message())};
  jobs_.push_back(*std::move(job));
  ForgetJobs();
  LOG(INFO) << absl::StrFormat("job %d: %s -> %s", next_job_id_, submit.input_path,
                               submit.output_path);
  return JobAccepted{next_job_id_++};
}

ClientReply Engine::Cancel(const CancelJob& cancel) {
  for (const std::shared_ptr<Job>& job : jobs_) {
    if (job->id() != cancel.job_id) continue;
    if (job->state() != JobState::kRunning) {
      return Refused{absl::StrFormat("job %d has ended already", cancel.job_id)};
    }
    job->Abandon("", Now());
    if (scheduler_ != nullptr) scheduler_->CancelJob(job->id());
    return JobCancelled{cancel.job_id};
  }
  return Refused{absl::StrFormat("there is no job %d; zipage-status lists them", cancel.job_id)};
}

EngineStatus Engine::Status() const {
  const Time now = Now();
  EngineStatus status;
  status.model = ModelName(parts_.config);
  status.ready = scheduler_ != nullptr;
  if (parts_.job_sockets.size() > 1) status.job_endpoint = parts_.job_sockets[1]->endpoint();
  status.draining = draining_;
  status.uptime = std::chrono::duration<double>(now - started_).count();
  status.step = last_step_;
  status.block_size = static_cast<uint32_t>(parts_.config.kvcache_block_size);
  status.device_seconds = device_seconds_;
  status.compression_seconds = compression_seconds_;
  status.running_history = history_.running();
  status.block_history = history_.block_share();
  status.history_seconds = history_.part_seconds();
  if (scheduler_ != nullptr) {
    const SchedulerStats stats = scheduler_->stats();
    status.num_blocks = static_cast<uint64_t>(stats.num_blocks);
    status.num_free_blocks = static_cast<uint64_t>(stats.num_free_blocks);
    status.num_cached_blocks = static_cast<uint64_t>(stats.num_cached_blocks);
    status.num_used_blocks = static_cast<uint64_t>(stats.num_used_blocks);
    status.num_running = static_cast<uint64_t>(stats.num_running);
    status.num_waiting = static_cast<uint64_t>(stats.num_waiting);
    status.peak_running = static_cast<uint64_t>(stats.peak_running);
    status.num_preemptions = static_cast<uint64_t>(stats.num_preemptions);
    status.prompt_tokens = static_cast<uint64_t>(stats.prompt_tokens);
    status.cached_tokens = static_cast<uint64_t>(stats.cached_tokens);
    status.recomputed_tokens = static_cast<uint64_t>(stats.recomputed_tokens);
    status.output_tokens = static_cast<uint64_t>(stats.output_tokens);
    status.num_query_slots = static_cast<uint64_t>(stats.num_query_slots);
    status.num_used_query_slots = static_cast<uint64_t>(stats.num_used_query_slots);
    status.num_swapped = static_cast<uint64_t>(stats.num_swapped);
    status.num_swaps_out = static_cast<uint64_t>(stats.num_swaps_out);
    status.num_compressions = static_cast<uint64_t>(stats.num_compressions);
  }
  status.workers = workers_.Status(now);
  absl::flat_hash_map<uint64_t, uint64_t> running;  // Requests by job.
  for (const auto& [id, open] : open_requests_) {
    const auto& sequences = open.request->sequences;
    if (std::any_of(sequences.begin(), sequences.end(),
                    [](const Sequence& s) { return s.sequence_slot.has_value(); })) {
      ++running[open.job->id()];
    }
  }
  for (const std::shared_ptr<Job>& job : jobs_) {
    status.jobs.push_back(job->Status(now, running[job->id()]));
  }
  return status;
}

}  // namespace zipage
