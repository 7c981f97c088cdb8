#include "worker/kv_pool.h"

namespace zipage {

absl::StatusOr<KvPool> KvPool::Create(const KvShape& shape, int64_t num_blocks, Backend* backend) {
  ZIPAGE_ASSIGN_OR_RETURN(DeviceMemory memory,
                          backend->Allocate(num_blocks * shape.block_bytes(), "the KV cache"));
  return KvPool(shape, num_blocks, std::move(memory));
}

}  // namespace zipage
