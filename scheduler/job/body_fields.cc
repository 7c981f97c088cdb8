#include "scheduler/job/body_fields.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "proto/config.h"
#include "scheduler/job/bounded_json.h"
#include "scheduler/job/chat_messages.h"
#include "scheduler/job/field_reader.h"

namespace zipage {
namespace {

using Json = nlohmann::ordered_json;

constexpr int32_t kMaxInt = std::numeric_limits<int32_t>::max();
constexpr int32_t kMaxSamples = 128;
constexpr int32_t kMaxLogprobs = 20;
// As the engine's options of these names.
constexpr int32_t kMaxNgramSize = 1024;
constexpr int32_t kMaxNgramCount = 1'000'000;
constexpr size_t kMaxStops = 64;
constexpr size_t kMaxStopBytes = 1024;
constexpr size_t kMaxStopTokenIds = 1024;
constexpr size_t kMaxModelNameBytes = 4096;

constexpr std::array<std::string_view, 8> kIgnored = {
    "user",         "metadata",          "priority",         "store",
    "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"};

// What a body is read into. Fields that depend on one another wait here until all have been seen.
struct BodyFields {
  ParsedRequest* request = nullptr;
  std::optional<int32_t> max_tokens;
  std::optional<int32_t> max_completion_tokens;
  std::optional<int32_t> best_of;
  std::optional<bool> chat_logprobs;
  std::optional<int32_t> top_logprobs;
  std::optional<int32_t> completion_logprobs;
  bool has_messages = false;
};

bool ReadPrompt(const Field& f, BodyFields* b) {
  constexpr std::string_view kCure = "give one prompt per line: a string, or an array of token ids";
  Json* value = f.value;
  // An array around one prompt is that prompt, as OpenAI's clients write it.
  if (value->is_array() && value->size() == 1 && !(*value)[0].is_number()) value = &(*value)[0];
  if (value->is_string()) {
    b->request->prompt = std::move(value->get_ref<std::string&>());
    return true;
  }
  if (!value->is_array()) return f.Refuse(kCure);
  if (value->empty()) return f.Fail(absl::StrFormat("is empty; %s", kCure));
  if ((*value)[0].is_string() || (*value)[0].is_array()) {
    return f.Fail(absl::StrFormat("has %d prompts; %s", value->size(), kCure));
  }
  b->request->prompt_token_ids.emplace();
  return Field{f.name, value, f.error}.ReadTokenIds(&*b->request->prompt_token_ids);
}

bool ReadPromptTokenIds(const Field& f, BodyFields* b) {
  std::vector<int32_t> ids;
  if (!f.ReadTokenIds(&ids)) return false;
  if (ids.empty()) return f.Fail("is empty; give at least one token id");
  if (b->request->prompt_token_ids.has_value()) {
    return f.Fail("is given next to a prompt of token ids; give one of the two");
  }
  b->request->prompt_token_ids = std::move(ids);
  return true;
}

bool ReadStop(const Field& f, BodyFields* b) {
  std::vector<std::string> stops;
  if (f.value->is_string()) {
    if (!f.ReadName(kMaxStopBytes, &stops.emplace_back())) return false;
  } else if (f.value->is_array() && f.value->size() <= kMaxStops) {
    for (size_t i = 0; i < f.value->size(); ++i) {
      if (!f.At(i).ReadName(kMaxStopBytes, &stops.emplace_back())) return false;
    }
  } else {
    return f.Refuse(absl::StrFormat("give a string or an array of at most %d", kMaxStops));
  }
  b->request->stop = std::move(stops);
  return true;
}

bool ReadStopTokenIds(const Field& f, BodyFields* b) {
  if (f.value->is_array() && f.value->size() > kMaxStopTokenIds) {
    return f.Refuse(absl::StrFormat("give at most %d", kMaxStopTokenIds));
  }
  return f.ReadTokenIds(&b->request->stop_token_ids);
}

bool ReadTopK(const Field& f, BodyFields* b) {
  int32_t top_k = 0;
  if (!f.ReadInt32(-1, kMaxInt, &top_k)) return false;
  b->request->top_k = std::max(top_k, 0);
  return true;
}

bool ReadLogprobs(const Field& f, BodyFields* b) {
  if (b->request->is_chat) {
    if (!f.value->is_boolean()) {
      return f.Refuse("give true or false (and top_logprobs for the number)");
    }
    return f.ReadBool(&b->chat_logprobs.emplace());
  }
  return f.ReadInt32(0, kMaxLogprobs, &b->completion_logprobs.emplace());
}

bool ReadTemplateArguments(const Field& f, BodyFields* b) {
  if (!f.value->is_object()) return f.Refuse("give an object");
  for (const char* taken : {"messages", "tools", "add_generation_prompt"}) {
    if (f.value->contains(taken)) return f.At(taken).Fail("belongs beside chat_template_kwargs");
  }
  b->request->chat_template_kwargs = std::move(*f.value);
  return true;
}

bool ReadResponseFormat(const Field& f, BodyFields* /*b*/) {
  if (f.value->is_object() && f.value->contains("type") && (*f.value)["type"] == "text")
    return true;
  if (f.value->is_object() && f.value->contains("type")) {
    return f.At("type").Refuse("only {\"type\": \"text\"} is supported");
  }
  return f.Refuse("only {\"type\": \"text\"} is supported");
}

bool ReadToolChoice(const Field& f, BodyFields* /*b*/) {
  if (*f.value == "none" || *f.value == "auto") return true;
  return f.Refuse("only \"none\" and \"auto\" are supported");
}

// For switches that this engine has in one position only.
bool ReadFalse(const Field& f, BodyFields* /*b*/) {
  if (*f.value == false) return true;
  return f.Refuse("not supported; leave it out or give false");
}

bool ReadEmpty(const Field& f, BodyFields* /*b*/) {
  if ((f.value->is_structured() && f.value->empty()) || *f.value == "") return true;
  return f.Refuse("not supported; leave it out");
}

bool ReadUnsupported(const Field& f, BodyFields* /*b*/) {
  return f.Fail("is not supported; leave it out");
}

bool ReadIgnored(const Field& /*f*/, BodyFields* /*b*/) { return true; }

enum Where : unsigned { kChat = 1, kCompletion = 2, kBoth = 3 };

struct FieldSpec {
  std::string_view name;
  Where where;
  bool (*read)(const Field& f, BodyFields* b);
};

// Every field, once. Short forms take those of chat if they have messages, else those of
// completions.
constexpr FieldSpec kFields[] = {
    {"model", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadName(kMaxModelNameBytes, &b->request->model.emplace());
     }},
    {"messages", kChat,
     [](const Field& f, BodyFields* b) {
       b->has_messages = true;
       return ReadMessages(f, &b->request->messages);
     }},
    {"prompt", kCompletion, ReadPrompt},
    {"prompt_token_ids", kCompletion, ReadPromptTokenIds},
    {"tools", kChat,
     [](const Field& f, BodyFields* b) { return ReadTools(f, &b->request->tools); }},
    {"tool_choice", kChat, ReadToolChoice},
    {"chat_template_kwargs", kChat, ReadTemplateArguments},
    {"add_generation_prompt", kChat,
     [](const Field& f, BodyFields* b) { return f.ReadBool(&b->request->add_generation_prompt); }},
    {"add_special_tokens", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadBool(&b->request->add_special_tokens.emplace());
     }},
    // vLLM and OpenAI take temperatures up to 2; some data generation goes higher.
    {"temperature", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadFloat(0, 100, &b->request->temperature.emplace());
     }},
    {"top_p", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadPositiveFloat(1, &b->request->top_p.emplace());
     }},
    {"top_k", kBoth, ReadTopK},
    {"min_p", kBoth,
     [](const Field& f, BodyFields* b) { return f.ReadFloat(0, 1, &b->request->min_p.emplace()); }},
    {"repetition_penalty", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadFloat(0.01F, 100, &b->request->repetition_penalty.emplace());
     }},
    {"presence_penalty", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadFloat(-2, 2, &b->request->presence_penalty);
     }},
    {"frequency_penalty", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadFloat(-2, 2, &b->request->frequency_penalty);
     }},
    {"seed", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadInt(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max(),
                        &b->request->seed.emplace());
     }},
    {"max_tokens", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadInt32(1, kMaxInt, &b->max_tokens.emplace());
     }},
    {"max_completion_tokens", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadInt32(1, kMaxInt, &b->max_completion_tokens.emplace());
     }},
    {"min_tokens", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadInt32(0, kMaxInt, &b->request->min_tokens);
     }},
    {"n", kBoth,
     [](const Field& f, BodyFields* b) { return f.ReadInt32(1, kMaxSamples, &b->request->n); }},
    {"best_of", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadInt32(1, kMaxSamples, &b->best_of.emplace());
     }},
    {"stop", kBoth, ReadStop},
    {"stop_token_ids", kBoth, ReadStopTokenIds},
    {"ignore_eos", kBoth,
     [](const Field& f, BodyFields* b) { return f.ReadBool(&b->request->ignore_eos); }},
    {"logprobs", kBoth, ReadLogprobs},
    {"top_logprobs", kChat,
     [](const Field& f, BodyFields* b) {
       return f.ReadInt32(0, kMaxLogprobs, &b->top_logprobs.emplace());
     }},
    {"include_stop_str_in_output", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadBool(&b->request->include_stop_str_in_output);
     }},
    {"skip_special_tokens", kBoth,
     [](const Field& f, BodyFields* b) { return f.ReadBool(&b->request->skip_special_tokens); }},
    {"return_token_ids", kBoth,
     [](const Field& f, BodyFields* b) { return f.ReadBool(&b->request->return_token_ids); }},
    {"kv_budget", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadInt32(1, kMaxInt, &b->request->kv_budget.emplace());
     }},
    {"repetition_ngram_size", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadInt32(0, kMaxNgramSize, &b->request->repetition_ngram_size.emplace());
     }},
    {"repetition_ngram_count", kBoth,
     [](const Field& f, BodyFields* b) {
       return f.ReadInt32(2, kMaxNgramCount, &b->request->repetition_ngram_count.emplace());
     }},
    {"response_format", kBoth, ReadResponseFormat},
    {"echo", kBoth, ReadFalse},
    {"stream", kBoth, ReadFalse},
    {"continue_final_message", kChat, ReadFalse},
    {"use_beam_search", kBoth, ReadFalse},
    {"logit_bias", kBoth, ReadEmpty},
    {"suffix", kCompletion, ReadEmpty},
    {"stream_options", kBoth, ReadUnsupported},
    {"prompt_logprobs", kBoth, ReadUnsupported},
    {"allowed_token_ids", kBoth, ReadUnsupported},
    {"bad_words", kBoth, ReadEmpty},
    {"truncate_prompt_tokens", kBoth, ReadUnsupported},
    {"length_penalty", kBoth, ReadUnsupported},
    {"functions", kChat, ReadUnsupported},
    {"function_call", kChat, ReadUnsupported},
    {"chat_template", kChat, ReadUnsupported},
    {"documents", kChat, ReadUnsupported},
    {"reasoning_effort", kChat, ReadUnsupported},
    {"structured_outputs", kBoth, ReadUnsupported},
    {"guided_json", kBoth, ReadUnsupported},
    {"guided_regex", kBoth, ReadUnsupported},
    {"guided_choice", kBoth, ReadUnsupported},
    {"guided_grammar", kBoth, ReadUnsupported},
    {"guided_decoding_backend", kBoth, ReadUnsupported},
    {"guided_whitespace_pattern", kBoth, ReadUnsupported},
};

