#include "launcher/progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "proto/status.h"

namespace zipage {
namespace {

// Characters of a drawn history: its line fits a terminal.
constexpr size_t kHistoryColumns = 32;

const char* StateText(JobState state) {
  switch (state) {
    case JobState::kRunning:
      return "running";
    case JobState::kFinished:
      return "finished";
    case JobState::kCancelled:
      return "cancelled";
    case JobState::kFailed:
      return "failed";
  }
  return "unknown";
}

double Ratio(double part, double whole) { return whole > 0 ? part / whole : 0; }

// "12/200", or "12" while the total is unknown.
std::string DoneOfTotal(const JobStatus& job) {
  const uint64_t done = job.num_succeeded + job.num_failed;
  return job.num_lines == 0 ? absl::StrCat(done) : absl::StrCat(done, "/", job.num_lines);
}

// Means of neighbours, so that at most `max_size` values are left. The last may be of fewer.
std::vector<float> Coarser(const std::vector<float>& values, size_t max_size) {
  const size_t group = (values.size() + max_size - 1) / max_size;
  std::vector<float> means;
  for (size_t i = 0; i < values.size(); i += group) {
    const size_t end = std::min(i + group, values.size());
    float sum = 0;
    for (size_t j = i; j < end; ++j) sum += values[j];
    means.push_back(sum / static_cast<float>(end - i));
  }
  return means;
}

// "▁▄█  min 1.0, mean 5.3, max 9.0" of means over equal parts of time, drawn as shares of `top`
// and printed with so many decimals after a multiplication by `scale`. REQUIRES: values.
std::string HistoryText(const std::vector<float>& values, double top, double scale, int decimals,
                        const char* unit) {
  const auto [min, max] = std::minmax_element(values.begin(), values.end());
  const double mean =
      std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
  const auto text = [&](double value) {
    return absl::StrFormat("%.*f%s", decimals, scale * value, unit);
  };
  return absl::StrFormat(
      "%s  min %s, mean %s, max %s", Sparkline(Coarser(values, kHistoryColumns), top),
      text(static_cast<double>(*min)), text(mean), text(static_cast<double>(*max)));
}

// Lines about the time the engine was busy behind `label`, empty if it never was.
std::string ConcurrencyLine(const EngineStatus& engine, const char* label) {
  const std::vector<float>& running = engine.running_history;
  if (running.empty()) return "";
  const auto top = static_cast<double>(*std::max_element(running.begin(), running.end()));
  return absl::StrFormat("%s%s\n", label, HistoryText(running, top, 1, 1, ""));
}

std::string OccupancyLine(const EngineStatus& engine, const char* label) {
  if (engine.block_history.empty()) return "";
  return absl::StrFormat("%s%s\n", label, HistoryText(engine.block_history, 1, 100, 0, "%"));
}

// "1.23k, 2.1% of the device's time"
std::string CompressionText(const EngineStatus& engine) {
  return absl::StrFormat("%s, %.1f%% of the device's time", FormatCount(engine.num_compressions),
                         100 * Ratio(engine.compression_seconds, engine.device_seconds));
}

// Whether there is anything to say about compression.
bool Compresses(const EngineStatus& engine) {
  return engine.num_query_slots > 0 || engine.num_compressions > 0;
}

// Text from elsewhere must not steer the terminal.
std::string Printable(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
  return text;
}

// JSON text is UTF-8, and a path need not be.
std::string Dump(const nlohmann::ordered_json& json) {
  return json.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace);
}

}  // namespace

std::string FormatCount(uint64_t n) {
  if (n < 1000) return absl::StrCat(n);
  double value = static_cast<double>(n);
  size_t unit = 0;
  constexpr char kUnits[] = {' ', 'k', 'M', 'G', 'T', 'P', 'E'};
  while (value >= 999.5) {  // Would be printed as four digits.
    value /= 1000;
    ++unit;
  }
  const int decimals = value < 9.995 ? 2 : value < 99.95 ? 1 : 0;
  return absl::StrFormat("%.*f%c", decimals, value, kUnits[unit]);
}

