#include "worker/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "nlohmann/json.hpp"
#include "worker/model/json_file.h"

namespace zipage {
namespace {

constexpr uint64_t kLengthBytes = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the format's own limit
constexpr size_t kMaxDimensions = 8;
constexpr std::string_view kLfsPrefix = "version https://git-lfs";

// Bits of one element; 0 if the type is unknown.
uint64_t TypeBits(std::string_view dtype) {
  static constexpr struct {
    std::string_view name;
    uint64_t bits;
  } kTypes[] = {{"F32", 32},    {"BF16", 16},   {"F16", 16},    {"F64", 64},    {"I64", 64},
                {"U64", 64},    {"I32", 32},    {"U32", 32},    {"I16", 16},    {"U16", 16},
                {"I8", 8},      {"U8", 8},      {"BOOL", 8},    {"F8_E4M3", 8}, {"F8_E5M2", 8},
                {"F8_E8M0", 8}, {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F4", 4},      {"C64", 64}};
  for (const auto& type : kTypes) {
    if (type.name == dtype) return type.bits;
  }
  return 0;
}

struct HeaderEntry {
  SafetensorsEntry tensor;
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Accepts exactly the header's grammar, event by event, so that a hostile header costs no more
// memory than its own size: {name: {"dtype": string, "shape": [u64...], "data_offsets": [u64,
// u64]}} and {"__metadata__": {string: string}}.
class HeaderReader final : public nlohmann::json_sax<nlohmann::json> {
 public:
  std::vector<HeaderEntry>& entries() { return entries_; }
  const std::string& error() const { return error_; }

  bool start_object(size_t) override {
    if (depth_ == 2 || in_array_) return Fail("an object where none belongs");
    ++depth_;
    return true;
  }

  bool key(std::string& name) override {
    if (depth_ == 1) {
      if (!names_.insert(name).second) return Fail("the name twice", &name);
      in_metadata_ = name == "__metadata__";
      seen_ = {};
      if (!in_metadata_) {
        entries_.emplace_back();
        entries_.back().tensor.name = name;
      }
      return true;
    }
    if (in_metadata_) return true;
    field_ = name == "dtype" ? kDType : name == "shape" ? kShape : kOffsets;
    if (field_ == kOffsets && name != "data_offsets") return Fail("an unknown member", &name);
    if (seen_[field_]) return Fail("a member twice", &name);
    seen_[field_] = true;
    return true;
  }

  bool end_object() override {
    if (depth_ == 2 && !in_metadata_ && !(seen_[kDType] && seen_[kShape] && seen_[kOffsets])) {
      return Fail("no dtype, shape or data_offsets");
    }
    if (depth_ == 2 && !in_metadata_ && num_offsets_ != 2) return Fail("not two data_offsets");
    --depth_;
    num_offsets_ = 0;
    return true;
  }

  bool string(std::string& value) override {
    if (depth_ == 2 && in_metadata_) return true;
    if (depth_ != 2 || in_array_ || field_ != kDType) return Fail("a string out of place", &value);
    entries_.back().tensor.dtype = value;
    return true;
  }

  bool start_array(size_t) override {
    if (depth_ != 2 || in_metadata_ || in_array_ || field_ == kDType) {
      return Fail("an array where none belongs");
    }
    in_array_ = true;
    return true;
  }

  bool end_array() override {
    in_array_ = false;
    return true;
  }

  bool number_unsigned(uint64_t value) override {
    if (!in_array_) return Fail("a number out of place");
    HeaderEntry& entry = entries_.back();
    if (field_ == kShape) {
      if (value > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) {
        return Fail("a dimension above 2^63");
      }
      if (entry.tensor.shape.size() == kMaxDimensions) return Fail("more than 8 dimensions");
      entry.tensor.shape.push_back(static_cast<int64_t>(value));
      return true;
    }
    if (num_offsets_ == 2) return Fail("not two data_offsets");
    (num_offsets_++ == 0 ? entry.begin : entry.end) = value;
    return true;
  }

  bool number_integer(int64_t) override { return Fail("a negative number"); }
  bool number_float(double, const std::string&) override { return Fail("a number not whole"); }
  bool null() override { return Fail("a null"); }
  bool boolean(bool) override { return Fail("true or false"); }
  bool binary(nlohmann::json::binary_t&) override { return Fail("binary data"); }
  bool parse_error(size_t, const std::string&, const nlohmann::detail::exception& e) override {
    error_ = absl::StrCat("is not JSON: ", e.what());
    return false;
  }

 private:
  enum Field : uint8_t { kDType, kShape, kOffsets };
  struct Seen {
    bool fields[3] = {false, false, false};
    bool& operator[](Field field) { return fields[field]; }
  };

  bool Fail(const char* what, const std::string* value = nullptr) {
    error_ = absl::StrCat("has ", what);
    if (value != nullptr) absl::StrAppend(&error_, ", ", Abbreviated(*value));
    if (depth_ > 0 && !entries_.empty()) {
      absl::StrAppend(&error_, ", at or after tensor ", Abbreviated(entries_.back().tensor.name));
    }
    return false;
  }

  std::vector<HeaderEntry> entries_;
  absl::flat_hash_set<std::string> names_;
  std::string error_;
  int depth_ = 0;  // of objects
  bool in_array_ = false;
  bool in_metadata_ = false;
  Field field_ = kDType;
  Seen seen_;
  int num_offsets_ = 0;
};

absl::Status Broken(std::string_view path, std::string_view what) {
  return absl::DataLossError(absl::StrFormat("%s: %s; download the file again", path, what));
}

// Bytes of a tensor; nothing if shape or size overflows or ends inside a byte.
bool TensorBytes(const std::vector<int64_t>& shape, uint64_t type_bits, uint64_t* bytes) {
  uint64_t bits = type_bits;
  for (const int64_t dimension : shape) {
    if (__builtin_mul_overflow(bits, static_cast<uint64_t>(dimension), &bits)) return false;
  }
  *bytes = bits / 8;
  return bits % 8 == 0;
}

// Type, shape and offsets of one tensor against each other and the size of the data.
absl::Status CheckEntry(const HeaderEntry& entry, uint64_t data_bytes, std::string_view path) {
  const std::string name = Abbreviated(entry.tensor.name);
  const uint64_t bits = TypeBits(entry.tensor.dtype);
  if (bits == 0) {
    return Broken(path, absl::StrFormat("tensor %s is of the unknown type %s", name,
                                        Abbreviated(entry.tensor.dtype)));
  }
  if (entry.begin > entry.end || entry.end > data_bytes) {
    return Broken(path, absl::StrFormat("tensor %s has data_offsets [%d, %d], but the file has %d "
                                        "bytes of data",
                                        name, entry.begin, entry.end, data_bytes));
  }
  uint64_t bytes = 0;
  if (!TensorBytes(entry.tensor.shape, bits, &bytes)) {
    return Broken(path, absl::StrFormat("tensor %s has a shape, %s, that overflows", name,
                                        nlohmann::json(entry.tensor.shape).dump()));
  }
  if (bytes != entry.end - entry.begin) {
    return Broken(
        path, absl::StrFormat("tensor %s of type %s and shape %s needs %d bytes, but its "
                              "data_offsets span %d",
                              name, entry.tensor.dtype, nlohmann::json(entry.tensor.shape).dump(),
                              bytes, entry.end - entry.begin));
  }
  return absl::OkStatus();
}

// The tensors, in order, cover all data once.
absl::Status CheckCover(const std::vector<HeaderEntry>& entries, uint64_t data_bytes,
                        std::string_view path) {
  uint64_t covered = 0;
  for (const HeaderEntry& entry : entries) {
    const std::string name = Abbreviated(entry.tensor.name);
    if (entry.begin < covered) {
      return Broken(path, absl::StrFormat("tensor %s overlaps the one before it", name));
    }
    if (entry.begin > covered) {
      return Broken(path, absl::StrFormat("%d bytes before tensor %s belong to no tensor",
                                          entry.begin - covered, name));
    }
    covered = entry.end;
  }
  if (covered == data_bytes) return absl::OkStatus();
  return Broken(path,
                absl::StrFormat("%d bytes at the end belong to no tensor", data_bytes - covered));
}

// The header's text.
absl::StatusOr<std::string_view> HeaderText(std::string_view file, std::string_view path) {
  if (file.substr(0, kLfsPrefix.size()) == kLfsPrefix) {
    return absl::DataLossError(absl::StrFormat(
        "%s is a Git LFS pointer, not the weights; run `git lfs pull` in its folder", path));
  }
  if (file.size() < kLengthBytes) {
    return Broken(path,
                  absl::StrFormat("has %d bytes, too few for a safetensors file", file.size()));
  }
  uint64_t length = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) {
    length = length << 8 | static_cast<uint8_t>(file[i]);
  }
  if (length > kMaxHeaderBytes) {
    return Broken(path, absl::StrFormat("header length %d is above the limit of %d, so this is no "
                                        "safetensors file",
                                        length, kMaxHeaderBytes));
  }
  if (length > file.size() - kLengthBytes) {
    return Broken(path, absl::StrFormat("is cut off: header length %d, but only %d bytes follow",
                                        length, file.size() - kLengthBytes));
  }
  return file.substr(kLengthBytes, length);
}

}  // namespace

absl::StatusOr<std::vector<SafetensorsEntry>> ParseSafetensors(std::string_view file,
                                                               std::string_view path) {
  ZIPAGE_ASSIGN_OR_RETURN(const std::string_view header, HeaderText(file, path));
  HeaderReader reader;
  if (!nlohmann::json::sax_parse(header.begin(), header.end(), &reader)) {
    return Broken(path, absl::StrCat("header ", reader.error()));
  }
  std::vector<HeaderEntry>& entries = reader.entries();
  const std::string_view data = file.substr(kLengthBytes + header.size());
  for (const HeaderEntry& entry : entries) {
    ZIPAGE_RETURN_IF_ERROR(CheckEntry(entry, data.size(), path));
  }
  std::sort(entries.begin(), entries.end(), [](const HeaderEntry& a, const HeaderEntry& b) {
    return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
  });
  ZIPAGE_RETURN_IF_ERROR(CheckCover(entries, data.size(), path));
  std::vector<SafetensorsEntry> tensors;
  tensors.reserve(entries.size());
  for (HeaderEntry& entry : entries) {
    entry.tensor.data = reinterpret_cast<const uint8_t*>(data.data()) + entry.begin;
    entry.tensor.bytes = entry.end - entry.begin;
    tensors.push_back(std::move(entry.tensor));
  }
  return tensors;
}

absl::StatusOr<std::unique_ptr<SafetensorsFile>> SafetensorsFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    return absl::NotFoundError(absl::StrFormat("%s: %s", path, std::strerror(errno)));
  }
  struct stat info {};
  auto file = std::unique_ptr<SafetensorsFile>(new SafetensorsFile);
  file->path_ = path;
  if (fstat(fd, &info) == 0 && S_ISREG(info.st_mode) && info.st_size > 0) {
    file->map_bytes_ = static_cast<size_t>(info.st_size);
    file->map_ = mmap(nullptr, file->map_bytes_, PROT_READ, MAP_PRIVATE, fd, 0);
  }
  const int error = errno;
  close(fd);
  if (file->map_ == MAP_FAILED) {
    file->map_ = nullptr;
    return absl::ResourceExhaustedError(
        absl::StrFormat("%s: mapping %d bytes: %s; free memory or raise `ulimit -v`", path,
                        file->map_bytes_, std::strerror(error)));
  }
  const std::string_view bytes(static_cast<const char*>(file->map_), file->map_bytes_);
  ZIPAGE_ASSIGN_OR_RETURN(file->entries_, ParseSafetensors(bytes, path));
  return file;
}

SafetensorsFile::~SafetensorsFile() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

}  // namespace zipage
