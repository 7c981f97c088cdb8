#include "worker/model/model_config.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "worker/model/json_file.h"

namespace zipage {
namespace {

constexpr size_t kMaxConfigBytes = size_t{1} << 20;
constexpr int64_t kMaxPosition = int64_t{1} << 27;
// Bounds that no real model reaches and no product of two overflows.
constexpr int kMaxHidden = 1 << 20;
constexpr int kMaxLayers = 1 << 12;
constexpr int kMaxHeads = 1 << 12;
constexpr int kMaxHeadDim = 1 << 12;
constexpr int kMaxVocab = 1 << 20;  // of cpu::Sample

absl::Status Unsupported(const JsonFields& fields, const char* name, const char* cure) {
  return absl::UnimplementedError(absl::StrFormat("%s: %s is %s; %s", fields.where(), name,
                                                  Abbreviated(fields.object().at(name)), cure));
}

absl::Status ReadArchitecture(const JsonFields& fields, ModelConfig* config) {
  static constexpr const char* kSupported[] = {"LlamaForCausalLM", "Qwen2ForCausalLM",
                                               "Qwen3ForCausalLM"};
  ZIPAGE_RETURN_IF_ERROR(fields.Require("architectures"));
  const nlohmann::json& names = fields.object().at("architectures");
  if (names.is_array() && !names.empty() && names[0].is_string()) {
    for (const char* name : kSupported) {
      if (names[0] == name) config->architecture = name;
    }
  }
  if (!config->architecture.empty()) return absl::OkStatus();
  const std::string cure =
      absl::StrFormat("the supported ones are %s", absl::StrJoin(kSupported, ", "));
  return Unsupported(fields, "architectures", cure.c_str());
}

absl::Status ReadSizes(const JsonFields& fields, ModelConfig* config) {
  for (const char* name : {"hidden_size", "intermediate_size", "num_hidden_layers",
                           "num_attention_heads", "vocab_size"}) {
    ZIPAGE_RETURN_IF_ERROR(fields.Require(name));
  }
  ZIPAGE_RETURN_IF_ERROR(fields.ReadInt("hidden_size", 1, kMaxHidden, &config->hidden_size));
  ZIPAGE_RETURN_IF_ERROR(
      fields.ReadInt("intermediate_size", 1, kMaxHidden, &config->intermediate_size));
  ZIPAGE_RETURN_IF_ERROR(fields.ReadInt("num_hidden_layers", 1, kMaxLayers, &config->num_layers));
  ZIPAGE_RETURN_IF_ERROR(fields.ReadInt("num_attention_heads", 1, kMaxHeads, &config->num_heads));
  ZIPAGE_RETURN_IF_ERROR(fields.ReadInt("vocab_size", 1, kMaxVocab, &config->vocab_size));
  config->num_kv_heads = config->num_heads;
  ZIPAGE_RETURN_IF_ERROR(
      fields.ReadInt("num_key_value_heads", 1, kMaxHeads, &config->num_kv_heads));
  if (config->num_heads % config->num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: num_key_value_heads is %d; it must divide num_attention_heads, %d",
                        fields.where(), config->num_kv_heads, config->num_heads));
  }
  // Qwen3Config's default is a number; the other two derive it.
  const bool is_qwen3 = config->architecture == "Qwen3ForCausalLM";
  config->head_dim = is_qwen3 && !fields.object().contains("head_dim")
                         ? 128
                         : config->hidden_size / config->num_heads;
  ZIPAGE_RETURN_IF_ERROR(fields.ReadInt("head_dim", 2, kMaxHeadDim, &config->head_dim));
  if (config->head_dim < 2 || config->head_dim % 2 != 0 || config->head_dim > kMaxHeadDim) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: head_dim is %d; it must be an even number from 2 to %d",
                        fields.where(), config->head_dim, kMaxHeadDim));
  }
  config->max_position = config->architecture == "LlamaForCausalLM" ? 2048 : 32768;
  return fields.ReadInt("max_position_embeddings", 1, kMaxPosition, &config->max_position);
}

absl::Status ReadBiases(const JsonFields& fields, ModelConfig* config) {
  if (config->architecture == "Qwen2ForCausalLM") {
    config->qkv_bias = true;
    return absl::OkStatus();
  }
  config->qk_norm = config->architecture == "Qwen3ForCausalLM";
  ZIPAGE_RETURN_IF_ERROR(fields.ReadBool("attention_bias", &config->qkv_bias));
  config->o_bias = config->qkv_bias;
  return config->qk_norm ? absl::OkStatus() : fields.ReadBool("mlp_bias", &config->mlp_bias);
}

