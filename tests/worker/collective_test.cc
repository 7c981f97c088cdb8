#include "worker/comm/collective.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <functional>
#include <random>
#include <thread>

#include "absl/strings/str_format.h"
#include "tests/worker/test_files.h"
#include "worker/comm/gloo.h"
#include "worker/comm/shared_memory.h"
#include "worker/comm/single.h"

namespace zipage {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using ::testing::Not;

enum class Kind { kSharedMemory, kGloo };

constexpr milliseconds kLong{120'000};  // never reached
constexpr milliseconds kShort{300};     // for ranks that do not come

// What the ranks of one test meet through.
class Meeting {
 public:
  Meeting(Kind kind, int size, size_t arena_bytes = 1 << 16) : kind_(kind), size_(size) {
    if (kind == Kind::kSharedMemory) memory_ = *SharedMemory::Anonymous(arena_bytes);
  }

  absl::StatusOr<std::unique_ptr<Collective>> Join(int rank, milliseconds timeout = kLong,
                                                   milliseconds init_timeout = kLong) const {
    if (kind_ == Kind::kSharedMemory) {
      return MakeSharedMemoryCollective(memory_, rank, size_, timeout);
    }
    return MakeGlooCollective({.rank = rank,
                               .size = size_,
                               .store_dir = dir_.File("epoch-1"),
                               .init_timeout = init_timeout,
                               .timeout = timeout});
  }

  int size() const { return size_; }

 private:
  Kind kind_;
  int size_;
  testing::TempDir dir_;
  std::shared_ptr<SharedMemory> memory_;
};

// What one rank does; returns what is wrong, or "".
using Body = std::function<std::string(Collective*)>;

std::string JoinAndRun(const Meeting& meeting, int rank, const Body& body) {
  auto collective = meeting.Join(rank);
  if (!collective.ok()) return collective.status().ToString();
  return body(collective->get());
}

void RunAsThreads(const Meeting& meeting, const Body& body) {
  std::vector<std::string> errors(meeting.size());
  std::vector<std::thread> threads;
  for (int r = 0; r < meeting.size(); ++r) {
    threads.emplace_back([&, r] { errors[r] = JoinAndRun(meeting, r, body); });
  }
  for (std::thread& thread : threads) thread.join();
  for (int r = 0; r < meeting.size(); ++r) EXPECT_EQ(errors[r], "") << "rank " << r;
}

// Starts `body` as a process; it ends with status 0 if that returns "".
pid_t Fork(const std::function<std::string()>& body) {
  const pid_t process = fork();
  if (process != 0) return process;
  const std::string error = body();
  if (!error.empty()) fprintf(stderr, "child: %s\n", error.c_str());
  _exit(error.empty() ? 0 : 1);
}

void ExpectExit(pid_t process, int status) {
  int found = 0;
  ASSERT_EQ(waitpid(process, &found, 0), process);
  EXPECT_TRUE(WIFEXITED(found) && WEXITSTATUS(found) == status) << found;
}

void RunAsProcesses(const Meeting& meeting, const Body& body) {
  std::vector<pid_t> processes;
  for (int r = 0; r < meeting.size(); ++r) {
    processes.push_back(Fork([&] { return JoinAndRun(meeting, r, body); }));
  }
  for (const pid_t process : processes) ExpectExit(process, 0);
}

// Values of so many magnitudes that the order of summation shows.
std::vector<float> Input(int rank, int round, size_t count) {
  std::mt19937 random(1000 * round + rank);
  std::vector<float> values(count);
  for (float& value : values) {
    value = std::ldexp(static_cast<float>(static_cast<int32_t>(random())),
                       static_cast<int>(random() % 40) - 20);
  }
  return values;
}

std::vector<float> PlainSum(int size, int round, size_t count) {
  std::vector<float> sum = Input(0, round, count);
  for (int r = 1; r < size; ++r) {
    const std::vector<float> term = Input(r, round, count);
    for (size_t i = 0; i < count; ++i) sum[i] += term[i];
  }
  return sum;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() &&
         (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

size_t RandomCount(std::mt19937* random) {
  static constexpr size_t kEdges[] = {0, 1, 2, 3, 5, 31, 16384, 16385, 40'001, 100'000};
  return (*random)() % 3 == 0 ? kEdges[(*random)() % std::size(kEdges)] : (*random)() % 3000;
}

// Every call, with random sizes, in an order all ranks know.
std::string RandomCalls(Collective* collective, int rounds) {
  const int size = collective->size();
  const int rank = collective->rank();
  std::mt19937 random(17);  // the same sizes on every rank
  for (int round = 0; round < rounds; ++round) {
    const size_t count = RandomCount(&random);
    const std::string where = absl::StrFormat("round %d, %d values: ", round, count);
    const uint32_t call = random() % 4;
    std::vector<float> own = Input(rank, round, count);
    const size_t bytes = count * sizeof(float);
    absl::Status status;
    if (call == 0) {
      std::vector<float> all(rank == 0 ? count * size : 0);
      status = collective->Gather(own.data(), bytes, rank == 0 ? all.data() : nullptr);
      for (int r = 0; status.ok() && rank == 0 && r < size; ++r) {
        const auto begin = all.begin() + static_cast<std::ptrdiff_t>(r * count);
        if (!SameBits({begin, begin + static_cast<std::ptrdiff_t>(count)},
                      Input(r, round, count))) {
          return where + "gathered something else";
        }
      }
    } else if (call == 1) {
      status = collective->Broadcast(own.data(), bytes);
      if (!SameBits(own, Input(0, round, count))) return where + "received something else";
    } else {
      status = collective->AllReduceSum(own.data(), count);
      if (!SameBits(own, PlainSum(size, round, count))) return where + "another sum";
    }
    if (!status.ok()) return where + status.ToString();
  }
  return "";
}

class CollectiveTest : public ::testing::TestWithParam<std::tuple<Kind, int, size_t>> {
 protected:
  Meeting MakeMeeting() {
    return {std::get<0>(GetParam()), std::get<1>(GetParam()), std::get<2>(GetParam())};
  }
};

TEST_P(CollectiveTest, EqualsThePlainSumBitForBitBetweenThreads) {
  RunAsThreads(MakeMeeting(), [](Collective* c) { return RandomCalls(c, 60); });
}

TEST_P(CollectiveTest, EqualsThePlainSumBitForBitBetweenProcesses) {
  RunAsProcesses(MakeMeeting(), [](Collective* c) { return RandomCalls(c, 60); });
}

INSTANTIATE_TEST_SUITE_P(
    All, CollectiveTest,
    ::testing::Values(std::tuple{Kind::kSharedMemory, 2, 1 << 13},
                      std::tuple{Kind::kSharedMemory, 2, 1 << 21},
                      std::tuple{Kind::kSharedMemory, 3, 1 << 16},
                      std::tuple{Kind::kSharedMemory, 4, 1 << 22},
                      std::tuple{Kind::kSharedMemory, 7, 1 << 18}, std::tuple{Kind::kGloo, 2, 0},
                      std::tuple{Kind::kGloo, 3, 0}, std::tuple{Kind::kGloo, 4, 0}),
    [](const auto& info) {
      return absl::StrFormat("%s%dRanks%dBytes",
                             std::get<0>(info.param) == Kind::kGloo ? "Gloo" : "SharedMemory",
                             std::get<1>(info.param), std::get<2>(info.param));
    });

class FailingCollectiveTest : public ::testing::TestWithParam<Kind> {};

TEST_P(FailingCollectiveTest, NamesTheRankThatDoesNotComeToACall) {
  const Meeting meeting(GetParam(), 3);
  std::atomic<int> done = 0;
  std::vector<absl::Status> statuses(3);
  std::vector<std::thread> threads;
  for (int r = 0; r < 3; ++r) {
    threads.emplace_back([&, r] {
      auto collective = meeting.Join(r, r == 1 ? kShort : kLong);
      ASSERT_TRUE(collective.ok()) << collective.status();
      float value = 1;
      ASSERT_TRUE((*collective)->AllReduceSum(&value, 1).ok());
      if (r == 1) {
        statuses[r] = (*collective)->AllReduceSum(&value, 1);
        // Out of step with the others, so nothing works any more, at once.
        EXPECT_EQ((*collective)->Broadcast(&value, 4), statuses[r]);
        done = 1;
        done.notify_all();
      } else {
        done.wait(0);  // stays away
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(absl::IsDeadlineExceeded(statuses[1])) << statuses[1];
  EXPECT_EQ(statuses[1].message(),
            "rank 1, AllReduceSum, call 2: rank 0, 2 did not come within 300 ms");
}

TEST_P(FailingCollectiveTest, NamesTheRankThatNeverStarts) {
  const Meeting meeting(GetParam(), 3);
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      auto collective = meeting.Join(r, kShort, kShort);
      statuses[r] = collective.status();
      float value = 1;
      if (collective.ok()) statuses[r] = (*collective)->AllReduceSum(&value, 1);
    });
  }
  for (std::thread& thread : threads) thread.join();
  // The other rank may have given up a little earlier and left.
  EXPECT_TRUE(absl::IsDeadlineExceeded(statuses[0]) || absl::IsDeadlineExceeded(statuses[1]))
      << statuses[0] << statuses[1];
  for (const absl::Status& status : statuses) {
    EXPECT_FALSE(status.ok());
    if (absl::IsDeadlineExceeded(status)) {
      EXPECT_THAT(std::string(status.message()), HasSubstr("rank 2 did not come"));
    }
  }
}

TEST_P(FailingCollectiveTest, AKilledProcessEndsTheOthersCall) {
  const Meeting meeting(GetParam(), 2);
  const pid_t waiting = Fork([&]() -> std::string {
    auto collective = meeting.Join(0);
    if (!collective.ok()) return collective.status().ToString();
    std::vector<float> values(50'000);
    for (;;) {
      const absl::Status status = (*collective)->AllReduceSum(values.data(), values.size());
      if (status.ok()) continue;
      const bool names = status.message().find("rank 1") != absl::string_view::npos;
      return absl::IsUnavailable(status) && names ? "" : status.ToString();
    }
  });
  const pid_t killed = Fork([&]() -> std::string {
    auto collective = meeting.Join(1);
    if (!collective.ok()) return collective.status().ToString();
    std::vector<float> values(50'000);
    for (int i = 0; i < 20; ++i) {
      if (!(*collective)->AllReduceSum(values.data(), values.size()).ok()) return "failed early";
    }
    raise(SIGKILL);
    return "";
  });
  ExpectExit(waiting, 0);  // while the killed process is a zombie
  int status = 0;
  ASSERT_EQ(waitpid(killed, &status, 0), killed);
  EXPECT_TRUE(WIFSIGNALED(status)) << status;
}

TEST_P(FailingCollectiveTest, ARankThatLeavesEndsTheOthersCall) {
  const Meeting meeting(GetParam(), 2);
  absl::Status status;
  std::thread other([&] {
    auto collective = meeting.Join(1);
    float value = 1;
    ASSERT_TRUE(collective.ok() && (*collective)->AllReduceSum(&value, 1).ok());
  });
  auto collective = meeting.Join(0);
  ASSERT_TRUE(collective.ok()) << collective.status();
  float value = 2;
  EXPECT_TRUE((*collective)->AllReduceSum(&value, 1).ok());
  EXPECT_EQ(value, 3);
  status = (*collective)->AllReduceSum(&value, 1);
  other.join();
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("call 2"));
  EXPECT_THAT(std::string(status.message()), Not(HasSubstr("\n")));
}

INSTANTIATE_TEST_SUITE_P(All, FailingCollectiveTest,
                         ::testing::Values(Kind::kSharedMemory, Kind::kGloo), [](const auto& info) {
                           return info.param == Kind::kGloo ? "Gloo" : "SharedMemory";
                         });

TEST(SharedMemoryTest, SleepsAndWakesWithFarMoreRanksThanCores) {
  const Meeting meeting(Kind::kSharedMemory, 16, 1 << 16);
  RunAsThreads(meeting, [](Collective* c) -> std::string {
    for (int i = 0; i < 300; ++i) {
      float value = 1;
      const absl::Status status = c->AllReduceSum(&value, 1);
      if (!status.ok()) return status.ToString();
      if (value != 16) return absl::StrFormat("round %d: %g", i, value);
    }
    return "";
  });
}

TEST(SharedMemoryTest, ServesProcessesThroughADescriptor) {
  const int fd = memfd_create("zipage-test", MFD_CLOEXEC);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(ftruncate(fd, 1 << 16), 0);
  std::vector<pid_t> processes;
  for (int r = 0; r < 3; ++r) {
    processes.push_back(Fork([&]() -> std::string {
      auto memory = SharedMemory::Map(fd);
      if (!memory.ok()) return memory.status().ToString();
      auto collective = MakeSharedMemoryCollective(*memory, r, 3, kLong);
      if (!collective.ok()) return collective.status().ToString();
      return RandomCalls(collective->get(), 100);
    }));
  }
  for (const pid_t process : processes) ExpectExit(process, 0);
  // The same mapping does not serve a second epoch.
  const auto again = MakeSharedMemoryCollective(*SharedMemory::Map(fd), 1, 3, kLong);
  EXPECT_TRUE(absl::IsFailedPrecondition(again.status())) << again.status();
  EXPECT_THAT(std::string(again.status().message()), HasSubstr("rank 1 is attached already"));
  close(fd);
  EXPECT_TRUE(absl::IsInvalidArgument(SharedMemory::Map(fd).status()));
}

TEST(SharedMemoryTest, RefusesAMappingForOthers) {
  const auto memory = *SharedMemory::Anonymous(1 << 16);
  ASSERT_TRUE(MakeSharedMemoryCollective(memory, 0, 2, kLong).ok());
  const auto other = MakeSharedMemoryCollective(memory, 1, 3, kLong);
  EXPECT_TRUE(absl::IsFailedPrecondition(other.status())) << other.status();
  EXPECT_THAT(std::string(other.status().message()), HasSubstr("2 ranks"));
  const auto noise = *SharedMemory::Anonymous(1 << 16);
  std::memset(noise->data(), 0x5A, noise->bytes());
  EXPECT_TRUE(absl::IsFailedPrecondition(MakeSharedMemoryCollective(noise, 0, 2, kLong).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(
      MakeSharedMemoryCollective(*SharedMemory::Anonymous(1024), 0, 4, kLong).status()));
}

TEST(SharedMemoryTest, ReportsRanksThatComeToDifferentCalls) {
  const Meeting meeting(Kind::kSharedMemory, 2);
  std::vector<absl::Status> statuses(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r) {
    threads.emplace_back([&, r] {
      auto collective = meeting.Join(r);
      std::vector<float> values(8);
      statuses[r] = r == 0 ? (*collective)->AllReduceSum(values.data(), 8)
                           : (*collective)->Broadcast(values.data(), 20);
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_TRUE(absl::IsInternal(statuses[0])) << statuses[0];
  EXPECT_TRUE(absl::IsInternal(statuses[1])) << statuses[1];
  EXPECT_EQ(statuses[0].message(),
            "rank 0, AllReduceSum, call 1 of 32 bytes: rank 1 came to Broadcast of 20 bytes");
}

TEST(GlooTest, RefusesAFolderThatWasUsedBefore) {
  const Meeting meeting(Kind::kGloo, 2);
  RunAsThreads(meeting, [](Collective* c) { return RandomCalls(c, 3); });
  const auto again = meeting.Join(0);
  EXPECT_TRUE(absl::IsFailedPrecondition(again.status())) << again.status();
  const auto nowhere = MakeGlooCollective({.rank = 0, .size = 2, .store_dir = "/proc/none/x"});
  EXPECT_TRUE(absl::IsFailedPrecondition(nowhere.status())) << nowhere.status();
}

TEST(SingleCollectiveTest, LeavesDataAlone) {
  SingleCollective collective;
  EXPECT_EQ(RandomCalls(&collective, 50), "");
}

}  // namespace
}  // namespace zipage
