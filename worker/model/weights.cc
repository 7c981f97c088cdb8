#include "worker/model/weights.h"

#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "glog/logging.h"
#include "kernels/rope.h"

namespace zipage {
namespace {

// Between two lines of the log about a long load.
constexpr std::chrono::seconds kProgressEvery{5};

// Loads tensor after tensor and counts the bytes.
class Loader {
 public:
  Loader(const ModelConfig& config, const Checkpoint& checkpoint, Weights* weights, int rank,
         Backend* backend)
      : config_(config),
        checkpoint_(checkpoint),
        weights_(weights),
        rank_(rank),
        backend_(backend),
        last_progress_(std::chrono::steady_clock::now()) {}

  absl::Status LoadLayer(int index, LayerWeights* layer);
  absl::Status LoadVocabulary();
  absl::Status LoadRopeTable();
  // A vector as float32.
  absl::Status LoadVector(const std::string& name, DeviceMemory* vector);
  void LogProgress(int layer);

 private:
  // Rows of a tensor, with their part of the bias if it has one.
  LinearPart Rows(const std::string& module, Shard rows, bool has_bias) const;
  absl::Status LoadRows(const std::vector<LinearPart>& parts, std::unique_ptr<Linear>* linear);
  // A matrix split over ranks by columns: its products are summed, so only rank 0 adds the bias.
  absl::Status LoadColumns(const std::string& module, Shard columns, bool has_bias,
                           std::unique_ptr<Linear>* linear);
  absl::StatusOr<DeviceMemory> Upload(const void* data, size_t bytes, const std::string& what);
  absl::Status Keep(absl::StatusOr<std::unique_ptr<Linear>> loaded,
                    std::unique_ptr<Linear>* linear);

