#include "proto/transport.h"

#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <zmq.hpp>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "glog/logging.h"

namespace zipage::transport {
namespace {

using std::chrono::milliseconds;

constexpr char kZapEndpoint[] = "inproc://zeromq.zap.01";  // Fixed by ZeroMQ RFC 27.
constexpr int64_t kMaxMessageBytes = int64_t{256} << 20;
constexpr int kLingerMs = 1000;
// Far above the two plans that run ahead; bounds what a peer that never reads can hold. Mandatory
// routing makes a full queue an error instead of a silent drop.
constexpr int kQueueLimit = 1000;
// Malformed messages skipped in one Receive, so that a flood of them cannot hold the caller.
constexpr int kMaxDropped = 64;

// The path of an ipc endpoint, empty for others.
std::string IpcPath(const std::string& endpoint) {
  absl::string_view path = endpoint;
  return absl::ConsumePrefix(&path, "ipc://") ? std::string(path) : std::string();
}

absl::Status CheckEndpoint(const std::string& endpoint) {
  constexpr size_t kMaxPath = sizeof(sockaddr_un::sun_path) - 1;
  const std::string path = IpcPath(endpoint);
  if (path.size() > kMaxPath) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "endpoint %s has a path of %d characters; a Unix socket allows %d, so choose a shorter "
        "directory",
        endpoint, path.size(), kMaxPath));
  }
  if (path.empty() && !absl::StartsWith(endpoint, "tcp://")) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "endpoint \"%s\" is neither ipc://PATH nor tcp://ADDRESS:PORT", absl::CEscape(endpoint)));
  }
  return absl::OkStatus();
}

// ZeroMQ unlinks whatever lies at an ipc path before it binds: another engine's live socket, or the
// user's file. Both are refused here; the socket of a dead process may go.
absl::Status CheckIpcPathIsFree(const std::string& endpoint) {
  const std::string path = IpcPath(endpoint);
  struct stat info = {};
  if (path.empty() || lstat(path.c_str(), &info) != 0) return absl::OkStatus();
  if (!S_ISSOCK(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("endpoint %s: the path exists and is no socket; give another", endpoint));
  }
  const int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  if (fd < 0) return absl::OkStatus();
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  std::memcpy(address.sun_path, path.c_str(), path.size());
  const bool alive = connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
  close(fd);
  if (!alive) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrFormat(
      "endpoint %s is in use by a running process; stop it or give another endpoint", endpoint));
}

const char* BindCure(int error) {
  switch (error) {
    case EADDRINUSE:
      return "; stop the process that uses it or give another port (* takes a free one)";
    case EADDRNOTAVAIL:
    case ENODEV:
      return "; give an address of this machine";
    case ENOENT:
    case ENOTDIR:
      return "; create the directory first";
    case EACCES:
    case EPERM:
      return "; choose a place this user may write to";
    default:
      return "; give ipc://PATH or tcp://ADDRESS:PORT";
  }
}

// What every socket has in common.
void SetCommonOptions(zmq::socket_t* socket, const std::string& endpoint) {
  socket->set(zmq::sockopt::linger, kLingerMs);
  socket->set(zmq::sockopt::maxmsgsize, kMaxMessageBytes);
  socket->set(zmq::sockopt::sndhwm, kQueueLimit);
  socket->set(zmq::sockopt::rcvhwm, kQueueLimit);
  if (endpoint.find('[') != std::string::npos) socket->set(zmq::sockopt::ipv6, true);
}

absl::Status CheckKeys(const CurveKeys& keys) {
  if (IsCurveKey(keys.public_key) && IsCurveKey(keys.secret_key)) return absl::OkStatus();
  return absl::InvalidArgumentError("a CURVE key pair is not 40 characters of Z85 each");
}

// Waits for `items`; false if the time is over or a signal interrupts.
bool Poll(std::vector<zmq_pollitem_t>* items, milliseconds timeout) {
  const int ready = zmq_poll(items->data(), static_cast<int>(items->size()),
                             static_cast<long>(std::max<int64_t>(timeout.count(), 0)));
  PCHECK(ready >= 0 || errno == EINTR) << "zmq_poll";
  return ready > 0;
}

}  // namespace

CurveKeys GenerateCurveKeys() {
  char public_key[41];
  char secret_key[41];
  PCHECK(zmq_curve_keypair(public_key, secret_key) == 0) << "libzmq without CURVE";
  return {public_key, secret_key};
}

// The ZAP handler (ZeroMQ RFC 27): for every client that knocks on a CURVE server of this context,
// libzmq asks it whether the client's key may enter. The domain names the server socket.
struct Context::Impl {
  zmq::context_t zmq;
  std::mutex mutex;
  std::map<std::string, std::vector<std::string>> allowed;  // By domain. Guarded by mutex.
  uint64_t num_domains = 0;                                 // Guarded by mutex.
  std::thread zap_thread;  // Guarded by mutex until the destructor.