absl::Status ReadDType(const JsonFields& fields, ModelConfig* config) {
  const char* name = fields.Has("dtype") ? "dtype" : "torch_dtype";
  std::string value;
  ZIPAGE_RETURN_IF_ERROR(fields.ReadString(name, &value));
  if (value.empty() || value == "auto") return absl::OkStatus();
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    if (value == DTypeName(dtype)) config->dtype = dtype;
  }
  if (config->dtype.has_value()) return absl::OkStatus();
  return Unsupported(fields, name, "the supported ones are float32, bfloat16, float16");
}

absl::Status RefuseSlidingWindow(const JsonFields& fields, const ModelConfig& config) {
  if (fields.Has("layer_types")) {
    const nlohmann::json& types = fields.object().at("layer_types");
    const auto is_full = [](const nlohmann::json& type) { return type == "full_attention"; };
    if (!types.is_array() || !std::all_of(types.begin(), types.end(), is_full)) {
      return Unsupported(fields, "layer_types", "only full_attention is supported");
    }
    return absl::OkStatus();  // they decide, where present
  }
  bool used = false;
  int max_window_layers = 28;  // layers before this one attend in full; Qwen2Config's default
  ZIPAGE_RETURN_IF_ERROR(fields.ReadBool("use_sliding_window", &used));
  ZIPAGE_RETURN_IF_ERROR(fields.ReadInt("max_window_layers", 0, 1 << 30, &max_window_layers));
  if (used && fields.Has("sliding_window") && max_window_layers < config.num_layers) {
    return Unsupported(fields, "use_sliding_window",
                       "sliding-window attention is not supported; only full attention is");
  }
  return absl::OkStatus();
}

absl::Status RefuseOtherFeatures(const JsonFields& fields, const ModelConfig& config) {
  std::string activation = "silu";
  ZIPAGE_RETURN_IF_ERROR(fields.ReadString("hidden_act", &activation));
  if (activation != "silu") return Unsupported(fields, "hidden_act", "only silu is supported");
  if (fields.Has("quantization_config")) {
    return absl::UnimplementedError(absl::StrFormat(
        "%s: quantization_config is set; give the checkpoint in bfloat16, float16 or float32",
        fields.where()));
  }
  return RefuseSlidingWindow(fields, config);
}

absl::Status ReadOptionalNumber(const JsonFields& fields, const char* name,
                                std::optional<double>* out) {
  if (!fields.Has(name)) return absl::OkStatus();
  double value = 0;
  ZIPAGE_RETURN_IF_ERROR(fields.ReadNumber(name, 0, 1e6, &value));
  *out = value;
  return absl::OkStatus();
}

absl::Status ReadLlama3(const JsonFields& fields, RopeConfig* rope) {
  for (const char* name :
       {"low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}) {
    ZIPAGE_RETURN_IF_ERROR(fields.Require(name));
  }
  ZIPAGE_RETURN_IF_ERROR(fields.ReadNumber("low_freq_factor", 1e-6, 1e6, &rope->low_freq_factor));
  ZIPAGE_RETURN_IF_ERROR(fields.ReadNumber("high_freq_factor", 1e-6, 1e6, &rope->high_freq_factor));
  if (rope->high_freq_factor > rope->low_freq_factor) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: high_freq_factor is %g; it must be above low_freq_factor, %g",
                      fields.where(), rope->high_freq_factor, rope->low_freq_factor));
}

absl::Status ReadYarn(const JsonFields& fields, RopeConfig* rope) {
  ZIPAGE_RETURN_IF_ERROR(fields.ReadNumber("beta_fast", 1e-6, 1e6, &rope->beta_fast));
  ZIPAGE_RETURN_IF_ERROR(fields.ReadNumber("beta_slow", 1e-6, 1e6, &rope->beta_slow));
  ZIPAGE_RETURN_IF_ERROR(fields.ReadBool("truncate", &rope->truncate));
  ZIPAGE_RETURN_IF_ERROR(ReadOptionalNumber(fields, "attention_factor", &rope->attention_factor));
  ZIPAGE_RETURN_IF_ERROR(ReadOptionalNumber(fields, "mscale", &rope->mscale));
  return ReadOptionalNumber(fields, "mscale_all_dim", &rope->mscale_all_dim);
}

