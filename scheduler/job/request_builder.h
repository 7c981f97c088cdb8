#pragma once
// ParsedRequest -> what the engine schedules: prompt token ids, sampling parameters with all
// defaults filled in, stop strings and output flags; or the 4xx of that request. Holds no state of
// a request; scheduler thread only.
//
// Defaults: request, then the engine's options, then generation_config.json (if given), then
// SamplingParams. max_tokens is the rest of the context for chat and the short form, 16 for
// /v1/completions. Temperatures below 1e-5 are greedy. A request without a seed gets one from its
// custom_id and the engine's seed, so that a restart draws the same tokens. An empty prompt is
// refused: there is no position to predict from. A kv_budget, in tokens, is rounded up to blocks.

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "proto/sampling_params.h"
#include "proto/status.h"
#include "scheduler/job/generation_defaults.h"
#include "scheduler/job/request_parser.h"
#include "scheduler/request.h"

namespace zipage {

class ChatTemplate;
class Tokenizer;

struct BuiltRequest {
  int64_t line = 0;
  std::string custom_id;
  std::string model;  // as the result line names it
  bool is_chat = false;
  std::vector<int32_t> prompt_token_ids;  // at least one, all in [0, vocab_size)
  SamplingParams sampling;                // prompt + max_tokens <= max_model_len
  RequestOptions options;                 // max_cache_blocks only if the request has a kv_budget
  int32_t n = 1;
  std::vector<std::string> stop;
  // The stop tokens the request itself asked for: the id is the choice's stop_reason, while that of
  // an end-of-sequence id is null. Sorted; a part of sampling.stop_token_ids.
  std::vector<int32_t> reported_stop_token_ids;
  bool include_stop_str_in_output = false;
  bool skip_special_tokens = true;
  bool return_token_ids = false;
};

using BuildResult = std::variant<BuiltRequest, RequestError>;

class RequestBuilder {
 public:
  struct Options {
    // Names a request's "model" may have; any other is a 404. Empty accepts every name.
    std::vector<std::string> served_names;
    // What results call the model if neither the request nor served_names names it.
    std::string default_name;
    int64_t max_model_len = 0;  // positions, prompt and output together; > 0
    int32_t vocab_size = 0;     // ids the model has an embedding for; > 0
    // Every end-of-sequence id of generation_config, config and tokenizer.
    std::vector<int32_t> eos_token_ids;
    uint64_t engine_seed = 0;
    GenerationDefaults defaults;
    // The engine's options of these names: 0 leaves the penalty to `defaults`, the guard off.
    float repetition_penalty = 0;
    int repetition_ngram_size = 0;
    int repetition_ngram_count = 0;
    // Whether the KV cache is compressed: only then may a request have a kv_budget.
    bool compresses = false;
    int block_size = 0;           // positions in a block of the KV cache; > 0 if it compresses
    int64_t num_blocks = 0;       // of the KV pool
    int64_t num_always_kept = 0;  // slots that every compression keeps: query window and sinks
  };

  // Null where the model has none: such chat requests are refused.
  struct Templates {
    const ChatTemplate* chat = nullptr;   // for requests without tools
    const ChatTemplate* tools = nullptr;  // for requests with tools; often the same text
  };

  // The tokenizer and the templates outlive the builder.
  RequestBuilder(const Tokenizer* tokenizer, Templates templates, Options options);

  BuildResult Build(ParsedRequest request) const;

 private:
  // These return false and fill `error` (field, message, code) if the request is refused.
  bool BuildPrompt(ParsedRequest* request, BuiltRequest* built, RequestError* error) const;
  bool EncodePrompt(const ParsedRequest& request, std::vector<int32_t>* ids,
                    RequestError* error) const;
  bool BuildSampling(const ParsedRequest& request, BuiltRequest* built, RequestError* error) const;
  bool BuildBudget(const ParsedRequest& request, BuiltRequest* built, RequestError* error) const;
  bool BuildGuard(const ParsedRequest& request, BuiltRequest* built, RequestError* error) const;
  absl::StatusOr<std::string> RenderChat(const ChatTemplate& chat_template,
                                         const ParsedRequest& request) const;
  void SetStopTokens(const ParsedRequest& request, BuiltRequest* built) const;

  const Tokenizer* tokenizer_;
  Templates templates_;
  Options options_;
};

}  // namespace zipage