  ~Impl() {
    zmq.shutdown();  // Ends the handler's wait.
    if (zap_thread.joinable()) zap_thread.join();
  }

  // Registers a server's clients and returns its domain. Starts the handler: it must be bound
  // before the server is, or libzmq would let every client in.
  std::string AddDomain(const std::vector<std::string>& clients) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (!zap_thread.joinable()) {
      zmq::socket_t handler(zmq, zmq::socket_type::rep);
      handler.set(zmq::sockopt::linger, 0);
      handler.bind(kZapEndpoint);
      // Signals are for the program's own threads.
      sigset_t all;
      sigset_t previous;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &previous);
      zap_thread = std::thread([this, socket = std::move(handler)]() mutable { Serve(&socket); });
      pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    }
    std::string domain = absl::StrFormat("zipage-%d", ++num_domains);
    allowed[domain] = clients;
    return domain;
  }

  bool IsAllowed(const std::string& domain, const std::string& mechanism, const std::string& key) {
    char text[41];
    if (mechanism != "CURVE" || key.size() != 32 ||
        zmq_z85_encode(text, reinterpret_cast<const uint8_t*>(key.data()), key.size()) == nullptr) {
      return false;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    const auto clients = allowed.find(domain);
    return clients != allowed.end() &&
           std::find(clients->second.begin(), clients->second.end(), text) != clients->second.end();
  }

  void Serve(zmq::socket_t* socket) {
    try {
      while (true) {
        std::vector<std::string> frames;
        zmq::message_t frame;
        do {
          if (!socket->recv(frame)) break;
          frames.push_back(frame.to_string());
        } while (frame.more());
        // Version, request id, domain, address, identity, mechanism, credentials.
        frames.resize(std::max<size_t>(frames.size(), 7));
        const bool ok = IsAllowed(frames[2], frames[5], frames[6]);
        LOG_IF_EVERY_N(WARNING, !ok, 100) << "refused a client at " << absl::CEscape(frames[3])
                                          << ": its key is not in the list of allowed clients";
        for (const std::string& part :
             {std::string("1.0"), frames[1], std::string(ok ? "200" : "400"),
              std::string(ok ? "OK" : "unknown key"), std::string()}) {
          socket->send(zmq::buffer(part), zmq::send_flags::sndmore);
        }
        socket->send(zmq::message_t(), zmq::send_flags::none);
      }
    } catch (const zmq::error_t& e) {
      // Without a handler libzmq accepts every client, so the process must not outlive it.
      LOG_IF(FATAL, e.num() != ETERM) << "CURVE handler ended: " << e.what();
    }
    socket->close();
  }
};

Context::Context() : impl_(std::make_unique<Impl>()) {}
Context::~Context() = default;

struct ServerSocket::Impl {
  zmq::socket_t socket;
};

