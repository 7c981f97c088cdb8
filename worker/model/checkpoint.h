#pragma once
// The weights of a model folder: which tensors a ModelConfig calls for, and where each lies in the
// mapped safetensors files. Opened once at start; read-only and usable from any thread afterwards.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "kernels/tensor.h"
#include "proto/status.h"
#include "worker/model/model_config.h"
#include "worker/model/safetensors.h"

namespace zipage {

// A tensor of the checkpoint, row-major and aligned for its type. Lives as long as its Checkpoint.
struct TensorView {
  DType dtype = DType::kFloat32;
  std::vector<int64_t> shape;     // one or two dimensions
  const uint8_t* data = nullptr;  // [shape...]

  int64_t rows() const { return shape[0]; }
  int64_t columns() const { return shape.size() == 2 ? shape[1] : 1; }
  // Address of an element: with columns() as stride, where a tensor-parallel shard begins.
  const void* At(int64_t row, int64_t column = 0) const {
    return data + static_cast<size_t>(row * columns() + column) * DTypeSize(dtype);
  }
};

// All elements as float32: [shape...], flat.
std::vector<float> ToFloats(const TensorView& view);

struct ExpectedTensor {
  std::string name;
  std::vector<int64_t> shape;
};

// Every tensor the model needs, in the order of the forward pass, under transformers' names:
//   model.embed_tokens.weight                                 [vocab, hidden]
//   model.layers.I.input_layernorm.weight                     [hidden]
//   model.layers.I.self_attn.{q,k,v}_proj.{weight,bias}       [heads * head_dim, hidden]
//   model.layers.I.self_attn.{q,k}_norm.weight                [head_dim]
//   model.layers.I.self_attn.o_proj.{weight,bias}             [hidden, heads * head_dim]
//   model.layers.I.post_attention_layernorm.weight            [hidden]
//   model.layers.I.mlp.{gate,up}_proj.{weight,bias}           [intermediate, hidden]
//   model.layers.I.mlp.down_proj.{weight,bias}                [hidden, intermediate]
//   model.norm.weight                                         [hidden]
//   lm_head.weight, unless tied                               [vocab, hidden]
std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config);

class Checkpoint {
 public:
  // REQUIRES: the model's ExpectedTensors hold `name`.
  const TensorView& Get(std::string_view name) const;

 private:
  friend absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& model_dir,
                                                   const ModelConfig& config);
  std::vector<std::unique_ptr<SafetensorsFile>> files_;
  std::vector<std::unique_ptr<uint8_t[]>> copies_;  // of tensors the file holds unaligned
  absl::flat_hash_map<std::string, TensorView> tensors_;
};

// Opens model.safetensors, or the shards that model.safetensors.index.json names. All differences
// between the files and ExpectedTensors (missing, extra, mis-shaped, of a type other than F32, BF16
// or F16) are one line, kFailedPrecondition, with the cure; the first 20 are spelled out. Ignored:
// `*.rotary_emb.inv_freq` (old exports) and, if the embeddings are tied, an `lm_head.weight` equal
// to them; one that differs is reported, since readers disagree on which of the two then counts.
// kNotFound if there is no checkpoint or a shard is absent, kDataLoss if a file is broken,
// kInvalidArgument if the index is.
absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& model_dir, const ModelConfig& config);

}  // namespace zipage
