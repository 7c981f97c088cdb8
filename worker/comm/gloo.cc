#include "worker/comm/gloo.h"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <exception>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "gloo/rendezvous/context.h"
#include "gloo/rendezvous/file_store.h"
#include "gloo/transport/device.h"
#include "gloo/transport/tcp/device.h"

namespace zipage {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// Up to this size every rank sends all it has to every other: one hop instead of two.
constexpr size_t kOneHopBytes = size_t{64} * 1024;

bool IsTimeout(std::string_view what) {
  return absl::StrContains(ToAbsl(what), "Timed out") || absl::StrContains(ToAbsl(what), "timeout");
}

// What one call sends to or receives from one rank.
struct Piece {
  void* data = nullptr;
  size_t bytes = 0;
};

class GlooCollective final : public Collective {
 public:
  GlooCollective(std::shared_ptr<gloo::rendezvous::Context> context, milliseconds timeout)
      : context_(std::move(context)), timeout_(timeout) {}
  ~GlooCollective() override { context_->closeConnections(); }

  int rank() const override { return context_->rank; }
  int size() const override { return context_->size; }

  absl::Status AllReduceSum(float* data, size_t count) override {
    ++calls_;
    return count * sizeof(float) <= kOneHopBytes ? ReduceInOneHop(data, count)
                                                 : ReduceBySlices(data, count);
  }

  absl::Status Gather(const void* data, size_t bytes, void* out) override {
    ++calls_;
    std::vector<Piece> sends(size());
    std::vector<Piece> receives(size());
    if (rank() != 0) {
      sends[0] = {const_cast<void*>(data), bytes};  // Gloo takes sources as void* too
    } else if (bytes > 0) {
      std::memmove(out, data, bytes);
      for (int peer = 1; peer < size(); ++peer) {
        receives[peer] = {static_cast<char*>(out) + peer * bytes, bytes};
      }
    }
    return Exchange("Gather", sends, receives);
  }

  absl::Status Broadcast(void* data, size_t bytes) override {
    ++calls_;
    std::vector<Piece> sends(size());
    std::vector<Piece> receives(size());
    if (rank() == 0) {
      std::fill(sends.begin(), sends.end(), Piece{data, bytes});
    } else {
      receives[0] = {data, bytes};
    }
    return Exchange("Broadcast", sends, receives);
  }

 private:
  // All data to everyone, then every rank sums all of it.
  absl::Status ReduceInOneHop(float* data, size_t count) {
    std::vector<Piece> sends(size(), Piece{data, count * sizeof(float)});
    ZIPAGE_RETURN_IF_ERROR(Exchange("AllReduceSum", sends, ScratchPieces(count)));
    SumInto(data, data, count);
    return absl::OkStatus();
  }

  // Rank r sums slice r of every rank and sends it to everyone.
  absl::Status ReduceBySlices(float* data, size_t count) {
    const auto begin = [&](int r) {
      return count / size() * r + std::min<size_t>(r, count % size());
    };
    float* own = data + begin(rank());
    const size_t own_count = begin(rank() + 1) - begin(rank());
    std::vector<Piece> slices(size());
    for (int r = 0; r < size(); ++r) {
      slices[r] = {data + begin(r), (begin(r + 1) - begin(r)) * sizeof(float)};
    }
    ZIPAGE_RETURN_IF_ERROR(Exchange("AllReduceSum", slices, ScratchPieces(own_count)));
    SumInto(own, own, own_count);
    const std::vector<Piece> sums(size(), Piece{own, own_count * sizeof(float)});
    return Exchange("AllReduceSum", sums, slices);
  }

  // A place in scratch_ for `count` values of every rank.
  std::vector<Piece> ScratchPieces(size_t count) {
    scratch_.resize(std::max(scratch_.size(), count * size()));
    std::vector<Piece> pieces(size());
    for (int r = 0; r < size(); ++r) {
      pieces[r] = {scratch_.data() + r * count, count * sizeof(float)};
    }
    return pieces;
  }

  // out = the sum over ranks, in rank order, of `own` and what ScratchPieces(count) received.
  void SumInto(float* out, const float* own, size_t count) {
    if (count == 0) return;
    std::memcpy(scratch_.data() + rank() * count, own, count * sizeof(float));
    std::memcpy(out, scratch_.data(), count * sizeof(float));
    for (int r = 1; r < size(); ++r) {
      const float* term = scratch_.data() + r * count;
      for (size_t i = 0; i < count; ++i) out[i] += term[i];
    }
  }

