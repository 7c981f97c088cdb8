#pragma once
// Sockets and deadlines: the only door to ZeroMQ. A server socket (ROUTER, mandatory routing) talks
// to named peers; a client socket (DEALER) talks to one server. One thread per socket. A message of
// more than 256 MiB ends the connection of the peer that sends it. A socket that is destroyed still
// delivers what was sent, for a second at most, before the Context goes.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "proto/curve_keys.h"
#include "proto/status.h"

namespace zipage::transport {

// A fresh key pair.
CurveKeys GenerateCurveKeys();

// How a server socket lets peers in; without it every peer that reaches the endpoint is accepted.
struct CurveServer {
  CurveKeys keys;
  std::vector<std::string>
      allowed_client_keys;  // Public keys; every other client is refused (ZAP).
};

struct CurveClient {
  CurveKeys keys;
  std::string server_key;  // Public.
};

// Owns the I/O thread, and the thread that checks client keys once a CURVE server is bound.
// Outlives its sockets. A forked child must not touch it.
class Context {
 public:
  Context();
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

 private:
  friend class ServerSocket;
  friend class ClientSocket;
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

struct Received {
  std::string peer;
  std::string bytes;
};

class ServerSocket {
 public:
  // Binds `endpoint` (ipc://PATH or tcp://ADDRESS:PORT; port * takes a free one). Errors name the
  // endpoint and the cure. `curve` empty: no encryption. An ipc path where a process listens, or
  // that is no socket, is refused; a dead process's socket is replaced. A socket closes in the
  // background: its endpoint may count as in use for a moment longer.
  static absl::StatusOr<std::unique_ptr<ServerSocket>> Bind(
      Context* context, const std::string& endpoint, const std::optional<CurveServer>& curve);
  ~ServerSocket();

  // With the port that was taken.
  const std::string& endpoint() const { return endpoint_; }

  // kUnavailable if the peer is gone or its queue (1000 messages) is full. Does not block. A peer
  // that connects under the name of another takes its place, as a rank does that comes back.
  absl::Status Send(const std::string& peer, std::string_view bytes);
  // Empty if nothing has arrived. Does not block. Frames that no ClientSocket sends are dropped.
  std::optional<Received> Receive();

 private:
  friend bool WaitReadable(const std::vector<ServerSocket*>& sockets, std::chrono::milliseconds);
  struct Impl;
  explicit ServerSocket(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  std::string endpoint_;
};

// Waits until one of the sockets has a message, the time is over or a signal arrives; true if one
// has.
bool WaitReadable(const std::vector<ServerSocket*>& sockets, std::chrono::milliseconds timeout);

class ClientSocket {
 public:
  // Connects in the background: a server that is not there yet is no error. `identity` is the name
  // the server sees; empty lets the server choose one.
  static absl::StatusOr<std::unique_ptr<ClientSocket>> Connect(
      Context* context, const std::string& endpoint, const std::string& identity,
      const std::optional<CurveClient>& curve);
  ~ClientSocket();

  // kUnavailable if the queue to the server (1000 messages) is full. Does not block.
  absl::Status Send(std::string_view bytes);
  // kDeadlineExceeded if nothing arrives in time, or if a signal interrupts the wait.
  absl::StatusOr<std::string> Receive(std::chrono::milliseconds timeout);

 private:
  struct Impl;
  explicit ClientSocket(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zipage::transport
