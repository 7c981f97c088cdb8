#include "scheduler/response.h"

#include <algorithm>
#include <utility>

namespace zipage {
namespace {

// Over the sequences of which a compression was reported; empty if there is none.
std::optional<KvTokensKept> MeanKept(const Request& request) {
  KvTokensKept sum;
  int num_compressed = 0;
  for (const Sequence& sequence : request.sequences) {
    if (sequence.kept_slots == 0) continue;
    ++num_compressed;
    const auto prompt = static_cast<double>(sequence.prompt_tokens_kept);
    sum.prompt += prompt;
    sum.output += static_cast<double>(sequence.kept_slots) - prompt;
  }
  if (num_compressed == 0) return std::nullopt;
  return KvTokensKept{sum.prompt / num_compressed, sum.output / num_compressed};
}

}  // namespace

Response::Response(BuiltRequest request, const Tokenizer* tokenizer)
    : request_(std::move(request)),
      tokenizer_(tokenizer),
      stops_(std::make_shared<const StopSet>(request_.stop)) {
  samples_.reserve(request_.n);
  for (int i = 0; i < request_.n; ++i) {
    samples_.push_back({IncrementalDetokenizer(tokenizer, request_.skip_special_tokens),
                        StopMatcher(stops_, request_.include_stop_str_in_output),
                        "",
                        {},
                        std::nullopt});
  }
}

bool Response::Take(const StopMatcher::Result& result, Sample* sample) {
  sample->text += result.text;
  sample->stop = result.stop;
  return sample->stop.has_value();
}

bool Response::AddToken(const TokenEvent& event) {
  const Sequence& sequence = *event.sequence;
  Sample& sample = samples_[sequence.sample_index];
  if (!event.logprobs.empty()) sample.logprobs.push_back(WithText(event.logprobs));
  if (!event.in_text) return false;
  std::string piece = sample.detokenizer.Push(event.token);
  // Stop strings count from min_tokens on, as stop tokens do.
  if (static_cast<int64_t>(sequence.output().size()) < request_.sampling.min_tokens) {
    sample.text += piece;
    return false;
  }
  return Take(sample.stop_matcher.Push(piece), &sample);
}

TokenTextLogprobs Response::WithText(const std::vector<TokenLogprob>& logprobs) const {
  TokenTextLogprobs result;
  result.sampled = {tokenizer_->TokenBytes(logprobs[0].token), logprobs[0].logprob};
  for (size_t i = 1; i < logprobs.size(); ++i) {
    result.top.push_back({tokenizer_->TokenBytes(logprobs[i].token), logprobs[i].logprob});
  }
  return result;
}

CompletionChoice Response::MakeChoice(const Sequence& sequence) {
  Sample& sample = samples_[sequence.sample_index];
  CompletionChoice choice;
  choice.index = sequence.sample_index;
  choice.token_ids.assign(sequence.output().begin(), sequence.output().end());
  choice.logprobs = std::move(sample.logprobs);
  // What was held back belongs to the text, unless a stop string shows in it after all.
  if (!sample.stop.has_value() &&
      !Take(sample.stop_matcher.Push(sample.detokenizer.Flush()), &sample)) {
    Take(sample.stop_matcher.Flush(), &sample);
  }
  choice.finish_reason = *sequence.finish_reason;
  if (sample.stop.has_value()) {
    choice.finish_reason = FinishReason::kStopString;
    choice.stop_reason = request_.stop[*sample.stop];
  } else if (choice.finish_reason == FinishReason::kStopToken) {
    const std::vector<int32_t>& reported = request_.reported_stop_token_ids;
    const int32_t last = sequence.tokens.back();
    if (std::binary_search(reported.begin(), reported.end(), last)) choice.stop_reason = last;
  }
  choice.text = std::move(sample.text);
  return choice;
}

std::string Response::FormatSuccess(const Request& request, const std::string& request_id,
                                    int64_t created) {
  CompletionResult result;
  result.request_id = request_id;
  result.custom_id = request_.custom_id;
  result.model = request_.model;
  result.created = created;
  result.is_chat = request_.is_chat;
  result.has_logprobs = request_.sampling.num_logprobs >= 0;
  result.return_token_ids = request_.return_token_ids;
  if (request_.return_token_ids) {
    result.prompt_token_ids.assign(request.prompt().begin(), request.prompt().end());
  }
  result.usage.prompt_tokens = static_cast<int64_t>(request.prompt().size());
  // Of the first sample: the others find what it has computed.
  result.usage.cached_tokens = request.sequences[0].num_cached_tokens;
  for (const Sequence& sequence : request.sequences) {
    result.choices.push_back(MakeChoice(sequence));
    result.usage.completion_tokens += static_cast<int64_t>(sequence.output().size());
    result.usage.kv_tokens_peak = std::max(result.usage.kv_tokens_peak, sequence.peak_slots);
    result.usage.compressions += sequence.num_compressions;
  }
  result.usage.kv_tokens_kept = MeanKept(request);
  return FormatResult(result);
}

}  // namespace zipage
