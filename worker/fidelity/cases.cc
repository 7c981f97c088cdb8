#include "worker/fidelity/cases.h"

#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "worker/model/json_file.h"

namespace zipage {
namespace {

using nlohmann::json;

// An engine's line nests six deep.
constexpr int kMaxDepth = 32;
constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";

absl::StatusOr<json> ParseObject(std::string_view line, const std::string& where) {
  bool too_deep = false;
  // A value that is refused here is not built, so depth costs nothing.
  const auto watch = [&too_deep](int depth, json::parse_event_t, json&) {
    if (depth > kMaxDepth) too_deep = true;
    return depth <= kMaxDepth;
  };
  json object;
  try {
    object = json::parse(line, watch);
  } catch (const json::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": not JSON: ", e.what()));
  }
  if (too_deep) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": nested deeper than ", kMaxDepth, " levels"));
  }
  if (!object.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": holds ", Abbreviated(object), "; a JSON object is needed"));
  }
  return object;
}

absl::StatusOr<std::vector<TokenId>> ReadTokens(const json& object, const char* name,
                                                const std::string& where,
                                                const CaseLimits& limits) {
  const auto found = object.find(name);
  if (found == object.end() || found->is_null()) {
    return absl::InvalidArgumentError(absl::StrCat(
        where, ": ", name, " is missing; of an engine's output, ask for return_token_ids"));
  }
  if (!found->is_array() || found->empty()) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": ", name, " is ", Abbreviated(*found),
                                                   "; give a list of one token id or more"));
  }
  std::vector<TokenId> tokens;
  tokens.reserve(found->size());
  for (const json& value : *found) {
    // Beyond int64 a number is unsigned or a float, and so refused.
    const bool fits =
        value.is_number_integer() && (!value.is_number_unsigned() ||
                                      value.get<uint64_t>() <= std::numeric_limits<int32_t>::max());
    const int64_t token = fits ? value.get<int64_t>() : -1;
    if (token < 0 || token >= limits.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrFormat("%s: %s[%d] is %s; the model has token ids 0 to %d", where, name,
                          tokens.size(), Abbreviated(value), limits.vocab_size - 1));
    }
    tokens.push_back(static_cast<TokenId>(token));
  }
  return tokens;
}

absl::Status CheckLength(const FidelityCase& one, const std::string& where,
                         const CaseLimits& limits) {
  const auto length = static_cast<int64_t>(one.prompt.size() + one.output.size());
  if (length <= limits.max_model_len) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("%s: %d tokens of prompt and %d of output, max_model_len is %d; cut them",
                      where, one.prompt.size(), one.output.size(), limits.max_model_len));
}

absl::Status ParseResponse(const json& line, const std::string& where, const CaseLimits& limits,
                           std::vector<FidelityCase>* cases) {
  const json& response = line.at("response");
  if (!response.is_object() || response.value("status_code", json()) != json(200)) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": the request was not answered; leave the line out"));
  }
  const auto body = response.find("body");
  if (body == response.end() || !body->is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(where, ": response.body is no object"));
  }
  const std::string in_body = where + ": response.body";
  ZIPAGE_ASSIGN_OR_RETURN(const std::vector<TokenId> prompt,
                          ReadTokens(*body, "prompt_token_ids", in_body, limits));
  const auto choices = body->find("choices");
  if (choices == body->end() || !choices->is_array() || choices->empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(in_body, ": choices is no list of one choice or more"));
  }
  std::string id;
  ZIPAGE_RETURN_IF_ERROR(JsonFields(line, where).ReadString("custom_id", &id));
  for (size_t i = 0; i < choices->size(); ++i) {
    const std::string in_choice = absl::StrCat(in_body, ".choices[", i, "]");
    const json& choice = (*choices)[i];
    if (!choice.is_object()) {
      return absl::InvalidArgumentError(absl::StrCat(in_choice, " is no object"));
    }
    FidelityCase one;
    one.id = choices->size() == 1 ? id : absl::StrCat(id, "/", i);
    one.prompt = prompt;
    ZIPAGE_ASSIGN_OR_RETURN(one.output, ReadTokens(choice, "token_ids", in_choice, limits));
    one.seed = limits.seed + cases->size();
    ZIPAGE_RETURN_IF_ERROR(CheckLength(one, where, limits));
    cases->push_back(std::move(one));
  }
  return absl::OkStatus();
}

absl::Status ParseOwn(const json& line, const std::string& where, const CaseLimits& limits,
                      std::vector<FidelityCase>* cases) {
  const JsonFields fields(line, where);
  FidelityCase one;
  ZIPAGE_RETURN_IF_ERROR(fields.ReadString("id", &one.id));
  ZIPAGE_ASSIGN_OR_RETURN(one.prompt, ReadTokens(line, "prompt_token_ids", where, limits));
  ZIPAGE_ASSIGN_OR_RETURN(one.output, ReadTokens(line, "output_token_ids", where, limits));
  const auto num_output = static_cast<int64_t>(one.output.size());
  ZIPAGE_RETURN_IF_ERROR(fields.ReadInt("recall_tokens", 0, num_output, &one.recall_tokens));
  auto seed = static_cast<int64_t>(limits.seed + cases->size());
  // Doubles are exact up to here.
  ZIPAGE_RETURN_IF_ERROR(fields.ReadInt("seed", 0, int64_t{1} << 53, &seed));
  one.seed = static_cast<uint64_t>(seed);
  ZIPAGE_RETURN_IF_ERROR(CheckLength(one, where, limits));
  cases->push_back(std::move(one));
  return absl::OkStatus();
}

}  // namespace

absl::Status ParseCases(std::string_view line, const std::string& where, const CaseLimits& limits,
                        std::vector<FidelityCase>* cases) {
  ZIPAGE_ASSIGN_OR_RETURN(const json object, ParseObject(line, where));
  return object.contains("response") ? ParseResponse(object, where, limits, cases)
                                     : ParseOwn(object, where, limits, cases);
}

absl::StatusOr<std::vector<FidelityCase>> ReadCases(const std::string& path,
                                                    const CaseLimits& limits) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::NotFoundError(
        absl::StrCat("input is \"", path, "\", which cannot be read; give a file of JSON Lines"));
  }
  std::vector<FidelityCase> cases;
  std::string line;
  for (int64_t number = 1; std::getline(file, line); ++number) {
    const std::string where = absl::StrCat(path, " line ", number);
    if (line.size() > limits.max_line_bytes) {
      return absl::InvalidArgumentError(absl::StrCat(where, ": ", line.size(),
                                                     " bytes; a line may have ",
                                                     limits.max_line_bytes, " (max_line_mb)"));
    }
    std::string_view text = line;
    if (number == 1 && text.substr(0, kByteOrderMark.size()) == kByteOrderMark) {
      text.remove_prefix(kByteOrderMark.size());
    }
    if (text.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    ZIPAGE_RETURN_IF_ERROR(ParseCases(text, where, limits, &cases));
  }
  if (file.bad()) return absl::DataLossError(absl::StrCat(path, ": reading failed"));
  if (cases.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("input is \"", path, "\", which holds no line; give a file of JSON Lines"));
  }
  return cases;
}

}  // namespace zipage
