#pragma once
// Starts the real programs of Zipage on the tiny golden models, in a directory of the test's own,
// and looks at what they write and leave. Whatever a test does, TearDown checks that no process,
// run directory or shared segment is left, and kills what is.

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/launcher/processes.h"
#include "tests/launcher/temp_dir.h"

namespace zipage {

using Json = nlohmann::json;
using Flags = std::vector<std::string>;

// A prompt of a golden model with the tokens that greedy sampling gives.
struct GreedyCase {
  std::vector<int> prompt;
  std::vector<int> output;
};

class EngineTest : public testing::Test {
 protected:
  void SetUp() override;
  void TearDown() override;

  // A folder with the golden model of that name ("tiny-qwen2": 2 heads, "tiny-llama": 3) in
  // float32, 512 positions and tokens, and a tokenizer with a chat template.
  std::string Model(const std::string& name = "tiny-qwen2");
  static std::vector<GreedyCase> GreedyCases(const std::string& name = "tiny-qwen2");

  // A program of ZIPAGE_BIN_DIR with the test's runtime directory.
  std::unique_ptr<Program> Start(const std::string& program, const Flags& flags);
  // zipage-launch on the CPU in float32 with a small pool; `flags` win over these.
  std::unique_ptr<Program> Launch(const Flags& flags);
  // The same without a job, once it is ready.
  std::unique_ptr<Program> Serve(const Flags& flags = {});
  // Runs a program to its end; the exit status and what it printed.
  struct Outcome {
    int status = 0;
    std::string out;
    std::string err;
  };
  Outcome Run(const std::string& program, const Flags& flags);

  // Writes the lines to NAME.jsonl.
  std::string WriteJob(const std::string& name, const std::vector<Json>& lines);
  // `--job` WriteJob(...) `--output` NAME.out.
  Flags JobFlags(const std::string& name, const std::vector<Json>& lines);
  std::string OutputPath(const std::string& name) const { return dir_ / (name + ".out"); }
  // The lines of an output file; a failure is recorded for any that is not JSON, and for a file
  // that does not end with a whole line.
  static std::vector<Json> ReadOutput(const std::string& path);
  // Launches with the job, expects success and one line per request.
  std::vector<Json> RunJob(const std::vector<Json>& lines, Flags flags,
                           const std::string& name = "job");

  // zipage-status --json of the only engine here, or of the one `flags` select.
  Json Status(const Flags& flags = {});
  // Polls the status until `condition` holds.
  bool StatusBecomes(const std::function<bool(const Json&)>& condition);

  std::string base() const { return dir_ / "runtime/zipage"; }
  // Run directories, of running engines or left behind.
  std::vector<std::string> RunDirectories() const;
  // Processes of this test's engines, zombies aside.
  std::vector<pid_t> EngineProcesses() const { return ProcessesNaming(base()); }
  // zipage-scheduler or one rank of zipage-worker of the test's only engine; waits until it is
  // there, and is 0 if it never is.
  pid_t SchedulerPid();
  pid_t WorkerPid(int rank);
  // Nothing of the engines is left, within five seconds: twice what is promised, for slow machines.
  void ExpectNothingLeft();

  TempDir dir_;

 private:
  pid_t FindProcess(const std::string& program, const std::string& argument);

  int num_started_ = 0;
  std::set<std::string> shared_before_;
};

// A request that is answered with exactly `max_tokens` tokens, their ids included.
Json TokensRequest(const std::string& id, const std::vector<int>& prompt, int max_tokens);
// `n` requests of random prompts and sampling parameters; every other one has a seed.
std::vector<Json> RandomRequests(int n, int max_tokens, uint32_t seed);
// n greedy requests of few prompt and `max_tokens` output tokens.
std::vector<Json> SimpleRequests(int n, int max_tokens);
// The token ids of every choice of an answered line.
std::vector<std::vector<int>> TokenIds(const Json& line);
// The line that answers `id`; records a failure if there is not exactly one.
Json Find(const std::vector<Json>& lines, const std::string& id);
int CountLines(const std::string& text);

}  // namespace zipage
