#pragma once
// Golden models for tests: checkpoints with the logits and greedy tokens that transformers
// computed. The two in tests/golden/models are always there; the others are in the folder that the
// environment variable ZIPAGE_SHARED_DIR names (its default lies beside the source tree).

#include <string>
#include <vector>

#include "kernels/tensor.h"
#include "proto/messages.h"

namespace zipage {

struct GoldenPrompt {
  std::vector<TokenId> ids;
  std::vector<TokenId> greedy;
  std::vector<double> greedy_margin;
  std::vector<float> logits;  // [ids.size(), vocab]
  double bf16_max_abs_diff = 0;
  double bf16_rms_diff = 0;
};

struct GoldenModel {
  std::string name;  // "tiny-llama/bf16"
  std::string dir;
  int num_heads = 0;
  std::vector<GoldenPrompt> prompts;
};

// Whether the shared folder is there.
bool HasSharedGoldenModels();
// Names of all models that are there, for both types of checkpoint.
std::vector<std::string> GoldenModelNames();
GoldenModel LoadGoldenModel(const std::string& name);

}  // namespace zipage