  const ModelConfig& config_;
  const Checkpoint& checkpoint_;
  Weights* weights_;
  int rank_;
  Backend* backend_;
  std::chrono::steady_clock::time_point last_progress_;
};

absl::StatusOr<DeviceMemory> Loader::Upload(const void* data, size_t bytes,
                                            const std::string& what) {
  ZIPAGE_ASSIGN_OR_RETURN(DeviceMemory memory, backend_->Allocate(bytes, what));
  backend_->CopyToDevice(memory.as(), data, bytes);
  weights_->bytes += bytes;
  return memory;
}

absl::Status Loader::LoadVector(const std::string& name, DeviceMemory* vector) {
  const std::vector<float> values = ToFloats(checkpoint_.Get(name));
  ZIPAGE_ASSIGN_OR_RETURN(*vector, Upload(values.data(), values.size() * sizeof(float), name));
  return absl::OkStatus();
}

LinearPart Loader::Rows(const std::string& module, Shard rows, bool has_bias) const {
  const TensorView& weight = checkpoint_.Get(module + ".weight");
  LinearPart part{.weight = weight.At(rows.begin),
                  .num_rows = rows.size(),
                  .row_stride = weight.columns(),
                  .dtype = weight.dtype};
  if (has_bias) {
    const TensorView& bias = checkpoint_.Get(module + ".bias");
    part.bias = bias.At(rows.begin);
    part.bias_dtype = bias.dtype;
  }
  return part;
}

absl::Status Loader::Keep(absl::StatusOr<std::unique_ptr<Linear>> loaded,
                          std::unique_ptr<Linear>* linear) {
  ZIPAGE_ASSIGN_OR_RETURN(*linear, std::move(loaded));
  weights_->bytes += (*linear)->bytes();
  return absl::OkStatus();
}

absl::Status Loader::LoadRows(const std::vector<LinearPart>& parts,
                              std::unique_ptr<Linear>* linear) {
  return Keep(backend_->LoadLinear(parts, config_.hidden_size, weights_->dtype), linear);
}

absl::Status Loader::LoadColumns(const std::string& module, Shard columns, bool has_bias,
                                 std::unique_ptr<Linear>* linear) {
  const TensorView& weight = checkpoint_.Get(module + ".weight");
  LinearPart part = Rows(module, {0, weight.rows()}, has_bias && rank_ == 0);
  part.weight = weight.At(0, columns.begin);
  return Keep(backend_->LoadLinear({part}, columns.size(), weights_->dtype), linear);
}

absl::Status Loader::LoadLayer(int index, LayerWeights* layer) {
  const std::string prefix = absl::StrCat("model.layers.", index, ".");
  const std::string attention = prefix + "self_attn.";
  const std::string mlp = prefix + "mlp.";
  const ModelShard& shard = weights_->shard;
  const int64_t d = config_.head_dim;
  const Shard q{shard.heads.begin * d, shard.heads.end * d};
  const Shard kv{shard.kv_heads.begin * d, shard.kv_heads.end * d};

  ZIPAGE_RETURN_IF_ERROR(LoadVector(prefix + "input_layernorm.weight", &layer->input_norm));
  ZIPAGE_RETURN_IF_ERROR(LoadRows({Rows(attention + "q_proj", q, config_.qkv_bias),
                                   Rows(attention + "k_proj", kv, config_.qkv_bias),
                                   Rows(attention + "v_proj", kv, config_.qkv_bias)},
                                  &layer->qkv));
  if (config_.qk_norm) {
    ZIPAGE_RETURN_IF_ERROR(LoadVector(attention + "q_norm.weight", &layer->q_norm));
    ZIPAGE_RETURN_IF_ERROR(LoadVector(attention + "k_norm.weight", &layer->k_norm));
  }
  ZIPAGE_RETURN_IF_ERROR(LoadColumns(attention + "o_proj", q, config_.o_bias, &layer->o));
  ZIPAGE_RETURN_IF_ERROR(
      LoadVector(prefix + "post_attention_layernorm.weight", &layer->post_attention_norm));
  ZIPAGE_RETURN_IF_ERROR(LoadRows({Rows(mlp + "gate_proj", shard.intermediate, config_.mlp_bias),
                                   Rows(mlp + "up_proj", shard.intermediate, config_.mlp_bias)},
                                  &layer->gate_up));
  return LoadColumns(mlp + "down_proj", shard.intermediate, config_.mlp_bias, &layer->down);
}

absl::Status Loader::LoadVocabulary() {
  const TensorView& table = checkpoint_.Get("model.embed_tokens.weight");
  const Shard& vocab = weights_->shard.vocab;
  const size_t bytes = vocab.size() * config_.hidden_size * DTypeSize(table.dtype);
  ZIPAGE_ASSIGN_OR_RETURN(weights_->embedding,
                          Upload(table.At(vocab.begin), bytes, "the embedding table"));
  weights_->embedding_dtype = table.dtype;
  const std::string head = config_.tie_word_embeddings ? "model.embed_tokens" : "lm_head";
  return LoadRows({Rows(head, vocab, /*has_bias=*/false)}, &weights_->lm_head);
}

absl::Status Loader::LoadRopeTable() {
  std::vector<float> table(weights_->max_position * config_.head_dim);
  BuildRopeTable(RopeInverseFrequencies(config_).data(), config_.head_dim, weights_->max_position,
                 RopeAttentionScaling(config_), table.data());
  ZIPAGE_ASSIGN_OR_RETURN(weights_->rope_table,
                          Upload(table.data(), table.size() * sizeof(float), "the rope table"));
  return absl::OkStatus();
}

void Loader::LogProgress(int layer) {
  const auto now = std::chrono::steady_clock::now();
  if (now - last_progress_ < kProgressEvery) return;
  last_progress_ = now;
  LOG(INFO) << "rank " << rank_ << ": loaded " << layer + 1 << " of " << config_.num_layers
            << " layers, " << (weights_->bytes >> 20) << " MiB";
}

// The smallest amount that can be told in advance: a rank's share of the matrices and the rope
// table, while it is made and uploaded. Memory that is only reserved here would end the process
// when it is touched.
absl::Status CheckMemory(const ModelConfig& config, int tp, DType dtype, int64_t max_position,
                         const Backend& backend) {
  double elements = 0;
  for (const ExpectedTensor& tensor : ExpectedTensors(config)) {
    double size = 1;
    for (const int64_t dimension : tensor.shape) size *= static_cast<double>(dimension);
    elements += size;
  }
  constexpr double kGiB = 1 << 30;
  const double matrices = elements * static_cast<double>(DTypeSize(dtype)) / tp;
  const double rope = 2.0 * sizeof(float) * static_cast<double>(max_position) * config.head_dim;
  ZIPAGE_ASSIGN_OR_RETURN(const size_t available, backend.AvailableMemory());
  if (matrices + rope <= static_cast<double>(available)) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrFormat(
      "%s takes %.2f GiB on each of %d ranks for weights in %s and %.2f GiB for %d positions, but "
      "%.2f GiB are available; %s",
      config.path, matrices / kGiB, tp, DTypeName(dtype), rope / kGiB, max_position,
      static_cast<double>(available) / kGiB,
      rope > matrices ? "lower max_model_len" : "free memory or choose a smaller model"));
}

}  // namespace

