#include "worker/kv_pool.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_format.h"

namespace zipage {
namespace {

// One block is written while another is being filled; with fewer nothing can run.
constexpr int64_t kMinBlocks = 2;
// Of all ranks together, unless an option asks for more.
constexpr double kAutomaticBytes = 4.0 * (int64_t{1} << 30);
constexpr double kGiB = 1 << 30;

}  // namespace

absl::StatusOr<int64_t> CountKvBlocks(const Config& config, const KvShape& shape,
                                      int64_t max_model_len, const Backend& backend) {
  const auto block_bytes = static_cast<double>(shape.block_bytes());
  ZIPAGE_ASSIGN_OR_RETURN(const size_t available, backend.AvailableMemory());
  if (config.num_kvcache_blocks > 0) {
    const double needed = config.num_kvcache_blocks * block_bytes;
    if (needed > static_cast<double>(available)) {
      return absl::ResourceExhaustedError(absl::StrFormat(
          "num_kvcache_blocks is %d, which takes %.3f GiB on each rank; %.3f GiB are available, so "
          "give at most %.0f",
          config.num_kvcache_blocks, needed / kGiB, available / kGiB,
          std::floor(available / block_bytes)));
    }
    return config.num_kvcache_blocks;
  }
  double bytes = config.kv_cache_memory_gb * kGiB;
  if (config.kv_cache_memory_gb > 0 && bytes > static_cast<double>(available)) {
    return absl::ResourceExhaustedError(absl::StrFormat(
        "kv_cache_memory_gb is %g on each rank; %.3f GiB are available, so give less",
        config.kv_cache_memory_gb, available / kGiB));
  }
  if (config.kv_cache_memory_gb <= 0) {
    const int64_t blocks_per_sequence = (max_model_len + shape.block_size - 1) / shape.block_size;
    const double all_sequences =
        block_bytes * static_cast<double>(blocks_per_sequence) * config.max_num_seqs;
    const double share = std::min(static_cast<double>(available) / 2, kAutomaticBytes) / config.tp;
    bytes = std::min(share, std::max(all_sequences, kMinBlocks * block_bytes));
  }
  const auto blocks = static_cast<int64_t>(bytes / block_bytes);
  if (blocks < kMinBlocks) {
    return absl::ResourceExhaustedError(
        absl::StrFormat("the KV cache gets %.3f GiB on each rank, but %d blocks of %d positions "
                        "take %.3f GiB; lower "
                        "kvcache_block_size or give kv_cache_memory_gb %.3f or more",
                        bytes / kGiB, kMinBlocks, shape.block_size, kMinBlocks * block_bytes / kGiB,
                        std::ceil(kMinBlocks * block_bytes / kGiB * 1000) / 1000));
  }
  return blocks;
}

absl::StatusOr<KvPool> KvPool::Create(const KvShape& shape, int64_t num_blocks, Backend* backend) {
  ZIPAGE_ASSIGN_OR_RETURN(DeviceMemory memory,
                          backend->Allocate(num_blocks * shape.block_bytes(), "the KV cache"));
  return KvPool(shape, num_blocks, std::move(memory));
}

}  // namespace zipage
