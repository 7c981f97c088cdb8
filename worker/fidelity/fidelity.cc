#include "worker/fidelity/fidelity.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "worker/comm/single.h"
#include "worker/fidelity/replay.h"
#include "worker/open_model.h"
#include "worker/worker.h"

namespace zipage {
namespace {

// A step's logits are computed at once.
constexpr int64_t kStepTokens = Transformer::kMaxLogitRows;
constexpr size_t kMiB = size_t{1} << 20;

// All replays in step with each other.
class Comparison {
 public:
  Comparison(const std::vector<FidelityCase>& cases, int64_t vocab, Backend* backend)
      : cases_(cases), vocab_(vocab), backend_(backend) {
    for (const FidelityCase& one : cases) {
      total_ += static_cast<int64_t>(one.output.size());
    }
    full_logits_.resize(kStepTokens * vocab);
    logits_.resize(kStepTokens * vocab);
    compared_.resize(kStepTokens);
  }

  absl::Status Prepare(Config base, const std::vector<FidelitySetting>& settings,
                       Transformer* transformer, Collective* collective);
  absl::Status Run(const FidelityProgressSink& progress);
  FidelityStatistics TakeStatistics(size_t setting) {
    return std::move(entries_[setting].statistics);
  }

 private:
  struct Entry {
    std::unique_ptr<Replay> replay;
    FidelityStatistics statistics;
    std::vector<FidelityProgress> progress;  // [slots]
  };
  // What runs in a sequence slot of every replay.
  struct Slot {
    const FidelityCase* one = nullptr;
    int64_t position = 0;
  };
  // A token of the step whose prediction is compared.
  struct Prediction {
    SequenceSlot slot = 0;
    int64_t position = 0;
    bool wanted = false;  // it predicts a token of the output
  };

  void FillSlots();
  void FinishCases();
  std::vector<ReplayChunk> NextChunks() const;
  int64_t ChunkEnd(const Slot& slot) const;
  absl::Status RunFull(const std::vector<ReplayChunk>& chunks, bool all_logits);
  absl::Status RunSetting(const std::vector<ReplayChunk>& chunks, bool all_logits, Entry* entry);
  absl::Status CopyLogits(Replay* replay, std::vector<float>* out);

  const std::vector<FidelityCase>& cases_;
  const int64_t vocab_;
  Backend* backend_;
  std::unique_ptr<Replay> full_;
  std::vector<Entry> entries_;
  std::vector<Slot> slots_;
  size_t next_case_ = 0;
  int64_t done_ = 0;   // predicted tokens
  int64_t total_ = 0;  // to predict

