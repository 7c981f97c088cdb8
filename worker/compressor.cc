#include "worker/compressor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "glog/logging.h"

namespace zipage {
namespace {

// Sequences of one batch at most; with the configured budget they fit.
constexpr int kMaxBatch = 16;
// Of Compressor::Arrays, for one sequence besides its tables and prompt slots, alignment included.
constexpr int64_t kSequenceBytes = 64;
constexpr int64_t kAlignment = 8;
constexpr int64_t kNumArrays = 16;

// max_blocks * batch of one batch.
int64_t BatchBlocks(const Config& config, const CompressorLimits& limits) {
  const int64_t table = int64_t{config.max_cache_blocks_per_seq} + 1;
  return std::max(limits.max_table_blocks, table * std::min(limits.max_num_seqs, kMaxBatch));
}

struct ScratchSizes {
  size_t scores = 0;  // of one array
  size_t kept = 0;
  size_t arrays = 0;
  size_t kept_sums = 0;
};

ScratchSizes Sizes(const Config& config, const CompressorLimits& limits, const KvShape& shape) {
  const int64_t blocks = BatchBlocks(config, limits);
  const int64_t layers = std::min(config.layer_stride, shape.num_layers);
  const size_t rows = layers * blocks * shape.block_size * shape.kv_heads;
  const size_t sequence_bytes =
      kSequenceBytes + size_t{1} * shape.num_layers * shape.kv_heads * sizeof(int32_t);
  return {
      .scores = rows * sizeof(float),
      .kept = rows * sizeof(int32_t),
      .arrays = 2 * blocks * sizeof(int32_t) + kMaxBatch * sequence_bytes + kNumArrays * kAlignment,
      .kept_sums = limits.max_num_seqs * sizeof(float)};
}

// Adds the blocks that the compression reads, stores scores of, or writes to `touched`; false, and
// nothing is added, if one of them is there already: two samples of one prompt still share blocks
// when both are compressed, and a block that one gives up may be the next one's target. Such
// compressions must follow each other.
bool Touch(const CompressionWork& work, int block_size, absl::flat_hash_set<BlockId>* touched) {
  absl::flat_hash_set<BlockId> blocks;
  const int64_t first_block = work.num_pinned / block_size;
  for (const std::vector<BlockId>* table : {&work.source_table, &work.target_table}) {
    blocks.insert(table->begin() + first_block, table->end());
  }
  for (const BlockId block : blocks) {
    if (touched->contains(block)) return false;
  }
  touched->insert(blocks.begin(), blocks.end());
  return true;
}

// Packs arrays of different types for one copy to the device.
class ArrayPacker {
 public:
  explicit ArrayPacker(const DeviceMemory& memory) : memory_(memory) {}

  // Where the values will be on the device.
  template <typename T>
  T* Add(const std::vector<T>& values) {
    const size_t offset = (bytes_.size() + kAlignment - 1) / kAlignment * kAlignment;
    bytes_.resize(offset + values.size() * sizeof(T));
    std::memcpy(bytes_.data() + offset, values.data(), values.size() * sizeof(T));
    return reinterpret_cast<T*>(memory_.as<uint8_t>() + offset);
  }
  void Upload(Backend* backend) const {
    CHECK_LE(bytes_.size(), memory_.bytes());
    backend->CopyToDevice(memory_.as(), bytes_.data(), bytes_.size());
  }

