#include "scheduler/job/request_parser.h"

#include <initializer_list>

#include "absl/strings/str_format.h"
#include "scheduler/job/body_fields.h"
#include "scheduler/job/bounded_json.h"
#include "scheduler/job/field_reader.h"

namespace zipage {
namespace {

using Json = nlohmann::ordered_json;

constexpr size_t kMaxIdBytes = 1024;
constexpr std::string_view kChatUrl = "/v1/chat/completions";
constexpr std::string_view kCompletionsUrl = "/v1/completions";

// An id too long to be accepted is left out of the error record too.
std::optional<std::string> FindShortCustomId(std::string_view text) {
  std::optional<std::string> id = FindCustomId(text);
  return id.has_value() && id->size() <= kMaxIdBytes ? id : std::nullopt;
}

// True if the member `name` is one of `choices`.
bool CheckChoice(Json& line, const char* name, std::initializer_list<std::string_view> choices,
                 std::string_view cure, RequestError* error) {
  const Field field{name, line.contains(name) ? &line[name] : nullptr, error};
  if (field.value == nullptr || field.value->is_null()) {
    return field.Fail(absl::StrFormat("is missing; %s", cure));
  }
  for (std::string_view choice : choices) {
    if (field.value->is_string() && field.value->get_ref<const std::string&>() == choice)
      return true;
  }
  return field.Refuse(cure);
}

bool ReadBatchLine(Json* line, ParsedRequest* request, RequestError* error) {
  const Field id{"custom_id", line->contains("custom_id") ? &(*line)["custom_id"] : nullptr, error};
  if (id.value == nullptr || id.value->is_null()) return id.Fail("is missing; give a string");
  if (!id.ReadName(kMaxIdBytes, &request->custom_id)) return false;
  error->custom_id = request->custom_id;
  for (const auto& [name, value] : line->items()) {
    if (name == "custom_id" || name == "method" || name == "url" || name == "body") continue;
    if (IsIgnoredField(name)) continue;
    return Field{name, &value, error}.Fail(
        "is not a field of a batch line (custom_id, method, url, body); put sampling parameters "
        "into "
        "body and your own data under metadata");
  }
  if (!CheckChoice(*line, "method", {"POST"}, "give \"POST\"", error)) return false;
  if (!CheckChoice(*line, "url", {kChatUrl, kCompletionsUrl},
                   "give \"/v1/chat/completions\" or \"/v1/completions\"", error)) {
    return false;
  }
  request->is_chat = (*line)["url"] == kChatUrl;
  const Field body{"body", line->contains("body") ? &(*line)["body"] : nullptr, error};
  if (body.value == nullptr || body.value->is_null())
    return body.Fail("is missing; give an object");
  if (!body.value->is_object()) return body.Refuse("give an object");
  return ReadBody(body.value, request, error);
}

bool ReadShortLine(Json* line, ParsedRequest* request, RequestError* error) {
  request->is_short_form = true;
  request->custom_id = absl::StrFormat("line-%d", request->line);
  if (const auto id = line->find("id"); id != line->end()) {
    if (id->is_number_integer()) {
      request->custom_id = id->dump();
    } else if (!id->is_null() &&
               !Field{"id", &*id, error}.ReadName(kMaxIdBytes, &request->custom_id)) {
      return false;
    }
    line->erase(id);
  }
  error->custom_id = request->custom_id;
  const auto messages = line->find("messages");
  request->is_chat = messages != line->end() && !messages->is_null();
  return ReadBody(line, request, error);
}

}  // namespace

ParseResult ParseRequest(std::string_view line, int64_t line_number) {
  RequestError error;
  error.line = line_number;
  absl::StatusOr<Json> json = ParseBoundedJson(line);
  if (!json.ok()) {
    error.custom_id = FindShortCustomId(line);
    error.message = absl::StrFormat("the line %s", std::string(json.status().message()));
    return error;
  }
  if (!json->is_object()) {
    error.message = absl::StrFormat("the line is %s; give a JSON object", DescribeJson(*json));
    return error;
  }
  ParsedRequest request;
  request.line = line_number;
  const bool is_batch = json->contains("custom_id") || json->contains("method") ||
                        json->contains("url") || json->contains("body");
  if (is_batch ? ReadBatchLine(&*json, &request, &error)
               : ReadShortLine(&*json, &request, &error)) {
    return request;
  }
  return error;
}

RequestError OverlongLineError(std::string_view prefix, int64_t line_number, int64_t num_bytes,
                               int64_t max_line_bytes) {
  RequestError error;
  error.line = line_number;
  error.custom_id = FindShortCustomId(prefix);
  error.message =
      absl::StrFormat("the line is %d bytes long; shorten it to %d bytes or raise max_line_mb",
                      num_bytes, max_line_bytes);
  return error;
}

}  // namespace zipage