  std::vector<Prediction> predictions_;  // of the step's logit rows
  std::vector<int32_t> targets_;         // the same
  std::vector<float> full_logits_;       // [kStepTokens, vocab], as the next
  std::vector<float> logits_;
  std::vector<LogitComparison> compared_;
};

absl::Status Comparison::Prepare(Config base, const std::vector<FidelitySetting>& settings,
                                 Transformer* transformer, Collective* collective) {
  // Chunks are mostly one block long, so that so many sequences fill a step.
  int block_size = base.kvcache_block_size;
  for (const FidelitySetting& setting : settings) {
    block_size = std::min(block_size, setting.config.kvcache_block_size);
  }
  const int64_t num_slots =
      std::clamp<int64_t>(kStepTokens / block_size, 1, static_cast<int64_t>(cases_.size()));
  slots_.resize(num_slots);
  const Replay::Limits limits{
      .num_slots = static_cast<int>(num_slots), .max_step_tokens = kStepTokens, .cases = &cases_};
  base.compression_policy = "none";
  ZIPAGE_ASSIGN_OR_RETURN(full_, Replay::Create(base, limits, transformer, collective, backend_));
  for (const FidelitySetting& setting : settings) {
    const Config& config = setting.config;
    ZIPAGE_ASSIGN_OR_RETURN(std::unique_ptr<Replay> replay,
                            Replay::Create(config, limits, transformer, collective, backend_));
    const int64_t budget = int64_t{config.max_cache_blocks_per_seq} * config.kvcache_block_size;
    entries_.push_back(
        {std::move(replay), FidelityStatistics(budget), std::vector<FidelityProgress>(num_slots)});
  }
  return absl::OkStatus();
}

absl::Status Comparison::Run(const FidelityProgressSink& progress) {
  FillSlots();
  for (std::vector<ReplayChunk> chunks = NextChunks(); !chunks.empty(); chunks = NextChunks()) {
    bool all_logits = false;
    for (const ReplayChunk& chunk : chunks) {
      const auto num_prompt = static_cast<int64_t>(slots_[chunk.slot].one->prompt.size());
      all_logits |= chunk.start + 1 >= num_prompt;
    }
    ZIPAGE_RETURN_IF_ERROR(RunFull(chunks, all_logits));
    for (Entry& entry : entries_) {
      ZIPAGE_RETURN_IF_ERROR(RunSetting(chunks, all_logits, &entry));
    }
    for (const ReplayChunk& chunk : chunks) slots_[chunk.slot].position += chunk.num_tokens;
    for (const Prediction& prediction : predictions_) done_ += prediction.wanted ? 1 : 0;
    if (progress != nullptr) progress(done_, total_);
    FinishCases();
    FillSlots();
  }
  return absl::OkStatus();
}

void Comparison::FillSlots() {
  for (size_t i = 0; i < slots_.size() && next_case_ < cases_.size(); ++i) {
    if (slots_[i].one != nullptr) continue;
    const FidelityCase& one = cases_[next_case_++];
    slots_[i] = {.one = &one, .position = 0};
    const auto slot = static_cast<SequenceSlot>(i);
    full_->Begin(slot, one);
    for (Entry& entry : entries_) {
      entry.replay->Begin(slot, one);
      entry.progress[i] = {.num_output = static_cast<int64_t>(one.output.size()),
                           .recall_tokens = one.recall_tokens};
    }
  }
}

void Comparison::FinishCases() {
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    if (slot.one == nullptr || slot.position < slot.one->num_computed()) continue;
    const auto index = static_cast<SequenceSlot>(i);
    for (Entry& entry : entries_) {
      entry.statistics.AddCase(entry.replay->num_compressions(index),
                               entry.replay->prompt_kept(index),
                               static_cast<int64_t>(slot.one->prompt.size()));
    }
    slot.one = nullptr;
  }
}

std::vector<ReplayChunk> Comparison::NextChunks() const {
  std::vector<ReplayChunk> chunks;
  int64_t left = kStepTokens;
  for (size_t i = 0; i < slots_.size() && left > 0; ++i) {
    const Slot& slot = slots_[i];
    if (slot.one == nullptr) continue;
    const int64_t count = std::min(ChunkEnd(slot) - slot.position, left);
    chunks.push_back({static_cast<SequenceSlot>(i), slot.position, count});
    left -= count;
  }
  return chunks;
}

int64_t Comparison::ChunkEnd(const Slot& slot) const {
  // The same chunks for all, so that settings differ by what they keep and by nothing else.
  int64_t end = slot.one->num_computed();
  for (const Entry& entry : entries_) {
    end = std::min(end, entry.replay->points().Next(*slot.one, slot.position + 1));
  }
  // Nobody asks what the first tokens of a prompt predict.
  const int64_t first_wanted = static_cast<int64_t>(slot.one->prompt.size()) - 1;
  return slot.position < first_wanted ? std::min(end, first_wanted) : end;
}

absl::Status Comparison::RunFull(const std::vector<ReplayChunk>& chunks, bool all_logits) {
  ZIPAGE_RETURN_IF_ERROR(full_->Step(chunks, all_logits));
  predictions_.clear();
  targets_.clear();
  for (const LogitRow& row : full_->logit_rows()) {
    const FidelityCase& one = *slots_[row.sequence_slot].one;
    const int64_t index = row.position + 1 - static_cast<int64_t>(one.prompt.size());
    predictions_.push_back({row.sequence_slot, row.position, index >= 0});
    targets_.push_back(index >= 0 ? one.output[index] : 0);
  }
  return CopyLogits(full_.get(), &full_logits_);
}

absl::Status Comparison::RunSetting(const std::vector<ReplayChunk>& chunks, bool all_logits,
                                    Entry* entry) {
  Replay* const replay = entry->replay.get();
  ZIPAGE_RETURN_IF_ERROR(replay->Step(chunks, all_logits));
  ZIPAGE_RETURN_IF_ERROR(CopyLogits(replay, &logits_));
  const auto num_rows = static_cast<int64_t>(predictions_.size());
  CHECK_EQ(replay->logit_rows().size(), predictions_.size());
  cpu::CompareLogits({.full = full_logits_.data(),
                      .other = logits_.data(),
                      .target = targets_.data(),
                      .out = compared_.data(),
                      .num_rows = num_rows,
                      .vocab = vocab_});
  // A case's last token is the first of the rows, so its others come before it here.
  std::vector<int64_t> order(num_rows);
  for (int64_t i = 0; i < num_rows; ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [this](int64_t a, int64_t b) {
    return predictions_[a].position < predictions_[b].position;
  });
  for (const int64_t i : order) {
    const Prediction& prediction = predictions_[i];
    CHECK_EQ(replay->logit_rows()[i].position, prediction.position);
    if (!prediction.wanted) continue;
    if (!compared_[i].valid) {
      return absl::InternalError(
          absl::StrCat("the logits of case \"", slots_[prediction.slot].one->id, "\" at position ",
                       prediction.position, " are no numbers; are the weights damaged?"));
    }
    entry->statistics.Add(compared_[i], targets_[i],
                          /*compressed=*/replay->num_compressions(prediction.slot) > 0,
                          &entry->progress[prediction.slot]);
  }
  return absl::OkStatus();
}

absl::Status Comparison::CopyLogits(Replay* replay, std::vector<float>* out) {
  const auto num_rows = static_cast<int64_t>(replay->logit_rows().size());
  if (num_rows == 0) return absl::OkStatus();
  ZIPAGE_ASSIGN_OR_RETURN(float* const logits, replay->Logits(0, num_rows));
  backend_->CopyToHost(out->data(), logits, num_rows * vocab_ * sizeof(float));
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<FidelityReport> RunFidelity(const Config& base,
                                           const std::vector<FidelitySetting>& settings,
                                           const std::string& input,
                                           const FidelityProgressSink& progress) {
  CHECK(!settings.empty());
  ZIPAGE_RETURN_IF_ERROR(CheckReplayable(base));
  ZIPAGE_ASSIGN_OR_RETURN(const std::unique_ptr<Backend> backend, MakeBackend(base));
  ZIPAGE_ASSIGN_OR_RETURN(OpenedModel model, OpenModel(base, *backend, /*needs_checkpoint=*/true));
  ZIPAGE_ASSIGN_OR_RETURN(
      const std::vector<FidelityCase> cases,
      ReadCases(input, {.vocab_size = model.config.vocab_size,
                        .max_model_len = model.max_model_len,
                        .max_line_bytes = static_cast<size_t>(base.max_line_mb * kMiB),
                        .seed = static_cast<uint64_t>(base.seed)}));
  ZIPAGE_ASSIGN_OR_RETURN(Weights weights,
                          LoadWeights(model.config, *model.checkpoint, /*rank=*/0, /*tp=*/1,
                                      model.dtype, model.max_model_len, backend.get()));
  SingleCollective collective;
  ZIPAGE_ASSIGN_OR_RETURN(Transformer transformer,
                          Transformer::Create(model.config, std::move(weights), kStepTokens,
                                              &collective, backend.get()));
  const auto start = std::chrono::steady_clock::now();
  Comparison comparison(cases, model.config.vocab_size, backend.get());
  ZIPAGE_RETURN_IF_ERROR(comparison.Prepare(base, settings, &transformer, &collective));
  ZIPAGE_RETURN_IF_ERROR(comparison.Run(progress));
  FidelityReport report;
  report.model = base.model;
  report.dtype = DTypeName(model.dtype);
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  for (size_t i = 0; i < settings.size(); ++i) {
    report.entries.push_back({settings[i], comparison.TakeStatistics(i)});
  }
  return report;
}

}  // namespace zipage
