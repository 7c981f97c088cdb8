// The loading half of Tokenizer: what each member of tokenizer.json and tokenizer_config.json may
// say. "truncation" and "padding" are not read: callers of tokenizers set them per call.
#include <algorithm>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/status.h"
#include "scheduler/text/model_files.h"
#include "scheduler/text/tokenizer.h"
#include "scheduler/text/utf8.h"

namespace zipage {
namespace {

constexpr size_t kMaxTokenizerBytes = 256 << 20;
constexpr size_t kMaxTemplateBytes = 1 << 20;
constexpr int kMaxDepth = 8;
constexpr size_t kMaxAroundIds = 64;
constexpr std::string_view kNamedTokens[] = {"bos_token", "eos_token", "unk_token", "sep_token",
                                             "pad_token", "cls_token", "mask_token"};

absl::Status Invalid(std::string_view what) {
  return absl::InvalidArgumentError(std::string(what));
}

const nlohmann::json& Member(const nlohmann::json& node, const char* name) {
  static const nlohmann::json kNull;
  auto it = node.find(name);
  return it == node.end() ? kNull : *it;
}

// "type" of a node; empty if it has none.
std::string TypeOf(const nlohmann::json& node) {
  const nlohmann::json& type = node.is_object() ? Member(node, "type") : node;
  return type.is_string() ? type.get<std::string>() : std::string();
}

// Follows Sequences and hands every other node to `visit`.
absl::Status VisitSequence(const nlohmann::json& node, const char* list_name, int depth,
                           absl::FunctionRef<absl::Status(const nlohmann::json&)> visit) {
  if (TypeOf(node) != "Sequence") return visit(node);
  const nlohmann::json& list = Member(node, list_name);
  if (depth > kMaxDepth || !list.is_array()) {
    return Invalid(absl::StrFormat("Sequence needs a list '%s', not nested too deeply", list_name));
  }
  for (const nlohmann::json& child : list) {
    ZIPAGE_RETURN_IF_ERROR(VisitSequence(child, list_name, depth + 1, visit));
  }
  return absl::OkStatus();
}

// Text of a token in tokenizer_config.json: "x" or {"content": "x"}; empty for null.
absl::StatusOr<std::string> TokenText(const nlohmann::json& node, std::string_view name) {
  const nlohmann::json& text = node.is_object() ? Member(node, "content") : node;
  if (text.is_string()) return text.get<std::string>();
  if (node.is_null()) return std::string();
  return Invalid(absl::StrFormat("'%s' is neither a string nor an object with 'content'", name));
}

}  // namespace

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& model_dir) {
  std::string path = model_dir + "/tokenizer.json";
  ZIPAGE_ASSIGN_OR_RETURN(std::string text, ReadFile(path, kMaxTokenizerBytes));
  std::string config_path = model_dir + "/tokenizer_config.json";
  ZIPAGE_ASSIGN_OR_RETURN(nlohmann::json config, ReadConfigFile(config_path));
  std::string template_path = model_dir + "/chat_template.jinja";
  absl::StatusOr<std::string> chat_template = ReadFile(template_path, kMaxTemplateBytes);
  if (chat_template.ok()) {
    if (!IsValidUtf8(*chat_template)) return Invalid(template_path + ": the file is not UTF-8");
    config["chat_template"] = *std::move(chat_template);
  } else if (!absl::IsNotFound(chat_template.status())) {
    return chat_template.status();
  }
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Parse(text, config);
  if (!tokenizer.ok()) {
    return absl::Status(tokenizer.status().code(),
                        absl::StrFormat("%s: %s", path, std::string(tokenizer.status().message())));
  }
  ZIPAGE_ASSIGN_OR_RETURN((*tokenizer)->eos_token_ids_,
                          ReadEosTokenIds(model_dir, (*tokenizer)->eos_id_));
  return tokenizer;
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Parse(std::string_view tokenizer_json,
                                                            const nlohmann::json& config) {
  ZIPAGE_ASSIGN_OR_RETURN(TokenizerFile file, ParseTokenizerFile(tokenizer_json));
  std::unique_ptr<Tokenizer> result(new Tokenizer);
  ZIPAGE_RETURN_IF_ERROR(result->ReadModel(file.rest, std::move(file.model)));
  ZIPAGE_RETURN_IF_ERROR(result->ReadNormalizer(file.rest));
  ZIPAGE_RETURN_IF_ERROR(result->ReadDecoder(file.rest));
  bool nfc = result->normalize_nfc_;
  ZIPAGE_ASSIGN_OR_RETURN(
      result->added_,
      AddedTokens::Parse(Member(file.rest, "added_tokens"), [nfc](std::string_view text) {
        return nfc ? NormalizeNfc(text) : std::string(text);
      }));
  for (const AddedToken& token : result->added_.tokens()) {
    std::optional<int32_t> id = result->bpe_->TokenId(token.content);
    if (id && *id != token.id) {
      return Invalid(absl::StrFormat("added token '%s' has id %d, in the vocabulary it has %d",
                                     token.content, token.id, *id));
    }
  }
  ZIPAGE_ASSIGN_OR_RETURN(result->pre_tokenizer_,
                          PreTokenizer::Parse(Member(file.rest, "pre_tokenizer")));
  const nlohmann::json& post_processor = Member(file.rest, "post_processor");
  ZIPAGE_RETURN_IF_ERROR(result->ReadPostProcessor(post_processor, 0));
  ZIPAGE_RETURN_IF_ERROR(result->ReadConfig(config, !post_processor.is_null()));
  ZIPAGE_RETURN_IF_ERROR(result->ReadChatTemplates(config));
  result->IndexTokens();
  if (result->eos_id_) result->eos_token_ids_ = {*result->eos_id_};
  return result;
}

absl::Status Tokenizer::ReadModel(const nlohmann::json& file, Bpe::Data data) {
  const nlohmann::json& model = Member(file, "model");
  std::string type = TypeOf(model);
  // Old files leave the type out; then the merges tell.
  if (type != "BPE" && !(type.empty() && !data.merges.empty())) {
    return Invalid(absl::StrFormat("model: type '%s' is not supported, only BPE", type));
  }
  for (const char* name : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
    const nlohmann::json& value = Member(model, name);
    bool is_off =
        value.is_null() || (value.is_string() && value.get_ref<const std::string&>().empty());
    if (!is_off) return Invalid(absl::StrFormat("model: '%s' is set; that is not supported", name));
  }
  for (const char* name : {"byte_fallback", "ignore_merges"}) {
    const nlohmann::json& value = Member(model, name);
    if (!value.is_null() && !value.is_boolean()) {
      return Invalid(absl::StrFormat("model: '%s' is no boolean", name));
    }
  }
  if (Member(model, "byte_fallback") == true) {
    return Invalid("model: 'byte_fallback' is set; only byte-level BPE is supported");
  }
  data.ignore_merges = Member(model, "ignore_merges") == true;
  data.has_unk_token = !Member(model, "unk_token").is_null();
  ZIPAGE_ASSIGN_OR_RETURN(bpe_, Bpe::Create(std::move(data)));
  return absl::OkStatus();
}

absl::Status Tokenizer::ReadNormalizer(const nlohmann::json& file) {
  const nlohmann::json& node = Member(file, "normalizer");
  if (node.is_null()) return absl::OkStatus();
  return VisitSequence(node, "normalizers", 0, [this](const nlohmann::json& child) {
    std::string type = TypeOf(child);
    if (type != "NFC") {
      return Invalid(absl::StrFormat("normalizer: type '%s' is not supported", type));
    }
    normalize_nfc_ = true;
    return absl::OkStatus();
  });
}

absl::Status Tokenizer::ReadDecoder(const nlohmann::json& file) const {
  int num_byte_level = 0;
  ZIPAGE_RETURN_IF_ERROR(
      VisitSequence(Member(file, "decoder"), "decoders", 0, [&](const nlohmann::json& child) {
        std::string type = TypeOf(child);
        if (type == "ByteLevel") {
          ++num_byte_level;
        } else if (type != "Fuse") {  // ByteLevel has fused everything already
          return Invalid(absl::StrFormat("decoder: type '%s' is not supported", type));
        }
        return absl::OkStatus();
      }));
  return num_byte_level == 1 ? absl::OkStatus() : Invalid("decoder: expected one ByteLevel");
}

absl::Status Tokenizer::ReadPostProcessor(const nlohmann::json& node, int depth) {
  if (node.is_null()) return absl::OkStatus();
  return VisitSequence(node, "processors", depth, [this](const nlohmann::json& child) {
    std::string type = TypeOf(child);
    if (type == "ByteLevel") return absl::OkStatus();  // it moves offsets, not ids
    if (type == "TemplateProcessing") return ReadTemplateProcessing(child);
    return Invalid(absl::StrFormat("post_processor: type '%s' is not supported", type));
  });
}

absl::Status Tokenizer::ReadTemplateProcessing(const nlohmann::json& node) {
  const nlohmann::json& single = Member(node, "single");
  const nlohmann::json& specials = Member(node, "special_tokens");
  absl::Status bad = Invalid("post_processor: TemplateProcessing is malformed");
  if (!single.is_array()) return bad;
  bool after_text = false;
  std::vector<int32_t> before;
  for (const nlohmann::json& part : single) {
    if (!part.is_object() || part.size() != 1 || !part.begin()->is_object()) return bad;
    const nlohmann::json& id = Member(*part.begin(), "id");
    if (!id.is_string()) return bad;
    if (part.begin().key() == "Sequence") {
      if (after_text || id != "A") return bad;
      after_text = true;
      continue;
    }
    if (part.begin().key() != "SpecialToken" || !specials.is_object()) return bad;
    const nlohmann::json& special = Member(specials, id.get_ref<const std::string&>().c_str());
    const nlohmann::json& ids = special.is_object() ? Member(special, "ids") : special;
    if (!ids.is_array() || ids.size() > kMaxAroundIds) return bad;
    for (const nlohmann::json& value : ids) {
      if (!value.is_number_integer() || value.get<int64_t>() < 0 ||
          value.get<int64_t>() > Bpe::kMaxTokenId) {
        return bad;
      }
      (after_text ? suffix_ids_ : before).push_back(value.get<int32_t>());
    }
    if (before.size() + suffix_ids_.size() > kMaxAroundIds) return bad;
  }
  if (!after_text) return bad;
  prefix_ids_.insert(prefix_ids_.begin(), before.begin(), before.end());
  return absl::OkStatus();
}

absl::Status Tokenizer::ReadConfig(const nlohmann::json& config, bool has_post_processor) {
  auto add = [this](std::string_view name, const std::string& text) -> std::optional<int32_t> {
    if (text.empty()) return std::nullopt;
    special_tokens_[std::string(name)] = text;
    std::optional<int32_t> id = TokenId(text);
    if (id) added_.MarkSpecial(text, *id);
    return id;
  };
  std::optional<int32_t> bos_id;
  for (std::string_view name : kNamedTokens) {
    ZIPAGE_ASSIGN_OR_RETURN(std::string text, TokenText(Member(config, name.data()), name));
    std::optional<int32_t> id = add(name, text);
    if (name != "bos_token" && name != "eos_token") continue;
    if (!text.empty() && !id) {
      return Invalid(absl::StrFormat("%s '%s' of tokenizer_config.json is not in the vocabulary",
                                     name, text.substr(0, 80)));
    }
    (name == "bos_token" ? bos_id : eos_id_) = id;
  }
  const nlohmann::json& additional = Member(config, "additional_special_tokens");
  if (additional.is_array()) {
    for (const nlohmann::json& node : additional) {
      ZIPAGE_ASSIGN_OR_RETURN(std::string text, TokenText(node, "additional_special_tokens"));
      std::optional<int32_t> id = TokenId(text);
      if (id) added_.MarkSpecial(text, *id);
    }
  }
  // add_bos_token and add_eos_token, if one is there, replace the post-processor (transformers 5).
  const nlohmann::json& add_bos = Member(config, "add_bos_token");
  const nlohmann::json& add_eos = Member(config, "add_eos_token");
  if (!has_post_processor || !add_bos.is_null() || !add_eos.is_null()) {
    prefix_ids_.clear();
    suffix_ids_.clear();
    if (add_bos == true && bos_id) prefix_ids_ = {*bos_id};
    if (add_eos == true && eos_id_) suffix_ids_ = {*eos_id_};
  }
  return absl::OkStatus();
}

absl::Status Tokenizer::ReadChatTemplates(const nlohmann::json& config) {
  const nlohmann::json& node = Member(config, "chat_template");
  if (node.is_null()) return absl::OkStatus();
  if (node.is_string()) {
    chat_templates_.emplace_back("default", node.get<std::string>());
    return absl::OkStatus();
  }
  absl::Status bad =
      Invalid("tokenizer_config.json: chat_template is no string or list of {name, template}");
  if (!node.is_array() || node.size() > 64) return bad;
  for (const nlohmann::json& item : node) {
    if (!item.is_object()) return bad;
    const nlohmann::json& name = Member(item, "name");
    const nlohmann::json& source = Member(item, "template");
    if (!name.is_string() || !source.is_string()) return bad;
    chat_templates_.emplace_back(name.get<std::string>(), source.get<std::string>());
  }
  return absl::OkStatus();
}

void Tokenizer::IndexTokens() {
  int32_t limit = bpe_->id_limit();
  for (const AddedToken& token : added_.tokens()) limit = std::max(limit, token.id + 1);
  is_special_.resize(static_cast<size_t>(limit));
  for (const AddedToken& token : added_.tokens()) {
    is_special_[static_cast<size_t>(token.id)] = token.special;
    // ByteLevel decodes added tokens too; only a text of other characters stays as it is.
    bool is_byte_level = false;
    added_bytes_[token.id] = ByteLevelToBytes(token.content, &is_byte_level);
  }
}

}  // namespace zipage
