#pragma once
// The table of everything a request's body may say: name, where it is allowed, how it is read.
// Pure.

#include <nlohmann/json.hpp>
#include <string_view>

#include "scheduler/job/request_parser.h"

namespace zipage {

// Reads all members of `body`, an object, into `request`, whose is_chat and is_short_form are set.
// Large values are moved out of `body`. Returns false and fills field and message of `error` at the
// first member that is unknown, misplaced, mistyped or out of range, or that contradicts another.
bool ReadBody(nlohmann::ordered_json* body, ParsedRequest* request, RequestError* error);

// True for names that are accepted and ignored everywhere (user, metadata, …).
bool IsIgnoredField(std::string_view name);

}  // namespace zipage
