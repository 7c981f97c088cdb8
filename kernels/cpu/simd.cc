#include "kernels/cpu/simd.h"

#include <cstdlib>
#include <string_view>

namespace zipage::cpu {
namespace {

int DetectLanes() {
#if defined(__x86_64__)
  const char* variable = std::getenv("ONEDNN_MAX_CPU_ISA");
  const std::string_view limit = variable != nullptr ? variable : "ALL";
  const bool allows_avx2 = limit != "SSE41" && limit != "AVX";
  const bool allows_avx512 = allows_avx2 && limit.substr(0, 4) != "AVX2";
  const bool has_v4 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  // Every CPU with these has F16C, LZCNT and MOVBE too, which complete x86-64-v3.
  const bool has_v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                      __builtin_cpu_supports("bmi") && __builtin_cpu_supports("bmi2");
  if (allows_avx512 && has_v4 && has_v3) return 16;
  if (allows_avx2 && has_v3) return 8;
#endif
  return 4;
}

}  // namespace

int VectorLanes() {
  static const int lanes = DetectLanes();
  return lanes;
}

}  // namespace zipage::cpu
