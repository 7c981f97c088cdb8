#include "scheduler/job/chat_messages.h"

#include <string>
#include <utility>

#include "absl/strings/str_format.h"
#include "scheduler/job/bounded_json.h"

namespace zipage {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxNameBytes = 256;

// Appends the text of one element of a content array.
bool AppendPart(const Field& part, std::string* text) {
  if (part.value->is_string()) {
    *text += part.value->get_ref<const std::string&>();
    return true;
  }
  if (!part.value->is_object()) return part.Refuse("give {\"type\": \"text\", \"text\": …}");
  if (!part.value->contains("type")) return part.Fail("has no type; only text parts are supported");
  const Field type = part.At("type");
  if (*type.value != "text") return type.Refuse("only parts of type \"text\" are supported");
  if (!part.value->contains("text")) return part.Fail("has no text");
  const Field body = part.At("text");
  if (!body.value->is_string()) return body.Refuse("give a string");
  *text += body.value->get_ref<const std::string&>();
  return true;
}

bool ReadContent(const Field& message) {
  Json& object = *message.value;
  const auto found = object.find("content");
  if (found == object.end() || found->is_null()) {
    const auto calls = object.find("tool_calls");
    if (calls == object.end() || !calls->is_array() || calls->empty()) {
      return Field{message.name + ".content", message.value, message.error}.Fail(
          "is missing; give a string (only a message with tool_calls may leave it out)");
    }
    object["content"] = "";
    return true;
  }
  if (found->is_string()) return true;
  const Field content = message.At("content");
  if (!content.value->is_array()) return content.Refuse("give a string or an array of text parts");
  std::string text;
  for (size_t i = 0; i < content.value->size(); ++i) {
    if (i > 0) text += '\n';
    if (!AppendPart(content.At(i), &text)) return false;
  }
  *content.value = std::move(text);
  return true;
}

bool ReadToolCall(const Field& call) {
  if (!call.value->is_object()) return call.Refuse("give an object");
  if (!call.value->contains("function")) return call.Fail("has no function");
  const Field function = call.At("function");
  if (!function.value->is_object()) return function.Refuse("give an object");
  if (!function.value->contains("name")) return function.Fail("has no name");
  std::string name;
  if (!function.At("name").ReadName(kMaxNameBytes, &name)) return false;
  if (!function.value->contains("arguments") || (*function.value)["arguments"].is_null()) {
    (*function.value)["arguments"] = Json::object();
    return true;
  }
  const Field arguments = function.At("arguments");
  if (arguments.value->is_object()) return true;
  if (!arguments.value->is_string()) return arguments.Refuse("give a JSON object or its text");
  const std::string& text = arguments.value->get_ref<const std::string&>();
  if (text.empty()) {
    *arguments.value = Json::object();
    return true;
  }
  absl::StatusOr<Json> parsed = ParseBoundedJson(text);
  if (!parsed.ok()) return arguments.Fail(std::string(parsed.status().message()));
  if (!parsed->is_object()) return arguments.Refuse("give a JSON object or its text");
  *arguments.value = *std::move(parsed);
  return true;
}

bool ReadMessage(const Field& message) {
  Json& object = *message.value;
  if (!object.is_object()) return message.Refuse("give {\"role\": …, \"content\": …}");
  if (!object.contains("role")) {
    return Field{message.name + ".role", message.value, message.error}.Fail(
        "is missing; give \"system\", \"user\" or \"assistant\"");
  }
  std::string role;
  if (!message.At("role").ReadName(kMaxNameBytes, &role)) return false;
  if (const auto calls = object.find("tool_calls"); calls != object.end()) {
    if (calls->is_null()) {
      object.erase("tool_calls");
    } else {
      const Field field = message.At("tool_calls");
      if (!calls->is_array()) return field.Refuse("give an array");
      for (size_t i = 0; i < field.value->size(); ++i) {
        if (!ReadToolCall(field.At(i))) return false;
      }
    }
  }
  return ReadContent(message);
}

}  // namespace

bool ReadMessages(const Field& field, Json* messages) {
  if (!field.value->is_array()) return field.Refuse("give an array of messages");
  if (field.value->empty()) return field.Fail("is empty; give at least one message");
  for (size_t i = 0; i < field.value->size(); ++i) {
    if (!ReadMessage(field.At(i))) return false;
  }
  *messages = std::move(*field.value);
  return true;
}

bool ReadTools(const Field& field, Json* tools) {
  if (!field.value->is_array()) return field.Refuse("give an array of tools");
  for (size_t i = 0; i < field.value->size(); ++i) {
    const Field tool = field.At(i);
    if (!tool.value->is_object()) return tool.Refuse("give {\"type\": \"function\", …}");
    if (tool.value->contains("type") && (*tool.value)["type"] != "function") {
      return tool.At("type").Refuse("give \"function\"");
    }
    if (!tool.value->contains("function")) return tool.Fail("has no function");
    const Field function = tool.At("function");
    if (!function.value->is_object()) return function.Refuse("give an object");
    if (!function.value->contains("name")) return function.Fail("has no name");
    std::string name;
    if (!function.At("name").ReadName(kMaxNameBytes, &name)) return false;
  }
  if (!field.value->empty()) *tools = std::move(*field.value);
  return true;
}

}  // namespace zipage
