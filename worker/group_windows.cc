#include "worker/group_windows.h"

namespace zipage {
namespace {

size_t OwnBytes(const QueryWindowShape& shape, int max_layers, int max_batch) {
  if (shape.num_sharers == 1) return 0;
  return size_t{1} * max_layers * max_batch * shape.plane_bytes();
}

}  // namespace

size_t GroupWindows::Bytes(const QueryWindowShape& shape, int max_layers, int max_batch, int tp) {
  return OwnBytes(shape, max_layers, max_batch) * (1 + tp + shape.num_sharers);
}

absl::StatusOr<GroupWindows> GroupWindows::Create(const QueryWindowShape& shape, int max_layers,
                                                  int max_batch, Collective* collective,
                                                  Backend* backend) {
  GroupWindows windows(shape, collective, backend);
  if (!windows.enabled()) return windows;
  const size_t own = OwnBytes(shape, max_layers, max_batch);
  const auto allocate = [&](size_t bytes) {
    return backend->Allocate(bytes, "compression scratch");
  };
  ZIPAGE_ASSIGN_OR_RETURN(windows.own_, allocate(own));
  ZIPAGE_ASSIGN_OR_RETURN(windows.gathered_, allocate(own * collective->size()));
  ZIPAGE_ASSIGN_OR_RETURN(windows.group_, allocate(own * shape.num_sharers));
  return windows;
}

absl::StatusOr<const void*> GroupWindows::Collect(const QueryWindows& windows, int first_layer,
                                                  int num_layers,
                                                  std::span<const QuerySlot> query_slots) {
  const size_t plane = shape_.plane_bytes();
  uint8_t* out = own_.as<uint8_t>();
  for (int layer = first_layer; layer < first_layer + num_layers; ++layer) {
    for (QuerySlot slot : query_slots) {
      const auto* from = static_cast<const uint8_t*>(windows.layer(layer)) + slot * plane;
      backend_->CopyRows(out, plane, from, plane, plane, 1);
      out += plane;
    }
  }
  const size_t own = num_layers * query_slots.size() * plane;
  ZIPAGE_RETURN_IF_ERROR(collective_->Gather(own_.as(), own, gathered_.as()));
  ZIPAGE_RETURN_IF_ERROR(collective_->Broadcast(gathered_.as(), own * collective_->size()));
  // Ranks that share KV heads are neighbours and hold their query heads in order.
  const int sharers = shape_.num_sharers;
  const int first_rank = collective_->rank() / sharers * sharers;
  const size_t row = plane / shape_.window;
  const auto rows = static_cast<int64_t>(own / row);
  for (int i = 0; i < sharers; ++i) {
    backend_->CopyRows(group_.as<uint8_t>() + i * row, sharers * row,
                       gathered_.as<uint8_t>() + (first_rank + i) * own, row, row, rows);
  }
  return group_.as();
}

}  // namespace zipage