  // Sends sends[r] to and receives receives[r] from every other rank r at once; empty pieces and
  // the rank's own are skipped. After an error the connections are closed, so it is returned for
  // ever.
  absl::Status Exchange(const char* call, const std::vector<Piece>& sends,
                        const std::vector<Piece>& receives) {
    if (!broken_.ok()) return broken_;
    const auto deadline = Clock::now() + timeout_;
    const uint64_t slot = slot_++;
    std::vector<std::pair<int, std::string>> failures;
    using Buffer = std::unique_ptr<gloo::transport::UnboundBuffer>;
    std::vector<Buffer> sending(size());
    std::vector<Buffer> receiving(size());
    const auto each_peer = [&](auto&& act) {
      for (int peer = 0; peer < size(); ++peer) {
        if (peer == rank()) continue;
        try {
          act(peer);
        } catch (const std::exception& e) {
          failures.emplace_back(peer, e.what());
        }
      }
    };
    each_peer([&](int peer) {
      if (receives[peer].bytes == 0) return;
      receiving[peer] = context_->createUnboundBuffer(receives[peer].data, receives[peer].bytes);
      receiving[peer]->recv(peer, slot);
    });
    each_peer([&](int peer) {
      if (sends[peer].bytes == 0) return;
      sending[peer] = context_->createUnboundBuffer(sends[peer].data, sends[peer].bytes);
      sending[peer]->send(peer, slot);
    });
    if (failures.empty()) {
      each_peer([&](int peer) {
        if (receiving[peer] != nullptr) receiving[peer]->waitRecv(Remaining(deadline));
      });
      each_peer([&](int peer) {
        if (sending[peer] != nullptr) sending[peer]->waitSend(Remaining(deadline));
      });
    }
    if (!failures.empty()) broken_ = FailureStatus(call, failures);
    return broken_;
  }

  static milliseconds Remaining(Clock::time_point deadline) {
    const auto left = std::chrono::duration_cast<milliseconds>(deadline - Clock::now());
    return std::max(left, milliseconds(1));  // 0 means no limit
  }

  absl::Status FailureStatus(const char* call,
                             const std::vector<std::pair<int, std::string>>& failures) const {
    const auto all_timeouts =
        std::all_of(failures.begin(), failures.end(),
                    [](const auto& failure) { return IsTimeout(failure.second); });
    std::vector<int> ranks;
    std::string reason;
    for (const auto& [peer, what] : failures) {
      if (std::find(ranks.begin(), ranks.end(), peer) == ranks.end()) ranks.push_back(peer);
      if (reason.empty() && IsTimeout(what) == all_timeouts) reason = what;
    }
    std::sort(ranks.begin(), ranks.end());
    const std::string where = absl::StrFormat("rank %d, %s, call %d", rank(), call, calls_);
    const std::string who = absl::StrJoin(ranks, ", ");
    if (all_timeouts) {
      return absl::DeadlineExceededError(
          absl::StrFormat("%s: rank %s did not come within %d ms", where, who, timeout_.count()));
    }
    return absl::UnavailableError(
        absl::StrFormat("%s: no connection to rank %s: %s", where, who, reason));
  }

  const std::shared_ptr<gloo::rendezvous::Context> context_;
  const milliseconds timeout_;
  std::vector<float> scratch_;
  uint64_t slot_ = 0;   // of exchanges; equal on all ranks
  uint64_t calls_ = 0;  // from 1, for messages
  absl::Status broken_;
};

class RankStore final : public gloo::rendezvous::FileStore {
 public:
  using FileStore::FileStore;
  void Announce(int rank) { set(Key(rank), std::vector<char>(1, '1')); }
  bool IsAnnounced(int rank) { return check({Key(rank)}); }

 private:
  static std::string Key(int rank) { return absl::StrCat("here-", rank); }
};

}  // namespace

absl::StatusOr<std::unique_ptr<Collective>> MakeGlooCollective(const GlooOptions& options) {
  if (mkdir(options.store_dir.c_str(), 0700) != 0 && errno != EEXIST) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: %s; the ranks meet in this folder, so its parent must be writable",
                        options.store_dir, std::strerror(errno)));
  }
  std::unique_ptr<RankStore> store;
  try {
    store = std::make_unique<RankStore>(options.store_dir);
    if (store->IsAnnounced(options.rank)) {
      return absl::FailedPreconditionError(
          absl::StrFormat("%s: rank %d used this folder before; give a new one for each epoch",
                          options.store_dir, options.rank));
    }
    store->Announce(options.rank);
    gloo::transport::tcp::attr attr;
    attr.hostname = "127.0.0.1";
    auto device = gloo::transport::tcp::CreateDevice(attr);
    auto context = std::make_shared<gloo::rendezvous::Context>(options.rank, options.size);
    context->setTimeout(options.init_timeout);
    context->connectFullMesh(*store, device);
    return std::make_unique<GlooCollective>(std::move(context), options.timeout);
  } catch (const std::exception& e) {
    std::vector<int> absent;
    for (int r = 0; store != nullptr && r < options.size; ++r) {
      if (!store->IsAnnounced(r)) absent.push_back(r);
    }
    if (absent.empty()) {
      return absl::UnavailableError(absl::StrFormat("rank %d: connecting the ranks through %s: %s",
                                                    options.rank, options.store_dir, e.what()));
    }
    return absl::DeadlineExceededError(
        absl::StrFormat("rank %d, connecting: rank %s did not come within %d ms", options.rank,
                        absl::StrJoin(absent, ", "), options.init_timeout.count()));
  }
}

}  // namespace zipage
