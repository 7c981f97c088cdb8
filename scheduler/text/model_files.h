#pragma once
// Reads the JSON files of a model folder that the text room needs. Hostile files give a Status that
// names the file; nothing here interprets more than their shape. Any thread.

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "scheduler/text/bpe.h"

namespace zipage {

// tokenizer.json, its two large members taken out while it is parsed.
struct TokenizerFile {
  nlohmann::json rest;  // everything but the contents of model.vocab and model.merges
  Bpe::Data model;
};

// Whole file as bytes; NotFound if there is none, FailedPrecondition above `max_bytes`.
absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes);

// Parses the text of tokenizer.json. Merges are strings ("a b") or pairs (["a", "b"]).
absl::StatusOr<TokenizerFile> ParseTokenizerFile(std::string_view text);

// Parses a small JSON object file (config.json and its like); an absent file is an empty object.
absl::StatusOr<nlohmann::json> ReadConfigFile(const std::string& path);

// Every id that ends a sequence: the union of generation_config.json's and config.json's
// "eos_token_id" (a number or a list) and `tokenizer_eos`. Sorted, without repeats.
absl::StatusOr<std::vector<int32_t>> ReadEosTokenIds(const std::string& model_dir,
                                                     std::optional<int32_t> tokenizer_eos);

}  // namespace zipage
