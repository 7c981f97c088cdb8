#include "worker/model/transformer.h"

#include <cmath>
#include <utility>

#include "glog/logging.h"

namespace zipage {

absl::StatusOr<Transformer> Transformer::Create(const ModelConfig& config, Weights weights,
                                                int64_t max_tokens, Collective* collective,
                                                Backend* backend) {
  Transformer transformer(config, std::move(weights), collective, backend);
  for (const Activation& activation :
       Activations(config, transformer.weights_.shard, transformer.weights_.dtype, max_tokens,
                   collective->rank(), collective->size())) {
    ZIPAGE_ASSIGN_OR_RETURN(transformer.*activation.memory,
                            backend->Allocate(activation.bytes, "activations"));
  }
  return transformer;
}

std::vector<Transformer::Activation> Transformer::Activations(const ModelConfig& config,
                                                              const ModelShard& shard, DType dtype,
                                                              int64_t max_tokens, int rank,
                                                              int tp) {
  const size_t element = DTypeSize(dtype);
  const size_t hidden = max_tokens * config.hidden_size * element;
  const int64_t heads = shard.heads.size();
  const int64_t qkv = (heads + 2 * shard.kv_heads.size()) * config.head_dim;
  const int64_t intermediate = shard.intermediate.size();
  std::vector<Activation> activations = {
      {&Transformer::x_, hidden},
      {&Transformer::residual_, hidden},
      {&Transformer::qkv_, max_tokens * qkv * element},
      {&Transformer::attention_, max_tokens * heads * config.head_dim * element},
      {&Transformer::gate_up_, max_tokens * 2 * intermediate * element},
      {&Transformer::mlp_, max_tokens * intermediate * element},
      {&Transformer::final_, hidden}};
  if (rank == 0) {
    activations.push_back(
        {&Transformer::logits_, kMaxLogitRows * config.vocab_size * sizeof(float)});
  }
  if (tp == 1) return activations;
  if (dtype != DType::kFloat32) {
    activations.push_back(
        {&Transformer::partial_, max_tokens * config.hidden_size * sizeof(float)});
  }
  // Ranks gather equal sizes, so the last rows of the smaller shards are padding.
  const size_t shard_logits = kMaxLogitRows * ((config.vocab_size + tp - 1) / tp) * sizeof(float);
  activations.push_back({&Transformer::shard_logits_, shard_logits});
  if (rank == 0) activations.push_back({&Transformer::all_logits_, tp * shard_logits});
  return activations;
}

size_t Transformer::ActivationBytes(const ModelConfig& config, const ModelShard& shard, DType dtype,
                                    int64_t max_tokens, int rank, int tp) {
  size_t bytes = 0;
  for (const Activation& activation : Activations(config, shard, dtype, max_tokens, rank, tp)) {
    bytes += activation.bytes;
  }
  return bytes;
}

absl::Status Transformer::Forward(const Batch& batch, const KvPool& pool,
                                  const QueryWindows* windows) {
  const int64_t tokens = batch.num_tokens;
  CHECK(tokens >= 1 && tokens * config_.hidden_size * DTypeSize(weights_.dtype) <= x_.bytes())
      << tokens << " tokens";
  ZIPAGE_RETURN_IF_ERROR(Embed(batch));
  for (int i = 0; i < config_.num_layers; ++i) {
    const LayerWeights& layer = weights_.layers[i];
    Norm(layer.input_norm, /*add_residual=*/i > 0, tokens);
    ZIPAGE_RETURN_IF_ERROR(Attention(i, batch, pool, windows));
    Norm(layer.post_attention_norm, /*add_residual=*/true, tokens);
    ZIPAGE_RETURN_IF_ERROR(Mlp(layer, tokens));
  }
  backend_->RmsNorm({.x = x_.as(),
                     .residual = residual_.as(),
                     .row_index = batch.logit_rows,
                     .weight = weights_.final_norm.as<float>(),
                     .out = final_.as(),
                     .rows = batch.num_logit_rows,
                     .hidden = config_.hidden_size,
                     .eps = config_.rms_norm_eps,
                     .dtype = weights_.dtype});
  return absl::OkStatus();
}

absl::Status Transformer::Embed(const Batch& batch) {
  const bool alone = collective_->size() == 1;
  backend_->Embedding({.ids = batch.ids,
                       .table = weights_.embedding.as(),
                       .out = alone ? residual_.as() : Partial(residual_),
                       .tokens = batch.num_tokens,
                       .hidden = config_.hidden_size,
                       .first_row = weights_.shard.vocab.begin,
                       .num_rows = weights_.shard.vocab.size(),
                       .table_dtype = weights_.embedding_dtype,
                       .out_dtype = alone ? weights_.dtype : DType::kFloat32});
  return SumRanks(residual_, batch.num_tokens);
}

void Transformer::Norm(const DeviceMemory& weight, bool add_residual, int64_t tokens) {
  backend_->RmsNorm({.x = add_residual ? x_.as() : residual_.as(),
                     .residual = add_residual ? residual_.as() : nullptr,
                     .row_index = nullptr,
                     .weight = weight.as<float>(),
                     .out = x_.as(),
                     .rows = tokens,
                     .hidden = config_.hidden_size,
                     .eps = config_.rms_norm_eps,
                     .dtype = weights_.dtype});
}

absl::Status Transformer::Attention(int layer, const Batch& batch, const KvPool& pool,
                                    const QueryWindows* windows) {
  const LayerWeights& w = weights_.layers[layer];
  const auto heads = static_cast<int>(weights_.shard.heads.size());
  const auto kv_heads = static_cast<int>(weights_.shard.kv_heads.size());
  const KvShape& shape = pool.shape();
  ZIPAGE_RETURN_IF_ERROR(
      backend_->Multiply(w.qkv.get(), x_.as(), qkv_.as(), batch.num_tokens, weights_.dtype));
  backend_->RopeAndCache({.qkv = qkv_.as(),
                          .positions = batch.positions,
                          .slot_mapping = batch.slot_mapping,
                          .rope_table = weights_.rope_table.as<float>(),
                          .q_norm_weight = w.q_norm.as<float>(),
                          .k_norm_weight = w.k_norm.as<float>(),
                          .key_cache = pool.key(layer),
                          .value_cache = pool.value(layer),
                          .tokens = batch.num_tokens,
                          .max_position = weights_.max_position,
                          .num_slots = pool.num_blocks() * shape.block_size,
                          .q_heads = heads,
                          .kv_heads = kv_heads,
                          .head_dim = config_.head_dim,
                          .norm_eps = config_.rms_norm_eps,
                          .dtype = weights_.dtype});
  if (windows != nullptr && batch.num_queries > 0) StoreQueries(layer, batch, *windows);
  backend_->PagedAttention({.q = qkv_.as(),
                            .key_cache = pool.key(layer),
                            .value_cache = pool.value(layer),
                            .block_tables = batch.block_tables,
                            .query_start = batch.query_start,
                            .context_len = batch.context_len,
                            .out = attention_.as(),
                            .q_stride = int64_t{heads + 2 * kv_heads} * config_.head_dim,
                            .num_blocks = pool.num_blocks(),
                            .num_seqs = batch.num_seqs,
                            .max_blocks = batch.max_blocks,
                            .block_size = shape.block_size,
                            .q_heads = heads,
                            .kv_heads = kv_heads,
                            .head_dim = config_.head_dim,
                            .scale = 1.0F / std::sqrt(static_cast<float>(config_.head_dim)),
                            .dtype = weights_.dtype,
                            .num_tokens = batch.num_tokens});
  return MultiplyAndReduce(w.o.get(), attention_.as(), batch.num_tokens);
}

void Transformer::StoreQueries(int layer, const Batch& batch, const QueryWindows& windows) {
  const QueryWindowShape& shape = windows.shape();
  const auto kv_heads = static_cast<int64_t>(weights_.shard.kv_heads.size());
  backend_->StoreQueries({.q = qkv_.as(),
                          .token = batch.query_tokens,
                          .window_row = batch.window_rows,
                          .window = windows.layer(layer),
                          .count = batch.num_queries,
                          .num_rows = windows.num_slots() * shape.window,
                          .q_stride = (shape.q_heads + 2 * kv_heads) * config_.head_dim,
                          .q_heads = shape.q_heads,
                          .head_dim = config_.head_dim,
                          .dtype = weights_.dtype});
}

absl::Status Transformer::Mlp(const LayerWeights& layer, int64_t tokens) {
  ZIPAGE_RETURN_IF_ERROR(
      backend_->Multiply(layer.gate_up.get(), x_.as(), gate_up_.as(), tokens, weights_.dtype));
  backend_->SiluMul({.gate_up = gate_up_.as(),
                     .out = mlp_.as(),
                     .tokens = tokens,
                     .n = weights_.shard.intermediate.size(),
                     .dtype = weights_.dtype});
  return MultiplyAndReduce(layer.down.get(), mlp_.as(), tokens);
}

absl::Status Transformer::MultiplyAndReduce(Linear* linear, const void* in, int64_t tokens) {
  if (collective_->size() == 1) {
    return backend_->Multiply(linear, in, x_.as(), tokens, weights_.dtype);
  }
  ZIPAGE_RETURN_IF_ERROR(backend_->Multiply(linear, in, Partial(x_), tokens, DType::kFloat32));
  return SumRanks(x_, tokens);
}

float* Transformer::Partial(const DeviceMemory& out) const {
  return weights_.dtype == DType::kFloat32 ? out.as<float>() : partial_.as<float>();
}

absl::Status Transformer::SumRanks(const DeviceMemory& out, int64_t tokens) {
  if (collective_->size() == 1) return absl::OkStatus();
  const int64_t count = tokens * config_.hidden_size;
  ZIPAGE_RETURN_IF_ERROR(collective_->AllReduceSum(Partial(out), count));
  if (weights_.dtype != DType::kFloat32) {
    backend_->RoundToBFloat16(partial_.as<float>(), out.as<BFloat16>(), count);
  }
  return absl::OkStatus();
}

absl::StatusOr<float*> Transformer::Logits(int64_t first, int64_t count) {
  CHECK(count >= 1 && count <= kMaxLogitRows) << count << " rows";
  const size_t row_bytes = config_.hidden_size * DTypeSize(weights_.dtype);
  const void* rows = final_.as<uint8_t>() + first * row_bytes;
  const int tp = collective_->size();
  if (tp == 1) {
    ZIPAGE_RETURN_IF_ERROR(
        backend_->Multiply(weights_.lm_head.get(), rows, logits_.as(), count, DType::kFloat32));
    return logits_.as<float>();
  }
  ZIPAGE_RETURN_IF_ERROR(
      backend_->Multiply(weights_.lm_head.get(), rows, shard_logits_.as(), count, DType::kFloat32));
  const int64_t largest_shard = (config_.vocab_size + tp - 1) / tp;
  const size_t gathered = count * largest_shard * sizeof(float);
  ZIPAGE_RETURN_IF_ERROR(collective_->Gather(shard_logits_.as(), gathered, all_logits_.as()));
  if (collective_->rank() != 0) return nullptr;
  for (int r = 0; r < tp; ++r) {
    const Shard vocab = EvenShard(config_.vocab_size, r, tp);
    backend_->CopyRows(logits_.as<float>() + vocab.begin, config_.vocab_size * sizeof(float),
                       all_logits_.as<uint8_t>() + r * gathered, vocab.size() * sizeof(float),
                       vocab.size() * sizeof(float), count);
  }
  return logits_.as<float>();
}

}  // namespace zipage
