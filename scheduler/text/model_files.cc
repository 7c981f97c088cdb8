#include "scheduler/text/model_files.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <utility>

#include "absl/strings/str_format.h"
#include "proto/status.h"

namespace zipage {
namespace {

constexpr size_t kMaxConfigBytes = 16 << 20;
constexpr size_t kMaxDepth = 64;
constexpr size_t kMaxEntries = 8'000'000;

// Thrown inside nlohmann's parser, caught around it: its callback has no other way out.
struct BadTokenizerFile : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Follows the parser's events and moves vocabulary and merges out before they become a tree.
class VocabularyTaker {
 public:
  explicit VocabularyTaker(Bpe::Data* data) : data_(data) {}

  bool operator()(nlohmann::json::parse_event_t event, nlohmann::json& parsed) {
    using Event = nlohmann::json::parse_event_t;
    switch (event) {
      case Event::object_start:
      case Event::array_start:
        if (path_.size() >= kMaxDepth) throw BadTokenizerFile("nested too deeply");
        if (where_ == Where::kVocab) throw BadTokenizerFile("model.vocab: an id is no number");
        if (where_ == Where::kMerge) throw BadTokenizerFile("model.merges: nested too deeply");
        path_.push_back(where_);
        where_ = Enter(event == Event::object_start);
        pair_.clear();
        return true;
      case Event::object_end:
      case Event::array_end: {
        bool ended_pair = where_ == Where::kMerge;
        if (ended_pair) AddPair();
        where_ = path_.back();
        path_.pop_back();
        return !ended_pair;
      }
      case Event::key:
        key_ = std::move(parsed.get_ref<std::string&>());
        if (where_ == Where::kVocab) return false;  // the value still arrives
        parsed = key_;
        return true;
      case Event::value:
        return TakeValue(parsed);
    }
    return true;
  }

 private:
  enum class Where { kElsewhere, kRoot, kModel, kVocab, kMerges, kMerge };

  Where Enter(bool is_object) const {
    if (path_.size() == 1) return is_object ? Where::kRoot : Where::kElsewhere;
    if (where_ == Where::kRoot && is_object && key_ == "model") return Where::kModel;
    if (where_ == Where::kModel && is_object && key_ == "vocab") return Where::kVocab;
    if (where_ == Where::kModel && !is_object && key_ == "merges") return Where::kMerges;
    if (where_ == Where::kMerges) {
      if (is_object) throw BadTokenizerFile("model.merges: an entry is an object");
      return Where::kMerge;
    }
    return Where::kElsewhere;
  }

  bool TakeValue(nlohmann::json& parsed) {
    if (where_ == Where::kVocab) {
      if (!parsed.is_number_integer()) throw BadTokenizerFile("model.vocab: an id is no integer");
      // Beyond int64 it wraps to a negative number, which the vocabulary refuses.
      Limit(data_->vocab.size());
      data_->vocab.emplace_back(std::move(key_), parsed.get<int64_t>());
      return true;
    }
    if (where_ != Where::kMerges && where_ != Where::kMerge) return true;
    if (!parsed.is_string()) throw BadTokenizerFile("model.merges: an entry is no string");
    std::string text = std::move(parsed.get_ref<std::string&>());
    if (where_ == Where::kMerge) {
      if (pair_.size() == 2) throw BadTokenizerFile("model.merges: a pair has more than two parts");
      pair_.push_back(std::move(text));
      return false;
    }
    size_t space = text.find(' ');
    if (space == std::string::npos || text.find(' ', space + 1) != std::string::npos) {
      throw BadTokenizerFile("model.merges: '" + text.substr(0, 80) + "' is no 'LEFT RIGHT'");
    }
    Limit(data_->merges.size());
    data_->merges.emplace_back(text.substr(0, space), text.substr(space + 1));
    return false;
  }

