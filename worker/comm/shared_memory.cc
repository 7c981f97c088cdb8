#include "worker/comm/shared_memory.h"

#include <glog/logging.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"

namespace zipage {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

constexpr uint32_t kMagic = 0x5A695067;  // "ZiPg"
constexpr uint32_t kVersion = 1;
constexpr size_t kLine = 128;  // two cache lines: the hardware prefetches them in pairs
constexpr int kMaxRanks = 256;
// Up to this size every rank sums everything: one barrier instead of two.
constexpr size_t kOneBarrierBytes = size_t{64} * 1024;
// Looks before sleeping, some tens of microseconds: longer than most waits if every rank has a
// core.
constexpr int kSpins = 2000;
constexpr milliseconds kLifeCheckInterval{100};

enum class Call : uint32_t { kNone, kAllReduceSum, kGather, kBroadcast };

const char* CallName(uint32_t call) {
  switch (static_cast<Call>(call)) {
    case Call::kAllReduceSum:
      return "AllReduceSum";
    case Call::kGather:
      return "Gather";
    case Call::kBroadcast:
      return "Broadcast";
    case Call::kNone:
      break;
  }
  return "an unknown call";
}

struct alignas(kLine) Header {
  std::atomic<uint32_t> magic;
  std::atomic<uint32_t> version;
  std::atomic<uint32_t> ranks;
  std::atomic<uint64_t> bytes;
};

// What one rank publishes. `call` and `call_bytes` are used in turn, like the banks.
struct alignas(kLine) RankLine {
  std::atomic<uint32_t> process;   // its id; 0 while not attached
  std::atomic<uint32_t> arrivals;  // barriers reached, modulo 2^32; others sleep on it
  std::atomic<uint32_t> sleepers;  // ranks asleep on arrivals, or about to be
  std::atomic<uint32_t> left;      // 1 once detached
  std::atomic<uint32_t> call[2];
  std::atomic<uint64_t> call_bytes[2];
};

static_assert(sizeof(Header) == kLine && sizeof(RankLine) == kLine);
static_assert(std::atomic<uint32_t>::is_always_lock_free &&
              std::atomic<uint64_t>::is_always_lock_free);

// Not FUTEX_PRIVATE: the word is shared between processes. `timeout` is relative.
void FutexWait(std::atomic<uint32_t>* word, uint32_t expected, milliseconds timeout) {
  const timespec time = {.tv_sec = timeout.count() / 1000,
                         .tv_nsec = timeout.count() % 1000 * 1'000'000};
  syscall(SYS_futex, word, FUTEX_WAIT, expected, &time, nullptr, 0);
}

void FutexWakeAll(std::atomic<uint32_t>* word) {
  syscall(SYS_futex, word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}

// True if the process ended, whether or not its parent has taken notice.
bool ProcessGone(uint32_t process) {
  if (kill(static_cast<pid_t>(process), 0) != 0 && errno == ESRCH) return true;
  std::FILE* file = std::fopen(absl::StrCat("/proc/", process, "/stat").c_str(), "re");
  if (file == nullptr) return false;
  char text[512] = {};
  const size_t length = std::fread(text, 1, sizeof(text) - 1, file);
  std::fclose(file);
  // "PID (NAME) STATE …"; the name may hold parentheses.
  const std::string_view stat(text, length);
  const size_t name_end = stat.rfind(") ");
  return name_end != std::string_view::npos && name_end + 2 < length &&
         (stat[name_end + 2] == 'Z' || stat[name_end + 2] == 'X');
}

class SharedMemoryCollective final : public Collective {
 public:
  SharedMemoryCollective(std::shared_ptr<SharedMemory> memory, int rank, int size,
                         size_t slot_bytes, milliseconds timeout)
      : memory_(std::move(memory)),
        rank_(rank),
        size_(size),
        slot_bytes_(slot_bytes),
        timeout_(timeout),
        spins_(size <= static_cast<int>(std::thread::hardware_concurrency()) ? kSpins : 0) {}

  ~SharedMemoryCollective() override {
    RankLine& own = Line(rank_);
    own.left.store(1);
    FutexWakeAll(&own.arrivals);
  }

  int rank() const override { return rank_; }
  int size() const override { return size_; }

  absl::Status AllReduceSum(float* data, size_t count) override {
    ++calls_;
    const size_t piece = slot_bytes_ / sizeof(float);
    for (size_t done = 0; done < count; done += piece) {
      const size_t n = std::min(piece, count - done);
      std::memcpy(Slot(rank_), data + done, n * sizeof(float));
      ZIPAGE_RETURN_IF_ERROR(Barrier(Call::kAllReduceSum, count * sizeof(float)));
      if (n * sizeof(float) <= kOneBarrierBytes) {
        Sum(data + done, 0, n);
      } else {
        ZIPAGE_RETURN_IF_ERROR(SumBySlices(data + done, n, count));
      }
      NextBank();
    }
    return absl::OkStatus();
  }

  absl::Status Gather(const void* data, size_t bytes, void* out) override {
    ++calls_;
    for (size_t done = 0; done < bytes; done += slot_bytes_) {
      const size_t n = std::min(slot_bytes_, bytes - done);
      std::memcpy(Slot(rank_), static_cast<const char*>(data) + done, n);
      ZIPAGE_RETURN_IF_ERROR(Barrier(Call::kGather, bytes));
      for (int r = 0; rank_ == 0 && r < size_; ++r) {
        std::memcpy(static_cast<char*>(out) + r * bytes + done, Slot(r), n);
      }
      NextBank();
    }
    return absl::OkStatus();
  }

  absl::Status Broadcast(void* data, size_t bytes) override {
    ++calls_;
    for (size_t done = 0; done < bytes; done += slot_bytes_) {
      const size_t n = std::min(slot_bytes_, bytes - done);
      if (rank_ == 0) std::memcpy(Slot(0), static_cast<char*>(data) + done, n);
      ZIPAGE_RETURN_IF_ERROR(Barrier(Call::kBroadcast, bytes));
      if (rank_ != 0) std::memcpy(static_cast<char*>(data) + done, Slot(0), n);
      NextBank();
    }
    return absl::OkStatus();
  }

 private:
  RankLine& Line(int rank) const {
    return reinterpret_cast<RankLine*>(static_cast<char*>(memory_->data()) + kLine)[rank];
  }

  // A rank's slot in the current bank. The bank of the call before stays readable until every rank
  // has passed this call's barrier, and so has finished with it.
  char* Slot(int rank) const {
    return static_cast<char*>(memory_->data()) + kLine * (1 + size_) +
           (bank_ * size_ + rank) * slot_bytes_;
  }

  void NextBank() { bank_ ^= 1; }

  // out[i] = the sum over ranks, in rank order, of element first + i of their slots.
  void Sum(float* out, size_t first, size_t count) const {
    std::memcpy(out, reinterpret_cast<const float*>(Slot(0)) + first, count * sizeof(float));
    for (int r = 1; r < size_; ++r) {
      const float* term = reinterpret_cast<const float*>(Slot(r)) + first;
      for (size_t i = 0; i < count; ++i) out[i] += term[i];
    }
  }

  // Rank r sums slice r and leaves it in its own slot, where nobody else reads that slice before
  // the second barrier.
  absl::Status SumBySlices(float* data, size_t count, size_t call_count) {
    const auto begin = [&](int r) { return count * r / size_; };
    const size_t own = begin(rank_);
    const size_t own_count = begin(rank_ + 1) - own;
    Sum(data + own, own, own_count);
    std::memcpy(reinterpret_cast<float*>(Slot(rank_)) + own, data + own, own_count * sizeof(float));
    ZIPAGE_RETURN_IF_ERROR(Barrier(Call::kAllReduceSum, call_count * sizeof(float)));
    for (int r = 0; r < size_; ++r) {
      if (r == rank_) continue;
      std::memcpy(data + begin(r), reinterpret_cast<const float*>(Slot(r)) + begin(r),
                  (begin(r + 1) - begin(r)) * sizeof(float));
    }
    return absl::OkStatus();
  }

  // Returns once every rank has come here for the same call. After an error the ranks are out of
  // step, so it is returned for ever.
  absl::Status Barrier(Call call, uint64_t bytes) {
    if (!broken_.ok()) return broken_;
    const uint32_t number = ++barriers_;
    RankLine& own = Line(rank_);
    own.call[number % 2].store(static_cast<uint32_t>(call), std::memory_order_relaxed);
    own.call_bytes[number % 2].store(bytes, std::memory_order_relaxed);
    own.arrivals.store(number);  // seq_cst, against the sleeper's count and second look
    if (own.sleepers.load() != 0) FutexWakeAll(&own.arrivals);
    const auto deadline = Clock::now() + timeout_;
    std::vector<int> absent;
    for (int r = 0; r < size_; ++r) {
      const absl::Status status = Await(r, number, deadline, call);
      if (absl::IsDeadlineExceeded(status)) {
        absent.push_back(r);
      } else if (!status.ok()) {
        return broken_ = status;
      }
    }
    if (!absent.empty()) {
      return broken_ = absl::DeadlineExceededError(
                 absl::StrFormat("%s: rank %s did not come within %d ms", Where(call),
                                 absl::StrJoin(absent, ", "), timeout_.count()));
    }
    return broken_ = CheckSameCall(number, call, bytes);
  }

  bool Arrived(int rank, uint32_t number) const {
    return static_cast<int32_t>(Line(rank).arrivals.load() - number) >= 0;
  }

  absl::Status Await(int rank, uint32_t number, Clock::time_point deadline, Call call) {
    RankLine& line = Line(rank);
    for (int spin = 0; spin < spins_; ++spin) {
      if (Arrived(rank, number)) return absl::OkStatus();
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
    for (;;) {
      line.sleepers.fetch_add(1);
      const uint32_t seen = line.arrivals.load();
      const bool left = line.left.load() != 0;
      if (static_cast<int32_t>(seen - number) < 0 && !left) {
        const auto rest = std::chrono::ceil<milliseconds>(deadline - Clock::now());
        FutexWait(&line.arrivals, seen, std::clamp(rest, milliseconds(0), kLifeCheckInterval));
      }
      line.sleepers.fetch_sub(1);
      if (Arrived(rank, number)) return absl::OkStatus();
      const uint32_t process = line.process.load();
      if (left) {
        return absl::UnavailableError(absl::StrFormat("%s: rank %d has left", Where(call), rank));
      }
      if (process != 0 && ProcessGone(process) && !Arrived(rank, number)) {
        return absl::UnavailableError(
            absl::StrFormat("%s: rank %d, process %d, has ended", Where(call), rank, process));
      }
      if (Clock::now() >= deadline) return absl::DeadlineExceededError("");
    }
  }

  absl::Status CheckSameCall(uint32_t number, Call call, uint64_t bytes) const {
    for (int r = 0; r < size_; ++r) {
      const uint32_t other = Line(r).call[number % 2].load(std::memory_order_relaxed);
      const uint64_t other_bytes = Line(r).call_bytes[number % 2].load(std::memory_order_relaxed);
      if (other == static_cast<uint32_t>(call) && other_bytes == bytes) continue;
      return absl::InternalError(absl::StrFormat("%s of %d bytes: rank %d came to %s of %d bytes",
                                                 Where(call), bytes, r, CallName(other),
                                                 other_bytes));
    }
    return absl::OkStatus();
  }

  std::string Where(Call call) const {
    return absl::StrFormat("rank %d, %s, call %d", rank_, CallName(static_cast<uint32_t>(call)),
                           calls_);
  }

  const std::shared_ptr<SharedMemory> memory_;
  const int rank_;
  const int size_;
  const size_t slot_bytes_;
  const milliseconds timeout_;
  const int spins_;  // none with more ranks than cores
  size_t bank_ = 0;
  uint32_t barriers_ = 0;
  uint64_t calls_ = 0;  // from 1, for messages
  absl::Status broken_;
};

// Writes `value` where nothing is yet; false if something else is.
template <typename T>
bool Agree(std::atomic<T>* field, T value) {
  T found = 0;
  return field->compare_exchange_strong(found, value) || found == value;
}

}  // namespace

absl::StatusOr<std::shared_ptr<SharedMemory>> SharedMemory::Map(int fd) {
  struct stat info {};
  if (fstat(fd, &info) != 0 || info.st_size <= 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "shared memory: file descriptor %d is not open or empty; the launcher passes it on", fd));
  }
  const auto bytes = static_cast<size_t>(info.st_size);
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return absl::InvalidArgumentError(
        absl::StrFormat("shared memory: mapping %d bytes of file descriptor %d: %s", bytes, fd,
                        std::strerror(errno)));
  }
  return std::shared_ptr<SharedMemory>(new SharedMemory(data, bytes));
}

