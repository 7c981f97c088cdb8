#include "launcher/client.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "launcher/file_descriptor.h"
#include "launcher/run_directory.h"
#include "proto/wire.h"

namespace zipage {
namespace {

namespace fs = std::filesystem;

absl::StatusOr<std::string> AbsolutePath(const std::string& path) {
  std::error_code error;
  const fs::path absolute = fs::absolute(path, error);
  if (error) {
    return absl::InvalidArgumentError(
        absl::StrFormat("cannot resolve the path %s: %s", path, error.message()));
  }
  return absolute.lexically_normal().string();
}

absl::StatusOr<uint64_t> CountLines(const std::string& path) {
  const FileDescriptor file(open(path.c_str(), O_RDONLY | O_CLOEXEC));
  struct stat info {};
  if (!file.is_open() || fstat(file.get(), &info) != 0) {
    return absl::NotFoundError(
        absl::StrFormat("cannot read the job %s: %s", path, std::strerror(errno)));
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("the job %s is not a file; write its lines to one", path));
  }
  std::vector<char> buffer(1 << 20);
  uint64_t num_lines = 0;
  bool blank = true;
  ssize_t n = 0;
  while ((n = read(file.get(), buffer.data(), buffer.size())) != 0) {
    if (n < 0) {
      if (errno == EINTR) continue;
      return absl::DataLossError(
          absl::StrFormat("reading the job %s failed: %s", path, std::strerror(errno)));
    }
    for (ssize_t i = 0; i < n; ++i) {
      const char c = buffer[static_cast<size_t>(i)];
      if (c == '\n') {
        num_lines += blank ? 0 : 1;
        blank = true;
      } else if (c != ' ' && c != '\t' && c != '\r') {
        blank = false;
      }
    }
  }
  return num_lines + (blank ? 0 : 1);
}

absl::StatusOr<std::optional<transport::CurveClient>> MakeCurve(const EngineSelection& selection) {
  if (selection.curve_server_key.empty() && selection.curve_key_file.empty()) {
    return std::optional<transport::CurveClient>();
  }
  if (selection.curve_server_key.empty() || selection.curve_key_file.empty()) {
    return absl::InvalidArgumentError(
        "curve_server_key and curve_key_file belong together: the engine's public key, and the "
        "file "
        "with your own pair (zipage-submit --curve_keygen FILE makes one)");
  }
  transport::CurveClient curve;
  ZIPAGE_ASSIGN_OR_RETURN(curve.keys, transport::ReadCurveKeyFile(selection.curve_key_file));
  if (!transport::IsCurveKey(selection.curve_server_key)) {
    return absl::InvalidArgumentError(
        "curve_server_key is not a CURVE key of 40 characters; the engine's key file has it as "
        "public, "
        "and it needs quotes in a shell");
  }
  curve.server_key = selection.curve_server_key;
  return std::optional<transport::CurveClient>(std::move(curve));
}

}  // namespace

absl::StatusOr<std::unique_ptr<JobClient>> JobClient::Connect(const EngineAddress& address) {
  std::unique_ptr<JobClient> client(new JobClient());
  client->address_ = address;
  ZIPAGE_ASSIGN_OR_RETURN(client->socket_,
                          transport::ClientSocket::Connect(&client->context_, address.endpoint,
                                                           /*identity=*/"", address.curve));
  return client;
}

absl::Status JobClient::Send(const ClientMessage& message) {
  return socket_->Send(wire::Encode(message));
}

absl::StatusOr<std::optional<ClientReply>> JobClient::Receive(std::chrono::milliseconds timeout) {
  absl::StatusOr<std::string> bytes = socket_->Receive(timeout);
  if (absl::IsDeadlineExceeded(bytes.status())) return std::optional<ClientReply>();
  if (!bytes.ok()) return bytes.status();
  ZIPAGE_ASSIGN_OR_RETURN(ClientReply reply, wire::DecodeClientReply(*bytes));
  return std::optional<ClientReply>(std::move(reply));
}

