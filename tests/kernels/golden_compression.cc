#include "tests/kernels/golden_compression.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "glog/logging.h"
#include "kernels/pack_slots.h"

namespace zipage::testing {

GoldenTensors::GoldenTensors(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream content;
  content << file.rdbuf();
  data_ = content.str();
  uint64_t header_size = 0;
  CHECK_GE(data_.size(), sizeof(header_size)) << path;
  std::memcpy(&header_size, data_.data(), sizeof(header_size));
  const size_t start = sizeof(header_size) + header_size;
  const nlohmann::json header =
      nlohmann::json::parse(data_.substr(sizeof(header_size), header_size));
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    tensors_[name] = {entry["dtype"], entry["shape"],
                      start + entry["data_offsets"][0].get<size_t>(),
                      start + entry["data_offsets"][1].get<size_t>()};
    CHECK_LE(tensors_[name].end, data_.size()) << name;
  }
}

const GoldenTensors::Entry& GoldenTensors::At(const std::string& name) const {
  const auto found = tensors_.find(name);
  CHECK(found != tensors_.end()) << "no tensor " << name;
  return found->second;
}

namespace {

template <typename T, typename To>
std::vector<To> Convert(const std::string& data, size_t begin, size_t end) {
  std::vector<To> values;
  for (; begin < end; begin += sizeof(T)) {
    T value;
    std::memcpy(&value, data.data() + begin, sizeof(value));
    if constexpr (std::is_same_v<To, float>) {
      values.push_back(ToFloat(value));
    } else {
      values.push_back(value);
    }
  }
  return values;
}

}  // namespace

std::vector<float> GoldenTensors::Floats(const std::string& name) const {
  const Entry& entry = At(name);
  CHECK(entry.dtype == "F32" || entry.dtype == "BF16") << name << " is " << entry.dtype;
  return entry.dtype == "F32" ? Convert<float, float>(data_, entry.begin, entry.end)
                              : Convert<BFloat16, float>(data_, entry.begin, entry.end);
}

std::vector<int32_t> GoldenTensors::Ints(const std::string& name) const {
  const Entry& entry = At(name);
  if (entry.dtype == "I32") return Convert<int32_t, int32_t>(data_, entry.begin, entry.end);
  if (entry.dtype == "I16") return Convert<int16_t, int32_t>(data_, entry.begin, entry.end);
  CHECK_EQ(entry.dtype, "U8") << name;
  return Convert<uint8_t, int32_t>(data_, entry.begin, entry.end);
}

std::string GoldenCompressionFile(const std::string& name) {
  const char* shared = std::getenv("ZIPAGE_SHARED_DIR");
  const std::string folder = shared != nullptr ? shared : ZIPAGE_SOURCE_DIR "/../shared";
  for (const std::string& path :
       {folder + "/golden/compression/" + name + ".safetensors",
        ZIPAGE_SOURCE_DIR "/tests/golden/compression/" + name + ".safetensors"}) {
    if (std::filesystem::exists(path)) return path;
  }
  return "";
}

std::vector<GoldenOptions> GoldenCompressionRuns() {
  const std::vector<GoldenOptions> all = {
      {.name = "margin_b64_d64_h8", .num_kept_blocks = 2, .lightning = true},
      {.name = "b64_d64_h4", .num_kept_blocks = 2, .lightning = true},
      {.name = "b64_d128_h8",
       .num_kept_blocks = 3,
       .lightning = false,
       .sink_len = 4,
       .continues_pooling = true},
      {.name = "b256_d128_h8", .num_kept_blocks = 2, .lightning = false, .max_norm = true}};
  std::vector<GoldenOptions> there;
  for (const GoldenOptions& run : all) {
    if (!GoldenCompressionFile(run.name).empty()) there.push_back(run);
  }
  return there;
}

namespace {

Tensor ToTensor(DType dtype, const std::vector<float>& values) {
  Tensor tensor(dtype, values.size());
  for (size_t i = 0; i < values.size(); ++i) tensor.Set(i, values[i]);
  return tensor;
}

}  // namespace

