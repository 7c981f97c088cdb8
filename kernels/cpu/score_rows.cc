#include "kernels/cpu/score_rows.h"

#include "glog/logging.h"

namespace zipage::cpu {

void CheckShape(const CompressionShape& shape) {
  CHECK(shape.layers >= 0 && shape.batch >= 0) << shape.layers << ", " << shape.batch;
  CHECK(shape.kv_heads > 0 && shape.block_size > 0 && shape.max_blocks > 0)
      << shape.kv_heads << " KV heads, blocks of " << shape.block_size << ", up to "
      << shape.max_blocks;
  for (int s = 0; s < shape.batch; ++s) {
    const int32_t len = shape.table_len[s];
    CHECK(len >= 1 && len <= shape.max_blocks)
        << "sequence " << s << " has " << len << " blocks of at most " << shape.max_blocks;
    for (int b = 0; b < len; ++b) {
      CHECK_GE(shape.block_table[int64_t{s} * shape.max_blocks + b], 0)
          << "block " << b << " of sequence " << s;
    }
  }
}

}  // namespace zipage::cpu