Shard EvenShard(int64_t total, int rank, int tp) {
  return {total * rank / tp, total * (rank + 1) / tp};
}

ModelShard MakeModelShard(const ModelConfig& config, int rank, int tp) {
  Shard kv_heads = EvenShard(config.num_kv_heads, rank, tp);
  if (config.num_kv_heads < tp) {
    kv_heads.begin = int64_t{config.num_kv_heads} * rank / tp;
    kv_heads.end = kv_heads.begin + 1;
  }
  return {.heads = EvenShard(config.num_heads, rank, tp),
          .kv_heads = kv_heads,
          .intermediate = EvenShard(config.intermediate_size, rank, tp),
          .vocab = EvenShard(config.vocab_size, rank, tp)};
}

size_t WeightBytes(const ModelConfig& config, const ModelShard& shard, DType dtype,
                   DType embedding_dtype, int64_t max_position) {
  const int64_t hidden = config.hidden_size;
  const int64_t heads = shard.heads.size() * config.head_dim;
  const int64_t kv_heads = shard.kv_heads.size() * config.head_dim;
  const int64_t matrices = hidden * (2 * heads + 2 * kv_heads + 3 * shard.intermediate.size());
  const int64_t norms = 2 * hidden + (config.qk_norm ? 2 * config.head_dim : 0);
  const int64_t table = shard.vocab.size() * hidden;
  return config.num_layers * (matrices * DTypeSize(dtype) + norms * sizeof(float)) +
         table * (DTypeSize(embedding_dtype) + DTypeSize(dtype)) + hidden * sizeof(float) +
         max_position * config.head_dim * sizeof(float);
}

absl::StatusOr<Weights> LoadWeights(const ModelConfig& config, const Checkpoint& checkpoint,
                                    int rank, int tp, DType dtype, int64_t max_position,
                                    Backend* backend) {
  ZIPAGE_RETURN_IF_ERROR(CheckMemory(config, tp, dtype, max_position, *backend));
  Weights weights;
  weights.shard = MakeModelShard(config, rank, tp);
  weights.dtype = dtype;
  weights.max_position = max_position;
  Loader loader(config, checkpoint, &weights, rank, backend);
  ZIPAGE_RETURN_IF_ERROR(loader.LoadVocabulary());
  weights.layers.resize(config.num_layers);
  for (int i = 0; i < config.num_layers; ++i) {
    ZIPAGE_RETURN_IF_ERROR(loader.LoadLayer(i, &weights.layers[i]));
    loader.LogProgress(i);
  }
  ZIPAGE_RETURN_IF_ERROR(loader.LoadVector("model.norm.weight", &weights.final_norm));
  ZIPAGE_RETURN_IF_ERROR(loader.LoadRopeTable());
  return weights;
}

}  // namespace zipage
