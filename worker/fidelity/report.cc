#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "worker/fidelity/fidelity.h"

namespace zipage {
namespace {

using nlohmann::ordered_json;

// JSON has no NaN.
ordered_json Number(double value) {
  return std::isfinite(value) ? ordered_json(value) : ordered_json(nullptr);
}

ordered_json SumsJson(const FidelitySums& sums) {
  return {{"positions", sums.positions},
          {"agreement", Number(sums.agreement())},
          {"kl", Number(sums.mean_divergence())},
          {"full_accuracy", Number(sums.full_accuracy())},
          {"accuracy", Number(sums.accuracy())},
          {"full_perplexity", Number(sums.full_perplexity())},
          {"perplexity", Number(sums.perplexity())}};
}

ordered_json OptionsJson(const Config& config) {
  return {{"compression_policy", config.compression_policy},
          {"kvcache_block_size", config.kvcache_block_size},
          {"max_cache_blocks_per_seq", config.max_cache_blocks_per_seq},
          {"query_cache_len", config.query_cache_len},
          {"pin_prompt", config.pin_prompt},
          {"score_share", config.score_share},
          {"use_global_score", config.use_global_score},
          {"decay_factor", config.decay_factor},
          {"max_norm", config.max_norm},
          {"enable_pooling", config.enable_pooling},
          {"continues_pooling", config.continues_pooling},
          {"pooling_size", config.pooling_size},
          {"use_similarity", config.use_similarity},
          {"lightning_similarity", config.lightning_similarity},
          {"similarity_lambda", config.similarity_lambda},
          {"similarity_temperature", config.similarity_temperature},
          {"use_attention_sink", config.use_attention_sink},
          {"sink_len", config.sink_len},
          {"compress_prefill", config.compress_prefill}};
}

ordered_json EntryJson(const FidelityReport::Entry& entry) {
  const FidelityStatistics& statistics = entry.statistics;
  ordered_json buckets = ordered_json::array();
  for (size_t i = 0; i < statistics.buckets().size(); ++i) {
    ordered_json bucket = {{"from", static_cast<int64_t>(i) * statistics.bucket_width()}};
    bucket.update(SumsJson(statistics.buckets()[i]));
    buckets.push_back(std::move(bucket));
  }
  const RecallSums& recall = statistics.recall();
  return {{"name", entry.setting.name},
          {"options", OptionsJson(entry.setting.config)},
          {"cases", statistics.num_cases()},
          {"compressed_cases", statistics.num_compressed_cases()},
          {"compressions", statistics.num_compressions()},
          {"prompt_kept", Number(statistics.prompt_kept())},
          {"all", SumsJson(statistics.all())},
          {"after_compression", SumsJson(statistics.after_compression())},
          {"bucket_width", statistics.bucket_width()},
          {"buckets", std::move(buckets)},
          {"recall",
           {{"probes", recall.probes},
            {"full_recalled", recall.full_recalled},
            {"recalled", recall.recalled},
            {"tokens", SumsJson(recall.tokens)}}}};
}

// A mean as a cell; "-" for one over nothing.
std::string Cell(const char* format, double value) {
  if (!std::isfinite(value)) return "-";
  return absl::StrFormat(*absl::ParsedFormat<'f'>::New(format), value);
}

std::string Percent(double share) { return Cell("%.2f", 100 * share); }

std::string RecallCell(const RecallSums& recall) {
  if (recall.probes == 0) return "-";
  return absl::StrFormat("%d/%d/%d", recall.recalled, recall.full_recalled, recall.probes);
}

}  // namespace

std::string ReportTable(const FidelityReport& report) {
  size_t width = 8;
  size_t num_buckets = 0;
  for (const FidelityReport::Entry& entry : report.entries) {
    width = std::max(width, entry.setting.name.size());
    num_buckets = std::max(num_buckets, entry.statistics.buckets().size());
  }
  const auto column = static_cast<int>(width);
  std::string text = absl::StrFormat(
      "%s, %s, %.1f s\n"
      "Against the full cache; * after a case's first compression. agree: same most probable "
      "token, %%; KL in nats;\n"
      "ppl: perplexity of the text; prompt: kept to the end, %%; recall: setting/full "
      "cache/probes.\n\n",
      report.model, report.dtype, report.seconds);
  absl::StrAppendFormat(&text, "%-*s %6s %9s %9s %7s %7s %8s %8s %8s %8s %7s %s\n", column,
                        "setting", "budget", "positions", "*", "agree", "*agree", "KL", "*KL",
                        "*full ppl", "*ppl", "prompt", "recall");
  for (const FidelityReport::Entry& entry : report.entries) {
    const FidelityStatistics& statistics = entry.statistics;
    const FidelitySums& after = statistics.after_compression();
    const bool full = entry.setting.config.compression_policy == "none";
    absl::StrAppendFormat(
        &text, "%-*s %6s %9d %9d %7s %7s %8s %8s %8s %8s %7s %s\n", column, entry.setting.name,
        full ? "-" : absl::StrCat(statistics.bucket_width()), statistics.all().positions,
        after.positions, Percent(statistics.all().agreement()), Percent(after.agreement()),
        Cell("%.4f", statistics.all().mean_divergence()), Cell("%.4f", after.mean_divergence()),
        Cell("%.3f", after.full_perplexity()), Cell("%.3f", after.perplexity()),
        Percent(statistics.prompt_kept()), RecallCell(statistics.recall()));
  }
  text += "\nagree %/KL by place in the output, in budgets\n";
  absl::StrAppendFormat(&text, "%-*s", column, "setting");
  for (size_t i = 0; i < num_buckets; ++i) {
    absl::StrAppendFormat(&text, " %14s", absl::StrCat(i, "-", i + 1));
  }
  text += "\n";
  for (const FidelityReport::Entry& entry : report.entries) {
    absl::StrAppendFormat(&text, "%-*s", column, entry.setting.name);
    for (const FidelitySums& sums : entry.statistics.buckets()) {
      absl::StrAppendFormat(
          &text, " %14s",
          absl::StrCat(Percent(sums.agreement()), "/", Cell("%.4f", sums.mean_divergence())));
    }
    text += "\n";
  }
  return text;
}

std::string ReportJson(const FidelityReport& report) {
  ordered_json settings = ordered_json::array();
  for (const FidelityReport::Entry& entry : report.entries) settings.push_back(EntryJson(entry));
  const ordered_json json = {{"model", report.model},
                             {"dtype", report.dtype},
                             {"seconds", report.seconds},
                             {"settings", std::move(settings)}};
  return json.dump(1, ' ', /*ensure_ascii=*/false, ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace zipage
