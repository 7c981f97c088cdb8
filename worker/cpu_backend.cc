#include "worker/cpu_backend.h"

#include <omp.h>
#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "glog/logging.h"
#include "kernels/matmul.h"

namespace zipage {
namespace {

class CpuLinear : public Linear {
 public:
  explicit CpuLinear(cpu::PackedLinear packed) : packed_(std::move(packed)) {}
  size_t bytes() const override { return packed_.packed_bytes(); }
  cpu::PackedLinear& packed() { return packed_; }

 private:
  cpu::PackedLinear packed_;
};

// From here on a mapping is worth huge pages.
constexpr size_t kHugePageFrom = size_t{4} << 20;

void Unmap(void* data, size_t bytes) { munmap(data, bytes); }

// The number in the first line of a file such as memory.max; nothing if there is no file or no
// number ("max").
std::optional<uint64_t> ReadNumber(const std::string& path) {
  std::ifstream file(path);
  uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// The number after `key` in a file of lines "key number …".
std::optional<uint64_t> ReadKey(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  std::string line;
  while (std::getline(file, line)) {
    if (line.size() > key.size() && line.compare(0, key.size(), key) == 0) {
      try {
        return std::stoull(line.substr(key.size()));
      } catch (const std::exception&) {
        return std::nullopt;
      }
    }
  }
  return std::nullopt;
}

// What the control group (version 2 or 1) leaves; page cache that can be dropped counts as free.
std::optional<uint64_t> CgroupMemory() {
  struct Files {
    const char* folder;
    const char* limit;
    const char* usage;
    const char* inactive;
  };
  constexpr Files kVersions[] = {
      {"/sys/fs/cgroup/", "memory.max", "memory.current", "inactive_file "},
      {"/sys/fs/cgroup/memory/", "memory.limit_in_bytes", "memory.usage_in_bytes",
       "total_inactive_file "}};
  for (const Files& files : kVersions) {
    const std::string folder = files.folder;
    const auto limit = ReadNumber(folder + files.limit);
    const auto usage = ReadNumber(folder + files.usage);
    if (!limit || !usage) continue;
    const uint64_t inactive = ReadKey(folder + "memory.stat", files.inactive).value_or(0);
    const uint64_t used = *usage - std::min(*usage, inactive);
    return *limit - std::min(*limit, used);
  }
  return std::nullopt;
}

bool AllNumbers(const float* row, int64_t count) {
  // A sum of zero products is NaN as soon as one element is NaN or infinite.
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += row[i] * 0.0F;
  return sum == 0.0F;
}

}  // namespace

CpuBackend::CpuBackend(int num_threads) : num_threads_(num_threads) {
  CHECK_GE(num_threads, 1);
  omp_set_num_threads(num_threads);
}

int CpuBackend::DefaultThreads(int tp) {
  if (std::getenv("OMP_NUM_THREADS") != nullptr) return omp_get_max_threads();
  int cpus = omp_get_num_procs();
  // "QUOTA PERIOD" in microseconds, or "max PERIOD" without a quota.
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  int64_t quota = 0;
  int64_t period = 0;
  if (file >> quota >> period && period > 0) {
    cpus = std::min(cpus, static_cast<int>((quota + period - 1) / period));
  }
  return std::max(1, cpus / tp);
}

std::string CpuBackend::Description() const {
  return absl::StrCat("cpu, ", num_threads_, num_threads_ == 1 ? " thread" : " threads");
}

absl::StatusOr<DType> CpuBackend::ResolveDType(const std::string& requested,
                                               DType checkpoint) const {
  const cpu::Bf16Matmul bf16 = cpu::CpuBf16Matmul();
  if (requested == "float32") return DType::kFloat32;
  if (requested == "auto") {
    const bool native = checkpoint == DType::kBFloat16 && bf16 == cpu::Bf16Matmul::kNative;
    return native ? DType::kBFloat16 : DType::kFloat32;
  }
  if (requested == "bfloat16") {
    if (bf16 != cpu::Bf16Matmul::kNone) return DType::kBFloat16;
    return absl::InvalidArgumentError(
        "dtype is bfloat16, which this CPU cannot multiply (it lacks AVX-512); use dtype auto or "
        "float32");
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "dtype is ", requested, ", which device cpu does not compute in; use dtype auto or float32"));
}

absl::StatusOr<size_t> CpuBackend::AvailableMemory() const {
  const auto kilobytes = ReadKey("/proc/meminfo", "MemAvailable:");
  if (!kilobytes) {
    return absl::InternalError("/proc/meminfo has no MemAvailable; is /proc mounted?");
  }
  return std::min<uint64_t>(*kilobytes * 1024,
                            CgroupMemory().value_or(std::numeric_limits<uint64_t>::max()));
}

absl::StatusOr<DeviceMemory> CpuBackend::Allocate(size_t bytes, const std::string& what) {
  // Mapped, so that pages cost nothing until they are touched; reserving nothing, because the KV
  // pool is sized by what is available and seldom filled.
  const size_t size = std::max<size_t>(bytes, 1);
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no memory for ", what, " (", bytes, " bytes): ", std::strerror(errno)));
  }
  if (size >= kHugePageFrom) madvise(data, size, MADV_HUGEPAGE);
  return DeviceMemory(data, size, &Unmap);
}

