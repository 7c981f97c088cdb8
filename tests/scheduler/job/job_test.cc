#include "scheduler/job/job.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <sstream>

namespace zipage {
namespace {

namespace fs = std::filesystem;

class JobTest : public ::testing::Test {
 protected:
  JobTest() : dir_(::testing::TempDir() + "job_test_" + std::to_string(getpid())) {
    fs::create_directories(dir_);
  }
  ~JobTest() override { fs::remove_all(dir_); }

  void Write(const fs::path& path, const std::string& text) {
    std::ofstream(path, std::ios::binary) << text;
  }
  std::string Read(const fs::path& path) {
    std::stringstream text;
    text << std::ifstream(path, std::ios::binary).rdbuf();
    return text.str();
  }
  absl::StatusOr<std::unique_ptr<Job>> Open(const fs::path& input, const fs::path& output,
                                            bool overwrite = false) {
    SubmitJob submit;
    submit.input_path = input;
    submit.output_path = output;
    submit.overwrite = overwrite;
    return Job::Open(1, submit, /*max_line_bytes=*/1000, {});
  }
  static int64_t NumDescriptors() {
    return std::distance(fs::directory_iterator("/proc/self/fd"), fs::directory_iterator());
  }

  fs::path dir_;
};

TEST_F(JobTest, AnEndedJobHoldsNoFileDescriptor) {
  Write(dir_ / "in", "{\"prompt\":\"a\"}\n\nnot json\n");
  const int64_t before = NumDescriptors();
  auto finished = Open(dir_ / "in", dir_ / "out").value();
  int num_lines = 0;
  while (finished->reading()) {
    const auto parsed = finished->Next();
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    if (!parsed->has_value()) continue;
    EXPECT_FALSE(finished->IsComplete());
    const bool good = std::holds_alternative<ParsedRequest>(**parsed);
    ++num_lines;
    ASSERT_TRUE((good ? finished->AnswerSuccess("{}", 1, 1) : finished->AnswerFailure("[]")).ok());
  }
  EXPECT_EQ(num_lines, 2);
  ASSERT_TRUE(finished->IsComplete());
  ASSERT_TRUE(finished->Finish({}).ok());
  EXPECT_EQ(Read(dir_ / "out"), "{}\n[]\n");
  auto cancelled = Open(dir_ / "in", dir_ / "other").value();
  cancelled->Abandon("", {});
  EXPECT_FALSE(cancelled->reading());
  EXPECT_EQ(cancelled->state(), JobState::kCancelled);
  EXPECT_EQ(NumDescriptors(), before);
}

TEST_F(JobTest, RefusesOneFileAsInputAndOutputUnderAnyName) {
  Write(dir_ / "in", "{}\n");
  fs::create_symlink(dir_ / "in", dir_ / "soft");
  fs::create_hard_link(dir_ / "in", dir_ / "hard");
  for (const char* output : {"in", "./in", "soft", "hard"}) {
    const auto job = Open(dir_ / "in", dir_ / output, /*overwrite=*/true);
    EXPECT_EQ(job.status().code(), absl::StatusCode::kInvalidArgument) << output;
  }
  EXPECT_EQ(Read(dir_ / "in"), "{}\n");
  EXPECT_FALSE(Open("in", dir_ / "out").ok()) << "a relative path";
}

TEST_F(JobTest, TwoJobsNeverWriteOneOutput) {
  Write(dir_ / "in", "{}\n");
  auto first = Open(dir_ / "in", dir_ / "out").value();
  for (const bool overwrite : {false, true}) {
    EXPECT_EQ(Open(dir_ / "in", dir_ / "out", overwrite).status().code(),
              absl::StatusCode::kFailedPrecondition);
  }
  first->Abandon("", {});
  EXPECT_TRUE(Open(dir_ / "in", dir_ / "out").ok());
}

TEST_F(JobTest, AFullDiskIsAnErrorThatNamesTheFile) {
  Write(dir_ / "in", "{\"prompt\":\"a\"}\n");
  auto job = Open(dir_ / "in", "/dev/full").value();
  ASSERT_TRUE(job->Next().ok());
  const absl::Status status = job->AnswerSuccess("{}", 1, 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("/dev/full"), absl::string_view::npos) << status;
}

}  // namespace
}  // namespace zipage
