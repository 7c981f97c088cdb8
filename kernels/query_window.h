#pragma once
// Keeps the newest rotated queries of sequences that will be compressed (DESIGN 5).

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/stream.h"
#include "kernels/tensor.h"

namespace zipage {

// window[window_row[i]] = q[token[i]], all heads, for i < count. No window row occurs twice. Bytes:
// 2 * count * q_heads * head_dim * sizeof(q). CHECKs the element type and rows against num_rows.
struct StoreQueriesParams {
  const void* q;              // [tokens, q_heads, head_dim], rows q_stride apart, after RoPE
  const int32_t* token;       // [count] row of q
  const int64_t* window_row;  // [count] query slot * w + place in the window
  void* window;  // [num_rows, q_heads, head_dim] of one layer; num_rows = query slots * w
  int64_t count;
  int64_t num_rows;
  int64_t q_stride;  // elements
  int q_heads;
  int head_dim;
  DType dtype;  // of both: kFloat32 or kBFloat16
};

namespace cpu {
void StoreQueries(const StoreQueriesParams& p);
}  // namespace cpu

namespace cuda {
// A row out of range ends the context with a trap.
// kUnimplemented for what it was not built for, kInternal if the launch fails.
absl::Status StoreQueries(const StoreQueriesParams& p, Stream stream);
}  // namespace cuda
}  // namespace zipage
