#pragma once
// Embedding rows of one vocabulary shard.

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace zipage {

// out[t, :] = table[ids[t] - first_row, :] if first_row <= ids[t] < first_row + num_rows, else 0;
// the sum of all shards' results is the whole table's result. Bytes: tokens * hidden *
// (sizeof(table) + sizeof(out)); no flops. CHECKs the element types.
struct EmbeddingParams {
  const int32_t* ids;  // [tokens]
  const void* table;   // [num_rows, hidden], rows first_row and up of the vocabulary
  void* out;           // [tokens, hidden]
  int64_t tokens;
  int64_t hidden;
  int64_t first_row;
  int64_t num_rows;
  DType table_dtype;  // any
  DType out_dtype;    // kFloat32 or kBFloat16
};

namespace cpu {
void Embedding(const EmbeddingParams& p);
}  // namespace cpu

namespace cuda {
// kUnimplemented for what it was not built for, kInternal if the launch fails.
absl::Status Embedding(const EmbeddingParams& p, Stream stream);
}  // namespace cuda
}  // namespace zipage