absl::StatusOr<ClientReply> JobClient::Call(const ClientMessage& message,
                                            std::chrono::milliseconds timeout) {
  using Clock = std::chrono::steady_clock;
  constexpr std::chrono::milliseconds kSlice{200};  // Between two looks at the engine's lock.
  ZIPAGE_RETURN_IF_ERROR(Send(message));
  const Clock::time_point deadline = Clock::now() + timeout;
  do {
    ZIPAGE_ASSIGN_OR_RETURN(std::optional<ClientReply> reply, Receive(std::min(kSlice, timeout)));
    if (reply.has_value()) return *std::move(reply);
    if (!address_.run_directory.empty() && !IsEngineRunning(address_.run_directory)) break;
  } while (Clock::now() < deadline);
  return NoAnswer(timeout);
}

absl::Status JobClient::NoAnswer(std::chrono::milliseconds silence) const {
  if (!address_.run_directory.empty() && !IsEngineRunning(address_.run_directory)) {
    return absl::UnavailableError(
        absl::StrFormat("the engine in %s is not running any more; start one with zipage-launch",
                        address_.run_directory));
  }
  return absl::UnavailableError(absl::StrFormat(
      "no answer from the engine at %s for %.0f s; check with zipage-status that it runs%s",
      address_.endpoint, static_cast<double>(silence.count()) / 1000.0,
      absl::StartsWith(address_.endpoint, "tcp:")
          ? ", that this host can reach it, and that both sides agree on CURVE keys"
          : ", and in the launcher's output what it is doing"));
}

absl::StatusOr<EngineAddress> FindEngine(const EngineSelection& selection,
                                         const std::vector<std::string>& bases) {
  EngineAddress address;
  ZIPAGE_ASSIGN_OR_RETURN(address.curve, MakeCurve(selection));
  if (!selection.endpoint.empty()) {
    if (!selection.engine.empty()) {
      return absl::InvalidArgumentError(
          "engine and endpoint both name an engine; give one of them");
    }
    address.endpoint = selection.endpoint;
    return address;
  }
  if (!selection.engine.empty()) {
    ZIPAGE_ASSIGN_OR_RETURN(address.run_directory, AbsolutePath(selection.engine));
    if (!IsEngineRunning(address.run_directory)) {
      return absl::NotFoundError(absl::StrFormat(
          "no engine is running in %s; zipage-status lists those that are", selection.engine));
    }
  } else {
    const std::vector<std::string> engines = RunningEngines(bases);
    if (engines.empty()) {
      return absl::NotFoundError(
          absl::StrFormat("no engine of this user is running (looked in %s); start one with "
                          "zipage-launch, or name one "
                          "with --engine RUN_DIR or --endpoint",
                          absl::StrJoin(bases, ", ")));
    }
    if (engines.size() > 1) {
      return absl::FailedPreconditionError(
          absl::StrFormat("%d engines are running; choose one: --engine %s", engines.size(),
                          absl::StrJoin(engines, " or --engine ")));
    }
    address.run_directory = engines.front();
  }
  address.endpoint = absl::StrFormat("ipc://%s/%s", address.run_directory, kJobSocketName);
  return address;
}

absl::Status PrepareJob(SubmitJob* job) {
  ZIPAGE_ASSIGN_OR_RETURN(job->input_path, AbsolutePath(job->input_path));
  ZIPAGE_ASSIGN_OR_RETURN(job->output_path, AbsolutePath(job->output_path));
  if (job->input_path == job->output_path) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "job and output are both %s; give the results a file of their own", job->input_path));
  }
  if (job->name.empty()) job->name = fs::path(job->input_path).stem().string();
  ZIPAGE_ASSIGN_OR_RETURN(job->num_lines, CountLines(job->input_path));
  return absl::OkStatus();
}

}  // namespace zipage
