#include "worker/model/checkpoint.h"

#include <glog/logging.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <map>
#include <optional>
#include <set>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "worker/model/json_file.h"

namespace zipage {
namespace {

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";
constexpr size_t kMaxIndexBytes = size_t{1} << 24;
constexpr size_t kMaxShards = 4096;
constexpr size_t kMaxListed = 20;
constexpr const char* kCure =
    "download the checkpoint again, or give the config.json that belongs to it";

// Where the index says that each tensor is: tensor -> file.
using WeightMap = std::map<std::string, std::string>;

std::string ShapeText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[", absl::StrJoin(shape, ", "), "]");
}

// "a; b; c; and 4 more"
std::string Listed(std::vector<std::string> items) {
  const size_t total = items.size();
  if (total > kMaxListed) {
    items.resize(kMaxListed);
    items.push_back(absl::StrFormat("and %d more", total - kMaxListed));
  }
  return absl::StrJoin(items, "; ");
}

std::optional<DType> ParseDType(std::string_view name) {
  if (name == "F32") return DType::kFloat32;
  if (name == "BF16") return DType::kBFloat16;
  if (name == "F16") return DType::kFloat16;
  return std::nullopt;
}

// A plain name of a safetensors file: the index must not lead out of the folder.
bool IsShardName(const std::string& name) {
  return absl::EndsWith(name, ".safetensors") && name[0] != '.' && name.size() <= 255 &&
         name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
}

absl::StatusOr<WeightMap> ReadIndex(const std::string& path) {
  ZIPAGE_ASSIGN_OR_RETURN(const nlohmann::json json, ReadJsonObject(path, kMaxIndexBytes));
  const auto found = json.find("weight_map");
  if (found == json.end() || !found->is_object() || found->empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: no weight_map object of tensor names; download the file again", path));
  }
  WeightMap weight_map;
  for (const auto& [tensor, file] : found->items()) {
    if (!file.is_string() || !IsShardName(file.get_ref<const std::string&>())) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: %s is in %s; it must be the plain name of a .safetensors file of this folder", path,
          Abbreviated(tensor), Abbreviated(file)));
    }
    weight_map[tensor] = file.get<std::string>();
  }
  return weight_map;
}

absl::Status NoCheckpoint(const std::string& model_dir) {
  std::vector<std::string> others;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(model_dir, error)) {
    const std::string extension = entry.path().extension().string();
    for (const char* other : {".safetensors", ".bin", ".gguf", ".pth", ".pt"}) {
      if (extension == other) others.push_back(Abbreviated(entry.path().filename().string()));
    }
  }
  if (others.empty()) {
    return absl::NotFoundError(
        absl::StrFormat("%s: neither %s nor %s is there; download the model's weights", model_dir,
                        kSingleFile, kIndexFile));
  }
  std::sort(others.begin(), others.end());
  return absl::NotFoundError(absl::StrFormat(
      "%s: neither %s nor %s is there, only %s; safetensors are needed: download or convert them "
      "(transformers' save_pretrained writes them)",
      model_dir, kSingleFile, kIndexFile, Listed(others)));
}

absl::Status CheckShardsExist(const std::string& model_dir, const std::set<std::string>& shards) {
  std::vector<std::string> absent;
  for (const std::string& shard : shards) {
    std::error_code error;
    if (!std::filesystem::exists(model_dir + "/" + shard, error)) absent.push_back(shard);
  }
  if (absent.empty() && shards.size() <= kMaxShards) return absl::OkStatus();
  if (absent.empty()) {
    return absl::InvalidArgumentError(absl::StrFormat("%s/%s: names %d files; at most %d are read",
                                                      model_dir, kIndexFile, shards.size(),
                                                      kMaxShards));
  }
  return absl::NotFoundError(
      absl::StrFormat("%s: %d of the %d files that %s names are missing: %s; download them",
                      model_dir, absent.size(), shards.size(), kIndexFile, Listed(absent)));
}

using Files = std::vector<std::unique_ptr<SafetensorsFile>>;
// A tensor of the files by name, with its file's name.
using Found = std::map<std::string, const SafetensorsEntry*>;