// `fields` is the object under rope_scaling or rope_parameters.
absl::Status ReadRopeScaling(const JsonFields& fields, ModelConfig* config) {
  RopeConfig& rope = config->rope;
  ZIPAGE_RETURN_IF_ERROR(fields.ReadNumber("rope_theta", 1.001, 1e15, &rope.theta));
  const char* key = fields.Has("rope_type") ? "rope_type" : "type";
  std::string type = "default";
  ZIPAGE_RETURN_IF_ERROR(fields.ReadString(key, &type));
  if (type == "default") {
    for (const auto& [name, value] : fields.object().items()) {  // one object per kind of layer
      if (value.is_object())
        return Unsupported(fields, name.c_str(), "one rotation for all layers is supported");
    }
    return absl::OkStatus();
  }
  if (type != "linear" && type != "llama3" && type != "yarn") {
    return Unsupported(fields, key, "the supported ones are default, linear, llama3, yarn");
  }
  ZIPAGE_RETURN_IF_ERROR(fields.Require("factor"));
  ZIPAGE_RETURN_IF_ERROR(fields.ReadNumber("factor", 1e-3, 1e6, &rope.factor));
  rope.original_max_position = config->max_position;
  ZIPAGE_RETURN_IF_ERROR(fields.ReadInt("original_max_position_embeddings", 1, kMaxPosition,
                                        &rope.original_max_position));
  if (type == "linear") {
    rope.type = RopeConfig::Type::kLinear;
    return absl::OkStatus();
  }
  rope.type = type == "yarn" ? RopeConfig::Type::kYarn : RopeConfig::Type::kLlama3;
  return type == "yarn" ? ReadYarn(fields, &rope) : ReadLlama3(fields, &rope);
}

absl::Status RefusePartialRotation(const JsonFields& fields) {
  double share = 1;
  ZIPAGE_RETURN_IF_ERROR(fields.ReadNumber("partial_rotary_factor", 0, 1, &share));
  return share == 1 ? absl::OkStatus()
                    : Unsupported(fields, "partial_rotary_factor", "only 1 is supported");
}

// transformers 4 writes rope_theta at the top and rope_scaling; transformers 5 all in
// rope_parameters.
absl::Status ReadRope(const JsonFields& fields, ModelConfig* config) {
  ZIPAGE_RETURN_IF_ERROR(fields.ReadNumber("rope_theta", 1.001, 1e15, &config->rope.theta));
  ZIPAGE_RETURN_IF_ERROR(RefusePartialRotation(fields));
  for (const char* name : {"rope_scaling", "rope_parameters"}) {
    if (!fields.Has(name)) continue;
    const nlohmann::json& object = fields.object().at(name);
    if (!object.is_object()) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: %s is %s; it must be an object or null", fields.where(), name, Abbreviated(object)));
    }
    const JsonFields scaling(object, absl::StrFormat("%s: %s", fields.where(), name));
    ZIPAGE_RETURN_IF_ERROR(RefusePartialRotation(scaling));
    return ReadRopeScaling(scaling, config);
  }
  return absl::OkStatus();
}

double YarnMscale(double scale, double mscale) {
  return scale <= 1 ? 1.0 : 0.1 * mscale * std::log(scale) + 1.0;
}

// The wavelengths in between are blended; `frequency` is unscaled.
float Llama3Frequency(const RopeConfig& rope, float frequency) {
  const auto factor = static_cast<float>(rope.factor);
  const auto original = static_cast<float>(rope.original_max_position);
  const auto low = static_cast<float>(rope.low_freq_factor);
  const auto high = static_cast<float>(rope.high_freq_factor);
  const float wavelength = 2 * std::numbers::pi_v<float> / frequency;
  if (wavelength > original / low) return frequency / factor;
  if (wavelength < original / high) return frequency;
  const float smooth = (original / wavelength - low) / (high - low);
  return (1 - smooth) * frequency / factor + smooth * frequency;
}

// Where YaRN's ramp from extrapolation to interpolation begins and ends, in dimension pairs.
std::pair<float, float> YarnRange(const RopeConfig& rope, int head_dim) {
  const auto dimension_of = [&](double rotations) {
    return head_dim *
           std::log(static_cast<double>(rope.original_max_position) /
                    (rotations * 2 * std::numbers::pi)) /
           (2 * std::log(rope.theta));
  };
  double low = dimension_of(rope.beta_fast);
  double high = dimension_of(rope.beta_slow);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(head_dim - 1));
  if (low == high) high += 0.001;
  return {static_cast<float>(low), static_cast<float>(high)};
}

}  // namespace

