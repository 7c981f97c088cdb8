#include "scheduler/job/result.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_format.h"
#include "scheduler/text/utf8.h"

namespace zipage {
namespace {

using Json = nlohmann::ordered_json;

// JSON has no infinity: what cannot be sampled is written as this, as in vLLM.
constexpr float kLowestLogprob = -9999.0F;

double WritableLogprob(float logprob) {
  return static_cast<double>(logprob > kLowestLogprob ? logprob : kLowestLogprob);
}

Json StopReason(const CompletionChoice& choice) {
  if (const auto* text = std::get_if<std::string>(&choice.stop_reason)) return *text;
  if (const auto* id = std::get_if<int32_t>(&choice.stop_reason)) return *id;
  return nullptr;
}

// {"token","logprob","bytes"} of OpenAI's chat format.
Json ChatToken(const TokenText& token) {
  Json bytes = Json::array();
  for (const char byte : token.bytes) bytes.push_back(static_cast<unsigned char>(byte));
  Json entry;
  entry["token"] = token.bytes;
  entry["logprob"] = WritableLogprob(token.logprob);
  entry["bytes"] = std::move(bytes);
  return entry;
}

Json ChatLogprobs(const std::vector<TokenTextLogprobs>& tokens) {
  Json content = Json::array();
  for (const TokenTextLogprobs& token : tokens) {
    Json entry = ChatToken(token.sampled);
    entry["top_logprobs"] = Json::array();
    for (const TokenText& top : token.top) entry["top_logprobs"].push_back(ChatToken(top));
    content.push_back(std::move(entry));
  }
  return {{"content", std::move(content)}};
}

// A token as a JSON string that no other token shares: parts of characters are spelled
// "bytes:\xe4".
std::string CompletionToken(const std::string& bytes) {
  if (IsValidUtf8(bytes)) return bytes;
  std::string text = "bytes:";
  for (const char byte : bytes) {
    absl::StrAppendFormat(&text, "\\x%02x", static_cast<unsigned char>(byte));
  }
  return text;
}

bool IsContinuationByte(char byte) { return (static_cast<unsigned char>(byte) & 0xC0U) == 0x80U; }

Json CompletionLogprobs(const std::vector<TokenTextLogprobs>& tokens) {
  Json logprobs = {{"text_offset", Json::array()},
                   {"token_logprobs", Json::array()},
                   {"tokens", Json::array()},
                   {"top_logprobs", Json::array()}};
  int64_t num_chars = 0;  // characters begun so far
  for (const TokenTextLogprobs& token : tokens) {
    const std::string& bytes = token.sampled.bytes;
    // A token that starts inside a character has that character's offset.
    const bool is_inside = !bytes.empty() && IsContinuationByte(bytes[0]) && num_chars > 0;
    logprobs["text_offset"].push_back(num_chars - (is_inside ? 1 : 0));
    num_chars += std::count_if(bytes.begin(), bytes.end(),
                               [](char byte) { return !IsContinuationByte(byte); });
    logprobs["token_logprobs"].push_back(WritableLogprob(token.sampled.logprob));
    logprobs["tokens"].push_back(CompletionToken(bytes));
    Json top = Json::object();
    for (const TokenText& entry : token.top) {
      top.emplace(CompletionToken(entry.bytes), WritableLogprob(entry.logprob));
    }
    top.emplace(CompletionToken(bytes), WritableLogprob(token.sampled.logprob));
    logprobs["top_logprobs"].push_back(std::move(top));
  }
  return logprobs;
}

Json ChoiceJson(const CompletionResult& result, const CompletionChoice& choice) {
  Json json;
  json["index"] = choice.index;
  if (result.is_chat) {
    json["message"] = {{"role", "assistant"}, {"content", choice.text}, {"refusal", nullptr}};
  } else {
    json["text"] = choice.text;
  }
  json["logprobs"] = nullptr;
  if (result.has_logprobs) {
    json["logprobs"] =
        result.is_chat ? ChatLogprobs(choice.logprobs) : CompletionLogprobs(choice.logprobs);
  }
  json["finish_reason"] = std::string(FinishReasonName(choice.finish_reason));
  json["stop_reason"] = StopReason(choice);
  if (result.return_token_ids) json["token_ids"] = choice.token_ids;
  return json;
}

double OneDecimal(double value) { return std::round(value * 10) / 10; }

Json UsageJson(const CompletionUsage& usage) {
  Json kept;  // null
  if (usage.kv_tokens_kept.has_value()) {
    kept = {{"prompt", OneDecimal(usage.kv_tokens_kept->prompt)},
            {"output", OneDecimal(usage.kv_tokens_kept->output)}};
  }
  return {{"prompt_tokens", usage.prompt_tokens},
          {"completion_tokens", usage.completion_tokens},
          {"total_tokens", usage.prompt_tokens + usage.completion_tokens},
          {"prompt_tokens_details", {{"cached_tokens", usage.cached_tokens}}},
          {"cached_tokens", usage.cached_tokens},
          {"kv_tokens_peak", usage.kv_tokens_peak},
          {"compressions", usage.compressions},
          {"kv_tokens_kept", std::move(kept)}};
}

Json LineJson(std::string_view request_id, Json custom_id) {
  Json line;
  line["id"] = absl::StrFormat("batch_req_%s", request_id);
  line["custom_id"] = std::move(custom_id);
  return line;
}

Json ResponseJson(int status_code, std::string_view request_id, Json body) {
  Json response;
  response["status_code"] = status_code;
  response["request_id"] = request_id;
  response["body"] = std::move(body);
  return response;
}

// One line; bytes that are no UTF-8 become U+FFFD.
std::string Dump(const Json& json) {
  return json.dump(-1, ' ', /*ensure_ascii=*/false, Json::error_handler_t::replace);
}

}  // namespace

std::string FormatResult(const CompletionResult& result) {
  Json body;
  body["id"] = absl::StrFormat("%s-%s", result.is_chat ? "chatcmpl" : "cmpl", result.request_id);
  body["object"] = result.is_chat ? "chat.completion" : "text_completion";
  body["created"] = result.created;
  body["model"] = result.model;
  body["choices"] = Json::array();
  for (const CompletionChoice& choice : result.choices) {
    body["choices"].push_back(ChoiceJson(result, choice));
  }
  body["usage"] = UsageJson(result.usage);
  if (result.return_token_ids) body["prompt_token_ids"] = result.prompt_token_ids;
  Json line = LineJson(result.request_id, result.custom_id);
  line["response"] = ResponseJson(200, result.request_id, std::move(body));
  line["error"] = nullptr;
  return Dump(line);
}

std::string FormatRefusal(const RequestError& error, std::string_view request_id) {
  Json details;
  details["message"] = absl::StrFormat("line %d: %s", error.line, error.message);
  details["type"] = "invalid_request_error";
  details["param"] = error.field.empty() ? Json(nullptr) : Json(error.field);
  details["code"] = error.status_code == 404 ? "model_not_found" : "invalid_value";
  details["line"] = error.line;
  Json body;
  body["error"] = std::move(details);
  Json line =
      LineJson(request_id, error.custom_id.has_value() ? Json(*error.custom_id) : Json(nullptr));
  line["response"] = ResponseJson(error.status_code, request_id, std::move(body));
  line["error"] = nullptr;
  line["line"] = error.line;
  return Dump(line);
}

std::string FormatFailure(std::string_view request_id, std::string_view custom_id,
                          int64_t line_number, std::string_view code, std::string_view message) {
  Json line = LineJson(request_id, std::string(custom_id));
  line["response"] = nullptr;
  line["error"] = {{"code", std::string(code)},
                   {"message", absl::StrFormat("line %d: %s", line_number, message)}};
  line["line"] = line_number;
  return Dump(line);
}

}  // namespace zipage
