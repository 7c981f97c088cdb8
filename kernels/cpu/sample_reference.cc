#include <algorithm>
#include <cmath>
#include <vector>

#include "absl/strings/str_format.h"
#include "kernels/cpu/simd.h"
#include "kernels/philox.h"
#include "kernels/sample.h"

namespace zipage::reference {
namespace {

struct Token {
  int32_t id;
  float z;
  uint64_t weight;
};

bool Usable(const std::vector<float>& z) {
  bool any = false;
  for (float value : z) {
    if (std::isnan(value) || value == INFINITY) return false;
    any |= value != -INFINITY;
  }
  return any;
}

// All tokens in order.
std::vector<Token> Sorted(const std::vector<float>& z, float temperature) {
  const float max = *std::max_element(z.begin(), z.end());
  std::vector<Token> tokens;
  for (size_t i = 0; i < z.size(); ++i) {
    const double weight = cpu::Exp<float, int32_t>((z[i] - max) / temperature);
    tokens.push_back(
        {static_cast<int32_t>(i), z[i], static_cast<uint64_t>(std::nearbyint(weight * 0x1p43))});
  }
  std::sort(tokens.begin(), tokens.end(), [](const Token& a, const Token& b) {
    return a.z > b.z || (a.z == b.z && a.id < b.id);
  });
  return tokens;
}

uint64_t Sum(const std::vector<Token>& tokens) {
  uint64_t sum = 0;
  for (const Token& token : tokens) sum += token.weight;
  return sum;
}

std::vector<float> Adjusted(std::vector<float> z, const SampleRow& row) {
  for (int i = 0; i < row.num_seen; ++i) {
    float& value = z[static_cast<size_t>(row.seen[i].token)];
    value = value > 0 ? value / row.repetition_penalty : value * row.repetition_penalty;
    value -= row.frequency_penalty * static_cast<float>(row.seen[i].output_count);
    if (row.seen[i].output_count > 0) value -= row.presence_penalty;
  }
  for (int i = 0; i < row.num_banned; ++i) {
    const int32_t id = row.banned[i];
    if (id >= 0 && id < static_cast<int32_t>(z.size())) z[static_cast<size_t>(id)] = -INFINITY;
  }
  return z;
}

int32_t Draw(const std::vector<float>& z, const SampleRow& row) {
  if (row.temperature == 0) return Sorted(z, 1.0F).front().id;
  std::vector<Token> kept = Sorted(z, row.temperature);
  const float max = kept.front().z;
  if (row.min_p > 0) {
    std::erase_if(kept, [&](const Token& token) {
      return (token.z - max) / row.temperature < std::log(row.min_p);
    });
  }
  if (row.top_k > 0 && kept.size() > static_cast<size_t>(row.top_k)) {
    kept.resize(static_cast<size_t>(row.top_k));
  }
  if (row.top_p < 1) {
    const double wanted = static_cast<double>(row.top_p) * static_cast<double>(Sum(kept));
    uint64_t sum = 0;
    size_t n = 0;
    while (n < kept.size()) {
      sum += kept[n++].weight;
      if (static_cast<double>(sum) >= wanted) break;
    }
    kept.resize(n);
  }
  std::sort(kept.begin(), kept.end(), [](const Token& a, const Token& b) { return a.id < b.id; });
  const auto random =
      Philox4x32({static_cast<uint32_t>(row.position), static_cast<uint32_t>(row.position >> 32),
                  row.sample_index, 0},
                 {static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32)});
  const uint64_t u = (uint64_t{random[1]} << 32) | random[0];
  __extension__ using Wide = unsigned __int128;
  const auto target = static_cast<uint64_t>((static_cast<Wide>(u) * Sum(kept)) >> 64);
  uint64_t running = 0;
  for (const Token& token : kept) {
    running += token.weight;
    if (running > target) return token.id;
  }
  return kept.back().id;
}

}  // namespace

absl::Status Sample(const SampleParams& p) {
  for (int64_t r = 0; r < p.num_rows; ++r) {
    const SampleRow& row = p.rows[r];
    const float* logits = p.logits + r * p.logits_stride;
    const std::vector<float> z(logits, logits + p.vocab);
    const std::vector<float> adjusted = Adjusted(z, row);
    if (!Usable(z) || !Usable(adjusted)) {
      return absl::InternalError(absl::StrFormat("row %d has no token to sample", r));
    }
    SampleResult& sampled = p.sampled[r];
    sampled = {Draw(adjusted, row), 0.0F};
    if (row.num_logprobs < 0) continue;
    const std::vector<Token> order = Sorted(z, 1.0F);
    const double log_sum = order.front().z + std::log(static_cast<double>(Sum(order)) / 0x1p43);
    sampled.logprob = static_cast<float>(z[static_cast<size_t>(sampled.token)] - log_sum);
    for (size_t i = 0; i < std::min(order.size(), static_cast<size_t>(row.num_logprobs)); ++i) {
      p.top_logprobs[r * p.max_logprobs + static_cast<int64_t>(i)] = {
          order[i].id, static_cast<float>(order[i].z - log_sum)};
    }
  }
  return absl::OkStatus();
}

}  // namespace zipage::reference
