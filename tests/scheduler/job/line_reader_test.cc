#include "scheduler/job/line_reader.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

namespace zipage {
namespace {

using Kind = LineReader::Kind;

class LineReaderTest : public testing::Test {
 protected:
  LineReaderTest() {
    char name[] = "/tmp/zipage_line_reader_XXXXXX";
    dir_ = mkdtemp(name);
  }
  ~LineReaderTest() override { (void)std::system(("rm -rf " + dir_).c_str()); }

  std::string Write(const std::string& bytes) {
    const std::string path = dir_ + "/job.jsonl";
    std::ofstream(path, std::ios::binary | std::ios::trunc) << bytes;
    return path;
  }

  // All lines of `bytes`; over-long ones appear as "<long N>".
  std::vector<std::pair<int64_t, std::string>> ReadAll(const std::string& bytes, size_t limit,
                                                       size_t buffer) {
    std::vector<std::pair<int64_t, std::string>> lines;
    absl::StatusOr<LineReader> reader = LineReader::Open(Write(bytes), limit, buffer);
    EXPECT_TRUE(reader.ok()) << reader.status();
    if (!reader.ok()) return lines;
    while (true) {
      absl::StatusOr<LineReader::Line> line = reader->Next();
      EXPECT_TRUE(line.ok()) << line.status();
      if (!line.ok() || line->kind == Kind::kEnd) break;
      if (line->kind == Kind::kPending) continue;
      lines.emplace_back(line->number, line->kind == Kind::kLine
                                           ? std::string(line->text)
                                           : "<long " + std::to_string(line->num_bytes) + ">");
      if (line->kind == Kind::kLine) {
        EXPECT_EQ(static_cast<size_t>(line->num_bytes), line->text.size());
      }
    }
    EXPECT_EQ(reader->Next()->kind, Kind::kEnd);
    return lines;
  }