GoldenRound::GoldenRound(const GoldenTensors& file, const GoldenOptions& options, DType dtype,
                         int round)
    : dtype(dtype),
      prefix(std::string(dtype == DType::kFloat32 ? "f32" : "bf16") + "/r" + std::to_string(round) +
             "/"),
      queries(ToTensor(dtype, file.Floats("in/r" + std::to_string(round) + "/query_cache"))) {
  const std::string in = "in/r" + std::to_string(round) + "/";
  const std::vector<int64_t> pool = file.Shape("in/k_pool");
  layers = static_cast<int>(pool[0]);
  pool_blocks = static_cast<int>(pool[1]);
  block_size = static_cast<int>(pool[2]);
  kv_heads = static_cast<int>(pool[3]);
  head_dim = static_cast<int>(pool[4]);
  q_heads = static_cast<int>(file.Shape(in + "query_cache")[3]);
  max_blocks = static_cast<int>(file.Shape(in + "block_table")[1]);
  max_kept = options.num_kept_blocks * block_size;
  table = file.Ints(in + "block_table");
  for (size_t i = 0; i < table.size(); ++i) {
    if (i % max_blocks == 0) table_len.push_back(0);
    if (table[i] != -1) ++table_len.back();
    if (table[i] < -1) table[i] = -table[i] - 2;  // a sequence's last block
  }
  target_table = file.Ints(in + "target_table");
  query_slot = file.Ints(in + "query_slot");
  num_kept.assign(table_len.size(), max_kept);
  zeros.assign(table_len.size(), 0);
  for (const int32_t flag : file.Ints(in + "compressed")) {
    compressed.push_back(static_cast<uint8_t>(flag));
    pools.push_back(static_cast<uint8_t>(options.continues_pooling || flag == 0));
  }
}

CompressionShape GoldenRound::shape() const {
  return {table.data(), table_len.data(), layers,    static_cast<int>(table_len.size()),
          kv_heads,     max_blocks,       block_size};
}

std::vector<size_t> GoldenRound::TargetBlocks(size_t width) const {
  std::vector<size_t> first;
  const size_t batch = table_len.size();
  for (size_t layer = 0; layer < static_cast<size_t>(layers); ++layer) {
    for (size_t seq = 0; seq < batch; ++seq) {
      for (int b = 0; b < max_kept / block_size; ++b) {
        const size_t block = target_table[seq * (target_table.size() / batch) + b];
        first.push_back((layer * pool_blocks + block) * block_size * kv_heads * width);
      }
    }
  }
  return first;
}

GoldenPools::GoldenPools(const GoldenTensors& file, const GoldenRound& round)
    : keys(ToTensor(round.dtype, file.Floats("in/k_pool"))),
      values(round.dtype, keys.size()),
      stored(file.Floats("in/score_cache")) {
  if (file.Has("in/v_pool")) {
    values = ToTensor(round.dtype, file.Floats("in/v_pool"));
  } else {
    for (size_t i = 0; i < keys.size(); ++i) values.Set(i, keys.Get((i + 1) % keys.size()));
  }
}

void GoldenPools::Pack(const GoldenRound& round, const std::vector<int32_t>& kept) {
  const int64_t stored_stride = int64_t{round.pool_blocks} * round.block_size * round.kv_heads;
  const auto batch = static_cast<int>(round.table_len.size());
  std::vector<int32_t> prompt_slots(static_cast<size_t>(round.layers) * batch * round.kv_heads);
  std::vector<int32_t> sequence_slot(round.table_len.size());
  for (size_t s = 0; s < sequence_slot.size(); ++s) sequence_slot[s] = static_cast<int32_t>(s);
  cpu::PackSlots({.shape = round.shape(),
                  .kept = kept.data(),
                  .num_kept = round.num_kept.data(),
                  .first_slot = round.zeros.data(),
                  .target_table = round.target_table.data(),
                  .key = keys.data(),
                  .value = values.data(),
                  .stored = stored.data(),
                  .prompt_slots = prompt_slots.data(),
                  .sequence_slot = sequence_slot.data(),
                  .kv_layer_stride = stored_stride * round.head_dim,
                  .stored_layer_stride = stored_stride,
                  .max_kept = round.max_kept,
                  .max_target_blocks = static_cast<int>(round.target_table.size()) / batch,
                  .max_num_seqs = batch,
                  .head_dim = round.head_dim,
                  .dtype = round.dtype});
}

void GoldenPools::AddNewKeys(const GoldenTensors& file, const GoldenRound& round1) {
  const std::vector<float> new_keys = file.Floats("in/r2/new_keys");  // [layers, 2, block]
  const size_t block = size_t{1} * round1.block_size * round1.kv_heads * round1.head_dim;
  const size_t target_blocks = round1.target_table.size() / round1.table_len.size();
  for (size_t layer = 0; layer < static_cast<size_t>(round1.layers); ++layer) {
    for (size_t s = 0; s < 2; ++s) {
      const size_t id = round1.target_table[(s + 1) * target_blocks - 1];
      for (size_t i = 0; i < block; ++i) {
        keys.Set((layer * round1.pool_blocks + id) * block + i,
                 new_keys[(layer * 2 + s) * block + i]);
      }
    }
  }
}

void GoldenPools::SetStored(const GoldenRound& round, const std::vector<float>& packed) {
  auto from = packed.begin();
  for (const size_t first : round.TargetBlocks(1)) {
    std::copy_n(from, round.block_size * round.kv_heads, stored.begin() + first);
    from += round.block_size * round.kv_heads;
  }
}

}  // namespace zipage::testing
