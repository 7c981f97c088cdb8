#pragma once
// Collectives over TCP between processes of one host, through Gloo; gloo.cc is the only file that
// knows that library.

#include <chrono>
#include <memory>
#include <string>

#include "proto/status.h"
#include "worker/comm/collective.h"

namespace zipage {

struct GlooOptions {
  int rank = 0;
  int size = 1;
  // Where the ranks leave their addresses. Fresh for every epoch: old addresses lead nowhere.
  // Created if its parent exists.
  std::string store_dir;
  std::chrono::milliseconds init_timeout{60'000};  // for all ranks to come
  std::chrono::milliseconds timeout{120'000};      // for each call
};

// Connects every rank with every other over 127.0.0.1; returns when all are there.
// kDeadlineExceeded names the ranks that did not come, kUnavailable a connection that failed,
// kFailedPrecondition a store_dir that this rank used before.
absl::StatusOr<std::unique_ptr<Collective>> MakeGlooCollective(const GlooOptions& options);

}  // namespace zipage