const FieldSpec* FindField(std::string_view name) {
  static constexpr FieldSpec kIgnoredSpec = {"", kBoth, ReadIgnored};
  if (IsIgnoredField(name)) return &kIgnoredSpec;
  const auto* found = std::find_if(std::begin(kFields), std::end(kFields),
                                   [&](const FieldSpec& spec) { return spec.name == name; });
  return found == std::end(kFields) ? nullptr : found;
}

bool RefuseUnknown(const Field& f, unsigned where) {
  std::string_view nearest;
  size_t nearest_distance = std::max<size_t>(2, std::min<size_t>(f.name.size(), 64) / 3) + 1;
  for (const FieldSpec& spec : kFields) {
    if ((spec.where & where) == 0 || f.name.size() > 64) continue;
    const size_t distance = EditDistance(f.name, spec.name);
    if (distance < nearest_distance) {
      nearest = spec.name;
      nearest_distance = distance;
    }
  }
  if (!nearest.empty()) {
    return f.Fail(absl::StrFormat("is not a known field; did you mean %s?", nearest));
  }
  return f.Fail("is not a known field; remove it, or put your own data under metadata");
}

// What one member alone cannot tell.
bool CheckTogether(const BodyFields& b, RequestError* error) {
  ParsedRequest& r = *b.request;
  const auto fail = [error](const char* field, std::string_view what) {
    return Field{field, nullptr, error}.Fail(what);
  };
  if (r.is_chat && !b.has_messages)
    return fail("messages", "is missing; give an array of messages");
  if (!r.is_chat && r.prompt.has_value() && r.prompt_token_ids.has_value()) {
    return fail("prompt", "and prompt_token_ids are both given; give one of the two");
  }
  if (!r.is_chat && !r.prompt.has_value() && !r.prompt_token_ids.has_value()) {
    return fail("prompt", r.is_short_form ? "is missing; give prompt, messages or prompt_token_ids"
                                          : "is missing; give a string or an array of token ids");
  }
  if (b.top_logprobs.has_value() && *b.top_logprobs > 0 && !b.chat_logprobs.value_or(false)) {
    return fail(
        "top_logprobs",
        absl::StrFormat("is %d without logprobs; give \"logprobs\": true too", *b.top_logprobs));
  }
  if (b.chat_logprobs.value_or(false)) r.num_logprobs = b.top_logprobs.value_or(0);
  if (b.completion_logprobs.has_value()) r.num_logprobs = b.completion_logprobs;
  r.max_tokens = b.max_completion_tokens.has_value() ? b.max_completion_tokens : b.max_tokens;
  if (r.max_tokens.has_value() && r.min_tokens > *r.max_tokens) {
    return fail("min_tokens", absl::StrFormat("is %d; give at most max_tokens, which is %d",
                                              r.min_tokens, *r.max_tokens));
  }
  if (b.best_of.has_value() && *b.best_of != r.n) {
    return fail("best_of", absl::StrFormat("is %d; only best_of equal to n (%d) is supported",
                                           *b.best_of, r.n));
  }
  return true;
}

}  // namespace

bool IsIgnoredField(std::string_view name) {
  return std::find(kIgnored.begin(), kIgnored.end(), name) != kIgnored.end();
}

bool ReadBody(Json* body, ParsedRequest* request, RequestError* error) {
  BodyFields fields;
  fields.request = request;
  const Where here = request->is_chat ? kChat : kCompletion;
  for (auto& [name, value] : body->items()) {
    const Field field{name, &value, error};
    const FieldSpec* spec = FindField(name);
    if (spec == nullptr) return RefuseUnknown(field, here);
    if (value.is_null()) continue;
    if ((spec->where & here) == 0) {
      return field.Fail(request->is_chat
                            ? "is for text completions (a prompt); this request has messages"
                            : "is for chat completions (messages); this request has a prompt");
    }
    if (!spec->read(field, &fields)) return false;
  }
  return CheckTogether(fields, error);
}

}  // namespace zipage
