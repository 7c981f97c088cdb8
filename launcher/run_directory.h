#pragma once
// The private directory of one engine: `lock`, `engine.toml`, the sockets and `epoch-N/`. Its
// launcher holds a flock on `lock` for its whole life, so a directory whose lock can be taken has
// no engine. Invariant: a run directory is only ever removed by whoever holds its lock.
//
// Default place: $XDG_RUNTIME_DIR/zipage/e-XXXXXX, or /tmp/zipage-UID/e-XXXXXX without a runtime
// directory. Everything is mode 0700 and belongs to this user; a directory that is not, or that is
// a symbolic link, is refused, because /tmp is everybody's.

#include <memory>
#include <string>
#include <vector>

#include "launcher/file_descriptor.h"
#include "proto/status.h"

namespace zipage {

inline constexpr char kWorkerSocketName[] = "worker.sock";
inline constexpr char kJobSocketName[] = "job.sock";
inline constexpr char kConfigFileName[] = "engine.toml";

// Where engines of this user put their run directories; the first is where new ones go.
std::vector<std::string> RunBases();

class RunDirectory {
 public:
  // A new directory inside `base`, which is made if it is missing. Directories there that a killed
  // engine left behind are removed.
  static absl::StatusOr<std::unique_ptr<RunDirectory>> CreateIn(const std::string& base);
  // Exactly `path`: made, or taken over if it is empty or left behind by a killed engine.
  static absl::StatusOr<std::unique_ptr<RunDirectory>> CreateAt(const std::string& path);
  // Removes the directory with everything in it, then lets go of the lock.
  ~RunDirectory();
  RunDirectory(const RunDirectory&) = delete;
  RunDirectory& operator=(const RunDirectory&) = delete;

  const std::string& path() const { return path_; }
  // ipc://PATH of a socket in the directory.
  std::string Endpoint(const std::string& socket_name) const;
  // Writes `name`, readable by this user only.
  absl::Status WriteFile(const std::string& name, const std::string& contents) const;

 private:
  RunDirectory(std::string path, FileDescriptor lock);

  const std::string path_;
  const FileDescriptor lock_;
};

// Whether a launcher holds the lock of `run_directory`.
bool IsEngineRunning(const std::string& run_directory);

// Run directories of running engines, sorted, in those of `bases` that belong to this user.
std::vector<std::string> RunningEngines(const std::vector<std::string>& bases);

}  // namespace zipage
