#include "launcher/run_directory.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <set>
#include <string>
#include <vector>

#include "tests/launcher/processes.h"
#include "tests/launcher/temp_dir.h"

namespace zipage {
namespace {

namespace fs = std::filesystem;

std::unique_ptr<RunDirectory> MustCreateIn(const std::string& base) {
  auto run = RunDirectory::CreateIn(base);
  EXPECT_TRUE(run.ok()) << run.status();
  return run.ok() ? *std::move(run) : nullptr;
}

mode_t Mode(const std::string& path) {
  struct stat info {};
  EXPECT_EQ(lstat(path.c_str(), &info), 0) << path;
  return info.st_mode & 07777;
}

// A run directory whose launcher was killed, with things in it.
std::string LeaveStale(const std::string& base) {
  int pipe_fds[2];
  EXPECT_EQ(pipe(pipe_fds), 0);
  const pid_t child = fork();
  if (child == 0) {
    auto run = RunDirectory::CreateIn(base);
    if (!run.ok()) _exit(1);
    fs::create_directories((*run)->path() + "/epoch-1/store");
    WriteText((*run)->path() + "/job.sock", "");
    const std::string& path = (*run)->path();
    if (write(pipe_fds[1], path.data(), path.size()) < 0) _exit(1);
    while (true) pause();
  }
  close(pipe_fds[1]);
  char buffer[256];
  const ssize_t n = read(pipe_fds[0], buffer, sizeof(buffer));
  close(pipe_fds[0]);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  return {buffer, static_cast<size_t>(n)};
}

TEST(RunDirectoryTest, IsPrivateHoldsTheLockAndIsRemoved) {
  TempDir dir;
  const std::string base = dir / "zipage";
  std::string path;
  {
    const auto run = MustCreateIn(base);
    path = run->path();
    EXPECT_EQ(Mode(base), 0700U);
    EXPECT_EQ(Mode(path), 0700U);
    EXPECT_TRUE(IsEngineRunning(path));
    EXPECT_EQ(RunningEngines({base}), std::vector<std::string>{path});
    ASSERT_TRUE(run->WriteFile("engine.toml", "a = 1\n").ok());
    EXPECT_EQ(ReadText(path + "/engine.toml"), "a = 1\n");
    EXPECT_EQ(Mode(path + "/engine.toml"), 0600U);
    EXPECT_EQ(run->Endpoint("job.sock"), "ipc://" + path + "/job.sock");
    fs::create_directories(path + "/epoch-1/store");
  }
  EXPECT_FALSE(fs::exists(path));
  EXPECT_FALSE(IsEngineRunning(path));
  EXPECT_TRUE(RunningEngines({base, dir / "missing"}).empty());
}

TEST(RunDirectoryTest, WhatAKilledLauncherLeftIsSweptAndOthersStay) {
  TempDir dir;
  const std::string stale = LeaveStale(dir.path());
  ASSERT_TRUE(fs::exists(stale + "/epoch-1/store"));
  EXPECT_FALSE(IsEngineRunning(stale));
  const std::string outside = dir / "kept";
  fs::create_directory(outside);
  WriteText(outside + "/file", "x");
  fs::create_symlink(outside, stale + "/link");
  fs::create_symlink(outside, dir / "e-link00");
  const auto first = MustCreateIn(dir.path());
  EXPECT_FALSE(fs::exists(stale));
  EXPECT_EQ(ReadText(outside + "/file"), "x") << "a symbolic link was followed";
  const auto second = MustCreateIn(dir.path());
  EXPECT_TRUE(fs::exists(first->path())) << "a running engine's directory was swept";
  EXPECT_EQ(RunningEngines({dir.path()}).size(), 2U);
}

TEST(RunDirectoryTest, ManyAtOnceGetDirectoriesOfTheirOwn) {
  TempDir dir;
  constexpr int kProcesses = 8;
  std::vector<pid_t> children;
  for (int i = 0; i < kProcesses; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      for (int round = 0; round < 20; ++round) {
        auto run = RunDirectory::CreateIn(dir.path());
        // Alive while held: no sweep of another takes it away.
        if (!run.ok() || !(*run)->WriteFile("mine", std::to_string(i)).ok()) _exit(1);
        for (int look = 0; look < 20; ++look) {
          if (ReadText((*run)->path() + "/mine") != std::to_string(i)) _exit(2);
        }
      }
      _exit(0);
    }
    children.push_back(child);
  }
  for (pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    EXPECT_EQ(status, 0);
  }
  EXPECT_TRUE(RunningEngines({dir.path()}).empty());
}

TEST(RunDirectoryTest, RefusesABaseThatOthersCouldUse) {
  TempDir dir;
  fs::create_directory(dir / "open");
  chmod((dir / "open").c_str(), 0755);
  fs::create_directory(dir / "real");
  chmod((dir / "real").c_str(), 0700);
  fs::create_symlink(dir / "real", dir / "link");
  WriteText(dir / "file", "");
  for (const char* name : {"open", "link", "file"}) {
    const auto run = RunDirectory::CreateIn(dir / name);
    EXPECT_EQ(run.status().code(), absl::StatusCode::kFailedPrecondition) << name;
    EXPECT_NE(run.status().message().find(dir / name), absl::string_view::npos);
    EXPECT_NE(run.status().message().find("--run_dir"), absl::string_view::npos);
  }
  if (geteuid() != 0) GTEST_SKIP() << "only root can make a directory of another user";
  fs::create_directory(dir / "other");
  chmod((dir / "other").c_str(), 0700);
  ASSERT_EQ(chown((dir / "other").c_str(), 12345, 12345), 0);
  const auto run = RunDirectory::CreateIn(dir / "other");
  EXPECT_NE(run.status().message().find("belongs to another user"), absl::string_view::npos)
      << run.status();
}

TEST(RunDirectoryTest, RefusesPathsThatNoSocketCanHave) {
  TempDir dir;
  const std::string base = dir / std::string(100, 'x');
  for (const auto& run :
       {RunDirectory::CreateIn(base).status(), RunDirectory::CreateAt(base).status()}) {
    EXPECT_EQ(run.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_NE(run.message().find("too long"), absl::string_view::npos) << run;
  }
  EXPECT_FALSE(fs::exists(base + "/e-"));
}

TEST(RunDirectoryTest, AGivenDirectoryIsTakenOverOnlyIfNobodyNeedsIt) {
  TempDir dir;
  const std::string path = dir / "run";
  {
    const auto run = RunDirectory::CreateAt(path);
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_EQ((*run)->path(), path);
    const auto second = RunDirectory::CreateAt(path + "/");
    EXPECT_NE(second.status().message().find("in use"), absl::string_view::npos) << second.status();
    EXPECT_TRUE(fs::exists(path + "/lock"));
  }
  EXPECT_FALSE(fs::exists(path));

  const std::string stale = LeaveStale(dir.path());
  {
    const auto run = RunDirectory::CreateAt(stale);
    ASSERT_TRUE(run.ok()) << run.status();
    EXPECT_FALSE(fs::exists(stale + "/epoch-1"));
  }
  fs::create_directory(path);
  chmod(path.c_str(), 0700);
  WriteText(path + "/thesis.tex", "precious");
  EXPECT_FALSE(RunDirectory::CreateAt(path).ok());
  EXPECT_EQ(ReadText(path + "/thesis.tex"), "precious");
  EXPECT_FALSE(RunDirectory::CreateAt(dir / "no/parent").ok());
}

TEST(RunBasesTest, PrefersTheRuntimeDirectoryAndAlwaysNamesTmp) {
  TempDir dir;
  const std::string tmp = "/tmp/zipage-" + std::to_string(geteuid());
  setenv("XDG_RUNTIME_DIR", dir.path().c_str(), 1);
  EXPECT_EQ(RunBases(), (std::vector<std::string>{dir / "zipage", tmp}));
  setenv("XDG_RUNTIME_DIR", (dir / "missing").c_str(), 1);
  EXPECT_EQ(RunBases(), std::vector<std::string>{tmp});
  unsetenv("XDG_RUNTIME_DIR");
  EXPECT_EQ(RunBases(), std::vector<std::string>{tmp});
}

}  // namespace
}  // namespace zipage
