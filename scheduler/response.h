#pragma once
// The answer to one request while it is generated: per sample the text so far, its stop strings and
// log-probabilities; at the end the output line. Scheduler thread only.

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "proto/messages.h"
#include "scheduler/job/request_builder.h"
#include "scheduler/job/result.h"
#include "scheduler/request.h"
#include "scheduler/scheduler.h"
#include "scheduler/text/detokenizer.h"
#include "scheduler/text/stop_matcher.h"
#include "scheduler/text/tokenizer.h"

namespace zipage {

class Response {
 public:
  // `tokenizer` outlives this.
  Response(BuiltRequest request, const Tokenizer* tokenizer);

  // Takes the next token of a sequence. True if a stop string ends it there: the caller finishes
  // the sequence. Nothing may follow for a sequence that ended.
  bool AddToken(const TokenEvent& event);

  // The output line. REQUIRES: `request` is finished, and no sequence is cancelled or corrupted.
  // `created` is in seconds since 1970.
  std::string FormatSuccess(const Request& request, const std::string& request_id, int64_t created);

  const BuiltRequest& request() const { return request_; }

 private:
  struct Sample {
    IncrementalDetokenizer detokenizer;
    StopMatcher stop_matcher;
    std::string text;
    std::vector<TokenTextLogprobs> logprobs;
    std::optional<size_t> stop;  // Index of the stop string that ended it.
  };

  // Appends what `result` found; true if it is the end.
  static bool Take(const StopMatcher::Result& result, Sample* sample);

  TokenTextLogprobs WithText(const std::vector<TokenLogprob>& logprobs) const;
  CompletionChoice MakeChoice(const Sequence& sequence);

  BuiltRequest request_;
  const Tokenizer* tokenizer_;
  std::shared_ptr<const StopSet> stops_;
  std::vector<Sample> samples_;  // [n]
};

}  // namespace zipage
