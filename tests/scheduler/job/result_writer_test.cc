#include "scheduler/job/result_writer.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>

namespace zipage {
namespace {

class ResultWriterTest : public testing::Test {
 protected:
  ResultWriterTest() {
    char name[] = "/tmp/zipage_result_writer_XXXXXX";
    dir_ = mkdtemp(name);
    path_ = dir_ + "/out.jsonl";
  }
  ~ResultWriterTest() override { (void)std::system(("rm -rf " + dir_).c_str()); }

  static std::string Read(const std::string& path) {
    std::ifstream file(path, std::ios::binary);
    std::stringstream bytes;
    bytes << file.rdbuf();
    return bytes.str();
  }

  static absl::StatusCode OpenCode(const std::string& path, bool overwrite = false) {
    const absl::Status status = ResultWriter::Open(path, overwrite).status();
    EXPECT_TRUE(status.ok() ||
                status.message().find(absl::string_view(path)) != absl::string_view::npos)
        << status;
    return status.code();
  }

  std::string dir_;
  std::string path_;
};

TEST_F(ResultWriterTest, PutsEachLineIntoTheFileAtOnce) {
  absl::StatusOr<ResultWriter> writer = ResultWriter::Open(path_, false);
  ASSERT_TRUE(writer.ok()) << writer.status();
  ASSERT_TRUE(writer->Append("{\"a\":1}").ok());
  EXPECT_EQ(Read(path_), "{\"a\":1}\n");
  const std::string big(3 << 20, 'x');
  ASSERT_TRUE(writer->Append(big).ok());
  ASSERT_TRUE(writer->Append("").ok());
  EXPECT_EQ(Read(path_), "{\"a\":1}\n" + big + "\n\n");
  EXPECT_TRUE(writer->Close().ok());
  EXPECT_TRUE(writer->Close().ok());
}

TEST_F(ResultWriterTest, NeverTouchesAFileThatHoldsSomething) {
  std::ofstream(path_) << "precious\n";
  EXPECT_EQ(OpenCode(path_), absl::StatusCode::kAlreadyExists);
  EXPECT_EQ(Read(path_), "precious\n");
  absl::StatusOr<ResultWriter> writer = ResultWriter::Open(path_, /*overwrite=*/true);
  ASSERT_TRUE(writer.ok());
  EXPECT_EQ(Read(path_), "");
  ASSERT_TRUE(writer->Append("new").ok());
  EXPECT_EQ(Read(path_), "new\n");
}

TEST_F(ResultWriterTest, TakesAnEmptyFile) {
  std::ofstream(path_).flush();
  EXPECT_EQ(OpenCode(path_), absl::StatusCode::kOk);
}

TEST_F(ResultWriterTest, LetsOneJobWriteAFileAtATime) {
  absl::StatusOr<ResultWriter> first = ResultWriter::Open(path_, false);
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(OpenCode(path_), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(first->Append("mine").ok());
  EXPECT_EQ(OpenCode(path_, /*overwrite=*/true), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Read(path_), "mine\n");
  const std::string link = dir_ + "/link.jsonl";
  ASSERT_EQ(symlink(path_.c_str(), link.c_str()), 0);
  EXPECT_EQ(OpenCode(link, true), absl::StatusCode::kFailedPrecondition);
  ResultWriter moved = *std::move(first);
  EXPECT_EQ(OpenCode(path_, true), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(moved.Close().ok());
  EXPECT_EQ(OpenCode(path_, true), absl::StatusCode::kOk);
}

TEST_F(ResultWriterTest, NamesAPathThatCannotBeWritten) {
  EXPECT_EQ(OpenCode(dir_ + "/missing/out.jsonl"), absl::StatusCode::kNotFound);
  EXPECT_EQ(OpenCode(dir_), absl::StatusCode::kInvalidArgument);
  std::ofstream(path_).flush();
  EXPECT_EQ(OpenCode(path_ + "/out.jsonl"), absl::StatusCode::kNotFound);
  const std::string fifo = dir_ + "/fifo";
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  EXPECT_FALSE(ResultWriter::Open(fifo, false).ok());
  EXPECT_EQ(OpenCode(dir_ + "/" + std::string(300, 'n')), absl::StatusCode::kUnavailable);
}

TEST_F(ResultWriterTest, ReportsAFullDisk) {
  absl::StatusOr<ResultWriter> writer = ResultWriter::Open("/dev/full", false);
  ASSERT_TRUE(writer.ok()) << writer.status();
  const absl::Status status = writer->Append("{}");
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("/dev/full"), absl::string_view::npos);
}

TEST_F(ResultWriterTest, TwoJobsMayBothDiscardTheirResults) {
  absl::StatusOr<ResultWriter> first = ResultWriter::Open("/dev/null", false);
  absl::StatusOr<ResultWriter> second = ResultWriter::Open("/dev/null", true);
  ASSERT_TRUE(first.ok() && second.ok());
  EXPECT_TRUE(first->Append("{}").ok());
  EXPECT_TRUE(first->Close().ok());
}

// A file size limit makes the kernel write a part of the line and then refuse, as a full disk does.
TEST_F(ResultWriterTest, CutsAHalfWrittenLineOffAndCanGoOn) {
  absl::StatusOr<ResultWriter> writer = ResultWriter::Open(path_, false);
  ASSERT_TRUE(writer.ok());
  ASSERT_TRUE(writer->Append("whole").ok());
  rlimit saved{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &saved), 0);
  auto* old_handler = signal(SIGXFSZ, SIG_IGN);
  const rlimit small{1000, saved.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status status = writer->Append(std::string(5000, 'x'));
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &saved), 0);
  signal(SIGXFSZ, old_handler);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(Read(path_), "whole\n");
  ASSERT_TRUE(writer->Append("again").ok());
  EXPECT_EQ(Read(path_), "whole\nagain\n");
}

}  // namespace
}  // namespace zipage
