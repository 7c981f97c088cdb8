#pragma once
// The order of work on a CUDA device, without CUDA's headers.

struct CUstream_st;

namespace zipage {

// The same type as cudaStream_t. Kernels of one stream run in the order of their launches.
using Stream = CUstream_st*;

}  // namespace zipage
