#include "scheduler/text/bpe.h"

#include <algorithm>
#include <array>
#include <functional>
#include <queue>

#include "absl/strings/str_format.h"
#include "proto/status.h"
#include "scheduler/text/utf8.h"

namespace zipage {
namespace {

constexpr uint32_t kNone = 0xFFFFFFFF;
// Up to this many symbols a scan for the best pair beats the queue.
constexpr size_t kShortPiece = 32;
constexpr size_t kMaxTokenBytes = 4096;

// byte_of[c] for code points below 324 (GPT-2's bytes_to_unicode, inverted); -1: stands for none.
// Printable Latin-1 stands for itself; the other 68 bytes are numbered from U+0100 on.
std::array<int, 324> MakeByteOfChar() {
  std::array<int, 324> byte_of;
  byte_of.fill(-1);
  int shifted = 256;
  for (int b = 0; b < 256; ++b) {
    bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
    byte_of[printable ? b : shifted++] = b;
  }
  return byte_of;
}

uint64_t PairKey(int32_t left, int32_t right) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32) | static_cast<uint32_t>(right);
}

}  // namespace

std::string ByteLevelToBytes(std::string_view token, bool* is_byte_level) {
  static const std::array<int, 324> kByteOfChar = MakeByteOfChar();
  std::string bytes;
  bytes.reserve(token.size());
  for (size_t i = 0; i < token.size();) {
    Utf8Char c = DecodeUtf8(token.substr(i));
    if (c.code_point >= kByteOfChar.size() || kByteOfChar[c.code_point] < 0) {
      *is_byte_level = false;
      return std::string(token);
    }
    bytes.push_back(static_cast<char>(kByteOfChar[c.code_point]));
    i += c.size;
  }
  *is_byte_level = true;
  return bytes;
}

absl::StatusOr<std::unique_ptr<Bpe>> Bpe::Create(Data data) {
  std::unique_ptr<Bpe> bpe(new Bpe);
  bpe->ignore_merges_ = data.ignore_merges;
  ZIPAGE_RETURN_IF_ERROR(bpe->AddVocab(data.vocab));
  ZIPAGE_RETURN_IF_ERROR(bpe->AddMerges(data.merges));
  for (int b = 0; b < 256; ++b) {
    auto it = bpe->id_of_bytes_.find(std::string(1, static_cast<char>(b)));
    bpe->byte_id_[b] = it == bpe->id_of_bytes_.end() ? -1 : it->second;
    if (bpe->byte_id_[b] < 0 && data.has_unk_token) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "model: unk_token is set and byte %d is no token; such a vocabulary is not supported",
          b));
    }
  }
  return bpe;
}

absl::Status Bpe::AddVocab(const std::vector<std::pair<std::string, int64_t>>& vocab) {
  if (vocab.empty()) return absl::InvalidArgumentError("model: 'vocab' is empty");
  int64_t max_id = 0;
  for (const auto& [text, id] : vocab) {
    if (id < 0 || id > kMaxTokenId) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "model: token '%s' has id %d; ids are 0 to %d", text.substr(0, 80), id, kMaxTokenId));
    }
    if (text.empty() || text.size() > kMaxTokenBytes) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "model: token %d has %d bytes; give 1 to %d", id, text.size(), kMaxTokenBytes));
    }
    max_id = std::max(max_id, id);
  }
  bytes_of_.resize(static_cast<size_t>(max_id) + 1);
  has_id_.resize(static_cast<size_t>(max_id) + 1);
  id_of_bytes_.reserve(vocab.size());
  for (const auto& [text, id] : vocab) {
    if (has_id_[id]) {
      return absl::InvalidArgumentError(absl::StrFormat("model: two tokens have id %d", id));
    }
    has_id_[id] = true;
    bool is_byte_level = false;
    bytes_of_[id] = ByteLevelToBytes(text, &is_byte_level);
    max_token_bytes_ = std::max(max_token_bytes_, bytes_of_[id].size());
    auto& map = is_byte_level ? id_of_bytes_ : id_of_text_;
    if (!map.emplace(bytes_of_[id], static_cast<int32_t>(id)).second) {
      return absl::InvalidArgumentError(
          absl::StrFormat("model: token '%s' is in 'vocab' twice", text.substr(0, 80)));
    }
  }
  return absl::OkStatus();
}

absl::Status Bpe::AddMerges(const std::vector<std::pair<std::string, std::string>>& merges) {
  merges_.reserve(merges.size());
  uint32_t rank = 0;
  for (const auto& [left, right] : merges) {
    std::optional<int32_t> left_id = TokenId(left);
    std::optional<int32_t> right_id = TokenId(right);
    std::optional<int32_t> result;
    if (left_id && right_id) result = TokenId(left + right);
    if (!result) {
      return absl::InvalidArgumentError(
          absl::StrFormat("model: merge %d ('%s' + '%s') names a token that is not in 'vocab'",
                          rank, left.substr(0, 80), right.substr(0, 80)));
    }
    merges_.insert_or_assign(PairKey(*left_id, *right_id), Merge{rank, *result});
    ++rank;
  }
  return absl::OkStatus();
}