absl::StatusOr<std::shared_ptr<SharedMemory>> SharedMemory::Anonymous(size_t bytes) {
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("shared memory: mapping %d bytes: %s", bytes, std::strerror(errno)));
  }
  return std::shared_ptr<SharedMemory>(new SharedMemory(data, bytes));
}

SharedMemory::~SharedMemory() { munmap(data_, bytes_); }

absl::StatusOr<std::unique_ptr<Collective>> MakeSharedMemoryCollective(
    std::shared_ptr<SharedMemory> memory, int rank, int size, milliseconds timeout) {
  CHECK(0 <= rank && rank < size && size <= kMaxRanks) << "rank " << rank << " of " << size;
  const auto ranks = static_cast<size_t>(size);
  const size_t lines = kLine * (1 + ranks);
  const size_t slots = memory->bytes() > lines ? memory->bytes() - lines : 0;
  const size_t slot_bytes = slots / (2 * ranks) / kLine * kLine;
  if (slot_bytes == 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("shared memory: %d bytes are too few for %d ranks; give %d or more",
                        memory->bytes(), size, lines + 2 * ranks * kLine));
  }
  auto* header = static_cast<Header*>(memory->data());
  if (!Agree(&header->magic, kMagic) || !Agree(&header->version, kVersion) ||
      !Agree(&header->ranks, static_cast<uint32_t>(size)) ||
      !Agree(&header->bytes, uint64_t{memory->bytes()})) {
    return absl::FailedPreconditionError(
        absl::StrFormat("shared memory: laid out for version %d, %d ranks and %d bytes, not "
                        "version %d, %d ranks and "
                        "%d bytes; start all ranks from one build with a fresh mapping",
                        header->version.load(), header->ranks.load(), header->bytes.load(),
                        kVersion, size, memory->bytes()));
  }
  auto* line = reinterpret_cast<RankLine*>(static_cast<char*>(memory->data()) + kLine) + rank;
  uint32_t process = 0;
  if (!line->process.compare_exchange_strong(process, static_cast<uint32_t>(getpid()))) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "shared memory: rank %d is attached already, by process %d; give each epoch "
        "a fresh mapping",
        rank, process));
  }
  return std::make_unique<SharedMemoryCollective>(std::move(memory), rank, size, slot_bytes,
                                                  timeout);
}

}  // namespace zipage
