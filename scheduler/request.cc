#include "scheduler/request.h"

#include <glog/logging.h>

#include <algorithm>
#include <utility>

namespace zipage {

std::string_view FinishReasonName(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStopToken:
    case FinishReason::kStopString:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kRepetition:
      return "repetition";
    case FinishReason::kCancelled:
      return "cancelled";
    case FinishReason::kCorrupted:
      return "corrupted";
  }
  LOG(FATAL) << "finish reason " << static_cast<int>(reason);
}

Request::Request(uint64_t id, uint64_t job_id, const std::vector<TokenId>& prompt,
                 SamplingParams sampling, int n, const RequestOptions& options)
    : id(id), job_id(job_id), sampling(std::move(sampling)), options(options), sequences(n) {
  CHECK_GE(n, 1);
  CHECK(!prompt.empty());
  for (int i = 0; i < n; ++i) {
    Sequence& sequence = sequences[i];
    sequence.request = this;
    sequence.sample_index = i;
    sequence.num_prompt_tokens = static_cast<int64_t>(prompt.size());
    sequence.tokens = prompt;
  }
}

bool Request::finished() const {
  return std::ranges::all_of(sequences, [](const Sequence& s) { return s.finished(); });
}

bool Request::settled() const {
  return std::ranges::all_of(
      sequences, [](const Sequence& s) { return s.finished() && s.num_in_flight == 0; });
}

}  // namespace zipage
