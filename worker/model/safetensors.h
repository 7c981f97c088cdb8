#pragma once
// One safetensors file, mapped read-only. Every byte of it is hostile: names, types, shapes and
// offsets are checked against each other and the file's size before any of the data can be reached.
// https://huggingface.co/docs/safetensors
//
//   bytes 0..7   N, little-endian u64: length of the header
//   bytes 8..8+N JSON: {"__metadata__": {"format": "pt"},
//                       "norm.weight": {"dtype": "BF16", "shape": [64], "data_offsets": [0, 128]}}
//   the rest     the tensors, without holes; offsets count from here

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "proto/status.h"

namespace zipage {

// One tensor of a file. `dtype` is the format's own name ("BF16", "F32", "I64", …): a file may hold
// tensors that the engine never reads. `data` may be unaligned for the type.
struct SafetensorsEntry {
  std::string name;
  std::string dtype;
  std::vector<int64_t> shape;     // at most 8 dimensions, no overflow; may hold zeros
  const uint8_t* data = nullptr;  // row-major, little-endian
  size_t bytes = 0;               // product(shape) * size of the type
};

// Thread-compatible. Pointers live as long as the object. The file must not shrink meanwhile.
class SafetensorsFile {
 public:
  // kNotFound if there is no such file; kDataLoss naming file, tensor and value if it is not a
  // whole, well-formed safetensors file (the cure for a Git LFS pointer is `git lfs pull`).
  static absl::StatusOr<std::unique_ptr<SafetensorsFile>> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(const SafetensorsFile&) = delete;
  SafetensorsFile& operator=(const SafetensorsFile&) = delete;

  // In the order of their offsets; names are unique.
  const std::vector<SafetensorsEntry>& entries() const { return entries_; }
  const std::string& path() const { return path_; }

 private:
  SafetensorsFile() = default;

  std::string path_;
  void* map_ = nullptr;
  size_t map_bytes_ = 0;
  std::vector<SafetensorsEntry> entries_;
};

// The checks of Open on bytes in memory: a whole file. `path` is for messages only.
absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensors(std::string_view file,
                                                               std::string_view path);

}  // namespace zipage
