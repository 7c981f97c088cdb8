#include "worker/model/checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tests/worker/test_files.h"

namespace zipage {
namespace {

using testing::FloatBytes;
using ::testing::HasSubstr;
using ::testing::Not;
using testing::RandomWeights;
using testing::SafetensorsBytes;
using testing::TempDir;
using testing::TestTensor;
using testing::TinyConfig;

constexpr const char* kIndex = "model.safetensors.index.json";

class CheckpointTest : public ::testing::Test {
 protected:
  explicit CheckpointTest(bool tied = false) {
    nlohmann::json json = TinyConfig();
    json["tie_word_embeddings"] = tied;
    dir_.Write("config.json", json.dump());
    config_ = *LoadModelConfig(dir_.path());
    tensors_ = RandomWeights(config_, 3);
  }

  TestTensor& Tensor(const std::string& name) {
    const auto it = std::find_if(tensors_.begin(), tensors_.end(),
                                 [&](const TestTensor& tensor) { return tensor.name == name; });
    EXPECT_NE(it, tensors_.end()) << name;
    return *it;
  }

  void Drop(const std::string& name) {
    std::erase_if(tensors_, [&](const TestTensor& tensor) { return tensor.name == name; });
  }

  absl::StatusOr<Checkpoint> Open() { return OpenCheckpoint(dir_.path(), config_); }

  std::string Error(absl::StatusCode code = absl::StatusCode::kFailedPrecondition) {
    const absl::Status status = Open().status();
    EXPECT_EQ(status.code(), code) << status;
    const std::string message(status.message());
    EXPECT_THAT(message, Not(HasSubstr("\n")));
    EXPECT_THAT(message, HasSubstr(dir_.path()));
    return message;
  }

  // Tensors in the order of tensors_, the first `first` in shard a, the others in b, and their
  // index.
  nlohmann::json WriteShards(size_t first) {
    const auto middle = tensors_.begin() + static_cast<std::ptrdiff_t>(first);
    nlohmann::json index;
    for (auto it = tensors_.begin(); it != tensors_.end(); ++it) {
      index["weight_map"][it->name] = it < middle ? "a.safetensors" : "b.safetensors";
    }
    dir_.Write("a.safetensors", SafetensorsBytes({tensors_.begin(), middle}));
    dir_.Write("b.safetensors", SafetensorsBytes({middle, tensors_.end()}));
    dir_.Write(kIndex, index.dump());
    return index;
  }

  void WriteSingle() { dir_.Write("model.safetensors", SafetensorsBytes(tensors_)); }

  void ExpectSameValues(const Checkpoint& checkpoint) {
    for (const TestTensor& tensor : tensors_) {
      const TensorView& view = checkpoint.Get(tensor.name);
      EXPECT_EQ(view.shape, tensor.shape) << tensor.name;
      EXPECT_EQ(std::string(reinterpret_cast<const char*>(view.data), tensor.bytes.size()),
                tensor.bytes)
          << tensor.name;
      EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % DTypeSize(view.dtype), 0U);
    }
  }

