#include "proto/transport.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <pthread.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <fstream>
#include <thread>
#include <zmq.hpp>

namespace zipage::transport {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

// Long enough that only a lost message ends it.
constexpr milliseconds kPatience(20'000);
// How long a client that must not be heard is listened for.
constexpr milliseconds kSilence(300);

class TransportTest : public ::testing::Test {
 protected:
  TransportTest() {
    std::string pattern = ::testing::TempDir() + "/zipXXXXXX";
    directory_ = mkdtemp(pattern.data());
  }
  ~TransportTest() override { std::system(("rm -rf " + directory_).c_str()); }

  std::string Ipc(const std::string& name) const { return "ipc://" + directory_ + "/" + name; }

  std::unique_ptr<ServerSocket> Server(const std::string& endpoint,
                                       const std::optional<CurveServer>& curve = {}) {
    auto server = ServerSocket::Bind(&context_, endpoint, curve);
    EXPECT_TRUE(server.ok()) << server.status();
    return *std::move(server);
  }

  std::unique_ptr<ClientSocket> Client(const std::string& endpoint, const std::string& identity,
                                       const std::optional<CurveClient>& curve = {}) {
    auto client = ClientSocket::Connect(&context_, endpoint, identity, curve);
    EXPECT_TRUE(client.ok()) << client.status();
    return *std::move(client);
  }

  static std::optional<Received> Next(ServerSocket* server, milliseconds patience = kPatience) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (std::chrono::steady_clock::now() < deadline) {
      if (!WaitReadable({server}, milliseconds(50))) continue;
      if (auto received = server->Receive()) return received;
    }
    return std::nullopt;
  }

  std::string directory_;
  Context context_;
};

TEST_F(TransportTest, CarriesMessagesBothWaysOverIpcAndTcp) {
  for (const std::string& endpoint : {Ipc("s"), std::string("tcp://127.0.0.1:*")}) {
    auto server = Server(endpoint);
    EXPECT_EQ(server->endpoint().find('*'), std::string::npos);
    auto client = Client(server->endpoint(), "rank-0");
    EXPECT_EQ(client->Receive(milliseconds(0)).status().code(),
              absl::StatusCode::kDeadlineExceeded);
    for (const std::string& text :
         {std::string(), std::string("\0x", 2), std::string(1 << 20, 'z')}) {
      ASSERT_TRUE(client->Send(text).ok());
      const auto received = Next(server.get());
      ASSERT_TRUE(received.has_value());
      EXPECT_EQ(received->peer, "rank-0");
      EXPECT_EQ(received->bytes, text);
      ASSERT_TRUE(server->Send("rank-0", text).ok());
      const auto back = client->Receive(kPatience);
      ASSERT_TRUE(back.ok()) << back.status();
      EXPECT_EQ(*back, text);
    }
    EXPECT_FALSE(server->Receive().has_value());
  }
}

TEST_F(TransportTest, AnswersAClientWithoutAName) {
  auto server = Server(Ipc("s"));
  auto client = Client(server->endpoint(), "");
  ASSERT_TRUE(client->Send("hi").ok());
  const auto received = Next(server.get());
  ASSERT_TRUE(received.has_value());
  ASSERT_TRUE(server->Send(received->peer, "there").ok());
  EXPECT_EQ(*client->Receive(kPatience), "there");
}

TEST_F(TransportTest, ConnectsToAServerThatComesLater) {
  auto client = Client(Ipc("late"), "rank-0");
  ASSERT_TRUE(client->Send("early").ok());
  auto server = Server(Ipc("late"));
  const auto received = Next(server.get());
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->bytes, "early");
}

TEST_F(TransportTest, WaitsForAnyOfSeveralSockets) {
  auto first = Server(Ipc("a"));
  auto second = Server(Ipc("b"));
  EXPECT_FALSE(WaitReadable({first.get(), second.get()}, milliseconds(0)));
  auto client = Client(second->endpoint(), "x");
  ASSERT_TRUE(client->Send("m").ok());
  EXPECT_TRUE(WaitReadable({first.get(), second.get()}, kPatience));
  EXPECT_FALSE(first->Receive().has_value());
  EXPECT_TRUE(second->Receive().has_value());
}