  void AddPair() {
    if (pair_.size() != 2) throw BadTokenizerFile("model.merges: a pair has not two parts");
    Limit(data_->merges.size());
    data_->merges.emplace_back(std::move(pair_[0]), std::move(pair_[1]));
    pair_.clear();
  }

  static void Limit(size_t count) {
    if (count >= kMaxEntries) throw BadTokenizerFile("more than 8000000 tokens or merges");
  }

  Bpe::Data* data_;
  std::vector<Where> path_;
  Where where_ = Where::kElsewhere;
  std::string key_;
  std::vector<std::string> pair_;
};

absl::Status AddEosIds(const nlohmann::json& config, std::string_view file,
                       std::vector<int32_t>* ids) {
  auto it = config.find("eos_token_id");
  if (it == config.end() || it->is_null()) return absl::OkStatus();
  nlohmann::json list = it->is_array() ? *it : nlohmann::json::array({*it});
  for (const nlohmann::json& id : list) {
    if (!id.is_number_integer() || id.get<int64_t>() < 0 || id.get<int64_t>() > Bpe::kMaxTokenId) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s: eos_token_id is %s; give token ids from 0 to %d", file,
          id.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace).substr(0, 80),
          Bpe::kMaxTokenId));
    }
    ids->push_back(id.get<int32_t>());
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::string> ReadFile(const std::string& path, size_t max_bytes) {
  std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (file == nullptr) {
    const int error = errno;
    const std::string message = absl::StrFormat(
        "%s: %s; give the folder of a Hugging Face model by --model DIR", path, strerror(error));
    return error == ENOENT ? absl::NotFoundError(message) : absl::FailedPreconditionError(message);
  }
  std::string text;
  char buffer[1 << 16];
  size_t n = 0;
  while ((n = std::fread(buffer, 1, sizeof(buffer), file.get())) > 0) {
    text.append(buffer, n);
    if (text.size() > max_bytes) {
      return absl::FailedPreconditionError(
          absl::StrFormat("%s: larger than %d bytes; is it the right file?", path, max_bytes));
    }
  }
  if (std::ferror(file.get()) != 0) {
    return absl::FailedPreconditionError(absl::StrFormat("%s: cannot be read", path));
  }
  return text;
}

absl::StatusOr<TokenizerFile> ParseTokenizerFile(std::string_view text) {
  TokenizerFile file;
  VocabularyTaker taker(&file.model);
  try {
    file.rest = nlohmann::json::parse(text.begin(), text.end(),
                                      [&](int, nlohmann::json::parse_event_t event,
                                          nlohmann::json& parsed) { return taker(event, parsed); });
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(std::string(e.what()).substr(0, 300));
  }
  if (!file.rest.is_object()) return absl::InvalidArgumentError("the file is no JSON object");
  return file;
}

absl::StatusOr<nlohmann::json> ReadConfigFile(const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, kMaxConfigBytes);
  if (absl::IsNotFound(text.status())) return nlohmann::json::object();
  if (!text.ok()) return text.status();
  nlohmann::json config;
  try {
    config = nlohmann::json::parse(*text);
  } catch (const std::exception& e) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s: %s", path, std::string(e.what()).substr(0, 300)));
  }
  if (!config.is_object()) {
    return absl::InvalidArgumentError(absl::StrFormat("%s: the file is no JSON object", path));
  }
  return config;
}

absl::StatusOr<std::vector<int32_t>> ReadEosTokenIds(const std::string& model_dir,
                                                     std::optional<int32_t> tokenizer_eos) {
  std::vector<int32_t> ids;
  for (const char* name : {"generation_config.json", "config.json"}) {
    std::string path = model_dir + "/" + name;
    ZIPAGE_ASSIGN_OR_RETURN(nlohmann::json config, ReadConfigFile(path));
    ZIPAGE_RETURN_IF_ERROR(AddEosIds(config, path, &ids));
  }
  if (tokenizer_eos) ids.push_back(*tokenizer_eos);
  std::sort(ids.begin(), ids.end());
  ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
  return ids;
}

}  // namespace zipage