  TempDir dir_;
  ModelConfig config_;
  std::vector<TestTensor> tensors_;
};

class TiedCheckpointTest : public CheckpointTest {
 protected:
  TiedCheckpointTest() : CheckpointTest(/*tied=*/true) {}
};

TEST_F(CheckpointTest, ReadsOneFileAndTwoShardsAlike) {
  for (size_t first = 1; first < tensors_.size(); first += 5) {
    WriteShards(first);
    const auto checkpoint = Open();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    ExpectSameValues(*checkpoint);
  }
  WriteSingle();
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ExpectSameValues(*checkpoint);
}

TEST_F(CheckpointTest, AlignsWhatTheFileHoldsUnaligned) {
  for (const size_t skew : {1, 2, 3}) {
    dir_.Write("model.safetensors", SafetensorsBytes(tensors_, 8, skew));
    const auto checkpoint = Open();
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    ExpectSameValues(*checkpoint);
  }
}

TEST_F(CheckpointTest, ListsAllDifferencesInOneLine) {
  Drop("lm_head.weight");
  TestTensor& down = Tensor("model.layers.1.mlp.down_proj.weight");
  std::swap(down.shape[0], down.shape[1]);
  TestTensor& norm = Tensor("model.norm.weight");
  norm.dtype = "I32";
  tensors_.push_back({"model.layers.0.self_attn.q_proj.bias", "F32", {16}, std::string(64, '\0')});
  tensors_.push_back(
      {"model.layers.0.self_attn.rotary_emb.inv_freq", "F32", {2}, std::string(8, '\0')});
  WriteSingle();
  const std::string message = Error();
  EXPECT_THAT(message, HasSubstr("missing lm_head.weight [40, 16]"));
  EXPECT_THAT(message, HasSubstr("mlp.down_proj.weight is [24, 16], should be [16, 24]"));
  EXPECT_THAT(message, HasSubstr("model.norm.weight is I32, should be F32, BF16 or F16"));
  EXPECT_THAT(message, HasSubstr("extra \"model.layers.0.self_attn.q_proj.bias\" [16]"));
  EXPECT_THAT(message, Not(HasSubstr("inv_freq")));
  EXPECT_THAT(message, HasSubstr("download"));
}

TEST_F(CheckpointTest, CutsALongListOfDifferences) {
  for (int i = 0; i < 50; ++i) {
    tensors_.push_back({"extra." + std::to_string(i), "U8", {1}, "x"});
  }
  WriteSingle();
  EXPECT_THAT(Error(), HasSubstr("and 30 more"));
}

TEST_F(CheckpointTest, IgnoresTensorsOfAnyTypeItNeverReads) {
  tensors_.push_back({"model.rotary_emb.inv_freq", "F64", {2}, std::string(16, '\0')});
  WriteSingle();
  EXPECT_TRUE(Open().ok());
}

TEST_F(TiedCheckpointTest, NeedsNoOutputMatrixAndIgnoresAnEqualOne) {
  WriteSingle();
  EXPECT_TRUE(Open().ok());
  TestTensor head = Tensor("model.embed_tokens.weight");
  head.name = "lm_head.weight";
  tensors_.push_back(head);
  WriteSingle();
  EXPECT_TRUE(Open().ok());
  tensors_.back().bytes[17] ^= 1;
  WriteSingle();
  EXPECT_THAT(Error(), HasSubstr("lm_head.weight differs from model.embed_tokens.weight"));
}

TEST_F(CheckpointTest, NamesTheMissingShard) {
  WriteShards(4);
  std::filesystem::remove(dir_.File("b.safetensors"));
  const std::string message = Error(absl::StatusCode::kNotFound);
  EXPECT_THAT(message, HasSubstr("1 of the 2 files"));
  EXPECT_THAT(message, HasSubstr("b.safetensors"));
}

TEST_F(CheckpointTest, ReportsWhereIndexAndFilesDisagree) {
  nlohmann::json index = WriteShards(4);
  const std::string moved = tensors_[0].name;
  index["weight_map"][moved] = "b.safetensors";
  index["weight_map"]["model.ghost"] = "a.safetensors";
  index["weight_map"].erase(tensors_[5].name);
  dir_.Write(kIndex, index.dump());
  const std::string message = Error();
  EXPECT_THAT(message, HasSubstr("\"" + moved + "\" should be in b.safetensors"));
  EXPECT_THAT(message, HasSubstr("\"" + moved + "\" is in a.safetensors"));
  EXPECT_THAT(message, HasSubstr("\"model.ghost\" should be in a.safetensors"));
  EXPECT_THAT(message, HasSubstr("missing " + tensors_[5].name));
}

TEST_F(CheckpointTest, DoesNotFollowAnIndexOutOfItsFolder) {
  nlohmann::json index = WriteShards(4);
  for (const char* name : {"../a.safetensors", "/etc/passwd", "x/../a.safetensors", "..", "",
                           ".hidden.safetensors", "model.bin"}) {
    index["weight_map"][tensors_[0].name] = name;
    dir_.Write(kIndex, index.dump());
    EXPECT_THAT(Error(absl::StatusCode::kInvalidArgument), HasSubstr("plain name")) << name;
  }
  index["weight_map"][tensors_[0].name] = 7;
  dir_.Write(kIndex, index.dump());
  Error(absl::StatusCode::kInvalidArgument);
  for (const char* text : {"", "{}", "{\"weight_map\":{}}", "{\"weight_map\":[]}", "[[[["}) {
    dir_.Write(kIndex, text);
    Error(absl::StatusCode::kInvalidArgument);
  }
}

TEST_F(CheckpointTest, SaysThatSafetensorsAreNeeded) {
  EXPECT_THAT(Error(absl::StatusCode::kNotFound), HasSubstr("model.safetensors"));
  dir_.Write("pytorch_model.bin", "x");
  dir_.Write("model-q4.gguf", "x");
  const std::string message = Error(absl::StatusCode::kNotFound);
  EXPECT_THAT(message, HasSubstr("pytorch_model.bin"));
  EXPECT_THAT(message, HasSubstr("model-q4.gguf"));
  EXPECT_THAT(message, HasSubstr("safetensors are needed"));
}

TEST_F(CheckpointTest, PassesOnWhatIsWrongWithAFile) {
  WriteSingle();
  const std::string file = testing::ReadWhole(dir_.File("model.safetensors"));
  dir_.Write("model.safetensors", file.substr(0, file.size() - 4));
  EXPECT_THAT(Error(absl::StatusCode::kDataLoss), HasSubstr("data_offsets"));
  dir_.Write("model.safetensors", file + "tail");
  EXPECT_THAT(Error(absl::StatusCode::kDataLoss), HasSubstr("4 bytes at the end"));
}

TEST(TensorViewTest, ConvertsAnyTypeAndFindsElements) {
  const std::vector<float> values = {0.5F, -1, 2, 3, 1024, -0.25F};
  for (const DType from : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    std::vector<uint8_t> stored(values.size() * DTypeSize(from));
    for (size_t i = 0; i < values.size(); ++i) {
      if (from == DType::kFloat32) std::memcpy(&stored[4 * i], &values[i], 4);
      const uint16_t bits =
          from == DType::kBFloat16 ? ToBFloat16(values[i]).bits : ToFloat16(values[i]).bits;
      if (from != DType::kFloat32) std::memcpy(&stored[2 * i], &bits, 2);
    }
    const TensorView view = {from, {3, 2}, stored.data()};
    EXPECT_EQ(ToFloats(view), values);
    EXPECT_EQ(view.At(2, 1), stored.data() + 5 * DTypeSize(from));
  }
}

TEST(ExpectedTensorsTest, MatchTheGoldenCheckpoints) {
  const std::string golden = testing::GoldenModels();
  if (golden.empty()) GTEST_SKIP() << "NO GOLDEN MODELS: set ZIPAGE_SHARED_DIR";
  for (const std::string name :
       {"tiny-llama", "tiny-llama-linear", "tiny-qwen2", "tiny-qwen3", "tiny-qwen3-yarn"}) {
    for (const std::string dtype : {"f32", "bf16"}) {
      const std::string dir = golden + "/" + name + "/" + dtype;
      const auto config = LoadModelConfig(dir);
      ASSERT_TRUE(config.ok()) << config.status();
      const auto checkpoint = OpenCheckpoint(dir, *config);
      ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
      EXPECT_EQ(checkpoint->Get("model.norm.weight").dtype,
                dtype == "f32" ? DType::kFloat32 : DType::kBFloat16);
    }
  }
}

}  // namespace
}  // namespace zipage
