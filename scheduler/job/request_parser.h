#pragma once
// One line of a job file -> ParsedRequest, or a RequestError that says in one line which field has
// which value and what is allowed. Pure; knows neither model nor tokenizer. Hostile input is
// expected: depth, number of values and lengths are capped, and no exception leaves.
//
// Two forms of a line:
//   {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": […],
//   …}}
//   {"id": "a", "prompt": "…", "max_tokens": 64}      or "messages" or "prompt_token_ids"
// A line with any of custom_id, method, url, body is of the first form. Rules:
//   - A short form without "id" is called "line-N"; an integer id becomes its decimal text.
//   - Equal custom_ids in one file are accepted: each line is answered.
//   - A key written twice in one object: the last value counts, as in Python.
//   - null is the same as leaving an optional field out. 1.0 is an integer, 1.5 and true are not.
//   - Unknown fields are errors, with the nearest known name. Ignored without a word: user,
//   metadata,
//     priority, store, service_tier, safety_identifier, prompt_cache_key, parallel_tool_calls and
//     tool_choice "none" or "auto" (calls are not parsed out of the text). metadata may hold
//     anything.
//   - Text parts of a message are joined by "\n" as vLLM does for templates that take strings;
//   other
//     keys of a message reach the chat template untouched, except that a tool call's arguments
//     given as JSON text become JSON, as vLLM does.

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

namespace zipage {

// Why a line is refused. `message` is one line of valid UTF-8 without the line number.
struct RequestError {
  int64_t line = 0;
  // What the line calls itself; absent if that could not be read.
  std::optional<std::string> custom_id;
  std::string field;  // Such as "temperature" or "messages[2].content"; empty for the whole line.
  std::string message;
  int status_code = 400;
};

struct ParsedRequest {
  int64_t line = 0;
  std::string custom_id;
  // Answered as a chat completion (true: `messages` is the prompt) or as a text completion.
  bool is_chat = false;
  // Short form: max_tokens defaults to the rest of the context, not to the 16 of /v1/completions.
  bool is_short_form = false;
  std::optional<std::string> model;

  // Exactly one of the three is the prompt. Key order is kept: templates print it.
  nlohmann::ordered_json messages;
  std::optional<std::string> prompt;
  std::optional<std::vector<int32_t>> prompt_token_ids;
  nlohmann::ordered_json tools;                 // array or null
  nlohmann::ordered_json chat_template_kwargs;  // object or null
  bool add_generation_prompt = true;
  // Absent: true for a text completion, false for chat (the template writes its own).
  std::optional<bool> add_special_tokens;

  // Absent fields get the engine's or the model's generation defaults, then those of
  // SamplingParams.
  std::optional<float> temperature;
  std::optional<float> top_p;
  std::optional<int32_t> top_k;  // 0 is off
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  float presence_penalty = 0;
  float frequency_penalty = 0;
  std::optional<int64_t> seed;
  std::optional<int32_t> max_tokens;  // max_completion_tokens wins if both are given
  int32_t min_tokens = 0;
  int32_t n = 1;
  std::vector<std::string> stop;
  std::vector<int32_t> stop_token_ids;
  bool ignore_eos = false;
  // Alternatives to report per token besides the sampled one's own; absent reports nothing.
  std::optional<int32_t> num_logprobs;

  // Absent fields get the engine's options. Tokens that a compression keeps of each sample.
  std::optional<int32_t> kv_budget;
  std::optional<int32_t> repetition_ngram_size;  // 0 is off
  std::optional<int32_t> repetition_ngram_count;

  bool include_stop_str_in_output = false;
  bool skip_special_tokens = true;
  bool return_token_ids = false;
};

using ParseResult = std::variant<ParsedRequest, RequestError>;

// Parses a line without its line ending. `line_number` is from 1.
ParseResult ParseRequest(std::string_view line, int64_t line_number);

// The error record of a line longer than the limit; `prefix` is its beginning.
RequestError OverlongLineError(std::string_view prefix, int64_t line_number, int64_t num_bytes,
                               int64_t max_line_bytes);

}  // namespace zipage
