#include "worker/swap_space.h"

#include <new>

#include "absl/strings/str_format.h"
#include "glog/logging.h"

namespace zipage {

absl::Status SwapSpace::Run(const SwapWork& work) {
  std::unique_ptr<uint8_t[]>& buffer = buffers_[work.sequence_slot];
  if (!work.to_host) {
    CHECK(buffer != nullptr) << "slot " << work.sequence_slot << " is not in host memory";
    ForEachPiece(work, buffer.get(), [this](void* device, const uint8_t* host, size_t bytes) {
      backend_->CopyToDevice(device, host, bytes);
    });
    buffer.reset();
    return absl::OkStatus();
  }
  const size_t bytes = WindowBytes() + work.blocks.size() * pool_->shape().block_bytes();
  buffer.reset(new (std::nothrow) uint8_t[bytes]);
  if (buffer == nullptr) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "no host memory for a swapped sequence (%d bytes); lower swap_space_gb", bytes));
  }
  ForEachPiece(work, buffer.get(), [this](const void* device, uint8_t* host, size_t bytes) {
    backend_->CopyToHost(host, device, bytes);
  });
  return absl::OkStatus();
}

void SwapSpace::ForEachPiece(const SwapWork& work, uint8_t* host,
                             const std::function<void(void*, uint8_t*, size_t)>& copy) const {
  const auto piece = [&](void* plane, int64_t index, size_t bytes) {
    if (bytes == 0) return;
    copy(static_cast<uint8_t*>(plane) + index * bytes, host, bytes);
    host += bytes;
  };
  const KvShape& shape = pool_->shape();
  uint8_t* const blocks = host + WindowBytes();
  if (work.query_slot.has_value() && windows_ != nullptr) {
    for (int layer = 0; layer < shape.num_layers; ++layer) {
      piece(windows_->layer(layer), *work.query_slot, windows_->shape().plane_bytes());
    }
  }
  host = blocks;
  for (int layer = 0; layer < shape.num_layers; ++layer) {
    for (BlockId block : work.blocks) {
      piece(pool_->key(layer), block, shape.plane_bytes());
      piece(pool_->value(layer), block, shape.plane_bytes());
      piece(pool_->stored_scores(layer), block, shape.score_bytes());
    }
  }
}

}  // namespace zipage
