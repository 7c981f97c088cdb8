#pragma once
// The model of the options, checked against them: what the worker loads and what a dry run only
// looks at. Host code, no weights are read.

#include <cstdint>
#include <optional>

#include "kernels/tensor.h"
#include "proto/config.h"
#include "proto/status.h"
#include "worker/backend.h"
#include "worker/model/checkpoint.h"
#include "worker/model/model_config.h"

namespace zipage {

struct OpenedModel {
  ModelConfig config;
  std::optional<Checkpoint> checkpoint;
  DType stored_dtype = DType::kFloat32;  // of the embeddings in the checkpoint
  DType dtype = DType::kFloat32;         // of weights, activations and KV
  int64_t max_model_len = 0;             // positions of a sequence
};

// Without needs_checkpoint a folder that has only config.json will do; the types are then those
// that it names. kInvalidArgument for options that do not suit the model, and the errors of
// LoadModelConfig, CheckTensorParallel, OpenCheckpoint and ResolveDType.
absl::StatusOr<OpenedModel> OpenModel(const Config& config, const Backend& backend,
                                      bool needs_checkpoint);

}  // namespace zipage