ServerSocket::ServerSocket(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ServerSocket::~ServerSocket() = default;

absl::StatusOr<std::unique_ptr<ServerSocket>> ServerSocket::Bind(
    Context* context, const std::string& endpoint, const std::optional<CurveServer>& curve) {
  ZIPAGE_RETURN_IF_ERROR(CheckEndpoint(endpoint));
  ZIPAGE_RETURN_IF_ERROR(CheckIpcPathIsFree(endpoint));
  if (curve) ZIPAGE_RETURN_IF_ERROR(CheckKeys(curve->keys));
  try {
    zmq::socket_t socket(context->impl_->zmq, zmq::socket_type::router);
    SetCommonOptions(&socket, endpoint);
    socket.set(zmq::sockopt::router_mandatory, true);
    socket.set(zmq::sockopt::router_handover, true);
    if (curve) {
      socket.set(zmq::sockopt::zap_domain, context->impl_->AddDomain(curve->allowed_client_keys));
      socket.set(zmq::sockopt::curve_server, true);
      socket.set(zmq::sockopt::curve_secretkey, curve->keys.secret_key);
    }
    socket.bind(endpoint);
    std::unique_ptr<ServerSocket> server(
        new ServerSocket(std::make_unique<Impl>(Impl{std::move(socket)})));
    server->endpoint_ = server->impl_->socket.get(zmq::sockopt::last_endpoint);
    return server;
  } catch (const zmq::error_t& e) {
    return absl::FailedPreconditionError(
        absl::StrFormat("cannot listen on %s: %s%s", endpoint, e.what(), BindCure(e.num())));
  }
}

absl::Status ServerSocket::Send(const std::string& peer, std::string_view bytes) {
  const auto unavailable = [&](const char* why) {
    return absl::UnavailableError(
        absl::StrFormat("peer \"%s\" at %s: %s", absl::CHexEscape(peer), endpoint_, why));
  };
  try {
    const auto flags = zmq::send_flags::dontwait;
    if (!impl_->socket.send(zmq::buffer(peer), flags | zmq::send_flags::sndmore) ||
        !impl_->socket.send(zmq::buffer(bytes), flags)) {
      return unavailable("its queue of unread messages is full");
    }
    return absl::OkStatus();
  } catch (const zmq::error_t& e) {
    return unavailable(e.num() == EHOSTUNREACH ? "not connected" : e.what());
  }
}

std::optional<Received> ServerSocket::Receive() {
  try {
    for (int dropped = 0; dropped < kMaxDropped; ++dropped) {
      zmq::message_t identity;
      if (!impl_->socket.recv(identity, zmq::recv_flags::dontwait)) return std::nullopt;
      if (!identity.more()) continue;
      // All frames of a message arrive together, so none of these waits.
      zmq::message_t payload;
      if (!impl_->socket.recv(payload, zmq::recv_flags::dontwait)) return std::nullopt;
      if (!payload.more()) return Received{identity.to_string(), payload.to_string()};
      while (payload.more()) {
        if (!impl_->socket.recv(payload, zmq::recv_flags::dontwait)) return std::nullopt;
      }
    }
  } catch (const zmq::error_t& e) {
    LOG_IF(ERROR, e.num() != EINTR) << "receive at " << endpoint_ << ": " << e.what();
  }
  return std::nullopt;
}

bool WaitReadable(const std::vector<ServerSocket*>& sockets, milliseconds timeout) {
  std::vector<zmq_pollitem_t> items;
  items.reserve(sockets.size());
  for (ServerSocket* socket : sockets) {
    items.push_back({socket->impl_->socket.handle(), 0, ZMQ_POLLIN, 0});
  }
  return Poll(&items, timeout);
}

struct ClientSocket::Impl {
  zmq::socket_t socket;
  std::string endpoint;
};

ClientSocket::ClientSocket(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
ClientSocket::~ClientSocket() = default;

absl::StatusOr<std::unique_ptr<ClientSocket>> ClientSocket::Connect(
    Context* context, const std::string& endpoint, const std::string& identity,
    const std::optional<CurveClient>& curve) {
  ZIPAGE_RETURN_IF_ERROR(CheckEndpoint(endpoint));
  if (curve) {
    ZIPAGE_RETURN_IF_ERROR(CheckKeys(curve->keys));
    if (!IsCurveKey(curve->server_key)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "the server key \"%s\" is no public key of 40 characters of Z85", curve->server_key));
    }
  }
  try {
    zmq::socket_t socket(context->impl_->zmq, zmq::socket_type::dealer);
    SetCommonOptions(&socket, endpoint);
    if (!identity.empty()) socket.set(zmq::sockopt::routing_id, identity);
    if (curve) {
      socket.set(zmq::sockopt::curve_serverkey, curve->server_key);
      socket.set(zmq::sockopt::curve_publickey, curve->keys.public_key);
      socket.set(zmq::sockopt::curve_secretkey, curve->keys.secret_key);
    }
    socket.connect(endpoint);
    return std::unique_ptr<ClientSocket>(
        new ClientSocket(std::make_unique<Impl>(Impl{std::move(socket), endpoint})));
  } catch (const zmq::error_t& e) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "cannot connect to %s: %s; give ipc://PATH or tcp://ADDRESS:PORT", endpoint, e.what()));
  }
}

absl::Status ClientSocket::Send(std::string_view bytes) {
  try {
    if (impl_->socket.send(zmq::buffer(bytes), zmq::send_flags::dontwait)) return absl::OkStatus();
    return absl::UnavailableError(
        absl::StrFormat("%s: the queue of unread messages is full", impl_->endpoint));
  } catch (const zmq::error_t& e) {
    return absl::UnavailableError(absl::StrFormat("%s: %s", impl_->endpoint, e.what()));
  }
}

absl::StatusOr<std::string> ClientSocket::Receive(milliseconds timeout) {
  const auto deadline = std::chrono::steady_clock::now() + timeout;
  try {
    while (true) {
      zmq::message_t message;
      if (impl_->socket.recv(message, zmq::recv_flags::dontwait)) {
        if (!message.more()) return message.to_string();
        // A server of ours sends one frame; the rest is there already.
        while (message.more() && impl_->socket.recv(message, zmq::recv_flags::dontwait)) {
        }
        continue;
      }
      std::vector<zmq_pollitem_t> items = {{impl_->socket.handle(), 0, ZMQ_POLLIN, 0}};
      const auto left =
          std::chrono::ceil<milliseconds>(deadline - std::chrono::steady_clock::now());
      if (left.count() <= 0 || !Poll(&items, left)) {
        return absl::DeadlineExceededError(
            absl::StrFormat("no message from %s in %d ms", impl_->endpoint, timeout.count()));
      }
    }
  } catch (const zmq::error_t& e) {
    if (e.num() == EINTR) {
      return absl::DeadlineExceededError(
          absl::StrFormat("a signal interrupted the wait for %s", impl_->endpoint));
    }
    return absl::UnavailableError(absl::StrFormat("%s: %s", impl_->endpoint, e.what()));
  }
}

}  // namespace zipage::transport
