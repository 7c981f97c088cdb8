#pragma once
// A model without weights, for the scheduler's tests. What a slot holds is a number that depends on
// the token, on its position and on everything that its sequence attended to before, in order; a
// token depends on all slots that are attended to, a compression on them and on the queries of the
// window. So a wrong slot, order or length changes every token after it, as it would in a real
// model. All of it is deterministic: a request's output is known without a scheduler (RunAlone).

#include <cstdint>
#include <span>
#include <vector>

#include "proto/messages.h"

namespace zipage::fake {

inline constexpr TokenId kVocabSize = 50;

uint64_t Mix(uint64_t h, uint64_t v);

// What attending to slots with these contents gives. Slot by slot: Attend(Attend({}), c) …
uint64_t Attend(std::span<const uint64_t> contents);
uint64_t Attend(uint64_t attended, uint64_t content);

// What the slot of a token holds, given what is attended to before it.
uint64_t ContentOf(uint64_t attended, TokenId token, int64_t position);
uint64_t QueryOf(uint64_t content);

// What a compression needs besides the slots.
struct Selection {
  int64_t num_kept = 0;
  int64_t num_pinned = 0;  // Leading slots, kept whatever they hold.
  uint32_t round = 0;      // Compressions before it.
  uint64_t seed = 0;
  uint32_t sample_index = 0;
};
// The slots it keeps, ascending: the pinned, the newest [window], the others by a score that
// depends on all contents and queries. `queries`: [window]. REQUIRES: num_pinned + window <=
// num_kept <= slots.
std::vector<int64_t> SelectSlots(std::span<const uint64_t> contents,
                                 std::span<const uint64_t> queries, const Selection& selection);

// The token after `length` tokens; no stop token before min_tokens.
TokenId NextToken(uint64_t attended, int64_t length, int64_t num_prompt_tokens,
                  const SamplingParams& sampling, uint32_t sample_index);

// How a request is compressed, written down again, apart from the scheduler's rules.
struct Rules {
  int block_size = 4;
  int max_cache_blocks = 0;  // 0: never.
  int window = 0;
  bool pin_prompt = false;
  bool compress_prefill = false;
  int ngram_size = 0;  // Of the degeneration guard; 0: off.
  int ngram_count = 0;

  // Leading slots that a compression to `num_kept` slots pins.
  int64_t NumPinned(int64_t num_prompt_tokens, int64_t num_kept) const;
  // Blocks of a table when it is compressed first: the most that a sequence ever has.
  int64_t FirstBlocks(int64_t num_prompt_tokens) const;
};

// What a request's sequence does when it runs alone.
struct Alone {
  std::vector<TokenId> output;
  bool repeats = false;          // The guard ends it.
  int64_t num_compressions = 0;  // Before a token that the output needs.
  int64_t peak_slots = 0;
  int64_t kept_slots = 0;  // By a compression; 0: there was none.
  int64_t prompt_tokens_kept = 0;
};
// Up to `max_length` tokens, prompt included.
Alone RunAlone(std::span<const TokenId> prompt, int64_t max_length, const SamplingParams& sampling,
               uint32_t sample_index, const Rules& rules);

}  // namespace zipage::fake
