#include "launcher/run_directory.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <system_error>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"

namespace zipage {
namespace {

namespace fs = std::filesystem;

constexpr char kLockName[] = "lock";
constexpr char kBaseLockName[] = ".lock";
constexpr char kPrefix[] = "e-";
// sockaddr_un holds 108 bytes with the terminating zero.
constexpr size_t kMaxSocketPath = 106;

bool SameFile(const struct stat& a, const struct stat& b) {
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

// Makes `path` if it is missing; refuses what another user could read or swap.
absl::Status EnsurePrivateDirectory(const std::string& path) {
  if (mkdir(path.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::FailedPreconditionError(
        absl::StrFormat("cannot make the run directory %s: %s; give another place with --run_dir",
                        path, std::strerror(errno)));
  }
  struct stat info {};
  if (lstat(path.c_str(), &info) != 0) {
    return absl::FailedPreconditionError(
        absl::StrFormat("cannot look at the run directory %s: %s", path, std::strerror(errno)));
  }
  const char* fault = nullptr;
  if (S_ISLNK(info.st_mode)) {
    fault = "is a symbolic link";
  } else if (!S_ISDIR(info.st_mode)) {
    fault = "is not a directory";
  } else if (info.st_uid != geteuid()) {
    fault = "belongs to another user";
  } else if ((info.st_mode & 0077) != 0) {
    fault = "is open to other users (chmod 700 closes it)";
  }
  if (fault != nullptr) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run directory %s %s; remove it, or give another place with --run_dir", path, fault));
  }
  return absl::OkStatus();
}

absl::Status CheckSocketPaths(const std::string& path) {
  size_t length = path.size() + 1 + std::strlen(kWorkerSocketName);
  if (length <= kMaxSocketPath) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("run directory %s is too long: a socket in it would have a path of %d bytes "
                      "and the system takes "
                      "%d; give a shorter one with --run_dir",
                      path, length, kMaxSocketPath));
}

// Takes the lock `name` in `directory`. Not open if another process holds it, or if there is none
// and `create` is false.
FileDescriptor TakeLock(const std::string& directory, const char* name, bool create, bool wait) {
  const std::string path = absl::StrFormat("%s/%s", directory, name);
  const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | (create ? O_CREAT : 0);
  // A lock file may be removed between open and flock by its former holder: then the lock is on a
  // file that nobody else sees, and the next try makes a new one.
  for (int tries = 0; tries < 100; ++tries) {
    FileDescriptor lock(open(path.c_str(), flags, 0600));
    if (!lock.is_open()) return {};
    while (flock(lock.get(), LOCK_EX | (wait ? 0 : LOCK_NB)) != 0) {
      if (errno != EINTR) return {};
    }
    struct stat locked {
    }, named{};
    if (fstat(lock.get(), &locked) == 0 && lstat(path.c_str(), &named) == 0 &&
        SameFile(locked, named)) {
      return lock;
    }
  }
  return {};
}

// Removes everything but the lock file. Symbolic links are unlinked, not followed.
void Clear(const std::string& directory) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(directory, error)) {
    if (entry.path().filename() == kLockName) continue;
    std::error_code ignored;
    fs::remove_all(entry.path(), ignored);
  }
}

// REQUIRES: the caller holds the lock of `directory`.
void Remove(const std::string& directory) {
  Clear(directory);
  std::error_code ignored;
  fs::remove_all(directory, ignored);
}

// REQUIRES: the caller holds the base's lock, so no directory without a lock file is a newborn one.
void Sweep(const std::string& base) {
  std::error_code error;
  for (const fs::directory_entry& entry : fs::directory_iterator(base, error)) {
    const std::string path = entry.path().string();
    struct stat info {};
    if (!absl::StartsWith(entry.path().filename().string(), kPrefix)) continue;
    if (lstat(path.c_str(), &info) != 0 || !S_ISDIR(info.st_mode)) continue;
    const FileDescriptor lock = TakeLock(path, kLockName, /*create=*/true, /*wait=*/false);
    if (lock.is_open()) Remove(path);
  }
}

}  // namespace

std::vector<std::string> RunBases() {
  std::vector<std::string> bases;
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  std::error_code error;
  if (runtime != nullptr && runtime[0] == '/' && fs::is_directory(runtime, error)) {
    bases.push_back(absl::StrFormat("%s/zipage", runtime));
  }
  bases.push_back(absl::StrFormat("/tmp/zipage-%d", geteuid()));
  return bases;
}

