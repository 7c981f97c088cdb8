#pragma once
// Checks the messages and tools of a chat request and brings them into the form that chat templates
// take. Pure.

#include "scheduler/job/field_reader.h"

namespace zipage {

// Checks an array of messages and moves it to `messages`, with every content a string: text parts
// are joined by "\n", an absent content next to tool_calls becomes "". Arguments of tool calls
// given as JSON text become the JSON they spell. Other keys stay as they are. False and an error
// otherwise.
bool ReadMessages(const Field& field, nlohmann::ordered_json* messages);

// Checks an array of {"type": "function", "function": {"name", …}} and moves it to `tools`; an
// empty array leaves null.
bool ReadTools(const Field& field, nlohmann::ordered_json* tools);

}  // namespace zipage
