#include "tests/scheduler/fake_model.h"

#include <algorithm>
#include <numeric>

namespace zipage::fake {

uint64_t Mix(uint64_t h, uint64_t v) {
  h = (h ^ v) * 0x9e3779b97f4a7c15ULL;
  h ^= h >> 29;
  return (h * 0xbf58476d1ce4e5b9ULL) ^ (h >> 32);
}

uint64_t Attend(uint64_t attended, uint64_t content) { return Mix(attended, content); }

uint64_t Attend(std::span<const uint64_t> contents) {
  uint64_t attended = 1;
  for (const uint64_t content : contents) attended = Attend(attended, content);
  return attended;
}

uint64_t ContentOf(uint64_t attended, TokenId token, int64_t position) {
  return Mix(Mix(attended, static_cast<uint64_t>(token) + 1), static_cast<uint64_t>(position));
}

uint64_t QueryOf(uint64_t content) { return Mix(content, 0x7175657279ULL); }

std::vector<int64_t> SelectSlots(std::span<const uint64_t> contents,
                                 std::span<const uint64_t> queries, const Selection& selection) {
  const auto num_slots = static_cast<int64_t>(contents.size());
  const auto window = static_cast<int64_t>(queries.size());
  uint64_t key = Mix(Mix(Attend(contents), selection.round), selection.seed);
  key = Mix(key, selection.sample_index);
  for (const uint64_t query : queries) key = Mix(key, query);
  std::vector<int64_t> rivals(num_slots - selection.num_pinned - window);
  std::iota(rivals.begin(), rivals.end(), selection.num_pinned);
  std::ranges::sort(rivals, {},
                    [&](int64_t slot) { return std::pair(Mix(key, contents[slot]), slot); });
  std::vector<int64_t> kept(selection.num_pinned);
  std::iota(kept.begin(), kept.end(), int64_t{0});
  kept.insert(kept.end(), rivals.begin(),
              rivals.begin() + (selection.num_kept - selection.num_pinned - window));
  for (int64_t slot = num_slots - window; slot < num_slots; ++slot) kept.push_back(slot);
  std::ranges::sort(kept);
  return kept;
}

TokenId NextToken(uint64_t attended, int64_t length, int64_t num_prompt_tokens,
                  const SamplingParams& sampling, uint32_t sample_index) {
  uint64_t h = Mix(Mix(attended, sampling.seed), sample_index);
  h = Mix(h, static_cast<uint64_t>(length));
  const bool may_stop = length - num_prompt_tokens >= sampling.min_tokens;
  for (;; h = Mix(h, 1)) {
    const auto token = static_cast<TokenId>((h >> 8) % kVocabSize);
    if (may_stop || !std::ranges::binary_search(sampling.stop_token_ids, token)) return token;
  }
}

int64_t Rules::NumPinned(int64_t num_prompt_tokens, int64_t num_kept) const {
  if (!pin_prompt) return 0;
  return std::min({num_prompt_tokens, num_kept / 2, num_kept - window});
}

int64_t Rules::FirstBlocks(int64_t num_prompt_tokens) const {
  const int64_t prompt_blocks = (num_prompt_tokens + block_size - 1) / block_size;
  return std::max<int64_t>(max_cache_blocks + 1, compress_prefill ? 0 : prompt_blocks);
}

namespace {

// Whether the last `size` tokens of `output` occur in it `count` times.
bool Repeats(const std::vector<TokenId>& output, int size, int count) {
  if (size == 0 || output.size() < static_cast<size_t>(size)) return false;
  int num_found = 0;
  for (auto it = output.begin(); output.end() - it >= size; ++it) {
    if (std::equal(it, it + size, output.end() - size)) ++num_found;
  }
  return num_found >= count;
}

// The slots of a sequence that runs alone.
class Slots {
 public:
  Slots(int64_t num_prompt_tokens, const SamplingParams& sampling, uint32_t sample_index,
        const Rules& rules)
      : num_prompt_tokens_(num_prompt_tokens),
        sampling_(sampling),
        sample_index_(sample_index),
        rules_(rules) {}

  void Compute(TokenId token, Alone* alone) {
    if (IsDue()) Compress(alone);
    contents_.push_back(ContentOf(Attend(contents_), token, position_));
    is_prompt_.push_back(position_ < num_prompt_tokens_);
    ++position_;
    alone->peak_slots = std::max(alone->peak_slots, static_cast<int64_t>(contents_.size()));
  }
  uint64_t attended() const { return Attend(contents_); }

 private:
  bool IsDue() const {
    const auto num_slots = static_cast<int64_t>(contents_.size());
    return rules_.max_cache_blocks > 0 && num_slots % rules_.block_size == 0 &&
           num_slots / rules_.block_size > rules_.max_cache_blocks &&
           (rules_.compress_prefill || position_ >= num_prompt_tokens_);
  }
  void Compress(Alone* alone) {
    const int64_t num_kept = int64_t{rules_.max_cache_blocks} * rules_.block_size;
    std::vector<uint64_t> queries;
    for (size_t i = contents_.size() - rules_.window; i < contents_.size(); ++i) {
      queries.push_back(QueryOf(contents_[i]));
    }
    const std::vector<int64_t> kept =
        SelectSlots(contents_, queries,
                    {.num_kept = num_kept,
                     .num_pinned = rules_.NumPinned(num_prompt_tokens_, num_kept),
                     .round = static_cast<uint32_t>(alone->num_compressions),
                     .seed = sampling_.seed,
                     .sample_index = sample_index_});
    for (size_t i = 0; i < kept.size(); ++i) {
      contents_[i] = contents_[kept[i]];
      is_prompt_[i] = is_prompt_[kept[i]];
    }
    contents_.resize(num_kept);
    is_prompt_.resize(num_kept);
    ++alone->num_compressions;
    alone->kept_slots = num_kept;
    alone->prompt_tokens_kept = std::ranges::count(is_prompt_, true);
  }

  int64_t num_prompt_tokens_;
  const SamplingParams& sampling_;
  uint32_t sample_index_;
  const Rules& rules_;
  std::vector<uint64_t> contents_;
  std::vector<bool> is_prompt_;
  int64_t position_ = 0;
};

}  // namespace

Alone RunAlone(std::span<const TokenId> prompt, int64_t max_length, const SamplingParams& sampling,
               uint32_t sample_index, const Rules& rules) {
  const auto num_prompt_tokens = static_cast<int64_t>(prompt.size());
  Alone alone;
  Slots slots(num_prompt_tokens, sampling, sample_index, rules);
  for (const TokenId token : prompt) slots.Compute(token, &alone);
  for (int64_t length = num_prompt_tokens; length < max_length; ++length) {
    if (length > num_prompt_tokens) slots.Compute(alone.output.back(), &alone);
    alone.output.push_back(
        NextToken(slots.attended(), length, num_prompt_tokens, sampling, sample_index));
    if (std::ranges::binary_search(sampling.stop_token_ids, alone.output.back())) break;
    alone.repeats = static_cast<int64_t>(alone.output.size()) >= sampling.min_tokens &&
                    Repeats(alone.output, rules.ngram_size, rules.ngram_count);
    if (alone.repeats) break;
  }
  return alone;
}

}  // namespace zipage::fake
