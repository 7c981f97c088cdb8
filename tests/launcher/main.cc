// Runs the tests, or, started under the name of an engine's program, plays that program.

#include <gtest/gtest.h>

#include <filesystem>

#include "tests/launcher/fake_engine.h"

int main(int argc, char** argv) {
  const std::string name = std::filesystem::path(argv[0]).filename().string();
  if (name == "zipage-scheduler") return zipage::FakeSchedulerMain(argc, argv);
  if (name == "zipage-worker") return zipage::FakeWorkerMain(argc, argv);
  testing::InitGoogleTest(&argc, argv);
  return RUN_ALL_TESTS();
}
