#pragma once
// Output lines in the OpenAI batch output format, as text without the newline. Pure functions;
// every line is valid UTF-8 and valid JSON whatever bytes the caller hands in (broken UTF-8 becomes
// U+FFFD).
//
//   answered {"id","custom_id","response":{"status_code":200,"request_id","body":{…}},"error":null}
//   refused    {"id","custom_id","response":{"status_code":400,"request_id","body":{"error":
//               {"message","type","param","code","line"}}},"error":null,"line":7}
//   failed     {"id","custom_id","response":null,"error":{"code","message"},"line":7}
// So status_code decides, as with OpenAI. "failed" is for the engine's own fault. The
// unanswered requests of a cancelled job have no line.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "scheduler/job/request_parser.h"
#include "scheduler/request.h"

namespace zipage {

// A token with its bytes as the detokenizer knows them; they may be part of a character only.
struct TokenText {
  std::string bytes;
  float logprob = 0;
};

struct TokenTextLogprobs {
  TokenText sampled;
  std::vector<TokenText> top;  // descending; at most as many as were asked for
};

struct CompletionChoice {
  int32_t index = 0;  // of the n samples
  std::string text;
  std::vector<int32_t> token_ids;  // written if return_token_ids
  // One entry per token of token_ids if log-probabilities were asked for.
  std::vector<TokenTextLogprobs> logprobs;
  // kStopToken, kStopString, kLength or kRepetition: a cancelled or corrupted request is a failure,
  // not a result.
  FinishReason finish_reason = FinishReason::kStopToken;
  // The stop string or stop token id that ended it; null for end of sequence, length and repetition
  // (vLLM's field).
  std::variant<std::monostate, std::string, int32_t> stop_reason;
};

// What a compressed choice kept in its last compression: tokens of the prompt and of the output,
// mean over layers and KV heads. Together they are the choice's budget.
struct KvTokensKept {
  double prompt = 0;
  double output = 0;
};

struct CompletionUsage {
  int64_t prompt_tokens = 0;
  int64_t completion_tokens = 0;  // over all choices
  int64_t cached_tokens = 0;      // prompt tokens found in the prefix cache
  int64_t kv_tokens_peak = 0;     // most tokens one choice held in the KV cache
  int64_t compressions = 0;       // over all choices
  // Mean over the choices that were compressed, so that `prompt` compares with prompt_tokens; null
  // if none was. Written with one decimal.
  std::optional<KvTokensKept> kv_tokens_kept;
};

struct CompletionResult {
  std::string request_id;  // unique within the engine; the ids of the line derive from it
  std::string custom_id;
  std::string model;
  int64_t created = 0;  // seconds since 1970
  bool is_chat = false;
  bool has_logprobs = false;
  bool return_token_ids = false;
  std::vector<int32_t> prompt_token_ids;  // written if return_token_ids
  std::vector<CompletionChoice> choices;
  CompletionUsage usage;
};

std::string FormatResult(const CompletionResult& result);

// The line of a refused request. `request_id` as in CompletionResult.
std::string FormatRefusal(const RequestError& error, std::string_view request_id);

// The line of a request that was accepted but has no answer. `code` is such as "internal_error".
std::string FormatFailure(std::string_view request_id, std::string_view custom_id, int64_t line,
                          std::string_view code, std::string_view message);

}  // namespace zipage
