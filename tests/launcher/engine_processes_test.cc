#include "launcher/engine_processes.h"

#include <gtest/gtest.h>
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
    EXPECT_EQ(worker.environment,
              (std::vector<std::pair<std::string, std::string>>{{"OMP_WAIT_POLICY", "passive"}}));
  }
  config.tp = 1;
  const std::vector<ProcessSpec> alone = EngineProcesses(config, **run, "/opt/bin", std::nullopt);
  ASSERT_EQ(alone.size(), 2U);
  EXPECT_EQ(std::count(alone[1].argv.begin(), alone[1].argv.end(), "--shm_fd"), 0);
}

}  // namespace
}  // namespace zipage