// All tensors of the files. Disagreements between files and index go to `differences`.
Found Collect(const Files& files, const WeightMap& weight_map,
              std::vector<std::string>* differences) {
  Found found;
  std::set<std::pair<std::string, std::string>> seen;  // tensor, file
  for (const auto& file : files) {
    const std::string name = std::filesystem::path(file->path()).filename();
    for (const SafetensorsEntry& entry : file->entries()) {
      const auto listed = weight_map.find(entry.name);
      if (!weight_map.empty() && (listed == weight_map.end() || listed->second != name)) {
        differences->push_back(absl::StrFormat("%s is in %s, but %s does not say so",
                                               Abbreviated(entry.name), name, kIndexFile));
      }
      seen.emplace(entry.name, name);
      if (weight_map.empty() || (listed != weight_map.end() && listed->second == name)) {
        found[entry.name] = &entry;
      }
    }
  }
  for (const auto& [tensor, file] : weight_map) {
    if (!seen.contains({tensor, file})) {
      differences->push_back(absl::StrFormat("%s should be in %s by %s, but is not",
                                             Abbreviated(tensor), file, kIndexFile));
    }
  }
  return found;
}

bool SameContent(const SafetensorsEntry& a, const SafetensorsEntry& b) {
  return a.dtype == b.dtype && a.shape == b.shape &&
         (a.bytes == 0 || std::memcmp(a.data, b.data, a.bytes) == 0);
}

void CompareWithExpected(const std::vector<ExpectedTensor>& expected, const Found& found,
                         std::vector<std::string>* differences) {
  for (const ExpectedTensor& tensor : expected) {
    const auto it = found.find(tensor.name);
    if (it == found.end()) {
      differences->push_back(absl::StrCat("missing ", tensor.name, " ", ShapeText(tensor.shape)));
      continue;
    }
    const SafetensorsEntry& entry = *it->second;
    if (entry.shape != tensor.shape) {
      differences->push_back(absl::StrFormat("%s is %s, should be %s", tensor.name,
                                             ShapeText(entry.shape), ShapeText(tensor.shape)));
    }
    if (!ParseDType(entry.dtype).has_value()) {
      differences->push_back(
          absl::StrFormat("%s is %s, should be F32, BF16 or F16", tensor.name, entry.dtype));
    }
  }
}

void FindExtras(const std::vector<ExpectedTensor>& expected, const Found& found,
                bool tie_word_embeddings, std::vector<std::string>* differences) {
  std::set<std::string> names;
  for (const ExpectedTensor& tensor : expected) names.insert(tensor.name);
  for (const auto& [name, entry] : found) {
    if (names.contains(name) || absl::EndsWith(name, ".rotary_emb.inv_freq")) continue;
    if (name == "lm_head.weight" && tie_word_embeddings) {
      const auto embedding = found.find("model.embed_tokens.weight");
      if (embedding == found.end() || SameContent(*entry, *embedding->second)) continue;
      differences->push_back(
          "lm_head.weight differs from model.embed_tokens.weight, though tie_word_embeddings is "
          "true");
      continue;
    }
    differences->push_back(absl::StrCat("extra ", Abbreviated(name), " ", ShapeText(entry->shape)));
  }
}

template <typename From>
std::vector<float> Converted(const void* from, size_t count) {
  const From* values = static_cast<const From*>(from);
  std::vector<float> floats(count);
  for (size_t i = 0; i < count; ++i) floats[i] = ToFloat(values[i]);
  return floats;
}

}  // namespace

std::vector<float> ToFloats(const TensorView& view) {
  const auto count = static_cast<size_t>(view.rows() * view.columns());
  switch (view.dtype) {
    case DType::kBFloat16:
      return Converted<BFloat16>(view.data, count);
    case DType::kFloat16:
      return Converted<Float16>(view.data, count);
    case DType::kFloat32:
      break;
  }
  return Converted<float>(view.data, count);
}

