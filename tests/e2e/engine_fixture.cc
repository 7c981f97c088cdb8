#include "tests/e2e/engine_fixture.h"

#include <algorithm>
#include <filesystem>
#include <fstream>

namespace zipage {
namespace {

namespace fs = std::filesystem;

const std::string kGolden = std::string(ZIPAGE_SOURCE_DIR) + "/tests/golden";

std::set<std::string> SharedSegments() {
  std::set<std::string> names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator("/dev/shm", error)) {
    names.insert(entry.path().filename().string());
  }
  return names;
}

}  // namespace

void EngineTest::SetUp() {
  for (const char* name : {"launch", "submit", "status", "scheduler", "worker"}) {
    ASSERT_TRUE(fs::exists(std::string(ZIPAGE_BIN_DIR) + "/zipage-" + name))
        << "build all targets first";
  }
  fs::create_directory(dir_ / "runtime");
  for (const char* name : {"SLURM_PROCID", "OMP_NUM_THREADS"}) unsetenv(name);
  setenv("XDG_RUNTIME_DIR", (dir_ / "runtime").c_str(), 1);
  shared_before_ = SharedSegments();
}

void EngineTest::TearDown() {
  ExpectNothingLeft();
  for (const pid_t pid : ProcessesNaming(dir_.path())) kill(pid, SIGKILL);
}

void EngineTest::ExpectNothingLeft() {
  const auto left = std::chrono::seconds(5);
  EXPECT_TRUE(Eventually([&] { return EngineProcesses().empty(); }, left))
      << EngineProcesses().size() << " processes";
  EXPECT_TRUE(Eventually([&] { return RunDirectories().empty(); }, left));
  const auto no_new_segment = [&] {
    const std::set<std::string> now = SharedSegments();
    return std::includes(shared_before_.begin(), shared_before_.end(), now.begin(), now.end());
  };
  EXPECT_TRUE(Eventually(no_new_segment, left)) << "something new is in /dev/shm";
}

std::string EngineTest::Model(const std::string& name) {
  const std::string folder = dir_ / name;
  if (fs::exists(folder)) return folder;
  fs::copy(kGolden + "/models/" + name + "/f32", folder);
  for (const char* file : {"tokenizer.json", "tokenizer_config.json"}) {
    fs::copy_file(kGolden + "/tokenizer/tiny/" + file, folder + "/" + file,
                  fs::copy_options::skip_existing);
  }
  return folder;
}

std::vector<GreedyCase> EngineTest::GreedyCases(const std::string& name) {
  const Json golden = Json::parse(ReadText(kGolden + "/models/" + name + "/golden_f32.json"));
  std::vector<GreedyCase> cases;
  for (const Json& prompt : golden.at("prompts")) {
    cases.push_back({prompt.at("ids"), prompt.at("greedy")});
  }
  return cases;
}

std::unique_ptr<Program> EngineTest::Start(const std::string& program, const Flags& flags) {
  Flags argv{std::string(ZIPAGE_BIN_DIR) + "/" + program};
  argv.insert(argv.end(), flags.begin(), flags.end());
  return std::make_unique<Program>(dir_, program + std::to_string(++num_started_), argv);
}

std::unique_ptr<Program> EngineTest::Launch(const Flags& flags) {
  Flags all{"--model",
            Model(),
            "--device",
            "cpu",
            "--dtype",
            "float32",
            "--kvcache_block_size",
            "16",
            "--num_kvcache_blocks",
            "2048",
            "--cpu_threads",
            "1"};
  all.insert(all.end(), flags.begin(), flags.end());
  return Start("zipage-launch", all);
}

std::unique_ptr<Program> EngineTest::Serve(const Flags& flags) {
  auto launch = Launch(flags);
  EXPECT_TRUE(Eventually([&] { return launch->out().find("stop:") != std::string::npos; }))
      << launch->err();
  return launch;
}

EngineTest::Outcome EngineTest::Run(const std::string& program, const Flags& flags) {
  auto process = program == "zipage-launch" ? Launch(flags) : Start(program, flags);
  const int status = process->Wait();
  return {status, process->out(), process->err()};
}

std::string EngineTest::WriteJob(const std::string& name, const std::vector<Json>& lines) {
  const std::string path = dir_ / (name + ".jsonl");
  std::ofstream file(path);
  for (const Json& line : lines) file << line.dump() << '\n';
  return path;
}

Flags EngineTest::JobFlags(const std::string& name, const std::vector<Json>& lines) {
  return {"--job", WriteJob(name, lines), "--output", OutputPath(name)};
}

std::vector<Json> EngineTest::ReadOutput(const std::string& path) {
  const std::string text = ReadText(path);
  EXPECT_TRUE(text.empty() || text.back() == '\n') << path << " ends with a torn line";
  std::vector<Json> lines;
  for (size_t begin = 0; begin < text.size();) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    Json line = Json::parse(text.begin() + static_cast<std::ptrdiff_t>(begin),
                            text.begin() + static_cast<std::ptrdiff_t>(end), nullptr,
                            /*allow_exceptions=*/false);
    EXPECT_FALSE(line.is_discarded()) << path << " has a line that is no JSON";
    if (!line.is_discarded()) lines.push_back(std::move(line));
    begin = end + 1;
  }
  return lines;
}

