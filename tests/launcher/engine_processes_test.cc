#include "launcher/engine_processes.h"

#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <vector>

#include "tests/launcher/temp_dir.h"

namespace zipage {
namespace {

TEST(ResolveDeviceTest, AutoIsCpuAndCudaIsRefusedWithTheCure) {
  Config config;
  ASSERT_TRUE(ResolveDevice(&config).ok());
  EXPECT_EQ(config.device, "cpu");
  config.device = "cuda";
  const absl::Status status = ResolveDevice(&config);
  EXPECT_NE(status.message().find("--device cpu"), absl::string_view::npos) << status;
}

TEST(ThreadsPerRankTest, TheOptionComesFirstThenTheEnvironmentThenAShareOfTheCores) {
  Config config;
  config.tp = 4;
  EXPECT_EQ(ThreadsPerRank(config, 18, nullptr), 4);
  EXPECT_EQ(ThreadsPerRank(config, 2, nullptr), 1);
  EXPECT_EQ(ThreadsPerRank(config, 18, "3"), 3);
  EXPECT_EQ(ThreadsPerRank(config, 18, "5,2"), 5);
  for (const char* bad : {"", "0", "-2", "many", "99999999999"}) {
    EXPECT_EQ(ThreadsPerRank(config, 18, bad), 4) << bad;
  }
  config.cpu_threads = 7;
  EXPECT_EQ(ThreadsPerRank(config, 18, "3"), 7);
}

TEST(AvailableCoresTest, RespectsTheAffinity) {
  cpu_set_t before, one;
  ASSERT_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  EXPECT_EQ(AvailableCores(), CPU_COUNT(&before));
  CPU_ZERO(&one);
  for (int i = 0; i < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++i) {
    if (CPU_ISSET(i, &before)) CPU_SET(i, &one);
  }
  ASSERT_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  EXPECT_EQ(AvailableCores(), 1);
  ASSERT_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST(SharedMemoryTest, IsZeroAndLarge) {
  const auto memory = MakeSharedMemory();
  ASSERT_TRUE(memory.ok()) << memory.status();
  constexpr size_t kBytes = 64 << 20;
  void* data = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, memory->get(), 0);
  ASSERT_NE(data, MAP_FAILED);
  EXPECT_EQ(static_cast<char*>(data)[kBytes - 1], 0);
  munmap(data, kBytes);
}

TEST(EngineProcessesTest, IsASchedulerAndAWorkerPerRank) {
  TempDir dir;
  const auto run = RunDirectory::CreateIn(dir.path());
  ASSERT_TRUE(run.ok());
  Config config;
  config.tp = 2;
  config.cpu_threads = 3;
  const std::vector<ProcessSpec> specs = EngineProcesses(config, **run, "/opt/bin", 42);
  ASSERT_EQ(specs.size(), 3U);
  EXPECT_EQ(specs[0].name, kSchedulerName);
  EXPECT_EQ(specs[0].argv[0], "/opt/bin/zipage-scheduler");
  EXPECT_FALSE(specs[0].dies_with_parent) << "it removes the run directory of a killed launcher";
  EXPECT_TRUE(specs[0].fds.empty());
  for (size_t rank = 0; rank < 2; ++rank) {
    const ProcessSpec& worker = specs[1 + rank];
    const std::string& path = (*run)->path();
    EXPECT_EQ(worker.argv, (std::vector<std::string>{
                               "/opt/bin/zipage-worker", "--config", path + "/engine.toml",
                               "--run_dir", path, "--epoch", "1", "--rank", std::to_string(rank),
                               "--endpoint", "ipc://" + path + "/worker.sock", "--shm_fd", "42"}));
    EXPECT_EQ(worker.fds, std::vector<int>{42});
    EXPECT_TRUE(worker.dies_with_parent);
    EXPECT_EQ(worker.environment, (std::vector<std::pair<std::string, std::string>>{
                                      {"OMP_NUM_THREADS", "3"}, {"OMP_WAIT_POLICY", "passive"}}));
  }
  config.tp = 1;
  const std::vector<ProcessSpec> alone = EngineProcesses(config, **run, "/opt/bin", std::nullopt);
  ASSERT_EQ(alone.size(), 2U);
  EXPECT_EQ(std::count(alone[1].argv.begin(), alone[1].argv.end(), "--shm_fd"), 0);
}

}  // namespace
}  // namespace zipage