void CpuBackend::CopyToDevice(void* device, const void* host, size_t bytes) {
  if (bytes > 0) std::memcpy(device, host, bytes);
}

void CpuBackend::CopyToHost(void* host, const void* device, size_t bytes) {
  if (bytes > 0) std::memcpy(host, device, bytes);
}

void CpuBackend::CopyRows(void* to, size_t to_stride, const void* from, size_t from_stride,
                          size_t row_bytes, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) {
    std::memcpy(static_cast<uint8_t*>(to) + r * to_stride,
                static_cast<const uint8_t*>(from) + r * from_stride, row_bytes);
  }
}

absl::StatusOr<std::unique_ptr<Linear>> CpuBackend::LoadLinear(const std::vector<LinearPart>& parts,
                                                               int64_t in_features, DType dtype) {
  int64_t out_features = 0;
  for (const LinearPart& part : parts) out_features += part.num_rows;
  cpu::PackedLinear packed(out_features, in_features, dtype);
  int64_t row = 0;
  for (const LinearPart& part : parts) {
    packed.SetRows(row, part.num_rows, part.weight, part.dtype, part.row_stride);
    if (part.bias != nullptr) packed.SetBias(row, part.num_rows, part.bias, part.bias_dtype);
    row += part.num_rows;
  }
  ZIPAGE_RETURN_IF_ERROR(packed.Pack());
  return std::make_unique<CpuLinear>(std::move(packed));
}

absl::Status CpuBackend::Multiply(Linear* linear, const void* x, void* y, int64_t rows,
                                  DType out_dtype) {
  return static_cast<CpuLinear*>(linear)->packed().Apply(x, y, rows, out_dtype);
}

void CpuBackend::Embedding(const EmbeddingParams& p) { cpu::Embedding(p); }
void CpuBackend::RmsNorm(const RmsNormParams& p) { cpu::RmsNorm(p); }
void CpuBackend::RopeAndCache(const RopeAndCacheParams& p) { cpu::RopeAndCache(p); }
void CpuBackend::PagedAttention(const PagedAttentionParams& p) { cpu::PagedAttention(p); }
void CpuBackend::SiluMul(const SiluMulParams& p) { cpu::SiluMul(p); }
void CpuBackend::StoreQueries(const StoreQueriesParams& p) { cpu::StoreQueries(p); }
void CpuBackend::WindowScores(const WindowScoresParams& p) { cpu::WindowScores(p); }
void CpuBackend::GlobalScores(const GlobalScoresParams& p) { cpu::GlobalScores(p); }
void CpuBackend::PoolScores(const PoolScoresParams& p) { cpu::PoolScores(p); }
void CpuBackend::KeySimilarity(const KeySimilarityParams& p) { cpu::KeySimilarity(p); }
void CpuBackend::CombineScores(const CombineScoresParams& p) { cpu::CombineScores(p); }
void CpuBackend::RandomScores(const RandomScoresParams& p) { cpu::RandomScores(p); }
void CpuBackend::SelectSlots(const SelectSlotsParams& p) { cpu::SelectSlots(p); }
void CpuBackend::PackSlots(const PackSlotsParams& p) { cpu::PackSlots(p); }

void CpuBackend::RoundToBFloat16(const float* in, BFloat16* out, int64_t count) {
#pragma omp parallel for simd
  for (int64_t i = 0; i < count; ++i) out[i] = ToBFloat16(in[i]);
}

absl::Status CpuBackend::Sample(float* logits, int64_t vocab, const std::vector<SampleRow>& rows,
                                int32_t* tokens, SampleOutput* output) {
  const auto num_rows = static_cast<int64_t>(rows.size());
  int32_t max_logprobs = 0;
  for (const SampleRow& row : rows) max_logprobs = std::max(max_logprobs, row.num_logprobs);
  output->results.resize(num_rows);
  output->logprobs.resize(num_rows * max_logprobs);
  output->corrupted.assign(num_rows, 0);
#pragma omp parallel for
  for (int64_t r = 0; r < num_rows; ++r) {
    if (AllNumbers(logits + r * vocab, vocab)) continue;
    output->corrupted[r] = 1;
    std::fill_n(logits + r * vocab, vocab, 0.0F);
  }
  ZIPAGE_RETURN_IF_ERROR(cpu::Sample({.logits = logits,
                                      .rows = rows.data(),
                                      .sampled = output->results.data(),
                                      .top_logprobs = output->logprobs.data(),
                                      .num_rows = num_rows,
                                      .vocab = vocab,
                                      .logits_stride = vocab,
                                      .max_logprobs = max_logprobs}));
  for (int64_t r = 0; r < num_rows; ++r) {
    tokens[r] = output->corrupted[r] != 0 ? 0 : output->results[r].token;
  }
  return absl::OkStatus();
}

void CpuBackend::GatherTokens(const int32_t* in, const int32_t* index, int32_t* out,
                              int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[i] = in[index[i]];
}

void CpuBackend::ScatterTokens(const int32_t* in, const int32_t* index, int32_t* out,
                               int64_t count) {
  for (int64_t i = 0; i < count; ++i) out[index[i]] = in[i];
}

}  // namespace zipage
