#pragma once
// Byte-level byte-pair encoding: vocabulary, merges, and the merging of one piece. Works on raw
// bytes; ByteLevel's printable stand-ins for bytes exist only in tokenizer.json. Immutable after
// Create; any thread.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"

namespace zipage {

// The bytes that a token's text in tokenizer.json stands for ("Ġthe" -> " the"): every character
// mapped back to its byte, or, if one of them stands for no byte, the text itself.
// `*is_byte_level` tells which.
std::string ByteLevelToBytes(std::string_view token, bool* is_byte_level);

class Bpe {
 public:
  struct Data {
    std::vector<std::pair<std::string, int64_t>> vocab;       // token text, id
    std::vector<std::pair<std::string, std::string>> merges;  // token texts, best first
    bool ignore_merges = false;  // a piece that is a token is that token, whatever the merges say
    bool has_unk_token = false;
  };
  static constexpr int64_t kMaxTokenId = (1 << 22) - 1;

  // InvalidArgument for ids out of range or given twice, and merges of unknown tokens.
  static absl::StatusOr<std::unique_ptr<Bpe>> Create(Data data);

  // Appends the ids of one piece. A byte that is no token is dropped (as the reference does for a
  // vocabulary without unk_token). O(n log n) in the piece's length.
  void EncodePiece(std::string_view piece, std::vector<int32_t>* ids) const;

  // Raw bytes of a token; empty if the id is not in the vocabulary.
  const std::string& TokenBytes(int32_t id) const;
  bool HasId(int32_t id) const;
  // Id of a token by its text as written in tokenizer.json.
  std::optional<int32_t> TokenId(std::string_view token_text) const;
  // One more than the largest id.
  int32_t id_limit() const { return static_cast<int32_t>(bytes_of_.size()); }
  size_t max_token_bytes() const { return max_token_bytes_; }

 private:
  struct Merge {
    uint32_t rank;
    int32_t result;
  };
  struct Symbol {
    int32_t id;  // -1: merged into the one before
    uint32_t previous;
    uint32_t next;
  };

  Bpe() = default;
  absl::Status AddVocab(const std::vector<std::pair<std::string, int64_t>>& vocab);
  absl::Status AddMerges(const std::vector<std::pair<std::string, std::string>>& merges);
  const Merge* FindMerge(int32_t left, int32_t right) const;
  void MergeShort(std::vector<int32_t>* symbols) const;
  void MergeLong(std::vector<int32_t>* symbols) const;

  std::vector<std::string> bytes_of_;
  std::vector<bool> has_id_;
  absl::flat_hash_map<std::string, int32_t> id_of_bytes_;
  absl::flat_hash_map<std::string, int32_t> id_of_text_;  // tokens whose text is not byte-level
  absl::flat_hash_map<uint64_t, Merge> merges_;           // left id << 32 | right id
  int32_t byte_id_[256];                                  // -1: no such token
  bool ignore_merges_ = false;
  size_t max_token_bytes_ = 1;
};

}  // namespace zipage
