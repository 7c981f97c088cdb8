#include "tests/worker/golden.h"

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "glog/logging.h"
#include "worker/model/safetensors.h"

namespace zipage {
namespace {

namespace fs = std::filesystem;

std::string SharedModels() {
  const char* shared = std::getenv("ZIPAGE_SHARED_DIR");
  return std::string(shared != nullptr ? shared : ZIPAGE_SOURCE_DIR "/../shared") +
         "/golden/models/";
}

std::string Folder(const std::string& model) {
  const std::string shared = SharedModels() + model;
  return fs::exists(shared) ? shared : ZIPAGE_SOURCE_DIR "/tests/golden/models/" + model;
}

}  // namespace

bool HasSharedGoldenModels() { return fs::exists(SharedModels()); }

std::vector<std::string> GoldenModelNames() {
  if (!HasSharedGoldenModels()) return {"tiny-qwen2/f32", "tiny-llama/f32"};
  std::vector<std::string> names;
  for (const char* model :
       {"tiny-qwen2", "tiny-llama", "tiny-llama-linear", "tiny-qwen3", "tiny-qwen3-yarn"}) {
    names.push_back(std::string(model) + "/f32");
    names.push_back(std::string(model) + "/bf16");
  }
  return names;
}

GoldenModel LoadGoldenModel(const std::string& name) {
  const std::string model = name.substr(0, name.find('/'));
  const std::string type = name.substr(name.find('/') + 1);
  GoldenModel golden;
  golden.name = name;
  golden.dir = Folder(model) + "/" + type;
  std::ifstream config_file(golden.dir + "/config.json");
  golden.num_heads = nlohmann::json::parse(config_file)["num_attention_heads"];
  std::ifstream file(Folder(model) + "/golden_" + type + ".json");
  const nlohmann::json json = nlohmann::json::parse(file);
  auto tensors = SafetensorsFile::Open(Folder(model) + "/golden_" + type + ".safetensors");
  CHECK(tensors.ok()) << tensors.status();
  for (const nlohmann::json& p : json["prompts"]) {
    GoldenPrompt& prompt = golden.prompts.emplace_back();
    prompt.ids = p["ids"].get<std::vector<TokenId>>();
    prompt.greedy = p["greedy"].get<std::vector<TokenId>>();
    prompt.greedy_margin = p["greedy_margin"].get<std::vector<double>>();
    prompt.bf16_max_abs_diff = p["bf16_compute_max_abs_diff"];
    prompt.bf16_rms_diff = p["bf16_compute_rms_diff"];
    const std::string logits = "prompt" + std::to_string(golden.prompts.size() - 1) + ".logits";
    for (const SafetensorsEntry& entry : (*tensors)->entries()) {
      if (entry.name != logits) continue;
      prompt.logits.resize(entry.bytes / sizeof(float));
      std::memcpy(prompt.logits.data(), entry.data, entry.bytes);
    }
    CHECK(!prompt.logits.empty()) << logits;
  }
  return golden;
}

}  // namespace zipage
