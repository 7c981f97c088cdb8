#pragma once
// Golden data of KV compression: inputs and outputs of the method authors' own kernels, stage by
// stage. All files are in golden/compression of the folder that the environment variable
// ZIPAGE_SHARED_DIR names (its default lies beside the source tree), with a README that describes
// stages, tensors and precision. The first layer of the one that is meant for end-to-end runs is in
// tests/golden/compression, so it is always there.

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/compression_shape.h"
#include "tests/kernels/random_data.h"

namespace zipage::testing {

// A safetensors file: F32 and BF16 tensors as floats, I32, I16 and U8 ones as integers. The reader
// trusts its file.
class GoldenTensors {
 public:
  explicit GoldenTensors(const std::string& path);

  bool Has(const std::string& name) const { return tensors_.count(name) != 0; }
  std::vector<int64_t> Shape(const std::string& name) const { return At(name).shape; }
  std::vector<float> Floats(const std::string& name) const;
  std::vector<int32_t> Ints(const std::string& name) const;

 private:
  struct Entry {
    std::string dtype;
    std::vector<int64_t> shape;
    size_t begin, end;  // bytes of data_
  };
  const Entry& At(const std::string& name) const;

  std::string data_;
  std::map<std::string, Entry> tensors_;
};

// The options of a file's run. Common to all: window 16, pooling 5, decay 0.8, lambda 0.2,
// temperature 0.4, stored scores on.
struct GoldenOptions {
  std::string name;
  int num_kept_blocks;
  bool lightning;
  int sink_len = 0;
  bool continues_pooling = false;
  bool max_norm = false;
};
constexpr int kGoldenWindow = 16;
constexpr int kGoldenPooling = 5;
constexpr float kGoldenDecay = 0.8F;
constexpr float kGoldenLambda = 0.2F;
constexpr float kGoldenTemperature = 0.4F;

// Path of a file: the shared one, or else the one in tests/golden/compression; empty if neither is
// there.
std::string GoldenCompressionFile(const std::string& name);
// The runs whose files are there.
std::vector<GoldenOptions> GoldenCompressionRuns();

// One round (1 or 2) of one run in one type: what the kernels are called with.
struct GoldenRound {
  GoldenRound(const GoldenTensors& file, const GoldenOptions& options, DType dtype, int round);

  CompressionShape shape() const;
  std::string Name(const std::string& stage) const { return prefix + stage; }
  // Slots of a score row: [layers, batch, kv_heads].
  size_t RowSlots(size_t row) const {
    return static_cast<size_t>(table_len[row / kv_heads % table_len.size()]) * block_size;
  }
  // Of a slot and head among those of all layers of a pool.
  size_t PoolRow(size_t row, size_t slot) const {
    const size_t seq = row / kv_heads % table_len.size();
    const size_t layer = row / kv_heads / table_len.size();
    const size_t block = table[seq * max_blocks + slot / block_size];
    return ((layer * pool_blocks + block) * block_size + slot % block_size) * kv_heads +
           row % kv_heads;
  }
  // First element of each block that is packed to, with `width` elements of a slot and head:
  // [layers, batch, max_kept / block_size].
  std::vector<size_t> TargetBlocks(size_t width) const;
  size_t num_rows() const { return static_cast<size_t>(layers) * table_len.size() * kv_heads; }
  size_t row_size() const { return static_cast<size_t>(max_blocks) * block_size; }

  DType dtype;
  std::string prefix;  // "f32/r1/"
  int layers, kv_heads, q_heads, head_dim, block_size, max_blocks, pool_blocks, max_kept;
  std::vector<int32_t> table, table_len, target_table, query_slot, num_kept, zeros;
  std::vector<uint8_t> compressed, pools;
  Tensor queries;
};

// Pools [layers, pool_blocks, block_size, kv_heads, head_dim or 1], changed by the rounds.
struct GoldenPools {
  // As they are before round 1. Values are the file's, or else the keys turned by one element.
  GoldenPools(const GoldenTensors& file, const GoldenRound& round);

  // Packs by a round's kept slots, [layers, batch, kv_heads, max_kept].
  void Pack(const GoldenRound& round, const std::vector<int32_t>& kept);
  // Writes the keys that arrive between the rounds into the last target blocks of round 1's first
  // two sequences.
  void AddNewKeys(const GoldenTensors& file, const GoldenRound& round1);
  // Overwrites the scores of the packed blocks, [layers, batch, blocks, block_size, kv_heads].
  void SetStored(const GoldenRound& round, const std::vector<float>& packed);

  Tensor keys, values;
  std::vector<float> stored;
};

}  // namespace zipage::testing