std::vector<Json> EngineTest::RunJob(const std::vector<Json>& lines, Flags flags,
                                     const std::string& name) {
  const Flags job = JobFlags(name, lines);
  flags.insert(flags.end(), job.begin(), job.end());
  flags.push_back("--overwrite");
  const Outcome outcome = Run("zipage-launch", flags);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  std::vector<Json> output = ReadOutput(OutputPath(name));
  EXPECT_EQ(output.size(), lines.size());
  return output;
}

Json EngineTest::Status(const Flags& flags) {
  Flags all{"--json"};
  all.insert(all.end(), flags.begin(), flags.end());
  const Outcome outcome = Run("zipage-status", all);
  EXPECT_EQ(outcome.status, 0) << outcome.err;
  Json status = Json::parse(outcome.out, nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(status.is_discarded()) << outcome.out;
  return status;
}

bool EngineTest::StatusBecomes(const std::function<bool(const Json&)>& condition) {
  const std::vector<std::string> engines = RunDirectories();
  if (engines.size() != 1) return false;
  return Eventually([&] {
    const Json status = Status({"--engine", engines[0]});
    return status.is_object() && condition(status);
  });
}

std::vector<std::string> EngineTest::RunDirectories() const {
  std::vector<std::string> found;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(base(), error)) {
    if (entry.is_directory()) found.push_back(entry.path().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

pid_t EngineTest::FindProcess(const std::string& program, const std::string& argument) {
  pid_t found = 0;
  Eventually([&] {
    for (const pid_t pid : EngineProcesses()) {
      const std::string command = ReadText("/proc/" + std::to_string(pid) + "/cmdline");
      // Arguments end with a zero byte there.
      if (command.find(program + '\0') != std::string::npos &&
          command.find(argument + '\0') != std::string::npos) {
        found = pid;
      }
    }
    return found != 0;
  });
  EXPECT_NE(found, 0) << program << " never started";
  return found;
}

pid_t EngineTest::SchedulerPid() { return FindProcess("zipage-scheduler", "--run_dir"); }

pid_t EngineTest::WorkerPid(int rank) {
  return FindProcess("zipage-worker", std::string("--rank") + '\0' + std::to_string(rank));
}

Json TokensRequest(const std::string& id, const std::vector<int>& prompt, int max_tokens) {
  return {{"id", id},         {"prompt_token_ids", prompt}, {"max_tokens", max_tokens},
          {"temperature", 0}, {"ignore_eos", true},         {"return_token_ids", true}};
}

std::vector<Json> RandomRequests(int n, int max_tokens, uint32_t seed) {
  std::mt19937 random(seed);
  const auto below = [&](int limit) {
    return static_cast<int>(random() % static_cast<uint32_t>(limit));
  };
  std::vector<Json> requests;
  for (int i = 0; i < n; ++i) {
    std::vector<int> prompt(static_cast<size_t>(1 + below(100)));
    for (int& token : prompt) token = below(509);
    Json request = TokensRequest("random-" + std::to_string(i), prompt, 1 + below(max_tokens));
    request["temperature"] = 0.5 * below(4);
    request["n"] = 1 + below(3);
    if (below(2) == 0) request["top_k"] = 1 + below(50);
    if (below(2) == 0) request["top_p"] = 0.9;
    if (below(3) == 0) request["repetition_penalty"] = 1.1;
    if (i % 2 == 0) request["seed"] = below(1000);
    requests.push_back(std::move(request));
  }
  return requests;
}

std::vector<Json> SimpleRequests(int n, int max_tokens) {
  std::vector<Json> requests;
  for (int i = 0; i < n; ++i) {
    requests.push_back(
        TokensRequest("simple-" + std::to_string(i), {i % 500, (i / 500) % 500, 7}, max_tokens));
  }
  return requests;
}

std::vector<std::vector<int>> TokenIds(const Json& line) {
  std::vector<std::vector<int>> ids;
  if (!line.is_object() || !line.at("response").is_object()) return ids;
  const Json& body = line.at("response").at("body");
  if (!body.contains("choices")) return ids;
  for (const Json& choice : body.at("choices")) ids.push_back(choice.at("token_ids"));
  return ids;
}

Json Find(const std::vector<Json>& lines, const std::string& id) {
  Json found;
  int count = 0;
  for (const Json& line : lines) {
    if (line.value("custom_id", Json()) != id) continue;
    found = line;
    ++count;
  }
  EXPECT_EQ(count, 1) << "lines that answer " << id;
  return found;
}

int CountLines(const std::string& text) {
  return static_cast<int>(std::count(text.begin(), text.end(), '\n'));
}

}  // namespace zipage