TEST_F(TransportTest, ReportsAPeerThatIsGoneAtOnce) {
  auto server = Server(Ipc("s"));
  const absl::Status never = server->Send("rank-7", "plan");
  EXPECT_EQ(never.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(never.message()), HasSubstr("peer \"rank-7\""));

  auto client = Client(server->endpoint(), "rank-0");
  ASSERT_TRUE(client->Send("hello").ok());
  ASSERT_TRUE(Next(server.get()).has_value());
  ASSERT_TRUE(server->Send("rank-0", "plan").ok());
  client.reset();
  // The I/O thread notices the closed connection in its own time; each wait lets it.
  absl::Status gone;
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  while (gone.ok() && std::chrono::steady_clock::now() < deadline) {
    WaitReadable({server.get()}, milliseconds(1));
    gone = server->Send("rank-0", "plan");
  }
  EXPECT_EQ(gone.code(), absl::StatusCode::kUnavailable);
}

TEST_F(TransportTest, ReportsAPeerThatDoesNotRead) {
  auto server = Server(Ipc("s"));
  auto client = Client(server->endpoint(), "slow");
  ASSERT_TRUE(client->Send("hello").ok());
  ASSERT_TRUE(Next(server.get()).has_value());
  absl::Status status;
  const std::string message(1 << 16, 'x');
  for (int i = 0; i < 10'000 && status.ok(); ++i) status = server->Send("slow", message);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr("full"));
}

TEST_F(TransportTest, HandsANameToThePeerThatComesBack) {
  auto server = Server(Ipc("s"));
  auto first = Client(server->endpoint(), "rank-0");
  ASSERT_TRUE(first->Send("first").ok());
  ASSERT_EQ(Next(server.get())->bytes, "first");
  auto second = Client(server->endpoint(), "rank-0");
  ASSERT_TRUE(second->Send("second").ok());
  ASSERT_EQ(Next(server.get())->bytes, "second");
  ASSERT_TRUE(server->Send("rank-0", "for the second").ok());
  EXPECT_EQ(*second->Receive(kPatience), "for the second");
  EXPECT_FALSE(first->Receive(milliseconds(0)).ok());
}

TEST_F(TransportTest, DeliversWhatWasSentBeforeASocketGoes) {
  auto server = Server(Ipc("s"));
  for (int i = 0; i < 50; ++i) {
    Context context;
    auto client = ClientSocket::Connect(&context, server->endpoint(), "last", {});
    ASSERT_TRUE(client.ok());
    ASSERT_TRUE((*client)->Send("last words").ok());
    client->reset();
    const auto received = Next(server.get());
    ASSERT_TRUE(received.has_value());
    EXPECT_EQ(received->bytes, "last words");
  }
  auto client = Client(server->endpoint(), "rank-0");
  ASSERT_TRUE(client->Send("hello").ok());
  ASSERT_TRUE(Next(server.get()).has_value());
  ASSERT_TRUE(server->Send("rank-0", "shutdown").ok());
  server.reset();
  EXPECT_EQ(*client->Receive(kPatience), "shutdown");
}

TEST_F(TransportTest, IgnoresFramesThatNoClientSends) {
  auto server = Server(Ipc("s"));
  zmq::context_t context;
  zmq::socket_t raw(context, zmq::socket_type::dealer);
  raw.set(zmq::sockopt::linger, 0);
  raw.set(zmq::sockopt::routing_id, "hostile");
  raw.connect(server->endpoint());
  for (int i = 0; i < 200; ++i) {
    for (int frames = 1 + i % 5; frames > 0; --frames) {
      raw.send(zmq::str_buffer("junk"), zmq::send_flags::sndmore);
    }
    raw.send(zmq::message_t(), zmq::send_flags::none);
  }
  raw.send(zmq::str_buffer("proper"), zmq::send_flags::none);
  const auto received = Next(server.get());
  ASSERT_TRUE(received.has_value());
  EXPECT_EQ(received->bytes, "proper");
  EXPECT_FALSE(server->Receive().has_value());
}

TEST_F(TransportTest, DropsAPeerThatSendsTooLargeAMessage) {
  auto server = Server(Ipc("s"));
  auto honest = Client(server->endpoint(), "honest");
  // Greeting and NULL handshake (ZMTP 3.0) spoken by hand, to announce a frame without having it.
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string path = directory_ + "/s";
  std::copy(path.begin(), path.end(), address.sun_path);
  ASSERT_EQ(connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  const auto send = [fd](const std::string& bytes) {
    ASSERT_EQ(write(fd, bytes.data(), bytes.size()), static_cast<ssize_t>(bytes.size()));
  };
  std::string greeting("\xFF\0\0\0\0\0\0\0\x01\x7F\x03\0NULL", 16);
  greeting.resize(64, '\0');
  send(greeting);
  char buffer[256];
  ASSERT_GT(read(fd, buffer, sizeof buffer), 0);  // The server's greeting.
  send(
      std::string("\x04\x29\x05READY\x0BSocket-Type\0\0\0\x06"
                  "DEALER\x08Identity\0\0\0\0",
                  43));
  send(std::string("\0\x05small", 7));
  const auto small = Next(server.get());
  ASSERT_TRUE(small.has_value());
  EXPECT_EQ(small->bytes, "small");
  // One byte more than 256 MiB.
  send(std::string("\x02\0\0\0\0\x10\0\0\x01", 9));
  while (read(fd, buffer, sizeof buffer) > 0) {
  }  // Until the server hangs up.
  close(fd);
  ASSERT_TRUE(honest->Send("still here").ok());
  EXPECT_EQ(Next(server.get())->bytes, "still here");
}

TEST_F(TransportTest, SaysWhyItCannotListen) {
  const auto error = [this](const std::string& endpoint) {
    const auto server = ServerSocket::Bind(&context_, endpoint, {});
    EXPECT_FALSE(server.ok()) << endpoint;
    EXPECT_EQ(server.status().message().find('\n'), std::string::npos);
    return std::string(server.status().message());
  };
  EXPECT_THAT(error("ipc://" + directory_ + "/" + std::string(120, 'a')),
              HasSubstr("a Unix socket allows 107"));
  EXPECT_THAT(error("ipc:///no/such/directory/s"), HasSubstr("create the directory first"));
  EXPECT_THAT(error("tcp://192.0.2.1:*"), HasSubstr("give an address of this machine"));
  EXPECT_THAT(error("udp://x:1"), HasSubstr("neither ipc://PATH nor tcp://ADDRESS:PORT"));
  EXPECT_THAT(error(""), HasSubstr("neither"));
  EXPECT_THAT(error("tcp://127.0.0.1"), HasSubstr("give ipc://PATH or tcp://ADDRESS:PORT"));
  auto tcp = Server("tcp://127.0.0.1:*");
  EXPECT_THAT(error(tcp->endpoint()), HasSubstr("give another port"));
  EXPECT_FALSE(ClientSocket::Connect(&context_, "nonsense", "", {}).ok());
  EXPECT_FALSE(ClientSocket::Connect(&context_, Ipc("s"), std::string(300, 'i'), {}).ok());
}

TEST_F(TransportTest, NeverTakesALivingSocketNorAFile) {
  const auto bind = [this] { return ServerSocket::Bind(&context_, Ipc("s"), {}); };
  auto server = Server(Ipc("s"));
  EXPECT_THAT(std::string(bind().status().message()), HasSubstr("in use by a running process"));
  auto client = Client(server->endpoint(), "x");
  ASSERT_TRUE(client->Send("m").ok());
  ASSERT_EQ(Next(server.get())->bytes, "m");

  std::ofstream(directory_ + "/file") << "precious";
  const auto over_file = ServerSocket::Bind(&context_, Ipc("file"), {});
  EXPECT_THAT(std::string(over_file.status().message()), HasSubstr("is no socket"));
  std::string text;
  std::ifstream(directory_ + "/file") >> text;
  EXPECT_EQ(text, "precious");

  // What a killed process leaves behind is taken over.
  const int fd = socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address = {};
  address.sun_family = AF_UNIX;
  const std::string path = directory_ + "/stale";
  std::copy(path.begin(), path.end(), address.sun_path);
  ASSERT_EQ(::bind(fd, reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  close(fd);
  EXPECT_TRUE(ServerSocket::Bind(&context_, Ipc("stale"), {}).ok());
}

TEST_F(TransportTest, LetsInOnlyTheKeysOfItsList) {
  const CurveKeys server_keys = GenerateCurveKeys();
  const CurveKeys good = GenerateCurveKeys();
  const CurveKeys bad = GenerateCurveKeys();
  for (const std::string& endpoint : {Ipc("curve"), std::string("tcp://127.0.0.1:*")}) {
    auto server = Server(endpoint, CurveServer{server_keys, {good.public_key}});
    // A second server of the same context has its own list.
    auto other = Server(Ipc("other" + std::to_string(endpoint.size())),
                        CurveServer{server_keys, {bad.public_key}});
    auto plain = Server(Ipc("plain" + std::to_string(endpoint.size())));

    auto refused = Client(server->endpoint(), "bad", CurveClient{bad, server_keys.public_key});
    auto unencrypted = Client(server->endpoint(), "plain");
    auto wrong_server = Client(server->endpoint(), "wrong", CurveClient{good, bad.public_key});
    for (const auto& client : {refused.get(), unencrypted.get(), wrong_server.get()}) {
      ASSERT_TRUE(client->Send("let me in").ok());
    }
    EXPECT_FALSE(Next(server.get(), kSilence).has_value());

    auto accepted = Client(server->endpoint(), "good", CurveClient{good, server_keys.public_key});
    ASSERT_TRUE(accepted->Send("hello").ok());
    const auto received = Next(server.get());
    ASSERT_TRUE(received.has_value());
    EXPECT_EQ(received->peer, "good");
    ASSERT_TRUE(server->Send("good", "welcome").ok());
    EXPECT_EQ(*accepted->Receive(kPatience), "welcome");

    auto elsewhere = Client(other->endpoint(), "bad", CurveClient{bad, server_keys.public_key});
    ASSERT_TRUE(elsewhere->Send("hello").ok());
    EXPECT_TRUE(Next(other.get()).has_value());
    auto open = Client(plain->endpoint(), "anyone");
    ASSERT_TRUE(open->Send("hello").ok());
    EXPECT_TRUE(Next(plain.get()).has_value());
    EXPECT_FALSE(Next(server.get(), kSilence).has_value());
  }
}

TEST_F(TransportTest, RefusesKeysThatAreNone) {
  const CurveKeys keys = GenerateCurveKeys();
  const CurveKeys broken = {keys.public_key, "short"};
  EXPECT_FALSE(ServerSocket::Bind(&context_, Ipc("s"), CurveServer{broken, {}}).ok());
  EXPECT_FALSE(ClientSocket::Connect(&context_, Ipc("s"), "", CurveClient{broken, ""}).ok());
  const auto client = ClientSocket::Connect(&context_, Ipc("s"), "", CurveClient{keys, "nokey"});
  EXPECT_THAT(std::string(client.status().message()), HasSubstr("nokey"));
}

TEST_F(TransportTest, ReturnsEarlyWhenASignalArrives) {
  struct sigaction action = {};
  action.sa_handler = [](int) {};
  struct sigaction previous = {};
  sigaction(SIGUSR1, &action, &previous);
  auto server = Server(Ipc("s"));
  auto client = Client(server->endpoint(), "x");
  for (const bool serve : {true, false}) {
    std::atomic<bool> done = false;
    const pthread_t waiter = pthread_self();
    // Repeated: the first signals may arrive before the wait begins.
    std::thread signals([&] {
      while (!done) {
        pthread_kill(waiter, SIGUSR1);
        std::this_thread::yield();
      }
    });
    const auto begin = std::chrono::steady_clock::now();
    if (serve) {
      EXPECT_FALSE(WaitReadable({server.get()}, milliseconds(3'600'000)));
    } else {
      EXPECT_EQ(client->Receive(milliseconds(3'600'000)).status().code(),
                absl::StatusCode::kDeadlineExceeded);
    }
    done = true;
    signals.join();
    EXPECT_LT(std::chrono::steady_clock::now() - begin, milliseconds(3'600'000));
  }
  sigaction(SIGUSR1, &previous, nullptr);
}

}  // namespace
}  // namespace zipage::transport
