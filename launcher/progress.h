#pragma once
// Text for people about engines and jobs. Pure functions, except ProgressPrinter, which owns the
// one live line of a terminal.

#include <cstdint>
#include <cstdio>
#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "proto/messages.h"

namespace zipage {

// 987, 12.3k, 4.56M, 7.89G: three digits.
std::string FormatCount(uint64_t n);
// 9s, 2m05s, 1h02m, 3d04h. "-" if it is negative or not a number: unknown.
std::string FormatDuration(double seconds);

// One character for each value, the higher the fuller, as shares of `top`: "▁▄█" for 0, 0.5, 1.
// Values outside of [0, top], and what is not a number, show as the nearest end.
std::string Sparkline(const std::vector<float>& values, double top);

// The growth of a counter over the last `window` seconds.
class RateMeter {
 public:
  explicit RateMeter(double window) : window_(window) {}
  // REQUIRES: `seconds` does not decrease. A counter that falls starts the meter anew.
  void Add(double seconds, uint64_t count);
  // 0 until two samples lie apart.
  double PerSecond() const;

 private:
  struct Sample {
    double seconds;
    uint64_t count;
  };
  const double window_;
  std::deque<Sample> samples_;
};

// Seconds until the job is done at `lines_per_second`; negative if that cannot be told.
double EtaSeconds(const JobStatus& job, double lines_per_second);

// "12/200 lines  1 failed  345 tok/s  8 running  4 waiting  kv 37%  56 compressions  eta 1m05s";
// compressions only if there are any.
std::string ProgressLine(const EngineStatus& engine, const JobStatus& job, double tokens_per_second,
                         double eta_seconds);

// What a starting engine of `tp` ranks waits for: "rank 0 loading weights, rank 1 not connected".
std::string StartupLine(const EngineStatus& engine, int tp);

// The end of a job, several lines. `wall_seconds` counts from the command's start.
std::string Summary(const EngineStatus& engine, const JobStatus& job, double wall_seconds);

// The engine, its workers and its jobs as a table.
std::string StatusTable(const EngineStatus& engine);
// The same as one JSON object, keys named like the fields of proto/messages.h.
std::string StatusJson(const EngineStatus& engine);

// Prints to `file`: on a terminal one line that is rewritten; elsewhere a line when `interval`
// seconds have passed or the text is marked as news; nothing if quiet.
class ProgressPrinter {
 public:
  static constexpr double kInterval = 10;

  ProgressPrinter(FILE* file, bool quiet);
  ~ProgressPrinter() { Clear(); }
  ProgressPrinter(const ProgressPrinter&) = delete;
  ProgressPrinter& operator=(const ProgressPrinter&) = delete;

  void Update(double seconds, std::string_view line, bool news = false);
  // Takes the live line away, so that other text can be printed.
  void Clear();

 private:
  FILE* const file_;
  const bool quiet_;
  const bool terminal_;
  bool live_ = false;
  double next_ = 0;
};

}  // namespace zipage
