#pragma once
// The texts that zipage-fidelity replays: token ids of prompts and of what followed, read from JSON
// Lines without trust. A line is what an engine wrote for a request with return_token_ids,
//   {"custom_id": "q1", "response": {"status_code": 200, "body": {"prompt_token_ids": [5, 6],
//    "choices": [{"index": 0, "token_ids": [7, 8, 9]}]}}}
// (one case for each choice), or
//   {"id": "q1", "prompt_token_ids": [5, 6], "output_token_ids": [7, 8, 9],
//    "recall_tokens": 2, "seed": 3}
// whose last two members may be absent. Other members are ignored, and blank lines, a byte-order
// mark and carriage returns at line ends are allowed. Host code.

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "proto/messages.h"
#include "proto/status.h"

namespace zipage {

struct FidelityCase {
  std::string id;
  std::vector<TokenId> prompt;  // at least one
  std::vector<TokenId> output;  // at least one
  // The last so many tokens of the output are what should be recalled; 0: the case is no probe.
  int64_t recall_tokens = 0;
  uint64_t seed = 0;  // of policies that draw

  // Positions that a replay computes: the last token is predicted, never computed.
  int64_t num_computed() const { return static_cast<int64_t>(prompt.size() + output.size()) - 1; }
};

struct CaseLimits {
  int64_t vocab_size = 0;     // ids are below
  int64_t max_model_len = 0;  // tokens of prompt and output together
  size_t max_line_bytes = 0;
  uint64_t seed = 0;  // of the first case; a case without its own gets this plus its number
};

// Adds the cases of one line. `where` ("FILE line 3") begins every message. kInvalidArgument for
// whatever a line above does not allow.
absl::Status ParseCases(std::string_view line, const std::string& where, const CaseLimits& limits,
                        std::vector<FidelityCase>* cases);

// All cases of a file. kNotFound if it cannot be read, kInvalidArgument if a line is wrong (the
// message names file and line) or there is none.
absl::StatusOr<std::vector<FidelityCase>> ReadCases(const std::string& path,
                                                    const CaseLimits& limits);

}  // namespace zipage