void Bpe::EncodePiece(std::string_view piece, std::vector<int32_t>* ids) const {
  if (ignore_merges_) {
    auto it = id_of_bytes_.find(ToAbsl(piece));
    if (it != id_of_bytes_.end()) {
      ids->push_back(it->second);
      return;
    }
  }
  std::vector<int32_t> symbols;
  symbols.reserve(piece.size());
  for (char c : piece) {
    int32_t id = byte_id_[static_cast<uint8_t>(c)];
    if (id >= 0) symbols.push_back(id);
  }
  if (symbols.size() <= kShortPiece) {
    MergeShort(&symbols);
  } else {
    MergeLong(&symbols);
  }
  ids->insert(ids->end(), symbols.begin(), symbols.end());
}

const Bpe::Merge* Bpe::FindMerge(int32_t left, int32_t right) const {
  auto it = merges_.find(PairKey(left, right));
  return it == merges_.end() ? nullptr : &it->second;
}

// The lowest rank first, the leftmost of equals: what the queue of MergeLong does, by scanning.
void Bpe::MergeShort(std::vector<int32_t>* symbols) const {
  size_t n = symbols->size();
  if (n < 2) return;
  int32_t* ids = symbols->data();
  const Merge* merge_at[kShortPiece];  // merge_at[i]: of symbols i and i + 1
  for (size_t i = 0; i + 1 < n; ++i) merge_at[i] = FindMerge(ids[i], ids[i + 1]);
  while (n > 1) {
    size_t best = n;
    uint32_t best_rank = kNone;
    for (size_t i = 0; i + 1 < n; ++i) {
      if (merge_at[i] != nullptr && merge_at[i]->rank < best_rank) {
        best_rank = merge_at[i]->rank;
        best = i;
      }
    }
    if (best == n) break;
    ids[best] = merge_at[best]->result;
    std::copy(ids + best + 2, ids + n, ids + best + 1);
    if (best + 2 < n) std::copy(merge_at + best + 2, merge_at + n - 1, merge_at + best + 1);
    --n;
    if (best > 0) merge_at[best - 1] = FindMerge(ids[best - 1], ids[best]);
    if (best + 1 < n) merge_at[best] = FindMerge(ids[best], ids[best + 1]);
  }
  symbols->resize(n);
}

void Bpe::MergeLong(std::vector<int32_t>* symbols) const {
  uint32_t n = static_cast<uint32_t>(symbols->size());
  std::vector<Symbol> list(n);
  std::vector<uint64_t> initial;  // rank << 32 | position of the left symbol
  for (uint32_t i = 0; i < n; ++i) {
    list[i] = {(*symbols)[i], i == 0 ? kNone : i - 1, i + 1 == n ? kNone : i + 1};
    const Merge* merge = i + 1 < n ? FindMerge((*symbols)[i], (*symbols)[i + 1]) : nullptr;
    if (merge != nullptr) initial.push_back((static_cast<uint64_t>(merge->rank) << 32) | i);
  }
  std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> queue(std::greater<>(),
                                                                             std::move(initial));
  auto push = [&](uint32_t at) {
    if (at == kNone || list[at].next == kNone) return;
    const Merge* merge = FindMerge(list[at].id, list[list[at].next].id);
    if (merge != nullptr) queue.push((static_cast<uint64_t>(merge->rank) << 32) | at);
  };
  while (!queue.empty()) {
    uint64_t top = queue.top();
    queue.pop();
    uint32_t at = static_cast<uint32_t>(top);
    Symbol& left = list[at];
    if (left.id < 0 || left.next == kNone) continue;
    Symbol& right = list[left.next];
    const Merge* merge = FindMerge(left.id, right.id);
    // An entry outlives its pair when a neighbour was merged away; its rank tells.
    if (merge == nullptr || merge->rank != static_cast<uint32_t>(top >> 32)) continue;
    left.id = merge->result;
    right.id = -1;
    left.next = right.next;
    if (left.next != kNone) list[left.next].previous = at;
    push(left.previous);
    push(at);
  }
  symbols->clear();
  for (uint32_t i = 0; i < n; i = list[i].next) {  // kNone ends it: n is smaller
    symbols->push_back(list[i].id);
  }
}

const std::string& Bpe::TokenBytes(int32_t id) const {
  static const std::string kEmpty;
  return HasId(id) ? bytes_of_[static_cast<size_t>(id)] : kEmpty;
}

bool Bpe::HasId(int32_t id) const {
  return id >= 0 && static_cast<size_t>(id) < has_id_.size() && has_id_[static_cast<size_t>(id)];
}

std::optional<int32_t> Bpe::TokenId(std::string_view token_text) const {
  bool is_byte_level = false;
  std::string bytes = ByteLevelToBytes(token_text, &is_byte_level);
  const auto& map = is_byte_level ? id_of_bytes_ : id_of_text_;
  auto it = map.find(bytes);
  if (it == map.end()) return std::nullopt;
  return it->second;
}

}  // namespace zipage
