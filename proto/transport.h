#pragma once
// Sockets and deadlines: the only door to ZeroMQ. A server socket (ROUTER, mandatory routing) talks to
// named peers; a client socket (DEALER) talks to one server. One thread per socket.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "proto/status.h"

namespace zipage::transport {

// CURVE keys of one side, Z85 text of 40 characters each.
struct CurveKeys {
  std::string public_key;
  std::string secret_key;
};

// A fresh key pair.
CurveKeys GenerateCurveKeys();

// How a server socket lets peers in; without it every peer that reaches the endpoint is accepted.
struct CurveServer {
  CurveKeys keys;
  std::vector<std::string> allowed_client_keys;  // Public keys; every other client is refused (ZAP).
};

struct CurveClient {
  CurveKeys keys;
  std::string server_key;  // Public.
};

// Owns the I/O thread. Outlives its sockets.
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
  // endpoint and the cure. `curve` empty: no encryption.
  static absl::StatusOr<std::unique_ptr<ServerSocket>> Bind(Context* context,
                                                            const std::string& endpoint,
                                                            const std::optional<CurveServer>& curve);
  ~ServerSocket();

  // With the port that was taken.
  const std::string& endpoint() const { return endpoint_; }

  // kUnavailable if the peer is gone or its queue is full. Does not block.
  absl::Status Send(const std::string& peer, std::string_view bytes);
  // Empty if nothing has arrived. Does not block.
  std::optional<Received> Receive();

 private:
  friend bool WaitReadable(const std::vector<ServerSocket*>& sockets, std::chrono::milliseconds);
  struct Impl;
  explicit ServerSocket(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
  std::string endpoint_;
};

// Waits until one of the sockets has a message or the time is over; true if one has.
bool WaitReadable(const std::vector<ServerSocket*>& sockets, std::chrono::milliseconds timeout);

class ClientSocket {
 public:
  // Connects in the background: a server that is not there yet is no error. `identity` is the name the
  // server sees; empty lets the server choose one.
  static absl::StatusOr<std::unique_ptr<ClientSocket>> Connect(
      Context* context, const std::string& endpoint, const std::string& identity,
      const std::optional<CurveClient>& curve);
  ~ClientSocket();

  absl::Status Send(std::string_view bytes);
  // kDeadlineExceeded if nothing arrives in time.
  absl::StatusOr<std::string> Receive(std::chrono::milliseconds timeout);

 private:
  struct Impl;
  explicit ClientSocket(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace zipage::transport
