#pragma once
// Struct to bytes (wire_encode.cc) and back (wire_decode.cc): the only door to Cap'n Proto. Bytes
// from a peer are hostile: Decode bounds size and depth, checks every list against its partners,
// and never throws. What a value means (is this slot in use?) is for the receiver to check.

#include <string>
#include <string_view>

#include "proto/messages.h"
#include "proto/status.h"

namespace zipage::wire {

std::string Encode(const WorkerMessage& message);
std::string Encode(const SchedulerMessage& message);
std::string Encode(const ClientMessage& message);
std::string Encode(const ClientReply& message);

// Each returns kInvalidArgument, naming the message and the field, for bytes that are no such
// message. `bytes` need not be aligned.
absl::StatusOr<WorkerMessage> DecodeWorkerMessage(std::string_view bytes);
absl::StatusOr<SchedulerMessage> DecodeSchedulerMessage(std::string_view bytes);
absl::StatusOr<ClientMessage> DecodeClientMessage(std::string_view bytes);
absl::StatusOr<ClientReply> DecodeClientReply(std::string_view bytes);

}  // namespace zipage::wire
