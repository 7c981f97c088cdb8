#include "launcher/progress.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <nlohmann/json.hpp>
#include <string>

#include "launcher/exit_status.h"
#include "tests/launcher/temp_dir.h"

namespace zipage {
namespace {

EngineStatus SomeEngine() {
  EngineStatus engine;
  engine.model = "SmolLM2";
  engine.ready = true;
  engine.uptime = 100;
  engine.device_seconds = 50;
  engine.num_blocks = 64;
  engine.num_used_blocks = 16;
  engine.num_running = 8;
  engine.num_waiting = 4;
  engine.prompt_tokens = 300;
  engine.cached_tokens = 100;
  engine.peak_running = 9;
  engine.workers.push_back({0, 71, WorkerPhase::kRunning, 5, 0.25, "cpu, 2 threads"});
  return engine;
}

JobStatus SomeJob() {
  JobStatus job;
  job.id = 3;
  job.name = "gsm8k";
  job.num_lines = 200;
  job.num_succeeded = 11;
  job.num_failed = 1;
  job.output_tokens = 1000;
  job.seconds = 10;
  job.output_path = "/tmp/out.jsonl";
  return job;
}

TEST(FormatTest, CountsHaveThreeDigits) {
  EXPECT_EQ(FormatCount(0), "0");
  EXPECT_EQ(FormatCount(999), "999");
  EXPECT_EQ(FormatCount(1000), "1.00k");
  EXPECT_EQ(FormatCount(12'345), "12.3k");
  EXPECT_EQ(FormatCount(9'999), "10.0k");
  EXPECT_EQ(FormatCount(99'999), "100k");
  EXPECT_EQ(FormatCount(999'499), "999k");
  EXPECT_EQ(FormatCount(999'500), "1.00M");
  EXPECT_EQ(FormatCount(std::numeric_limits<uint64_t>::max()), "18.4E");
}

TEST(FormatTest, DurationsHaveTwoUnits) {
  EXPECT_EQ(FormatDuration(0), "0s");
  EXPECT_EQ(FormatDuration(59.4), "59s");
  EXPECT_EQ(FormatDuration(59.6), "1m00s");
  EXPECT_EQ(FormatDuration(3725), "1h02m");
  EXPECT_EQ(FormatDuration(3 * 86400 + 4 * 3600), "3d04h");
  EXPECT_EQ(FormatDuration(-1), "-");
  EXPECT_EQ(FormatDuration(std::nan("")), "-");
  EXPECT_EQ(FormatDuration(std::numeric_limits<double>::infinity()), "-");
}

TEST(RateMeterTest, MeasuresTheLastWindowOnly) {
  RateMeter meter(10);
  EXPECT_EQ(meter.PerSecond(), 0);
  for (int t = 0; t <= 100; ++t) meter.Add(t, 5);
  EXPECT_EQ(meter.PerSecond(), 0);
  for (int t = 101; t <= 110; ++t) meter.Add(t, 5 + 20 * static_cast<uint64_t>(t - 100));
  EXPECT_DOUBLE_EQ(meter.PerSecond(), 20);
  meter.Add(111, 0);  // Another engine's counter.
  EXPECT_EQ(meter.PerSecond(), 0);
  meter.Add(111, 7);
  EXPECT_EQ(meter.PerSecond(), 0) << "two samples at one time";
}

TEST(EtaTest, IsUnknownRatherThanWrong) {
  JobStatus job = SomeJob();
  EXPECT_DOUBLE_EQ(EtaSeconds(job, 2), 94);
  EXPECT_LT(EtaSeconds(job, 0), 0);
  job.num_lines = 0;
  EXPECT_LT(EtaSeconds(job, 2), 0);
  job.num_lines = 5;  // The file shrank after it was counted.
  EXPECT_EQ(EtaSeconds(job, 2), 0);
}

TEST(ProgressLineTest, ShowsWhatMatters) {
  EXPECT_EQ(ProgressLine(SomeEngine(), SomeJob(), 345.6, 65),
            "12/200 lines  1 failed  345 tok/s  8 running  4 waiting  kv 25%  eta 1m05s");
  EngineStatus engine;
  engine.draining = true;
  EXPECT_EQ(ProgressLine(engine, JobStatus{}, 0, -1),
            "0 lines  0 failed  0 tok/s  0 running  0 waiting  kv 0%  stopping");
}

TEST(ProgressLineTest, CountsCompressionsOnceThereAreAny) {
  EngineStatus engine = SomeEngine();
  engine.num_compressions = 1234;
  EXPECT_EQ(ProgressLine(engine, SomeJob(), 345.6, 65),
            "12/200 lines  1 failed  345 tok/s  8 running  4 waiting  kv 25%  1.23k compressions  "
            "eta 1m05s");
}

TEST(SparklineTest, DrawsSharesOfTheTop) {
  EXPECT_EQ(Sparkline({}, 1), "");
  EXPECT_EQ(Sparkline({0, 1, 2, 3, 4, 5, 6, 7}, 7), "▁▂▃▄▅▆▇█");
  EXPECT_EQ(Sparkline({0.07F, 0.08F, 0.92F, 0.93F}, 1), "▁▂▇█");
  EXPECT_EQ(Sparkline({5, 5}, 5), "██");
  EXPECT_EQ(Sparkline({0, 0}, 0), "▁▁") << "nothing ran";
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(Sparkline({-1, 9, infinity, -infinity, std::nanf("")}, 1), "▁██▁▁");
}

TEST(StartupLineTest, NamesEveryRankEvenThoseNotHeard) {
  EngineStatus engine;
  engine.workers.push_back({1, 71, WorkerPhase::kLoadingWeights, 0, 0, ""});
  engine.workers.push_back({7, 72, WorkerPhase::kIdle, 0, 0, ""});
  EXPECT_EQ(StartupLine(engine, 2), "rank 0 not connected, rank 1 loading weights");
}

TEST(SummaryTest, GivesTheNumbersOfTheJob) {
  JobStatus job = SomeJob();
  job.state = JobState::kFinished;
  const std::string text = Summary(SomeEngine(), job, 12);
  for (const char* part : {"finished: 11 of 200 lines succeeded, 1 failed", "1000 output",
                           "100.0 output tok/s", "peak 9 sequences", "25.0%", "/tmp/out.jsonl"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  job.state = JobState::kFailed;
  job.error = "disk full\x1b[2J";
  EXPECT_NE(Summary(SomeEngine(), job, 12)
                .find("failed: 11 of 200 lines succeeded, 1 failed: disk full?"),
            std::string::npos);
}

size_t CountBars(const std::string& text) {
  size_t n = 0;
  for (const char* bar : {"▁", "▂", "▃", "▄", "▅", "▆", "▇", "█"}) {
    for (size_t at = text.find(bar); at != std::string::npos; at = text.find(bar, at + 1)) ++n;
  }
  return n;
}

EngineStatus CompressingEngine() {
  EngineStatus engine = SomeEngine();
  engine.num_query_slots = 12;
  engine.num_used_query_slots = 7;
  engine.num_swapped = 3;
  engine.num_swaps_out = 5;
  engine.num_compressions = 420;
  engine.compression_seconds = 0.65;
  engine.running_history = {1, 8, 6};
  engine.block_history = {0.125F, 1, 0.75F};
  engine.history_seconds = 16;
  return engine;
}

TEST(SummaryTest, ShowsCompressionAndTheCourseOfTheRun) {
  const std::string text = Summary(CompressingEngine(), SomeJob(), 12);
  for (const char* part : {"concurrency  ▂█▆  min 1.0, mean 5.0, max 8.0\n",
                           "kv cache     ▂█▆  min 12%, mean 62%, max 100%\n",
                           "compressions 420, 1.3% of the device's time; 5 swaps to the host\n"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part << " in " << text;
  }
  const std::string none = Summary(SomeEngine(), SomeJob(), 12);
  for (const char* part : {"compress", "concurrency", "kv cache"}) {
    EXPECT_EQ(none.find(part), std::string::npos) << part << " in " << none;
  }
}

TEST(SummaryTest, DrawsALongRunInOneLineOfATerminal) {
  for (size_t n = 1; n <= 64; ++n) {
    EngineStatus engine = SomeEngine();
    // Only the last part differs: it must not get lost, and must not leak into the others.
    engine.running_history.assign(n, 4);
    engine.running_history.back() = 0;
    engine.block_history.assign(n, 1);
    const std::string text = Summary(engine, SomeJob(), 12);
    EXPECT_EQ(CountBars(text), 2 * (n <= 32 ? n : (n + 1) / 2)) << n << text;
    EXPECT_NE(text.find("min 0.0, mean"), std::string::npos) << text;
    // A bar is three bytes of one column; half of them are in the other line.
    const size_t begin = text.find("concurrency");
    EXPECT_LT(text.find('\n', begin) - begin - CountBars(text), 80U) << text;
  }
}

TEST(StatusTest, TableAndJsonShowCompression) {
  const std::string table = StatusTable(CompressingEngine());
  for (const char* part :
       {"compress 420, 1.3% of the device's time; 7 of 12 query slots used, 3 sequences swapped (5 "
        "swaps)\n",
        "         ▂█▆  min 1.0, mean 5.0, max 8.0\n",
        "         ▂█▆  min 12%, mean 62%, max 100%\n"}) {
    EXPECT_NE(table.find(part), std::string::npos) << part << " in " << table;
  }
  EXPECT_EQ(StatusTable(SomeEngine()).find("compress"), std::string::npos);
  const nlohmann::json json = nlohmann::json::parse(StatusJson(CompressingEngine()));
  EXPECT_EQ(json["num_query_slots"], 12);
  EXPECT_EQ(json["num_used_query_slots"], 7);
  EXPECT_EQ(json["num_swapped"], 3);
  EXPECT_EQ(json["num_swaps_out"], 5);
  EXPECT_EQ(json["num_compressions"], 420);
  EXPECT_EQ(json["compression_seconds"], 0.65);
  EXPECT_EQ(json["running_history"], nlohmann::json({1.0, 8.0, 6.0}));
  EXPECT_EQ(json["block_history"], nlohmann::json({0.125, 1.0, 0.75}));
  EXPECT_EQ(json["history_seconds"], 16.0);
}

TEST(StatusTest, TableAndJsonHoldEveryWorkerAndJob) {
  EngineStatus engine = SomeEngine();
  engine.jobs.push_back(SomeJob());
  engine.jobs[0].name = "bad \xff name";
  engine.jobs[0].error = "line\nbreak";
  const std::string table = StatusTable(engine);
  EXPECT_NE(table.find("cpu, 2 threads"), std::string::npos) << table;
  EXPECT_NE(table.find("line?break"), std::string::npos) << table;
  const nlohmann::json json = nlohmann::json::parse(StatusJson(engine));
  EXPECT_EQ(json["workers"][0]["pid"], 71);
  EXPECT_EQ(json["workers"][0]["phase"], "running");
  EXPECT_EQ(json["jobs"][0]["num_lines"], 200);
  EXPECT_EQ(json["jobs"][0]["state"], "running");
  EXPECT_EQ(json["num_used_blocks"], 16);
}

TEST(ProgressPrinterTest, WithoutATerminalItPrintsNewsAndALineEveryTenSeconds) {
  TempDir dir;
  for (bool quiet : {false, true}) {
    FILE* file = fopen((dir / "out").c_str(), "w");
    {
      ProgressPrinter printer(file, quiet);
      for (int i = 0; i < 50; ++i) printer.Update(0.5 * i, std::to_string(i));
      printer.Update(25, "news", /*news=*/true);
    }
    fclose(file);
    EXPECT_EQ(ReadText(dir / "out"), quiet ? "" : "0\n20\n40\nnews\n");
  }
}

TEST(ExitStatusTest, TellsCompletePartialFailedAndUnfinishedApart) {
  JobStatus job;
  EXPECT_EQ(JobExitStatus(job), kExitUnfinished);
  job.state = JobState::kCancelled;
  EXPECT_EQ(JobExitStatus(job), kExitUnfinished);
  job.state = JobState::kFinished;
  EXPECT_EQ(JobExitStatus(job), kExitComplete) << "an empty job is complete";
  job.num_failed = 1;
  EXPECT_EQ(JobExitStatus(job), kExitFailed);
  job.num_succeeded = 1;
  EXPECT_EQ(JobExitStatus(job), kExitPartial);
  job.num_failed = 0;
  EXPECT_EQ(JobExitStatus(job), kExitComplete);
  job.state = JobState::kFailed;
  EXPECT_EQ(JobExitStatus(job), kExitFailed);
}

}  // namespace
}  // namespace zipage
