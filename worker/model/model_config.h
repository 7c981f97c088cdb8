#pragma once
// What config.json of a Hugging Face model folder says about the shape of the network, checked:
// every value is in range and every feature that changes the arithmetic is either described here or
// refused. Plain values; reading happens once, at start.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kernels/tensor.h"
#include "proto/status.h"

namespace zipage {

// Rotary position embedding as in transformers' modeling_rope_utils.py.
struct RopeConfig {
  enum class Type : uint8_t { kDefault, kLinear, kLlama3, kYarn };
  Type type = Type::kDefault;
  double theta = 10000.0;
  double factor = 1.0;                     // linear, llama3, yarn
  double low_freq_factor = 1.0;            // llama3
  double high_freq_factor = 4.0;           // llama3
  int64_t original_max_position = 0;       // llama3, yarn
  double beta_fast = 32.0;                 // yarn
  double beta_slow = 1.0;                  // yarn
  bool truncate = true;                    // yarn: round the ramp's ends to whole dimensions
  std::optional<double> attention_factor;  // yarn: replaces the value computed from factor
  std::optional<double> mscale;            // yarn
  std::optional<double> mscale_all_dim;    // yarn
};

// A decoder of the Llama family: RMSNorm, rotary attention with grouped KV heads, gated SiLU MLP.
struct ModelConfig {
  std::string path;          // the folder, for messages
  std::string architecture;  // LlamaForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM
  int hidden_size = 0;
  int intermediate_size = 0;
  int num_layers = 0;
  int num_heads = 0;
  int num_kv_heads = 0;  // divides num_heads
  int head_dim = 0;      // even; num_heads * head_dim may differ from hidden_size
  int vocab_size = 0;
  int64_t max_position = 0;  // positions the model was made for
  float rms_norm_eps = 1e-6F;
  bool tie_word_embeddings = false;  // the output projection is the embedding table
  bool qkv_bias = false;             // q_proj, k_proj, v_proj
  bool o_bias = false;               // o_proj
  bool mlp_bias = false;             // gate_proj, up_proj, down_proj
  bool qk_norm = false;              // RMSNorm of each query and key head before rotation
  RopeConfig rope;
  std::optional<DType> dtype;  // of the weights, if config.json says so
};

// Reads `model_dir`/config.json. Errors name file, field and value: kNotFound (no such file),
// kInvalidArgument (broken JSON, wrong type, out of range), kUnimplemented (a feature this engine
// lacks, with the list of what it has).
absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir);

// inv_freq of the rotation after scaling, fp32: [head_dim / 2], as BuildRopeTable takes it.
std::vector<float> RopeInverseFrequencies(const ModelConfig& config);

// What cos and sin are multiplied by; 1 except for yarn.
float RopeAttentionScaling(const ModelConfig& config);

// OK if `tp` ranks can share the model: attention heads divide by tp; KV heads divide by tp, or tp
// by the KV heads (then rank r holds KV head r * num_kv_heads / tp). Shares of the MLP and of the
// vocabulary may be uneven, but none is empty. The error lists the values that work.
absl::Status CheckTensorParallel(const ModelConfig& config, int tp);

}  // namespace zipage