  std::string dir_;
};

using Lines = std::vector<std::pair<int64_t, std::string>>;

TEST_F(LineReaderTest, NumbersLinesTheSameAtEveryBufferBoundary) {
  const std::string bytes =
      std::string("\xEF\xBB\xBF{\"a\":1}\r\n\r\n   \t \n\n{\"b\":2}\n{\"c\":\r3}\r\n") +
      std::string("x\0y\n", 4) + "\xFF\xFE\n  {\"d\":4}  \r\nlast";
  const Lines expected = {
      {1, "{\"a\":1}"}, {5, "{\"b\":2}"},     {6, "{\"c\":\r3}"}, {7, std::string("x\0y", 3)},
      {8, "\xFF\xFE"},  {9, "  {\"d\":4}  "}, {10, "last"}};
  for (size_t buffer = 1; buffer <= bytes.size() + 1; ++buffer) {
    EXPECT_EQ(ReadAll(bytes, 1000, buffer), expected) << "buffer of " << buffer;
  }
}

TEST_F(LineReaderTest, TakesEveryKindOfLastLine) {
  for (const char* ending : {"", "\n", "\r\n", "\r", "\n\n", "\r\n  "}) {
    EXPECT_EQ(ReadAll(std::string("{}") + ending, 100, 3), (Lines{{1, "{}"}})) << ending;
  }
  for (const char* empty :
       {"", "\n", "\r\n", " ", "\xEF\xBB\xBF", "\xEF\xBB\xBF\n", "\n\n \t\r\n"}) {
    EXPECT_EQ(ReadAll(empty, 100, 2), Lines{});
  }
}

TEST_F(LineReaderTest, DropsAByteOrderMarkOnlyAtTheStartOfTheFile) {
  EXPECT_EQ(ReadAll("\xEF\xBB\xBF"
                    "a\n\xEF\xBB\xBF"
                    "b\n",
                    100, 1),
            (Lines{{1, "a"},
                   {2,
                    "\xEF\xBB\xBF"
                    "b"}}));
  EXPECT_EQ(ReadAll("\n\xEF\xBB\xBF"
                    "b\n",
                    100, 1),
            (Lines{{2,
                    "\xEF\xBB\xBF"
                    "b"}}));
}

TEST_F(LineReaderTest, ReportsAnOverlongLineAndGoesOn) {
  for (size_t buffer : {1U, 7U, 64U, 65536U}) {
    for (const char* ending : {"\n", "\r\n"}) {
      for (const char* mark : {"", "\xEF\xBB\xBF"}) {
        const std::string exact(10, 'x');
        EXPECT_EQ(ReadAll(mark + exact + ending + "next", 10, buffer),
                  (Lines{{1, exact}, {2, "next"}}));
        EXPECT_EQ(ReadAll(mark + exact + "y" + ending + "next", 10, buffer),
                  (Lines{{1, "<long 11>"}, {2, "next"}}));
      }
    }
    EXPECT_EQ(ReadAll(std::string(100000, 'x') + "\nok\n" + std::string(5000, 'z'), 10, buffer),
              (Lines{{1, "<long 100000>"}, {2, "ok"}, {3, "<long 5000>"}}));
  }
}

TEST_F(LineReaderTest, KeepsTheBeginningOfAnOverlongLine) {
  std::string bytes = "{\"custom_id\":\"big\",\"x\":\"";
  bytes += std::string(100000, 'x');
  LineReader reader = *LineReader::Open(Write(bytes), 8192, 100);
  absl::StatusOr<LineReader::Line> line = reader.Next();
  ASSERT_TRUE(line.ok());
  ASSERT_EQ(line->kind, Kind::kOverlong);
  EXPECT_EQ(line->text, bytes.substr(0, LineReader::kKeptPrefix));
}

TEST_F(LineReaderTest, NamesWhatCannotBeRead) {
  const absl::Status missing = LineReader::Open(dir_ + "/none.jsonl", 10).status();
  EXPECT_EQ(missing.code(), absl::StatusCode::kNotFound);
  EXPECT_NE(missing.message().find("none.jsonl"), absl::string_view::npos);
  EXPECT_EQ(LineReader::Open(dir_, 10).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LineReader::Open("/dev/zero", 10).status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(LineReader::Open(Write("x") + "/y", 10).status().code(), absl::StatusCode::kNotFound);
}

TEST_F(LineReaderTest, TurnsAReadErrorIntoAStatusAndEnds) {
  // The first page of an address space is not mapped: reading it fails with EIO.
  absl::StatusOr<LineReader> reader = LineReader::Open("/proc/self/mem", 10);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->Next().status().code(), absl::StatusCode::kDataLoss);
  EXPECT_EQ(reader->Next()->kind, Kind::kEnd);
}

TEST_F(LineReaderTest, SurvivesRemovalAndNoticesTruncation) {
  const std::string path = Write("first\nsecond\nthird\n");
  LineReader removed = *LineReader::Open(path, 100, 4);
  EXPECT_EQ(removed.Next()->text, "first");
  unlink(path.c_str());
  EXPECT_EQ(removed.Next()->text, "second");
  EXPECT_EQ(removed.Next()->text, "third");
  EXPECT_EQ(removed.Next()->kind, Kind::kEnd);

  const std::string again = Write("first\nsecond\nthird\n");
  LineReader other = *LineReader::Open(again, 100, 8);
  EXPECT_EQ(other.Next()->text, "first");
  ASSERT_EQ(truncate(again.c_str(), 3), 0);
  absl::StatusOr<LineReader::Line> line = other.Next();
  EXPECT_EQ(line.status().code(), absl::StatusCode::kDataLoss);
}

TEST_F(LineReaderTest, ReadsAPipeWithoutEverWaiting) {
  const std::string path = dir_ + "/fifo";
  ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
  absl::StatusOr<LineReader> reader = LineReader::Open(path, 100);
  ASSERT_TRUE(reader.ok()) << reader.status();
  EXPECT_EQ(reader->Next()->kind, Kind::kPending);  // no writer yet
  const int fd = open(path.c_str(), O_WRONLY);
  ASSERT_GE(fd, 0);
  EXPECT_EQ(reader->Next()->kind, Kind::kPending);
  ASSERT_EQ(write(fd, "one\ntw", 6), 6);
  EXPECT_EQ(reader->Next()->text, "one");
  EXPECT_EQ(reader->Next()->kind, Kind::kPending);
  ASSERT_EQ(write(fd, "o\nthree", 7), 7);
  EXPECT_EQ(reader->Next()->text, "two");
  close(fd);
  EXPECT_EQ(reader->Next()->text, "three");
  EXPECT_EQ(reader->Next()->kind, Kind::kEnd);
}

// Peak resident bytes since the last reset.
int64_t PeakRss() {
  std::ifstream status("/proc/self/status");
  std::string line;
  while (std::getline(status, line)) {
    if (line.rfind("VmHWM:", 0) == 0) return std::stoll(line.substr(6)) << 10;
  }
  return 0;
}

void ResetPeakRss() { std::ofstream("/proc/self/clear_refs") << 5; }

#ifndef ZIPAGE_SANITIZE
constexpr int64_t kAllowedGrowth = int64_t{8} << 20;
#else
constexpr int64_t kAllowedGrowth = int64_t{1} << 40;  // freed memory waits in quarantine
#endif

TEST_F(LineReaderTest, StreamsTwoHundredThousandLinesInConstantMemory) {
  constexpr int kNumLines = 200000;
  const std::string path = dir_ + "/big.jsonl";
  {
    std::ofstream file(path, std::ios::binary);
    for (int i = 0; i < kNumLines; ++i) {
      file << "{\"id\":\"" << i << "\",\"prompt\":\"" << std::string(300, 'p') << "\"}\n";
    }
  }
  ResetPeakRss();
  const int64_t before = PeakRss();
  LineReader reader = *LineReader::Open(path, 1 << 20);
  int64_t num_lines = 0;
  while (true) {
    absl::StatusOr<LineReader::Line> line = reader.Next();
    ASSERT_TRUE(line.ok());
    if (line->kind == Kind::kEnd) break;
    if (line->kind == Kind::kPending) continue;
    ASSERT_EQ(line->number, ++num_lines);
  }
  EXPECT_EQ(num_lines, kNumLines);
  EXPECT_LT(PeakRss() - before, kAllowedGrowth);
}

TEST_F(LineReaderTest, SkipsALineOfAQuarterGigabyteWithoutHoldingIt) {
  const std::string path = Write("");
  constexpr off_t kBytes = off_t{256} << 20;
  ASSERT_EQ(truncate(path.c_str(), kBytes), 0);
  std::ofstream(path, std::ios::binary | std::ios::app) << "\nok\n";
  ResetPeakRss();
  const int64_t before = PeakRss();
  LineReader reader = *LineReader::Open(path, 4 << 20);
  int num_calls = 1;
  absl::StatusOr<LineReader::Line> line = reader.Next();
  for (; line->kind == Kind::kPending; line = reader.Next()) ++num_calls;
  EXPECT_EQ(line->kind, Kind::kOverlong);
  EXPECT_EQ(line->num_bytes, kBytes);
  EXPECT_GE(num_calls, kBytes / LineReader::kMaxBytesPerCall);
  EXPECT_EQ(reader.Next()->text, "ok");
  EXPECT_LT(PeakRss() - before, 2 * kAllowedGrowth);
}

}  // namespace
}  // namespace zipage
