#include "worker/open_model.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace zipage {

absl::StatusOr<OpenedModel> OpenModel(const Config& config, const Backend& backend,
                                      bool needs_checkpoint) {
  OpenedModel model;
  ZIPAGE_ASSIGN_OR_RETURN(model.config, LoadModelConfig(config.model));
  ZIPAGE_RETURN_IF_ERROR(CheckTensorParallel(model.config, config.tp));
  const int64_t max_position = model.config.max_position;
  if (config.max_model_len > max_position) {
    return absl::InvalidArgumentError(absl::StrCat(
        "max_model_len is ", config.max_model_len, ", but ", config.model,
        "/config.json has max_position_embeddings ", max_position, "; give at most that"));
  }
  model.max_model_len = config.max_model_len > 0 ? config.max_model_len : max_position;
  absl::StatusOr<Checkpoint> checkpoint = OpenCheckpoint(config.model, model.config);
  if (checkpoint.ok()) {
    model.checkpoint = *std::move(checkpoint);
    model.stored_dtype = model.checkpoint->Get("model.embed_tokens.weight").dtype;
  } else if (needs_checkpoint || !absl::IsNotFound(checkpoint.status())) {
    return checkpoint.status();
  } else {
    model.stored_dtype = model.config.dtype.value_or(DType::kFloat32);
  }
  ZIPAGE_ASSIGN_OR_RETURN(model.dtype, backend.ResolveDType(config.dtype, model.stored_dtype));
  return model;
}

}  // namespace zipage