RunDirectory::RunDirectory(std::string path, FileDescriptor lock)
    : path_(std::move(path)), lock_(std::move(lock)) {}

RunDirectory::~RunDirectory() { Remove(path_); }

absl::StatusOr<std::unique_ptr<RunDirectory>> RunDirectory::CreateIn(const std::string& base) {
  ZIPAGE_RETURN_IF_ERROR(EnsurePrivateDirectory(base));
  std::string path = absl::StrFormat("%s/%sXXXXXX", base, kPrefix);
  ZIPAGE_RETURN_IF_ERROR(CheckSocketPaths(path));
  const FileDescriptor base_lock = TakeLock(base, kBaseLockName, /*create=*/true, /*wait=*/true);
  if (!base_lock.is_open()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "cannot lock %s/%s: %s; is the disk full?", base, kBaseLockName, std::strerror(errno)));
  }
  Sweep(base);
  if (mkdtemp(path.data()) == nullptr) {
    return absl::FailedPreconditionError(
        absl::StrFormat("cannot make a run directory in %s: %s", base, std::strerror(errno)));
  }
  FileDescriptor lock = TakeLock(path, kLockName, /*create=*/true, /*wait=*/true);
  if (!lock.is_open()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("cannot lock run directory %s: %s", path, std::strerror(errno)));
  }
  return std::unique_ptr<RunDirectory>(new RunDirectory(std::move(path), std::move(lock)));
}

absl::StatusOr<std::unique_ptr<RunDirectory>> RunDirectory::CreateAt(const std::string& given) {
  std::error_code error;
  std::string path = fs::absolute(given, error).lexically_normal().string();
  while (path.size() > 1 && path.back() == '/') path.pop_back();
  ZIPAGE_RETURN_IF_ERROR(CheckSocketPaths(path));
  ZIPAGE_RETURN_IF_ERROR(EnsurePrivateDirectory(path));
  if (!fs::exists(absl::StrFormat("%s/%s", path, kLockName), error) && !fs::is_empty(path, error)) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run_dir %s holds other files, and a run directory is emptied; give a new or empty one",
        path));
  }
  FileDescriptor lock = TakeLock(path, kLockName, /*create=*/true, /*wait=*/false);
  if (!lock.is_open()) {
    return absl::FailedPreconditionError(absl::StrFormat(
        "run_dir %s is in use by a running engine; stop that one, or give another directory",
        path));
  }
  Clear(path);
  return std::unique_ptr<RunDirectory>(new RunDirectory(std::move(path), std::move(lock)));
}

std::string RunDirectory::Endpoint(const std::string& socket_name) const {
  return absl::StrFormat("ipc://%s/%s", path_, socket_name);
}

absl::Status RunDirectory::WriteFile(const std::string& name, const std::string& contents) const {
  const std::string path = absl::StrFormat("%s/%s", path_, name);
  const FileDescriptor file(
      open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0600));
  size_t written = 0;
  while (file.is_open() && written < contents.size()) {
    const ssize_t n = write(file.get(), contents.data() + written, contents.size() - written);
    if (n < 0 && errno != EINTR) break;
    if (n > 0) written += static_cast<size_t>(n);
  }
  if (!file.is_open() || written < contents.size()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("cannot write %s: %s", path, std::strerror(errno)));
  }
  return absl::OkStatus();
}

bool IsEngineRunning(const std::string& run_directory) {
  const std::string path = absl::StrFormat("%s/%s", run_directory, kLockName);
  const FileDescriptor lock(open(path.c_str(), O_RDWR | O_CLOEXEC | O_NOFOLLOW));
  // A shared lock, so that two who ask at the same moment do not take each other for an engine.
  return lock.is_open() && flock(lock.get(), LOCK_SH | LOCK_NB) != 0 && errno == EWOULDBLOCK;
}

std::vector<std::string> RunningEngines(const std::vector<std::string>& bases) {
  std::vector<std::string> engines;
  for (const std::string& base : bases) {
    struct stat info {};
    if (lstat(base.c_str(), &info) != 0 || !S_ISDIR(info.st_mode) || info.st_uid != geteuid()) {
      continue;
    }
    std::error_code error;
    for (const fs::directory_entry& entry : fs::directory_iterator(base, error)) {
      if (IsEngineRunning(entry.path().string())) engines.push_back(entry.path().string());
    }
  }
  std::sort(engines.begin(), engines.end());
  return engines;
}

}  // namespace zipage