std::string FormatDuration(double seconds) {
  if (!(seconds >= 0) || seconds > 1e9) return "-";
  const auto s = static_cast<int64_t>(std::llround(seconds));
  if (s < 60) return absl::StrFormat("%ds", s);
  if (s < 3600) return absl::StrFormat("%dm%02ds", s / 60, s % 60);
  if (s < 86400) return absl::StrFormat("%dh%02dm", s / 3600, s / 60 % 60);
  return absl::StrFormat("%dd%02dh", s / 86400, s / 3600 % 24);
}

std::string Sparkline(const std::vector<float>& values, double top) {
  constexpr const char* kBars[] = {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"};
  constexpr double kHighest = 7;
  std::string text;
  for (const float value : values) {
    const double share = Ratio(static_cast<double>(value), top);
    // Written so that what is not a number is the lowest.
    const double level = share > 0 ? std::min(kHighest, std::round(share * kHighest)) : 0;
    text += kBars[static_cast<size_t>(level)];
  }
  return text;
}

void RateMeter::Add(double seconds, uint64_t count) {
  if (!samples_.empty() && count < samples_.back().count) samples_.clear();
  samples_.push_back({seconds, count});
  // The oldest one kept is at or before the window's start, so that the whole window counts.
  while (samples_.size() > 2 && samples_[1].seconds <= seconds - window_) samples_.pop_front();
}

double RateMeter::PerSecond() const {
  if (samples_.size() < 2) return 0;
  return Ratio(static_cast<double>(samples_.back().count - samples_.front().count),
               samples_.back().seconds - samples_.front().seconds);
}

double EtaSeconds(const JobStatus& job, double lines_per_second) {
  const uint64_t done = job.num_succeeded + job.num_failed;
  if (job.num_lines == 0) return -1;
  if (done >= job.num_lines) return 0;
  if (lines_per_second <= 0) return -1;
  return static_cast<double>(job.num_lines - done) / lines_per_second;
}

std::string ProgressLine(const EngineStatus& engine, const JobStatus& job, double tokens_per_second,
                         double eta_seconds) {
  const double kv = 100 * Ratio(static_cast<double>(engine.num_used_blocks),
                                static_cast<double>(engine.num_blocks));
  const std::string compressions =
      engine.num_compressions > 0
          ? absl::StrFormat("%s compressions  ", FormatCount(engine.num_compressions))
          : "";
  return absl::StrFormat("%s lines  %d failed  %s tok/s  %d running  %d waiting  kv %.0f%%  %s%s",
                         DoneOfTotal(job), job.num_failed,
                         FormatCount(static_cast<uint64_t>(std::max(0.0, tokens_per_second))),
                         engine.num_running, engine.num_waiting, kv, compressions,
                         engine.draining ? std::string("stopping")
                                         : absl::StrCat("eta ", FormatDuration(eta_seconds)));
}

std::string StartupLine(const EngineStatus& engine, int tp) {
  std::vector<std::string> ranks(static_cast<size_t>(std::max(0, tp)), "not connected");
  for (const WorkerStatus& worker : engine.workers) {
    if (worker.rank >= ranks.size()) continue;
    ranks[worker.rank] = worker.pid == 0 ? "not connected" : WorkerPhaseName(worker.phase);
  }
  for (size_t i = 0; i < ranks.size(); ++i) ranks[i] = absl::StrCat("rank ", i, " ", ranks[i]);
  return absl::StrJoin(ranks, ", ");
}

std::string Summary(const EngineStatus& engine, const JobStatus& job, double wall_seconds) {
  const double hits = 100 * Ratio(static_cast<double>(engine.cached_tokens),
                                  static_cast<double>(engine.cached_tokens + engine.prompt_tokens));
  std::string text = absl::StrFormat(
      "%s: %d of %d lines succeeded, %d failed%s%s\n", StateText(job.state), job.num_succeeded,
      std::max(job.num_lines, job.num_succeeded + job.num_failed), job.num_failed,
      job.error.empty() ? "" : ": ", Printable(job.error));
  absl::StrAppendFormat(&text, "tokens       %d prompt, %d output; %.1f output tok/s over %s\n",
                        job.prompt_tokens, job.output_tokens,
                        Ratio(static_cast<double>(job.output_tokens), job.seconds),
                        FormatDuration(job.seconds));
  absl::StrAppendFormat(&text, "engine       peak %d sequences at once, %d preemptions, %s steps\n",
                        engine.peak_running, engine.num_preemptions, FormatCount(engine.step));
  text += ConcurrencyLine(engine, "concurrency  ");
  text += OccupancyLine(engine, "kv cache     ");
  if (Compresses(engine)) {
    absl::StrAppendFormat(&text, "compressions %s; %d swaps to the host\n", CompressionText(engine),
                          engine.num_swaps_out);
  }
  absl::StrAppendFormat(&text, "prefix cache %d prompt tokens found (%.1f%%)\n",
                        engine.cached_tokens, hits);
  absl::StrAppendFormat(&text, "wall time    %s\n", FormatDuration(wall_seconds));
  absl::StrAppendFormat(&text, "output       %s\n", Printable(job.output_path));
  return text;
}

std::string StatusTable(const EngineStatus& engine) {
  const char* state = engine.draining ? "stopping" : engine.ready ? "ready" : "starting";
  std::string text = absl::StrFormat("model    %s\n", Printable(engine.model));
  absl::StrAppendFormat(&text, "state    %s, up %s, step %d, device busy %.0f%%\n", state,
                        FormatDuration(engine.uptime), engine.step,
                        100 * std::min(1.0, Ratio(engine.device_seconds, engine.uptime)));
  absl::StrAppendFormat(&text, "running  %d sequences (peak %d), %d waiting, %d preemptions\n",
                        engine.num_running, engine.peak_running, engine.num_waiting,
                        engine.num_preemptions);
  text += ConcurrencyLine(engine, "         ");
  absl::StrAppendFormat(&text, "kv       %d blocks of %d: %d used, %d cached, %d free\n",
                        engine.num_blocks, engine.block_size, engine.num_used_blocks,
                        engine.num_cached_blocks, engine.num_free_blocks);
  text += OccupancyLine(engine, "         ");
  if (Compresses(engine)) {
    absl::StrAppendFormat(&text,
                          "compress %s; %d of %d query slots used, %d sequences swapped (%d "
                          "swaps)\n",
                          CompressionText(engine), engine.num_used_query_slots,
                          engine.num_query_slots, engine.num_swapped, engine.num_swaps_out);
  }
  absl::StrAppendFormat(&text,
                        "tokens   %s prompt, %s from the prefix cache, %s recomputed, %s output\n",
                        FormatCount(engine.prompt_tokens), FormatCount(engine.cached_tokens),
                        FormatCount(engine.recomputed_tokens), FormatCount(engine.output_tokens));
  absl::StrAppendFormat(&text, "\n%4s %8s  %-29s %10s %9s  %s\n", "rank", "pid", "phase", "step",
                        "heard", "device");
  for (const WorkerStatus& w : engine.workers) {
    absl::StrAppendFormat(&text, "%4d %8d  %-29s %10d %8.1fs  %s\n", w.rank, w.pid,
                          WorkerPhaseName(w.phase), w.step, w.heartbeat_age, Printable(w.device));
  }
  absl::StrAppendFormat(&text, "\n%4s %-9s %15s %7s %7s %8s %8s  %s\n", "job", "state", "lines",
                        "failed", "running", "output", "time", "name");
  for (const JobStatus& j : engine.jobs) {
    absl::StrAppendFormat(&text, "%4d %-9s %15s %7d %7d %8s %8s  %s%s%s\n", j.id,
                          StateText(j.state), DoneOfTotal(j), j.num_failed, j.num_running,
                          FormatCount(j.output_tokens), FormatDuration(j.seconds),
                          Printable(j.name), j.error.empty() ? "" : ": ", Printable(j.error));
  }
  return text;
}

std::string StatusJson(const EngineStatus& e) {
  nlohmann::ordered_json json = {
      {"model", e.model},
      {"ready", e.ready},
      {"draining", e.draining},
      {"job_endpoint", e.job_endpoint},
      {"uptime", e.uptime},
      {"step", e.step},
      {"block_size", e.block_size},
      {"num_blocks", e.num_blocks},
      {"num_free_blocks", e.num_free_blocks},
      {"num_cached_blocks", e.num_cached_blocks},
      {"num_used_blocks", e.num_used_blocks},
      {"num_running", e.num_running},
      {"num_waiting", e.num_waiting},
      {"peak_running", e.peak_running},
      {"num_preemptions", e.num_preemptions},
      {"prompt_tokens", e.prompt_tokens},
      {"cached_tokens", e.cached_tokens},
      {"recomputed_tokens", e.recomputed_tokens},
      {"output_tokens", e.output_tokens},
      {"device_seconds", e.device_seconds},
      {"num_query_slots", e.num_query_slots},
      {"num_used_query_slots", e.num_used_query_slots},
      {"num_swapped", e.num_swapped},
      {"num_swaps_out", e.num_swaps_out},
      {"num_compressions", e.num_compressions},
      {"compression_seconds", e.compression_seconds},
      {"running_history", e.running_history},
      {"block_history", e.block_history},
      {"history_seconds", e.history_seconds},
      {"workers", nlohmann::ordered_json::array()},
      {"jobs", nlohmann::ordered_json::array()},
  };
  for (const WorkerStatus& w : e.workers) {
    json["workers"].push_back({{"rank", w.rank},
                               {"pid", w.pid},
                               {"phase", WorkerPhaseName(w.phase)},
                               {"step", w.step},
                               {"heartbeat_age", w.heartbeat_age},
                               {"device", w.device}});
  }
  for (const JobStatus& j : e.jobs) {
    json["jobs"].push_back({{"id", j.id},
                            {"name", j.name},
                            {"state", StateText(j.state)},
                            {"input_path", j.input_path},
                            {"output_path", j.output_path},
                            {"num_lines", j.num_lines},
                            {"num_read", j.num_read},
                            {"num_succeeded", j.num_succeeded},
                            {"num_failed", j.num_failed},
                            {"num_running", j.num_running},
                            {"prompt_tokens", j.prompt_tokens},
                            {"output_tokens", j.output_tokens},
                            {"seconds", j.seconds},
                            {"error", j.error}});
  }
  return Dump(json);
}

ProgressPrinter::ProgressPrinter(FILE* file, bool quiet)
    : file_(file), quiet_(quiet), terminal_(isatty(fileno(file)) == 1) {}

void ProgressPrinter::Update(double seconds, std::string_view line, bool news) {
  if (quiet_) return;
  if (terminal_) {
    winsize size{};
    size_t width = 80;
    if (ioctl(fileno(file_), TIOCGWINSZ, &size) == 0 && size.ws_col > 1) width = size.ws_col;
    // One column less: a full line would wrap and could not be rewritten.
    absl::FPrintF(file_, "\r%s\x1b[K", line.substr(0, width - 1));
    live_ = true;
  } else if (news || seconds >= next_) {
    absl::FPrintF(file_, "%s\n", line);
    next_ = seconds + kInterval;
  }
  fflush(file_);
}

void ProgressPrinter::Clear() {
  if (!live_) return;
  absl::FPrintF(file_, "\r\x1b[K");
  fflush(file_);
  live_ = false;
}

}  // namespace zipage
