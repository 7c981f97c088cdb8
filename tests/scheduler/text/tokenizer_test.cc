#include "scheduler/text/tokenizer.h"

#include <gtest/gtest.h>

#include <fstream>
#include <functional>
#include <map>

#include "scheduler/text/detokenizer.h"
#include "tests/scheduler/text/text_fixtures.h"

namespace zipage {
namespace {

using Json = nlohmann::ordered_json;

std::vector<int32_t> Ids(const Json& row, const char* name) {
  return row.at(name).get<std::vector<int32_t>>();
}

std::unique_ptr<Tokenizer> LoadOrDie(const std::string& dir) {
  absl::StatusOr<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::Load(dir);
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return tokenizer.ok() ? *std::move(tokenizer) : nullptr;
}

// The committed tiny tokenizer, with `change` made to its tokenizer.json.
absl::StatusOr<std::unique_ptr<Tokenizer>> ParseTiny(
    const std::function<void(nlohmann::json*)>& change,
    const nlohmann::json& config = nlohmann::json::object()) {
  nlohmann::json file = nlohmann::json::parse(ReadAll(GoldenDir() + "/tiny/tokenizer.json"));
  change(&file);
  return Tokenizer::Parse(file.dump(), config);
}

std::vector<int32_t> EncodeOrDie(const Tokenizer& tokenizer, std::string_view text,
                                 bool add_special_tokens = false) {
  absl::StatusOr<std::vector<int32_t>> ids = tokenizer.Encode(text, add_special_tokens);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.value_or(std::vector<int32_t>());
}

// What a detokenizer must give: all bytes at once.
std::string Decode(const Tokenizer& tokenizer, const std::vector<int32_t>& ids, bool skip_special) {
  std::string bytes;
  for (int32_t id : ids) {
    if (!skip_special || !tokenizer.IsSpecial(id)) bytes += tokenizer.TokenBytes(id);
  }
  std::string text;
  AppendLossyUtf8(bytes, /*is_final=*/true, &text);
  return text;
}

std::string DetokenizeOneByOne(const Tokenizer& tokenizer, const std::vector<int32_t>& ids,
                               bool skip_special) {
  IncrementalDetokenizer detokenizer(&tokenizer, skip_special);
  std::string text;
  for (int32_t id : ids) {
    std::string piece = detokenizer.Push(id);
    EXPECT_TRUE(IsValidUtf8(piece));
    text += piece;
  }
  return text + detokenizer.Flush();
}

void CheckEncodeRow(const Tokenizer& tokenizer, const Json& row) {
  std::string text = row.at("text");
  EXPECT_EQ(EncodeOrDie(tokenizer, text), Ids(row, "ids")) << row.dump();
  EXPECT_EQ(EncodeOrDie(tokenizer, text, true), Ids(row, "ids_special")) << row.dump();
}

void CheckDecodeRow(const Tokenizer& tokenizer, const Json& row) {
  std::vector<int32_t> ids = Ids(row, "ids");
  for (bool skip : {false, true}) {
    std::string want = row.at(skip ? "decoded_skip_special" : "decoded");
    EXPECT_EQ(Decode(tokenizer, ids, skip), want) << row.dump();
    EXPECT_EQ(DetokenizeOneByOne(tokenizer, ids, skip), want) << row.dump();
  }
}

TEST(TokenizerTest, EqualsTheReferenceOnEveryGoldenText) {
  if (!HasShared()) GTEST_SKIP() << "NO GOLDEN FILES in " << SharedDir() << ": nothing compared";
  std::map<std::string, std::unique_ptr<Tokenizer>> tokenizers;
  for (const char* name : {"qwen3", "qwen2.5", "smollm2"}) {
    tokenizers[name] = LoadOrDie(SharedDir() + "/tokenizers/" + name);
    ASSERT_NE(tokenizers[name], nullptr);
  }
  std::vector<Json> encode = ReadJsonLines(SharedDir() + "/golden/tokenizer/encode.jsonl");
  std::vector<Json> decode = ReadJsonLines(SharedDir() + "/golden/tokenizer/decode.jsonl");
  ASSERT_EQ(encode.size(), 465u);
  ASSERT_EQ(decode.size(), 120u);
  for (const Json& row : encode) {
    CheckEncodeRow(*tokenizers.at(row.at("tok")), row);
    CheckDecodeRow(*tokenizers.at(row.at("tok")), row);
  }
  for (const Json& row : decode) CheckDecodeRow(*tokenizers.at(row.at("tok")), row);
}

TEST(TokenizerTest, EqualsTheReferenceOnTheCommittedTinyTokenizerAndItsVariants) {
  std::vector<Json> rows = ReadJsonLines(GoldenDir() + "/tiny.jsonl");
  ASSERT_GE(rows.size(), 100u);
  std::map<std::string, std::unique_ptr<Tokenizer>> variants;
  for (const Json& row : rows) {
    std::unique_ptr<Tokenizer>& tokenizer = variants[row["patch"].dump()];
    if (tokenizer == nullptr) {
      auto parsed = ParseTiny(
          [&](nlohmann::json* file) {
            for (auto it = row["patch"].begin(); it != row["patch"].end(); ++it) {
              (*file)[it.key()] = nlohmann::json::parse(it.value().dump());
            }
          },
          {{"add_prefix_space", false}});
      ASSERT_TRUE(parsed.ok()) << parsed.status() << row["patch"];
      tokenizer = *std::move(parsed);
    }
    CheckEncodeRow(*tokenizer, row);
    CheckDecodeRow(*tokenizer, row);
  }
}

std::unique_ptr<Tokenizer> TinyWithoutNormalizer() {
  auto tokenizer = ParseTiny([](nlohmann::json* file) { (*file)["normalizer"] = nullptr; });
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

TEST(TokenizerTest, RandomTextComesBackUnchanged) {
  std::unique_ptr<Tokenizer> tokenizer = TinyWithoutNormalizer();
  std::mt19937_64 rng(3);
  for (int round = 0; round < 2'000; ++round) {
    std::string text = RandomText(&rng, Pick(&rng, 40));
    std::vector<int32_t> ids = EncodeOrDie(*tokenizer, text);
    ASSERT_EQ(Decode(*tokenizer, ids, false), text);
  }
}

TEST(TokenizerTest, RandomBytesComeBackAsTheLossyRepairOfThem) {
  std::unique_ptr<Tokenizer> tokenizer = TinyWithoutNormalizer();
  std::mt19937_64 rng(4);
  for (int round = 0; round < 2'000; ++round) {
    std::string bytes = RandomBytes(&rng, Pick(&rng, 60));
    std::string repaired;
    AppendLossyUtf8(bytes, true, &repaired);
    ASSERT_TRUE(IsValidUtf8(repaired));
    ASSERT_EQ(Decode(*tokenizer, EncodeOrDie(*tokenizer, bytes), false), repaired);
  }
}

TEST(TokenizerTest, OneByOneEqualsTheWholeForRandomIds) {
  std::unique_ptr<Tokenizer> tokenizer = TinyWithoutNormalizer();
  std::mt19937_64 rng(5);
  for (int round = 0; round < 3'000; ++round) {
    std::vector<int32_t> ids(Pick(&rng, 30));
    for (int32_t& id : ids) id = static_cast<int32_t>(Pick(&rng, 520)) - 3;
    for (bool skip : {false, true}) {
      ASSERT_EQ(DetokenizeOneByOne(*tokenizer, ids, skip), Decode(*tokenizer, ids, skip));
    }
  }
}

TEST(TokenizerTest, ALongPieceEncodesLikeThePairwiseDefinition) {
  // The queue of long pieces against the scan of short ones: merging the best pair, leftmost first.
  std::unique_ptr<Tokenizer> tokenizer = TinyWithoutNormalizer();
  nlohmann::json file = nlohmann::json::parse(ReadAll(GoldenDir() + "/tiny/tokenizer.json"));
  std::map<std::pair<std::string, std::string>, size_t> rank;
  for (const auto& merge : file["model"]["merges"]) {
    std::string left = merge.is_array()
                           ? merge[0].get<std::string>()
                           : merge.get<std::string>().substr(0, merge.get<std::string>().find(' '));
    std::string right = merge.is_array() ? merge[1].get<std::string>()
                                         : merge.get<std::string>().substr(left.size() + 1);
    rank.emplace(std::pair{left, right}, rank.size());
  }
  std::mt19937_64 rng(6);
  for (int round = 0; round < 50; ++round) {
    std::string word;
    while (word.size() < 33 + Pick(&rng, 200)) word += "etaoinshrdlu"[Pick(&rng, 12)];
    std::vector<std::string> symbols;
    for (char c : word) symbols.emplace_back(1, c);
    while (true) {
      size_t best = symbols.size();
      size_t best_rank = rank.size();
      for (size_t i = 0; i + 1 < symbols.size(); ++i) {
        auto it = rank.find({symbols[i], symbols[i + 1]});
        if (it != rank.end() && it->second < best_rank) {
          best = i;
          best_rank = it->second;
        }
      }
      if (best == symbols.size()) break;
      symbols[best] += symbols[best + 1];
      symbols.erase(symbols.begin() + static_cast<long>(best) + 1);
    }
    std::vector<int32_t> want;
    for (const std::string& symbol : symbols) want.push_back(*tokenizer->TokenId(symbol));
    ASSERT_EQ(EncodeOrDie(*tokenizer, word), want) << word;
  }
}

TEST(TokenizerTest, StopsEarlyOnTextThatIsTooLong) {
  std::unique_ptr<Tokenizer> tokenizer = TinyWithoutNormalizer();
  for (std::string unit : {"the ", "a", " ", "\xF0", "日", "<|im_end|>", "\u0301\u0323"}) {
    std::string text;
    while (text.size() < 300'000) text += unit;
    absl::StatusOr<std::vector<int32_t>> ids = tokenizer->Encode(text, false, 10);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_GT(ids->size(), 10u) << unit;
    std::vector<int32_t> few = EncodeOrDie(*tokenizer, unit);
    ids = tokenizer->Encode(unit, false, few.size());
    ASSERT_TRUE(ids.ok());
    EXPECT_EQ(*ids, few);
  }
}

TEST(TokenizerTest, ReadsSpecialTokensAndBosFromTheConfig) {
  auto none = [](nlohmann::json*) {};
  auto tokenizer = ParseTiny(
      none,
      {{"bos_token", {{"content", "<|im_start|>"}}},
       {"eos_token", "<|im_end|>"},
       {"add_bos_token", true},
       {"chat_template",
        {{{"name", "default"}, {"template", "d"}}, {{"name", "tool_use"}, {"template", "t"}}}}});
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->eos_token_ids(), std::vector<int32_t>{511});
  EXPECT_EQ(EncodeOrDie(**tokenizer, "", true), std::vector<int32_t>{510});
  EXPECT_TRUE(EncodeOrDie(**tokenizer, "", false).empty());
  EXPECT_EQ((*tokenizer)->chat_template(false), "d");
  EXPECT_EQ((*tokenizer)->chat_template(true), "t");
  EXPECT_TRUE((*tokenizer)->IsSpecial(511));
  EXPECT_FALSE((*tokenizer)->IsSpecial(-1));
  EXPECT_FALSE((*tokenizer)->IsSpecial(1 << 30));
  EXPECT_EQ((*tokenizer)->TokenBytes(1 << 30), "");
  EXPECT_EQ((*tokenizer)->special_tokens()["eos_token"], "<|im_end|>");
  EXPECT_FALSE(ParseTiny(none, {{"eos_token", "<nowhere>"}}).ok());
}

TEST(TokenizerTest, EosIdsAreTheUnionOfAllFiles) {
  std::string dir = ::testing::TempDir() + "/zipage_text_eos";
  std::filesystem::create_directories(dir);
  for (const char* name : {"tokenizer.json", "tokenizer_config.json"}) {
    std::filesystem::copy_file(GoldenDir() + "/tiny/" + name, dir + "/" + name,
                               std::filesystem::copy_options::overwrite_existing);
  }
  auto write = [&](const char* name, const std::string& text) {
    std::ofstream(dir + "/" + name) << text;
  };
  write("generation_config.json", R"({"eos_token_id": [509, 7]})");
  write("config.json", R"({"eos_token_id": 7})");
  write("chat_template.jinja", "from the file");
  auto tokenizer = Tokenizer::Load(dir);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  EXPECT_EQ((*tokenizer)->eos_token_ids(), (std::vector<int32_t>{7, 509, 511}));
  EXPECT_EQ((*tokenizer)->chat_template(false), "from the file");
  write("config.json", R"({"eos_token_id": -1})");
  EXPECT_FALSE(Tokenizer::Load(dir).ok());
  write("config.json", "{");
  EXPECT_FALSE(Tokenizer::Load(dir).ok());
  std::filesystem::remove_all(dir);
  absl::Status missing = Tokenizer::Load(dir).status();
  EXPECT_TRUE(absl::IsNotFound(missing)) << missing;
}

TEST(TokenizerTest, RefusesWhatItDoesNotSupportByName) {
  struct Case {
    const char* pointer;
    nlohmann::json value;
    const char* named;
  };
  nlohmann::json byte_level = {{"type", "ByteLevel"}};
  auto stages = [](nlohmann::json list) {
    return nlohmann::json{{"type", "Sequence"}, {"pretokenizers", std::move(list)}};
  };
  auto regex = [&](const char* pattern) {
    return stages({{{"type", "Split"}, {"pattern", {{"Regex", pattern}}}, {"behavior", "Isolated"}},
                   byte_level});
  };
  const Case cases[] = {
      {"/normalizer", {{"type", "Lowercase"}}, "Lowercase"},
      {"/pre_tokenizer", {{"type", "Metaspace"}}, "Metaspace"},
      {"/pre_tokenizer", nullptr, "pre_tokenizer"},
      {"/pre_tokenizer", stages({byte_level, byte_level}), "ByteLevel"},
      {"/pre_tokenizer", stages({{{"type", "Digits"}}}), "ByteLevel"},
      {"/pre_tokenizer", regex("\\w+"), "\\w"},
      {"/pre_tokenizer", regex("^a"), "^"},
      {"/pre_tokenizer", regex("[a[b]]"), "["},
      {"/pre_tokenizer", regex("[\\S]"), "\\S"},
      {"/pre_tokenizer", regex("(?m:a)"), "(?m:"},
      {"/pre_tokenizer", regex("(a"), "compile"},
      {"/pre_tokenizer", regex(""), "empty"},
      {"/post_processor", {{"type", "BertProcessing"}}, "BertProcessing"},
      {"/post_processor", {{"type", "TemplateProcessing"}}, "TemplateProcessing"},
      {"/decoder", {{"type", "Metaspace"}}, "Metaspace"},
      {"/decoder", nullptr, "decoder"},
      {"/model/type", "Unigram", "Unigram"},
      {"/model/dropout", 0.1, "dropout"},
      {"/model/byte_fallback", true, "byte_fallback"},
      {"/model/continuing_subword_prefix", "##", "continuing_subword_prefix"},
      {"/model/ignore_merges", 3, "ignore_merges"},
      {"/model/vocab/a", -5, "id"},
      {"/model/vocab/a", 1 << 30, "id"},
      {"/model/vocab/a", 1.5, "integer"},
      {"/model/vocab/a", {{"x", 1}}, "number"},
      {"/model/vocab/a", 0, "id 0"},
      {"/model/vocab", nlohmann::json::array(), "empty"},
      {"/model/merges", nlohmann::json::array({"a b c"}), "LEFT RIGHT"},
      {"/model/merges", nlohmann::json::array({"nope a"}), "merge 0"},
      {"/model/merges", nlohmann::json::array({nlohmann::json::array({"a"})}), "pair"},
      {"/model/merges", nlohmann::json::array({7}), "string"},
      {"/added_tokens/0/id", 1 << 30, "id"},
      {"/added_tokens/0/id", 510, "510"},
      {"/added_tokens/0/content", "a", "vocabulary"},
      {"/added_tokens/0/special", "yes", "special"},
  };
  for (const Case& c : cases) {
    auto parsed = ParseTiny(
        [&](nlohmann::json* file) { (*file)[nlohmann::json::json_pointer(c.pointer)] = c.value; });
    ASSERT_FALSE(parsed.ok()) << c.pointer << c.value;
    EXPECT_NE(std::string(parsed.status().message()).find(c.named), std::string::npos)
        << parsed.status();
    EXPECT_EQ(std::string(parsed.status().message()).find('\n'), std::string::npos);
  }
}

TEST(TokenizerTest, SurvivesTruncatedAndMutatedFiles) {
  std::string text = ReadAll(GoldenDir() + "/tiny/tokenizer.json");
  std::mt19937_64 rng(8);
  int num_ok = 0;
  for (int round = 0; round < 400; ++round) {
    std::string bad = text;
    if (round % 4 == 0) bad.resize(Pick(&rng, bad.size()));
    for (size_t n = Pick(&rng, 4) + (round % 4 == 0 ? 0 : 1); n > 0 && !bad.empty(); --n) {
      size_t at = Pick(&rng, bad.size());
      if (Pick(&rng, 2) == 0) {
        bad[at] = static_cast<char>(rng());
      } else {
        bad.insert(at, bad.substr(Pick(&rng, bad.size()), Pick(&rng, 30)));
      }
    }
    auto parsed = Tokenizer::Parse(bad, nlohmann::json::object());
    if (!parsed.ok()) continue;
    ++num_ok;
    auto ids = (*parsed)->Encode("It's the 1st <|im_end|> té\u0301st", true);
    if (ids.ok()) Decode(**parsed, *ids, true);
  }
  EXPECT_GT(num_ok, 0);
  EXPECT_FALSE(Tokenizer::Parse(std::string(100'000, '['), {}).ok());
  std::string deep = R"({"model":)";
  for (int i = 0; i < 50'000; ++i) deep += R"({"a":)";
  EXPECT_FALSE(Tokenizer::Parse(deep, {}).ok());
}

TEST(NfcTest, ALongRunOfMarksIsSortedByClassAndKeepsItsOrderWithin) {
  std::string text = "a";
  for (int i = 0; i < 50'000; ++i) text += "\u0301\u0323";  // classes 230 and 220
  std::string want = "\u1ea1\u0301";                        // the first dot below composes
  std::string got = NormalizeNfc(text);
  EXPECT_EQ(got.substr(0, 3), "\u1ea1");
  EXPECT_EQ(got.size(), 3 + 2 * (50'000 - 1) + 2 * 50'000u);
  EXPECT_EQ(NormalizeNfc("a\u0301\u0323"), want);
  EXPECT_EQ(NormalizeNfc("\u1112\u1161\u11ab \u0958 \u212b A\u030a"),
            "\ud55c \u0915\u093c \u00c5 \u00c5");
}

}  // namespace
}  // namespace zipage