 private:
  const DeviceMemory& memory_;
  std::vector<uint8_t> bytes_;
};

}  // namespace

struct Compressor::Arrays {
  int batch = 0;
  int max_blocks = 0;
  int max_target_blocks = 0;
  int max_kept = 0;
  const int32_t* block_table = nullptr;   // [batch, max_blocks]
  const int32_t* target_table = nullptr;  // [batch, max_target_blocks]
  const int32_t* table_len = nullptr;     // [batch], as all below
  const int32_t* query_slot = nullptr;
  const int32_t* num_pinned = nullptr;
  const int32_t* num_kept = nullptr;
  const int32_t* num_raised = nullptr;
  const int32_t* first_block = nullptr;
  const int32_t* first_slot = nullptr;
  const int32_t* index = nullptr;  // 0, 1, …
  const uint64_t* seed = nullptr;
  const uint32_t* sample_index = nullptr;
  const uint32_t* round = nullptr;
  const uint8_t* compressed = nullptr;
  const uint8_t* pools = nullptr;
  int32_t* prompt_slots = nullptr;  // [layers, batch, kv_heads]
};

absl::StatusOr<std::unique_ptr<Compressor>> Compressor::Create(
    const Config& config, const CompressorLimits& limits, const KvPool* pool,
    const QueryWindowShape& windows, int64_t num_query_slots, int first_kv_head,
    Collective* collective, Backend* backend) {
  ZIPAGE_ASSIGN_OR_RETURN(QueryWindows query_windows,
                          QueryWindows::Create(windows, num_query_slots, backend));
  ZIPAGE_ASSIGN_OR_RETURN(
      GroupWindows group_windows,
      GroupWindows::Create(windows, std::min(config.layer_stride, windows.num_layers), kMaxBatch,
                           collective, backend));
  std::unique_ptr<Compressor> compressor(
      new Compressor(config, limits, pool, std::move(query_windows), std::move(group_windows),
                     first_kv_head, collective, backend));
  ZIPAGE_RETURN_IF_ERROR(compressor->Allocate());
  return compressor;
}

Compressor::Compressor(const Config& config, const CompressorLimits& limits, const KvPool* pool,
                       QueryWindows windows, GroupWindows group_windows, int first_kv_head,
                       Collective* collective, Backend* backend)
    : config_(config),
      limits_(limits),
      pool_(pool),
      windows_(std::move(windows)),
      group_windows_(std::move(group_windows)),
      first_kv_head_(first_kv_head),
      collective_(collective),
      backend_(backend),
      policy_(MakeCompressionPolicy(config)),
      batch_blocks_(BatchBlocks(config, limits)) {
  CHECK(policy_ != nullptr) << "a compressor without a policy";
}

size_t Compressor::ScratchBytes(const Config& config, const CompressorLimits& limits,
                                const KvShape& shape, const QueryWindowShape& windows) {
  const std::unique_ptr<CompressionPolicy> policy = MakeCompressionPolicy(config);
  if (policy == nullptr) return 0;
  const ScratchSizes sizes = Sizes(config, limits, shape);
  return policy->needs().scratch_arrays * sizes.scores + sizes.kept + sizes.arrays +
         sizes.kept_sums +
         GroupWindows::Bytes(windows, std::min(config.layer_stride, shape.num_layers), kMaxBatch,
                             config.tp);
}

absl::Status Compressor::Allocate() {
  const KvShape& shape = pool_->shape();
  const ScratchSizes sizes = Sizes(config_, limits_, shape);
  for (int i = 0; i < policy_->needs().scratch_arrays; ++i) {
    ZIPAGE_ASSIGN_OR_RETURN(scratch_[i], backend_->Allocate(sizes.scores, "compression scratch"));
  }
  ZIPAGE_ASSIGN_OR_RETURN(kept_, backend_->Allocate(sizes.kept, "compression scratch"));
  ZIPAGE_ASSIGN_OR_RETURN(arrays_, backend_->Allocate(sizes.arrays, "compression scratch"));
  ZIPAGE_ASSIGN_OR_RETURN(kept_sums_, backend_->Allocate(sizes.kept_sums, "compression scratch"));
  prompt_slots_.resize(int64_t{limits_.max_num_seqs} * shape.num_layers * shape.kv_heads);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FinishedCompression>> Compressor::Compress(
    const std::vector<CompressionWork>& work) {
  std::vector<float> kept(work.size());
  for (size_t begin = 0; begin < work.size();) {
    size_t end = begin;
    int64_t max_blocks = 0;
    absl::flat_hash_set<BlockId> touched;
    while (end < std::min(work.size(), begin + kMaxBatch)) {
      const auto blocks = static_cast<int64_t>(work[end].source_table.size());
      const int64_t longest = std::max(max_blocks, blocks);
      if (end > begin && longest * static_cast<int64_t>(end + 1 - begin) > batch_blocks_) break;
      if (!Touch(work[end], pool_->shape().block_size, &touched)) break;
      max_blocks = longest;
      ++end;
    }
    ZIPAGE_RETURN_IF_ERROR(
        CompressBatch(std::span(work).subspan(begin, end - begin), kept.data() + begin));
    begin = end;
  }
  const size_t bytes = kept.size() * sizeof(float);
  backend_->CopyToDevice(kept_sums_.as(), kept.data(), bytes);
  ZIPAGE_RETURN_IF_ERROR(collective_->AllReduceSum(kept_sums_.as<float>(), kept.size()));
  backend_->CopyToHost(kept.data(), kept_sums_.as(), bytes);
  // With fewer KV heads than ranks every head counts equally often.
  const KvShape& shape = pool_->shape();
  const auto rows = static_cast<float>(shape.num_layers * shape.kv_heads * collective_->size());
  std::vector<FinishedCompression> finished(work.size());
  for (size_t i = 0; i < work.size(); ++i) {
    finished[i] = {.sequence_slot = work[i].sequence_slot, .prompt_tokens_kept = kept[i] / rows};
  }
  return finished;
}

absl::Status Compressor::CompressBatch(std::span<const CompressionWork> work, float* kept) {
  const KvShape& shape = pool_->shape();
  for (const CompressionWork& one : work) {
    int32_t* const slots = PromptSlots(one.sequence_slot, 0);
    for (int i = 0; i < shape.num_layers * shape.kv_heads; ++i) {
      slots[i] = (one.round == 0 ? 0 : slots[i]) + static_cast<int32_t>(one.new_prompt_slots);
    }
  }
  const Arrays arrays = Upload(work);
  for (int layer = 0; layer < shape.num_layers; layer += config_.layer_stride) {
    const int num_layers = std::min(config_.layer_stride, shape.num_layers - layer);
    ZIPAGE_ASSIGN_OR_RETURN(const PolicyInput in, Input(work, arrays, layer, num_layers));
    policy_->Select(in, backend_);
    Pack(arrays, in);
  }
  std::vector<int32_t> prompt_slots(work.size() * shape.num_layers * shape.kv_heads);
  backend_->CopyToHost(prompt_slots.data(), arrays.prompt_slots,
                       prompt_slots.size() * sizeof(int32_t));
  for (size_t i = 0; i < work.size(); ++i) {
    for (int layer = 0; layer < shape.num_layers; ++layer) {
      const int32_t* const row = prompt_slots.data() + (layer * work.size() + i) * shape.kv_heads;
      std::copy_n(row, shape.kv_heads, PromptSlots(work[i].sequence_slot, layer));
      for (int h = 0; h < shape.kv_heads; ++h) kept[i] += static_cast<float>(row[h]);
    }
  }
  return absl::OkStatus();
}

Compressor::Arrays Compressor::Upload(std::span<const CompressionWork> work) {
  const KvShape& shape = pool_->shape();
  const bool pools_always = config_.continues_pooling;
  Arrays arrays;
  arrays.batch = static_cast<int>(work.size());
  for (const CompressionWork& one : work) {
    arrays.max_blocks = std::max(arrays.max_blocks, static_cast<int>(one.source_table.size()));
    arrays.max_target_blocks =
        std::max(arrays.max_target_blocks, static_cast<int>(one.target_table.size()));
  }
  arrays.max_kept = (arrays.max_target_blocks - 1) * shape.block_size;
  const auto per_sequence = [&work](auto of) {
    std::vector<decltype(of(work[0]))> values;
    for (const CompressionWork& one : work) values.push_back(of(one));
    return values;
  };
  const auto num_kept = [&shape](const CompressionWork& one) {
    return static_cast<int32_t>((one.target_table.size() - 1) * shape.block_size);
  };
  const auto tables = [&work](auto table, int width) {
    std::vector<int32_t> values(work.size() * width);
    for (size_t i = 0; i < work.size(); ++i) {
      std::copy((work[i].*table).begin(), (work[i].*table).end(), values.data() + i * width);
    }
    return values;
  };
  std::vector<int32_t> index(work.size());
  std::vector<int32_t> prompt_slots(work.size() * shape.num_layers * shape.kv_heads);
  for (size_t i = 0; i < work.size(); ++i) {
    index[i] = static_cast<int32_t>(i);
    for (int layer = 0; layer < shape.num_layers; ++layer) {
      std::copy_n(PromptSlots(work[i].sequence_slot, layer), shape.kv_heads,
                  prompt_slots.data() + (layer * work.size() + i) * shape.kv_heads);
    }
  }
  ArrayPacker packer(arrays_);
  const auto add = [&](auto of) { return packer.Add(per_sequence(of)); };
  using Work = CompressionWork;
  arrays.block_table = packer.Add(tables(&Work::source_table, arrays.max_blocks));
  arrays.target_table = packer.Add(tables(&Work::target_table, arrays.max_target_blocks));
  arrays.table_len = add([](const Work& w) { return static_cast<int32_t>(w.source_table.size()); });
  arrays.query_slot = add([](const Work& w) { return int32_t{w.query_slot}; });
  arrays.num_pinned = add([](const Work& w) { return static_cast<int32_t>(w.num_pinned); });
  arrays.num_kept = add(num_kept);
  arrays.num_raised = add([&](const Work& w) {
    return static_cast<int32_t>(policy_->NumRaised(num_kept(w), w.num_pinned));
  });
  const int block_size = shape.block_size;
  arrays.first_block =
      add([=](const Work& w) { return static_cast<int32_t>(w.num_pinned / block_size); });
  arrays.first_slot = add(
      [=](const Work& w) { return static_cast<int32_t>(w.num_pinned / block_size * block_size); });
  arrays.index = packer.Add(index);
  arrays.seed = add([](const Work& w) { return w.seed; });
  arrays.sample_index = add([](const Work& w) { return w.sample_index; });
  arrays.round = add([](const Work& w) { return w.round; });
  arrays.compressed = add([](const Work& w) { return static_cast<uint8_t>(w.round > 0); });
  arrays.pools =
      add([=](const Work& w) { return static_cast<uint8_t>(pools_always || w.round == 0); });
  arrays.prompt_slots = packer.Add(prompt_slots);
  packer.Upload(backend_);
  return arrays;
}

absl::StatusOr<PolicyInput> Compressor::Input(std::span<const CompressionWork> work,
                                              const Arrays& arrays, int layer, int num_layers) {
  const KvShape& shape = pool_->shape();
  PolicyInput in;
  in.shape = {.block_table = arrays.block_table,
              .table_len = arrays.table_len,
              .layers = num_layers,
              .batch = arrays.batch,
              .kv_heads = shape.kv_heads,
              .max_blocks = arrays.max_blocks,
              .block_size = shape.block_size};
  in.num_pinned = arrays.num_pinned;
  in.num_kept = arrays.num_kept;
  in.num_raised = arrays.num_raised;
  in.first_block = arrays.first_block;
  in.compressed = arrays.compressed;
  in.pools = arrays.pools;
  in.seed = arrays.seed;
  in.sample_index = arrays.sample_index;
  in.round = arrays.round;
  in.max_kept = arrays.max_kept;
  in.key = pool_->key(layer);
  in.key_layer_stride = pool_->kv_layer_stride();
  in.stored_scores = pool_->stored_scores(layer);
  in.stored_layer_stride = pool_->score_layer_stride();
  in.head_dim = shape.head_dim;
  in.dtype = shape.dtype;
  in.first_layer = layer;
  in.first_kv_head = first_kv_head_;
  for (int i = 0; i < 3; ++i) in.scratch[i] = scratch_[i].as<float>();
  in.kept = kept_.as<int32_t>();
  if (policy_->needs().queries) ZIPAGE_RETURN_IF_ERROR(AddQueries(work, arrays, &in));
  return in;
}

absl::Status Compressor::AddQueries(std::span<const CompressionWork> work, const Arrays& arrays,
                                    PolicyInput* in) {
  if (!group_windows_.enabled()) {
    in->query_window = windows_.layer(in->first_layer);
    in->window_layer_stride = windows_.layer_stride();
    in->query_slot = arrays.query_slot;
    in->q_heads = windows_.shape().q_heads;
    return absl::OkStatus();
  }
  std::vector<QuerySlot> query_slots;
  for (const CompressionWork& one : work) query_slots.push_back(one.query_slot);
  ZIPAGE_ASSIGN_OR_RETURN(in->query_window, group_windows_.Collect(windows_, in->first_layer,
                                                                   in->shape.layers, query_slots));
  in->query_slot = arrays.index;
  in->q_heads = group_windows_.q_heads();
  in->window_layer_stride =
      int64_t{arrays.batch} * windows_.shape().window * in->q_heads * in->head_dim;
  return absl::OkStatus();
}

void Compressor::Pack(const Arrays& arrays, const PolicyInput& in) {
  const KvShape& shape = pool_->shape();
  const int layer = in.first_layer;
  backend_->PackSlots(
      {.shape = in.shape,
       .kept = in.kept,
       .num_kept = arrays.num_kept,
       .first_slot = arrays.first_slot,
       .target_table = arrays.target_table,
       .key = pool_->key(layer),
       .value = pool_->value(layer),
       .stored = pool_->stored_scores(layer),
       .prompt_slots = arrays.prompt_slots + int64_t{layer} * arrays.batch * shape.kv_heads,
       .sequence_slot = arrays.index,
       .kv_layer_stride = pool_->kv_layer_stride(),
       .stored_layer_stride = pool_->score_layer_stride(),
       .max_kept = in.max_kept,
       .max_target_blocks = arrays.max_target_blocks,
       .max_num_seqs = arrays.batch,
       .head_dim = shape.head_dim,
       .dtype = shape.dtype});
}

}  // namespace zipage
