#include "scheduler/text/tokenizer.h"

#include "absl/strings/str_format.h"
#include "proto/status.h"
#include "scheduler/text/utf8.h"

namespace zipage {
namespace {

constexpr size_t kMaxCachedPieceBytes = 64;
constexpr size_t kMaxCachedPieces = 1 << 16;

}  // namespace

absl::StatusOr<std::vector<int32_t>> Tokenizer::Encode(std::string_view text,
                                                       bool add_special_tokens,
                                                       size_t max_tokens) const {
  std::vector<int32_t> ids;
  if (add_special_tokens) ids = prefix_ids_;
  if (IsValidUtf8(text)) {
    ZIPAGE_RETURN_IF_ERROR(EncodeText(text, max_tokens, &ids));
  } else {
    std::string repaired;
    AppendLossyUtf8(text, /*is_final=*/true, &repaired);
    ZIPAGE_RETURN_IF_ERROR(EncodeText(repaired, max_tokens, &ids));
  }
  if (add_special_tokens) ids.insert(ids.end(), suffix_ids_.begin(), suffix_ids_.end());
  return ids;
}

absl::Status Tokenizer::EncodeText(std::string_view text, size_t max_tokens,
                                   std::vector<int32_t>* ids) const {
  std::lock_guard<std::mutex> lock(cache_mutex_);
  absl::Status status;
  auto more = [&] { return status.ok() && ids->size() <= max_tokens; };
  auto in_normalized = [&](std::string_view stretch, const AddedToken* token) {
    if (token != nullptr) {
      ids->push_back(token->id);
    } else {
      status = EncodeStretch(stretch, max_tokens, ids);
    }
    return more();
  };
  added_.Split(text, /*normalized=*/false, [&](std::string_view stretch, const AddedToken* token) {
    if (token != nullptr) {
      ids->push_back(token->id);
    } else if (normalize_nfc_) {
      added_.Split(NormalizeNfc(stretch), /*normalized=*/true, in_normalized);
    } else {
      added_.Split(stretch, /*normalized=*/true, in_normalized);
    }
    return more();
  });
  return status;
}

absl::Status Tokenizer::EncodeStretch(std::string_view text, size_t max_tokens,
                                      std::vector<int32_t>* ids) const {
  return pre_tokenizer_->Split(text, [&](std::string_view piece) {
    EncodePiece(piece, max_tokens, ids);
    return ids->size() <= max_tokens;
  });
}

void Tokenizer::EncodePiece(std::string_view piece, size_t max_tokens,
                            std::vector<int32_t>* ids) const {
  if (piece.size() > kMaxCachedPieceBytes) {
    // A piece that cannot fit however well it merges is encoded only as far as that shows.
    size_t room = max_tokens - ids->size();
    if (room < piece.size() / bpe_->max_token_bytes()) {
      size_t before = ids->size();
      bpe_->EncodePiece(piece.substr(0, (room + 1) * bpe_->max_token_bytes()), ids);
      if (ids->size() > max_tokens) return;
      ids->resize(before);  // bytes that are no token took no room
    }
    bpe_->EncodePiece(piece, ids);
    return;
  }
  auto it = cache_.find(ToAbsl(piece));
  if (it == cache_.end()) {
    if (cache_.size() >= kMaxCachedPieces) cache_.clear();
    it = cache_.emplace(std::string(piece), std::vector<int32_t>()).first;
    bpe_->EncodePiece(piece, &it->second);
  }
  ids->insert(ids->end(), it->second.begin(), it->second.end());
}

const std::string& Tokenizer::TokenBytes(int32_t id) const {
  auto it = added_bytes_.find(id);
  return it == added_bytes_.end() ? bpe_->TokenBytes(id) : it->second;
}

bool Tokenizer::IsSpecial(int32_t id) const {
  return id >= 0 && static_cast<size_t>(id) < is_special_.size() &&
         is_special_[static_cast<size_t>(id)];
}

std::optional<int32_t> Tokenizer::TokenId(std::string_view token) const {
  const AddedToken* added = added_.Find(token);
  if (added != nullptr) return added->id;
  return bpe_->TokenId(token);
}

std::optional<std::string> Tokenizer::chat_template(bool with_tools) const {
  for (std::string_view name : {with_tools ? "tool_use" : "default", "default"}) {
    for (const auto& [key, source] : chat_templates_) {
      if (key == name) return source;
    }
  }
  return std::nullopt;
}

}  // namespace zipage
