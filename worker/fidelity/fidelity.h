#pragma once
// Compares compression settings with the full cache on given texts (teacher forcing): every text
// goes token by token through the full cache and through every setting, side by side in one
// process, and what they predict for the next token is compared. Memory holds one load of the
// weights, a KV pool for each setting and the logits of one step. CPU backend, one rank.

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "proto/config.h"
#include "proto/status.h"
#include "worker/fidelity/cases.h"
#include "worker/fidelity/settings.h"
#include "worker/fidelity/statistics.h"

namespace zipage {

struct FidelityReport {
  struct Entry {
    FidelitySetting setting;
    FidelityStatistics statistics;
  };
  std::string model;  // folder
  std::string dtype;  // that was computed in
  double seconds = 0;
  std::vector<Entry> entries;  // in the order of the settings
};

// Takes the predicted tokens so far and their number in all cases together.
using FidelityProgressSink = std::function<void(int64_t done, int64_t total)>;

// Reads the cases of `input` and replays them. base: model, device, type and lengths; at least one
// setting, each made by ParseSetting from it. Statistics depend on nothing but a setting and the
// cases. Errors: of the options, the model and the input as their readers say; kInternal if the
// logits are no numbers.
absl::StatusOr<FidelityReport> RunFidelity(const Config& base,
                                           const std::vector<FidelitySetting>& settings,
                                           const std::string& input,
                                           const FidelityProgressSink& progress = nullptr);

// For people: a table of all settings, and one of agreement and divergence by place in the output.
std::string ReportTable(const FidelityReport& report);

// JSON text with every number of the report; a mean over nothing is null.
//   {"model", "dtype", "seconds", "settings": [{"name", "options": {…}, "cases",
//    "compressed_cases", "compressions", "prompt_kept", "all": SUMS, "after_compression": SUMS,
//    "bucket_width", "buckets": [SUMS and "from"], "recall": {"probes", "full_recalled",
//    "recalled", "tokens": SUMS}}]}
// with SUMS = {"positions", "agreement", "kl", "full_accuracy", "accuracy", "full_perplexity",
// "perplexity"}: kl in nats; accuracy: share of tokens of the text that are the most probable ones.
std::string ReportJson(const FidelityReport& report);

}  // namespace zipage
