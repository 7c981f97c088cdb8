#pragma once
// Temporary folders, and safetensors files and tiny model folders made by the tests.

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "nlohmann/json.hpp"
#include "worker/model/checkpoint.h"

namespace zipage::testing {

// A folder that goes with the object.
class TempDir {
 public:
  TempDir() {
    std::string pattern = ::testing::TempDir() + "zipage-XXXXXX";
    if (mkdtemp(pattern.data()) == nullptr) ADD_FAILURE() << "mkdtemp " << pattern;
    path_ = pattern;
  }
  ~TempDir() { std::filesystem::remove_all(path_); }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;

  const std::string& path() const { return path_; }
  std::string File(const std::string& name) const { return path_ + "/" + name; }
  void Write(const std::string& name, const std::string& bytes) const {
    std::ofstream file(File(name), std::ios::binary | std::ios::trunc);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    ASSERT_TRUE(file.good()) << File(name);
  }

 private:
  std::string path_;
};

inline std::string ReadWhole(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

// The golden files, or "" where this checkout has none.
inline std::string GoldenModels() {
  const char* shared = std::getenv("ZIPAGE_SHARED_DIR");
  const std::string path =
      (shared != nullptr ? std::string(shared) : ZIPAGE_SOURCE_DIR "/../shared") + "/golden/models";
  return std::filesystem::exists(path) ? path : "";
}

struct TestTensor {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;
  std::string bytes;
};

// A file with this text as header.
inline std::string SafetensorsBytes(const std::string& header, const std::string& data) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(header.size() >> (8 * i));
  return file + header + data;
}

// A well-formed file. The header is padded with spaces to a multiple of `align`, plus `skew`.
inline std::string SafetensorsBytes(const std::vector<TestTensor>& tensors, size_t align = 8,
                                    size_t skew = 0) {
  nlohmann::ordered_json header;
  header["__metadata__"] = {{"format", "pt"}};
  std::string data;
  for (const TestTensor& tensor : tensors) {
    header[tensor.name] = {{"dtype", tensor.dtype},
                           {"shape", tensor.shape},
                           {"data_offsets", {data.size(), data.size() + tensor.bytes.size()}}};
    data += tensor.bytes;
  }
  std::string text = header.dump();
  while ((text.size() + 8) % align != 0) text += ' ';
  return SafetensorsBytes(text + std::string(skew, ' '), data);
}

inline std::string FloatBytes(const std::vector<float>& values) {
  std::string bytes(values.size() * sizeof(float), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// F32 tensors with random values, exactly those the model needs.
inline std::vector<TestTensor> RandomWeights(const ModelConfig& config, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<TestTensor> tensors;
  for (const ExpectedTensor& expected : ExpectedTensors(config)) {
    int64_t count = 1;
    for (const int64_t dimension : expected.shape) count *= dimension;
    std::vector<float> values(count);
    for (float& value : values) value = normal(random);
    tensors.push_back({expected.name, "F32", expected.shape, FloatBytes(values)});
  }
  return tensors;
}

// A small Llama's config.json.
inline nlohmann::json TinyConfig() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", 16},
          {"intermediate_size", 24},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"vocab_size", 40},
          {"max_position_embeddings", 128},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 10000.0},
          {"tie_word_embeddings", false},
          {"torch_dtype", "float32"}};
}

}  // namespace zipage::testing
