#pragma once
// A model's tokenizer: text to token ids and back, exactly as HuggingFace tokenizers does it for
// byte-level BPE (Qwen2/2.5/3, Llama-3.x, SmolLM2, the DeepSeek-R1 distillations). Built from
// tokenizer.json and tokenizer_config.json; whatever those files ask for and this code does not do
// is an error at Load, never another result.
//
// Immutable after Load but for a cache of pieces behind a mutex: any thread.

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "scheduler/text/added_tokens.h"
#include "scheduler/text/bpe.h"
#include "scheduler/text/pre_tokenizer.h"

namespace zipage {

class Tokenizer {
 public:
  // Reads MODEL_DIR/tokenizer.json, tokenizer_config.json and chat_template.jinja (the last two may
  // be absent). NotFound, FailedPrecondition or InvalidArgument; the message names the file.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& model_dir);

  // The same from the files' contents. `config` is an object, empty if there is no file.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Parse(std::string_view tokenizer_json,
                                                          const nlohmann::json& config);

  // Token ids of `text`. Invalid UTF-8 is first replaced by U+FFFD. An added token written in the
  // text becomes its one id. With `add_special_tokens` the ids that the model wants around a text
  // (BOS, for Llama and DeepSeek) are put around; pass false for the output of a chat template,
  // which writes them itself. Stops early once there are more than `max_tokens` ids: the caller
  // rejects such a text, whatever the ids.
  // ResourceExhausted if a pattern of the tokenizer gives up on the text.
  absl::StatusOr<std::vector<int32_t>> Encode(
      std::string_view text, bool add_special_tokens,
      size_t max_tokens = std::numeric_limits<size_t>::max()) const;

  // Raw bytes that a token adds to the text; they may be part of a character. Empty if unknown.
  const std::string& TokenBytes(int32_t id) const;
  bool IsSpecial(int32_t id) const;
  // Id of an added token by its text, or of a vocabulary entry as tokenizer.json writes it.
  std::optional<int32_t> TokenId(std::string_view token) const;

  // Ids that end a sequence, sorted: those of generation_config.json, config.json and eos_token.
  const std::vector<int32_t>& eos_token_ids() const { return eos_token_ids_; }

  // What a chat template sees as bos_token, eos_token, ...: {"eos_token": "<|im_end|>", ...}.
  const nlohmann::ordered_json& special_tokens() const { return special_tokens_; }

  // Source of the chat template; nothing if the model has none. `with_tools`: the one named
  // "tool_use" where there are several.
  std::optional<std::string> chat_template(bool with_tools) const;

 private:
  Tokenizer() = default;
  absl::Status ReadNormalizer(const nlohmann::json& file);
  absl::Status ReadDecoder(const nlohmann::json& file) const;
  absl::Status ReadModel(const nlohmann::json& file, Bpe::Data data);
  absl::Status ReadPostProcessor(const nlohmann::json& node, int depth);
  absl::Status ReadTemplateProcessing(const nlohmann::json& node);
  absl::Status ReadConfig(const nlohmann::json& config, bool has_post_processor);
  absl::Status ReadChatTemplates(const nlohmann::json& config);
  void IndexTokens();

  absl::Status EncodeText(std::string_view text, size_t max_tokens,
                          std::vector<int32_t>* ids) const;
  absl::Status EncodeStretch(std::string_view text, size_t max_tokens,
                             std::vector<int32_t>* ids) const;
  void EncodePiece(std::string_view piece, size_t max_tokens, std::vector<int32_t>* ids) const;

  bool normalize_nfc_ = false;
  AddedTokens added_;
  std::unique_ptr<PreTokenizer> pre_tokenizer_;
  std::unique_ptr<Bpe> bpe_;
  std::vector<int32_t> prefix_ids_;  // around a text with add_special_tokens
  std::vector<int32_t> suffix_ids_;

  std::optional<int32_t> eos_id_;  // of tokenizer_config.json's eos_token
  std::vector<int32_t> eos_token_ids_;
  nlohmann::ordered_json special_tokens_ = nlohmann::ordered_json::object();
  std::vector<std::pair<std::string, std::string>> chat_templates_;  // name, source

  std::vector<bool> is_special_;                           // by id
  absl::flat_hash_map<int32_t, std::string> added_bytes_;  // what an added token decodes to

  mutable std::mutex cache_mutex_;
  mutable absl::flat_hash_map<std::string, std::vector<int32_t>> cache_;  // piece -> ids
};

}  // namespace zipage