std::vector<ExpectedTensor> ExpectedTensors(const ModelConfig& config) {
  const int64_t hidden = config.hidden_size;
  const int64_t query = int64_t{config.num_heads} * config.head_dim;
  const int64_t kv = int64_t{config.num_kv_heads} * config.head_dim;
  const int64_t wide = config.intermediate_size;
  std::vector<ExpectedTensor> tensors;
  const auto linear = [&](const std::string& name, int64_t out, int64_t in, bool bias) {
    tensors.push_back({name + ".weight", {out, in}});
    if (bias) tensors.push_back({name + ".bias", {out}});
  };
  const auto norm = [&](const std::string& name, int64_t size) {
    tensors.push_back({name + ".weight", {size}});
  };
  linear("model.embed_tokens", config.vocab_size, hidden, false);
  for (int i = 0; i < config.num_layers; ++i) {
    const std::string layer = absl::StrCat("model.layers.", i, ".");
    norm(layer + "input_layernorm", hidden);
    linear(layer + "self_attn.q_proj", query, hidden, config.qkv_bias);
    linear(layer + "self_attn.k_proj", kv, hidden, config.qkv_bias);
    linear(layer + "self_attn.v_proj", kv, hidden, config.qkv_bias);
    if (config.qk_norm) {
      norm(layer + "self_attn.q_norm", config.head_dim);
      norm(layer + "self_attn.k_norm", config.head_dim);
    }
    linear(layer + "self_attn.o_proj", hidden, query, config.o_bias);
    norm(layer + "post_attention_layernorm", hidden);
    linear(layer + "mlp.gate_proj", wide, hidden, config.mlp_bias);
    linear(layer + "mlp.up_proj", wide, hidden, config.mlp_bias);
    linear(layer + "mlp.down_proj", hidden, wide, config.mlp_bias);
  }
  norm("model.norm", hidden);
  if (!config.tie_word_embeddings) linear("lm_head", config.vocab_size, hidden, false);
  return tensors;
}

const TensorView& Checkpoint::Get(std::string_view name) const {
  const auto it = tensors_.find(ToAbsl(name));
  CHECK(it != tensors_.end()) << "tensor " << name << " is not one of ExpectedTensors";
  return it->second;
}

absl::StatusOr<Checkpoint> OpenCheckpoint(const std::string& model_dir, const ModelConfig& config) {
  WeightMap weight_map;  // empty for a single file
  std::set<std::string> names = {kSingleFile};
  std::error_code error;
  if (!std::filesystem::exists(model_dir + "/" + kSingleFile, error)) {
    if (!std::filesystem::exists(model_dir + "/" + kIndexFile, error)) {
      return NoCheckpoint(model_dir);
    }
    ZIPAGE_ASSIGN_OR_RETURN(weight_map, ReadIndex(model_dir + "/" + kIndexFile));
    names.clear();
    for (const auto& [tensor, file] : weight_map) names.insert(file);
    ZIPAGE_RETURN_IF_ERROR(CheckShardsExist(model_dir, names));
  }
  Checkpoint checkpoint;
  for (const std::string& name : names) {
    ZIPAGE_ASSIGN_OR_RETURN(auto file, SafetensorsFile::Open(model_dir + "/" + name));
    checkpoint.files_.push_back(std::move(file));
  }
  const std::vector<ExpectedTensor> expected = ExpectedTensors(config);
  std::vector<std::string> differences;
  std::vector<std::string> disagreements;
  const Found found = Collect(checkpoint.files_, weight_map, &disagreements);
  CompareWithExpected(expected, found, &differences);
  FindExtras(expected, found, config.tie_word_embeddings, &differences);
  differences.insert(differences.end(), disagreements.begin(), disagreements.end());
  if (!differences.empty()) {
    return absl::FailedPreconditionError(
        absl::StrFormat("%s: the weights do not fit config.json (%s): %s; %s", model_dir,
                        config.architecture, Listed(differences), kCure));
  }
  for (const ExpectedTensor& tensor : expected) {
    const SafetensorsEntry& entry = *found.at(tensor.name);
    const DType dtype = *ParseDType(entry.dtype);
    const uint8_t* data = entry.data;
    if (reinterpret_cast<uintptr_t>(data) % DTypeSize(dtype) != 0) {
      checkpoint.copies_.push_back(std::make_unique<uint8_t[]>(entry.bytes));
      std::memcpy(checkpoint.copies_.back().get(), data, entry.bytes);
      data = checkpoint.copies_.back().get();
    }
    checkpoint.tensors_[tensor.name] = {dtype, entry.shape, data};
  }
  return checkpoint;
}

}  // namespace zipage
