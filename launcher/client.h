#pragma once
// The client's side of the job socket: one connection, requests answered in order. One thread.

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/messages.h"
#include "proto/status.h"
#include "proto/transport.h"

namespace zipage {

// How long an engine may take for an answer: it answers between two steps, or while it loads.
inline constexpr std::chrono::milliseconds kAnswerTimeout{10'000};

// Where an engine is, and how to get in.
struct EngineAddress {
  std::string endpoint;       // ipc://PATH or tcp://HOST:PORT
  std::string run_directory;  // Empty if the engine was named by its endpoint.
  std::optional<transport::CurveClient> curve;
};

class JobClient {
 public:
  // An engine that is not there yet is no error: what is sent waits for it.
  static absl::StatusOr<std::unique_ptr<JobClient>> Connect(const EngineAddress& address);

  absl::Status Send(const ClientMessage& message);
  // The next reply; empty if none comes in time.
  absl::StatusOr<std::optional<ClientReply>> Receive(std::chrono::milliseconds timeout);
  // Sends and waits for the reply. kUnavailable, with endpoint and cure, if none comes in time or
  // the engine is gone. REQUIRES: every reply to what was sent before has been received.
  absl::StatusOr<ClientReply> Call(const ClientMessage& message,
                                   std::chrono::milliseconds timeout = kAnswerTimeout);
  // The error of an engine that has not answered for `silence`.
  absl::Status NoAnswer(std::chrono::milliseconds silence) const;

 private:
  JobClient() = default;

  EngineAddress address_;
  transport::Context context_;
  std::unique_ptr<transport::ClientSocket> socket_;
};

// Options by which zipage-submit and zipage-status name their engine.
struct EngineSelection {
  std::string engine;    // A run directory.
  std::string endpoint;  // Of the job socket.
  std::string curve_server_key;
  std::string curve_key_file;
};

// The selected engine, or the only one that runs in `bases`. Errors list the candidates.
absl::StatusOr<EngineAddress> FindEngine(const EngineSelection& selection,
                                         const std::vector<std::string>& bases);

// Checks that the job's input can be read, makes its paths absolute, and counts the lines that are
// not blank, in one pass with constant memory.
absl::Status PrepareJob(SubmitJob* job);

}  // namespace zipage