absl::StatusOr<ModelConfig> LoadModelConfig(const std::string& model_dir) {
  const std::string path = model_dir + "/config.json";
  absl::StatusOr<nlohmann::json> json = ReadJsonObject(path, kMaxConfigBytes);
  if (absl::IsNotFound(json.status())) {
    return absl::NotFoundError(absl::StrFormat(
        "%s: no such file; model must be a Hugging Face model folder with config.json", path));
  }
  if (!json.ok()) return json.status();
  const JsonFields fields(*json, path);
  ModelConfig config;
  config.path = model_dir;
  ZIPAGE_RETURN_IF_ERROR(ReadArchitecture(fields, &config));
  ZIPAGE_RETURN_IF_ERROR(ReadSizes(fields, &config));
  ZIPAGE_RETURN_IF_ERROR(ReadBiases(fields, &config));
  ZIPAGE_RETURN_IF_ERROR(ReadDType(fields, &config));
  ZIPAGE_RETURN_IF_ERROR(RefuseOtherFeatures(fields, config));
  ZIPAGE_RETURN_IF_ERROR(ReadRope(fields, &config));
  double eps = config.rms_norm_eps;
  ZIPAGE_RETURN_IF_ERROR(fields.ReadNumber("rms_norm_eps", 0, 1, &eps));
  config.rms_norm_eps = static_cast<float>(eps);
  ZIPAGE_RETURN_IF_ERROR(fields.ReadBool("tie_word_embeddings", &config.tie_word_embeddings));
  return config;
}

std::vector<float> RopeInverseFrequencies(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  const int pairs = config.head_dim / 2;
  const auto [low, high] = rope.type == RopeConfig::Type::kYarn
                               ? YarnRange(rope, config.head_dim)
                               : std::pair<float, float>{0.0F, 1.0F};
  const auto factor = static_cast<float>(rope.factor);
  std::vector<float> frequencies(pairs);
  for (int i = 0; i < pairs; ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.head_dim);
    const float period = std::pow(static_cast<float>(rope.theta), exponent);
    const float frequency = 1.0F / period;
    switch (rope.type) {
      case RopeConfig::Type::kDefault:
        frequencies[i] = frequency;
        break;
      case RopeConfig::Type::kLinear:
        frequencies[i] = frequency / factor;
        break;
      case RopeConfig::Type::kLlama3:
        frequencies[i] = Llama3Frequency(rope, frequency);
        break;
      case RopeConfig::Type::kYarn: {
        const float ramp = std::clamp((static_cast<float>(i) - low) / (high - low), 0.0F, 1.0F);
        const float kept = 1 - ramp;
        frequencies[i] = 1.0F / (factor * period) * (1 - kept) + frequency * kept;
        break;
      }
    }
  }
  return frequencies;
}

float RopeAttentionScaling(const ModelConfig& config) {
  const RopeConfig& rope = config.rope;
  if (rope.type != RopeConfig::Type::kYarn) return 1.0F;
  if (rope.attention_factor.has_value()) return static_cast<float>(*rope.attention_factor);
  const double mscale = rope.mscale.value_or(0);
  const double mscale_all_dim = rope.mscale_all_dim.value_or(0);
  if (mscale != 0 && mscale_all_dim != 0) {
    return static_cast<float>(YarnMscale(rope.factor, mscale) /
                              YarnMscale(rope.factor, mscale_all_dim));
  }
  return static_cast<float>(YarnMscale(rope.factor, 1));
}

absl::Status CheckTensorParallel(const ModelConfig& config, int tp) {
  const auto works = [&](int n) {
    return config.num_heads % n == 0 &&
           (config.num_kv_heads % n == 0 || n % config.num_kv_heads == 0) &&
           n <= std::min<int64_t>(config.intermediate_size, config.vocab_size);
  };
  if (tp >= 1 && works(tp)) return absl::OkStatus();
  std::vector<int> working;
  for (int n = 1; n <= config.num_heads; ++n) {
    if (works(n)) working.push_back(n);
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "tp is %d, but %s has %d attention heads and %d KV heads; give one of %s", tp, config.path,
      config.num_heads, config.num_kv_heads, absl::StrJoin(working, ", ")));
}

}  // namespace zipage
