#include "scheduler/job/request_builder.h"

#include <glog/logging.h>
#include <xxhash.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "scheduler/job/bounded_json.h"
#include "scheduler/text/chat_template.h"
#include "scheduler/text/tokenizer.h"

namespace zipage {
namespace {

// What OpenAI and vLLM give /v1/completions.
constexpr int64_t kCompletionsMaxTokens = 16;
// vLLM's limit below which sampling is greedy; dividing logits by less would overflow.
constexpr float kGreedyTemperature = 1e-5F;

// Always false, so that a caller can return it.
bool Refuse(RequestError* error, std::string_view field, const std::string& message,
            int status_code = 400) {
  error->field = std::string(field);
  error->message = Printable(message, 1000);
  error->status_code = status_code;
  return false;
}

// The first id that the model has no embedding for.
std::optional<size_t> FindBadId(const std::vector<int32_t>& ids, int32_t vocab_size) {
  const auto bad =
      std::find_if(ids.begin(), ids.end(), [&](int32_t id) { return id < 0 || id >= vocab_size; });
  if (bad == ids.end()) return std::nullopt;
  return static_cast<size_t>(bad - ids.begin());
}

void SortUnique(std::vector<int32_t>* ids) {
  std::sort(ids->begin(), ids->end());
  ids->erase(std::unique(ids->begin(), ids->end()), ids->end());
}

}  // namespace

RequestBuilder::RequestBuilder(const Tokenizer* tokenizer, Templates templates, Options options)
    : tokenizer_(tokenizer), templates_(templates), options_(std::move(options)) {
  CHECK(tokenizer_ != nullptr);
  CHECK_GT(options_.max_model_len, 0);
  CHECK_GT(options_.vocab_size, 0);
  // An id the model cannot produce ends nothing, and the worker checks ids against its vocabulary.
  std::erase_if(options_.eos_token_ids,
                [&](int32_t id) { return id < 0 || id >= options_.vocab_size; });
  if (options_.repetition_penalty > 0) {
    options_.defaults.repetition_penalty = options_.repetition_penalty;
  }
  if (options_.compresses) CHECK_GT(options_.block_size, 0);
}

BuildResult RequestBuilder::Build(ParsedRequest request) const {
  RequestError error;
  error.line = request.line;
  error.custom_id = request.custom_id;
  BuiltRequest built;
  built.line = request.line;
  built.is_chat = request.is_chat;
  built.n = request.n;
  built.include_stop_str_in_output = request.include_stop_str_in_output;
  built.skip_special_tokens = request.skip_special_tokens;
  built.return_token_ids = request.return_token_ids;
  const std::vector<std::string>& names = options_.served_names;
  if (request.model.has_value() && !names.empty() &&
      std::find(names.begin(), names.end(), *request.model) == names.end()) {
    Refuse(&error, "model",
           absl::StrFormat("model \"%s\" is not served here; give \"%s\" or leave it out",
                           Printable(*request.model, 100), absl::StrJoin(names, "\" or \"")),
           404);
    return error;
  }
  built.model = request.model.value_or(names.empty() ? options_.default_name : names[0]);
  if (!BuildPrompt(&request, &built, &error) || !BuildSampling(request, &built, &error) ||
      !BuildBudget(request, &built, &error) || !BuildGuard(request, &built, &error)) {
    return error;
  }
  built.custom_id = std::move(request.custom_id);
  built.stop = std::move(request.stop);
  return built;
}

bool RequestBuilder::EncodePrompt(const ParsedRequest& request, std::vector<int32_t>* ids,
                                  RequestError* error) const {
  const char* field = request.is_chat ? "messages" : "prompt";
  std::string rendered;
  if (request.is_chat) {
    const ChatTemplate* chat_template =
        request.tools.is_null() ? templates_.chat : templates_.tools;
    if (chat_template == nullptr) {
      return Refuse(error, field,
                    "the model has no chat template; give a prompt instead of messages");
    }
    absl::StatusOr<std::string> text = RenderChat(*chat_template, request);
    if (!text.ok()) {
      return Refuse(error, field,
                    absl::StrFormat("the chat template refuses the messages: %s",
                                    std::string(text.status().message())));
    }
    rendered = *std::move(text);
  }
  // Some way beyond the limit, so that the message can name the length of a prompt that nearly
  // fits, while a giant one is not tokenized to its end.
  const auto max_tokens = static_cast<size_t>(2 * options_.max_model_len + 1024);
  absl::StatusOr<std::vector<int32_t>> encoded =
      tokenizer_->Encode(request.is_chat ? rendered : *request.prompt,
                         request.add_special_tokens.value_or(!request.is_chat), max_tokens);
  if (!encoded.ok()) {
    return Refuse(error, field,
                  absl::StrFormat("%s cannot be tokenized: %s", field,
                                  std::string(encoded.status().message())));
  }
  if (encoded->size() > max_tokens) {
    return Refuse(
        error, field,
        absl::StrFormat("%s has more than %d tokens; the context is %d tokens, and a "
                        "prompt may have %d",
                        field, max_tokens, options_.max_model_len, options_.max_model_len - 1));
  }
  *ids = *std::move(encoded);
  return true;
}

bool RequestBuilder::BuildPrompt(ParsedRequest* request, BuiltRequest* built,
                                 RequestError* error) const {
  std::vector<int32_t>& ids = built->prompt_token_ids;
  const bool is_ids = request->prompt_token_ids.has_value();
  const char* field = is_ids ? "prompt_token_ids" : request->is_chat ? "messages" : "prompt";
  if (is_ids) {
    ids = *std::move(request->prompt_token_ids);
  } else if (!EncodePrompt(*request, &ids, error)) {
    return false;
  }
  if (ids.empty()) {
    return Refuse(error, field, absl::StrFormat("%s is empty; give at least one token", field));
  }
  if (const auto bad = FindBadId(ids, options_.vocab_size); bad.has_value()) {
    return Refuse(error, field,
                  is_ids
                      ? absl::StrFormat("prompt_token_ids[%d] is %d; give ids from 0 to %d", *bad,
                                        ids[*bad], options_.vocab_size - 1)
                      : absl::StrFormat("%s has token id %d, but the model knows only ids from 0 "
                                        "to %d; remove that token's text",
                                        field, ids[*bad], options_.vocab_size - 1));
  }
  if (static_cast<int64_t>(ids.size()) >= options_.max_model_len) {
    return Refuse(
        error, field,
        absl::StrFormat("%s has %d tokens; the context is %d tokens, and a prompt may "
                        "have %d",
                        field, ids.size(), options_.max_model_len, options_.max_model_len - 1));
  }
  return true;
}

bool RequestBuilder::BuildSampling(const ParsedRequest& request, BuiltRequest* built,
                                   RequestError* error) const {
  SamplingParams& sampling = built->sampling;
  const GenerationDefaults& defaults = options_.defaults;
  const auto choose = [](const auto& given, const auto& by_model, auto* target) {
    if (given.has_value()) {
      *target = *given;
    } else if (by_model.has_value()) {
      *target = *by_model;
    }
  };
  choose(request.temperature, defaults.temperature, &sampling.temperature);
  choose(request.top_p, defaults.top_p, &sampling.top_p);
  choose(request.top_k, defaults.top_k, &sampling.top_k);
  choose(request.min_p, defaults.min_p, &sampling.min_p);
  choose(request.repetition_penalty, defaults.repetition_penalty, &sampling.repetition_penalty);
  if (sampling.temperature < kGreedyTemperature) sampling.temperature = 0;
  sampling.presence_penalty = request.presence_penalty;
  sampling.frequency_penalty = request.frequency_penalty;
  sampling.seed = request.seed.has_value()
                      ? static_cast<uint64_t>(*request.seed)
                      : XXH3_64bits_withSeed(request.custom_id.data(), request.custom_id.size(),
                                             options_.engine_seed);
  sampling.num_logprobs = request.num_logprobs.value_or(-1);

  const auto prompt_tokens = static_cast<int64_t>(built->prompt_token_ids.size());
  const int64_t room = std::min<int64_t>(options_.max_model_len - prompt_tokens,
                                         std::numeric_limits<int32_t>::max());
  const bool is_completions_url = !request.is_chat && !request.is_short_form;
  const int64_t max_tokens = request.max_tokens.value_or(
      is_completions_url ? std::min(room, kCompletionsMaxTokens) : room);
  if (max_tokens > room) {
    return Refuse(
        error, "max_tokens",
        absl::StrFormat("max_tokens is %d and the prompt has %d tokens; the context is %d "
                        "tokens, give at most %d",
                        max_tokens, prompt_tokens, options_.max_model_len, room));
  }
  if (request.min_tokens > max_tokens) {
    return Refuse(error, "min_tokens",
                  absl::StrFormat("min_tokens is %d; give at most max_tokens, which is %d here",
                                  request.min_tokens, max_tokens));
  }
  sampling.max_tokens = static_cast<int32_t>(max_tokens);
  sampling.min_tokens = request.min_tokens;
  if (const auto bad = FindBadId(request.stop_token_ids, options_.vocab_size); bad.has_value()) {
    return Refuse(error, "stop_token_ids",
                  absl::StrFormat("stop_token_ids[%d] is %d; give ids from 0 to %d", *bad,
                                  request.stop_token_ids[*bad], options_.vocab_size - 1));
  }
  SetStopTokens(request, built);
  if (sampling.min_tokens > 0 &&
      std::ssize(sampling.stop_token_ids) >= static_cast<std::ptrdiff_t>(options_.vocab_size)) {
    return Refuse(error, "stop_token_ids",
                  absl::StrFormat("stop_token_ids holds all %d ids of the vocabulary, which leaves "
                                  "nothing for min_tokens %d; give fewer, or min_tokens 0",
                                  options_.vocab_size, sampling.min_tokens));
  }
  return true;
}

bool RequestBuilder::BuildBudget(const ParsedRequest& request, BuiltRequest* built,
                                 RequestError* error) const {
  if (!request.kv_budget.has_value()) return true;
  const int64_t budget = *request.kv_budget;
  if (!options_.compresses) {
    return Refuse(error, "kv_budget",
                  absl::StrFormat("kv_budget is %d, but the engine keeps the full cache "
                                  "(compression_policy none); leave it out",
                                  budget));
  }
  const int64_t num_blocks = (budget + options_.block_size - 1) / options_.block_size;
  if (num_blocks * options_.block_size < options_.num_always_kept) {
    return Refuse(error, "kv_budget",
                  absl::StrFormat("kv_budget is %d, but the query window and the attention sinks "
                                  "keep %d tokens; give at least that",
                                  budget, options_.num_always_kept));
  }
  if (num_blocks + 1 > options_.num_blocks) {
    const int64_t most = (options_.num_blocks - 1) * options_.block_size;
    return Refuse(
        error, "kv_budget",
        absl::StrFormat("kv_budget is %d, which takes %d blocks of %d and one to fill, "
                        "but the KV cache has %d; %s",
                        budget, num_blocks, options_.block_size, options_.num_blocks,
                        most > 0 ? absl::StrFormat("give at most %d", most) : "leave it out"));
  }
  built->options.max_cache_blocks = static_cast<int>(num_blocks);
  return true;
}

bool RequestBuilder::BuildGuard(const ParsedRequest& request, BuiltRequest* built,
                                RequestError* error) const {
  RequestOptions& options = built->options;
  options.repetition_ngram_size =
      request.repetition_ngram_size.value_or(options_.repetition_ngram_size);
  options.repetition_ngram_count =
      request.repetition_ngram_count.value_or(options_.repetition_ngram_count);
  if (options.repetition_ngram_size == 0 && !request.repetition_ngram_size.has_value() &&
      request.repetition_ngram_count.has_value()) {
    return Refuse(error, "repetition_ngram_count",
                  absl::StrFormat("repetition_ngram_count is %d without repetition_ngram_size; "
                                  "give both",
                                  *request.repetition_ngram_count));
  }
  return true;
}

void RequestBuilder::SetStopTokens(const ParsedRequest& request, BuiltRequest* built) const {
  const std::vector<int32_t>& eos = options_.eos_token_ids;
  std::vector<int32_t>& reported = built->reported_stop_token_ids;
  reported = request.stop_token_ids;
  if (!request.ignore_eos) {
    std::erase_if(reported,
                  [&](int32_t id) { return std::find(eos.begin(), eos.end(), id) != eos.end(); });
  }
  SortUnique(&reported);
  built->sampling.stop_token_ids = reported;
  if (!request.ignore_eos) {
    built->sampling.stop_token_ids.insert(built->sampling.stop_token_ids.end(), eos.begin(),
                                          eos.end());
  }
  SortUnique(&built->sampling.stop_token_ids);
}

absl::StatusOr<std::string> RequestBuilder::RenderChat(const ChatTemplate& chat_template,
                                                       const ParsedRequest& request) const {
  // As in transformers, a template sees the special tokens (bos_token, …), then the request's own
  // arguments, which may replace them.
  nlohmann::ordered_json variables = tokenizer_->special_tokens();
  if (!request.chat_template_kwargs.is_null()) variables.update(request.chat_template_kwargs);
  if (!request.tools.is_null()) variables["tools"] = request.tools;
  return chat_template.Render(request.messages, variables, request.add_generation_prompt);
}

}  // namespace zipage
