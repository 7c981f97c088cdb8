#include "scheduler/text/chat_template.h"

#include <gtest/gtest.h>

#include <map>

#include "scheduler/text/tokenizer.h"
#include "tests/scheduler/text/text_fixtures.h"

namespace zipage {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<std::string> RenderSource(const std::string& source, const Json& messages,
                                         const Json& extra, bool add_generation_prompt) {
  absl::StatusOr<ChatTemplate> parsed = ChatTemplate::Parse(source);
  if (!parsed.ok()) return parsed.status();
  return parsed->Render(messages, extra, add_generation_prompt);
}

absl::StatusOr<std::string> RenderSource(const std::string& source) {
  return RenderSource(source, Json::array(), Json::object(), false);
}

// Of a row of chat.jsonl: everything apply_chat_template got besides the messages.
Json ExtraOf(const Json& row, const Tokenizer& tokenizer) {
  Json extra = tokenizer.special_tokens();
  for (const char* name : {"tools", "enable_thinking"}) {
    if (row.contains(name)) extra[name] = row[name];
  }
  return extra;
}

TEST(ChatTemplateTest, EqualsTransformersOnEveryGoldenConversation) {
  if (!HasShared()) GTEST_SKIP() << "NO GOLDEN FILES in " << SharedDir() << ": nothing compared";
  std::map<std::string, std::unique_ptr<Tokenizer>> tokenizers;
  for (const char* name : {"qwen3", "qwen2.5", "smollm2"}) {
    auto tokenizer = Tokenizer::Load(SharedDir() + "/tokenizers/" + name);
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
    tokenizers[name] = *std::move(tokenizer);
  }
  std::vector<Json> rows = ReadJsonLines(SharedDir() + "/golden/tokenizer/chat.jsonl");
  ASSERT_EQ(rows.size(), 112u);
  for (const Json& row : rows) {
    const Tokenizer& tokenizer = *tokenizers.at(row["tok"]);
    std::optional<std::string> source = tokenizer.chat_template(row.contains("tools"));
    ASSERT_TRUE(source.has_value());
    absl::StatusOr<std::string> text = RenderSource(
        *source, row["messages"], ExtraOf(row, tokenizer), row["add_generation_prompt"]);
    ASSERT_TRUE(text.ok()) << text.status() << row.dump();
    EXPECT_EQ(*text, row["text"].get<std::string>()) << row["tok"] << row["case"];
    absl::StatusOr<std::vector<int32_t>> ids = tokenizer.Encode(*text, false);
    ASSERT_TRUE(ids.ok()) << ids.status();
    EXPECT_EQ(*ids, row["ids"].get<std::vector<int32_t>>()) << row["tok"] << row["case"];
  }
}

TEST(ChatTemplateTest, EqualsJinjaOnCommittedTemplatesAndSnippets) {
  std::vector<Json> rows = ReadJsonLines(GoldenDir() + "/templates.jsonl");
  ASSERT_GT(rows.size(), 150u);
  for (const Json& row : rows) {
    std::string source =
        row.contains("source")
            ? row["source"].get<std::string>()
            : ReadAll(GoldenDir() + "/templates/" + row["template"].get<std::string>());
    absl::StatusOr<std::string> text =
        RenderSource(source, row["messages"], row["extra"], row["add_generation_prompt"]);
    if (row.contains("error")) {
      EXPECT_FALSE(text.ok()) << row.dump() << "\nrendered: " << *text;
    } else {
      ASSERT_TRUE(text.ok()) << text.status() << "\n" << row.dump();
      EXPECT_EQ(*text, row["text"].get<std::string>()) << row.dump();
    }
  }
}

TEST(ChatTemplateTest, EqualsTransformersOnTheCommittedConversations) {
  std::vector<Json> rows = ReadJsonLines(GoldenDir() + "/chat.jsonl");
  ASSERT_GE(rows.size(), 15u);
  for (const Json& row : rows) {
    Json extra = Json::object();
    for (const char* name : {"tools", "enable_thinking"}) {
      if (row.contains(name)) extra[name] = row[name];
    }
    std::string source =
        ReadAll(GoldenDir() + "/templates/" + row["tok"].get<std::string>() + ".txt");
    absl::StatusOr<std::string> text =
        RenderSource(source, row["messages"], extra, row["add_generation_prompt"]);
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_EQ(*text, row["text"].get<std::string>()) << row["tok"] << row["case"];
  }
}

TEST(ChatTemplateTest, NamesTheUnsupportedConstructAndItsLine) {
  for (auto [source, named] :
       {std::pair{"\n{% include 'x' %}", "tag 'include'"},
        std::pair{"\n{% for x in y recursive %}{% endfor %}", "recursive"},
        std::pair{"\n{{ x | urlize }}", "filter 'urlize'"},
        std::pair{"\n{{ x is frobnicated }}", "test 'frobnicated'"},
        std::pair{"\n{{ f(*x) }}", "*args"}, std::pair{"\n{{ '%s' % 1 }}", "formatting"},
        std::pair{"\n{{ 'a'.zfill(3) }}", "zfill"}, std::pair{"\n{{ [1].append(2) }}", "append"},
        std::pair{"\n{{ ''.__class__ }}", "__class__"},
        std::pair{"\n{{ ('a' | safe) + 'b' }}", "safe"},
        std::pair{"\n{{ [1] | select }}", "generator"},
        std::pair{"\n{{ 9223372036854775807 + 1 }}", "64 bits"},
        std::pair{"\n{{ 99999999999999999999 }}", "integer"},
        std::pair{"\n{% set n = namespace(a=1) %}{% for x in [1] if n.a %}"
                  "{% endfor %}",
                  "namespace"},
        std::pair{"\n{{ cycler('a') }}", "cycler"},
        std::pair{"\n{{ '\u00df'.upper() }}", "special casing"}}) {
    absl::StatusOr<std::string> text = RenderSource(source);
    ASSERT_FALSE(text.ok()) << source << " gave " << *text;
    EXPECT_TRUE(absl::IsUnimplemented(text.status())) << text.status();
    EXPECT_NE(std::string(text.status().message()).find(named), std::string::npos) << text.status();
    EXPECT_NE(std::string(text.status().message()).find("line 2"), std::string::npos)
        << text.status();
  }
}

TEST(ChatTemplateTest, WhatTheTemplateRaisesReachesTheCaller) {
  absl::Status status = RenderSource("{{ raise_exception('roles must alternate') }}").status();
  EXPECT_TRUE(absl::IsInvalidArgument(status));
  EXPECT_NE(std::string(status.message()).find("roles must alternate"), std::string::npos);
}

TEST(ChatTemplateTest, TheDateIsToday) {
  absl::StatusOr<std::string> text = RenderSource("{{ strftime_now('%d %b %Y') }}");
  ASSERT_TRUE(text.ok()) << text.status();
  EXPECT_EQ(text->size(), 11u);
  EXPECT_EQ(text->substr(7, 2), "20");
}

TEST(ChatTemplateTest, HostileTemplatesEndInAnErrorAfterBoundedWork) {
  std::string nested_parentheses =
      "{{ " + std::string(50'000, '(') + "1" + std::string(50'000, ')') + " }}";
  std::string long_sum = "{{ 1";
  std::string many_nots = "{{ ";
  std::string nested_blocks;
  std::string dots = "{{ x";
  for (int i = 0; i < 50'000; ++i) {
    long_sum += "+1";
    many_nots += "not ";
    nested_blocks += "{% if 1 %}";
    dots += "[0]";
  }
  for (const std::string& source :
       {nested_parentheses,
        long_sum + " }}",
        many_nots + "1 }}",
        nested_blocks,
        dots + " }}",
        "{{ " + std::string(50'000, '-') + "1 }}",
        "{{ " + std::string(50'000, '[') + " }}",
        std::string(
            "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}"),
        std::string("{% for a in range(100000) %}{{ 'x' * 10000 }}{% endfor %}"),
        std::string("{{ 'x' * 10000000000 }}"),
        std::string("{{ [0] * 100000000 }}"),
        std::string("{% set n = namespace(x='x') %}{% for a in range(90) %}{% set n.x = n.x ~ n.x "
                    "%}{% endfor %}"),
        std::string("{% set n = namespace(x=[]) %}{% for a in range(90000) %}{% set n.x = [n.x] "
                    "%}{% endfor %}"),
        std::string("{% set n = namespace(x=[]) %}{% for a in range(90) %}{% set n.x = [n.x, n.x] "
                    "%}{% endfor %}{{ n.x }}"),
        std::string("{% set n = namespace(x=[]) %}{% for a in range(90) %}{% set n.x = [n.x, n.x] "
                    "%}{% endfor %}{{ n.x | tojson }}"),
        std::string("{% set n = namespace(x=[], y=[]) %}{% for a in range(90) %}{% set n.x = [n.x, "
                    "n.x] %}{% set n.y = [n.y, n.y] %}{% endfor %}{{ n.x == n.y }}"),
        std::string("{% set n = namespace() %}{% set n.x = [n] %}"),
        std::string("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"),
        std::string("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}"),
        std::string("{{ range(1000000000) }}"),
        std::string("{{ 2 ** 1000000000 }}"),
        std::string("{{ 'a' | replace('', 'b' * 60000000) | replace('b', 'c' * 60000000) }}"),
        std::string("{{ [[1]] | tojson(indent='x' * 60000000) }}"),
        std::string("{{ 'x' | indent('y' * 60000000, true) | indent('y' * 60000000, true) }}")}) {
    absl::StatusOr<std::string> text = RenderSource(source);
    EXPECT_FALSE(text.ok()) << source.substr(0, 100);
  }
}

// Cuts, repeats, swaps and overwrites pieces of a template.
std::string Mutate(std::string source, const std::string& other, std::mt19937_64* rng) {
  static const char* const kParts[] = {
      "{%",    "%}",   "{{",   "}}",    "-%}",    "{%-",    "{#",       "#}",   "|",
      ".",     "(",    ")",    "[",     "]",      "'",      "\"",       " if ", " else ",
      " not ", " in ", " is ", "endif", "endfor", "loop",   "messages", "0",    "-1",
      "::",    "~",    "+",    "*",     "%",      "tojson", "none",     "\xff", "\n"};
  for (size_t n = 1 + Pick(rng, 4); n > 0; --n) {
    size_t at = Pick(rng, source.size() + 1);
    size_t size = Pick(rng, 40);
    switch (Pick(rng, 4)) {
      case 0:
        source.erase(at, size);
        break;
      case 1:
        source.insert(at, kParts[Pick(rng, std::size(kParts))]);
        break;
      case 2:
        source.insert(at, other.substr(Pick(rng, other.size()), size));
        break;
      default:
        source.replace(at, std::min(size, source.size() - at),
                       kParts[Pick(rng, std::size(kParts))]);
    }
  }
  return source;
}

TEST(ChatTemplateTest, MutatedTemplatesNeverCrashOrHang) {
  std::vector<std::string> sources;
  for (const char* name :
       {"llama31.jinja", "deepseek-r1-distill.jinja", "macros.jinja", "qwen3.txt", "smollm2.txt"}) {
    sources.push_back(ReadAll(GoldenDir() + "/templates/" + name));
    ASSERT_FALSE(sources.back().empty()) << name;
  }
  std::vector<Json> rows = ReadJsonLines(GoldenDir() + "/templates.jsonl");
  for (const Json& row : rows) {
    if (row.contains("source")) sources.push_back(row["source"]);
  }
  std::mt19937_64 rng(9);
  int num_rendered = 0;
  for (int round = 0; round < 6'000; ++round) {
    const std::string& source = sources[Pick(&rng, sources.size())];
    std::string mutated = Mutate(source, sources[Pick(&rng, sources.size())], &rng);
    const Json& row = rows[Pick(&rng, rows.size())];
    absl::StatusOr<std::string> text = RenderSource(mutated, row["messages"], row["extra"], true);
    num_rendered += text.ok() ? 1 : 0;
    if (!text.ok()) {
      EXPECT_FALSE(text.status().message().empty());
    }
  }
  EXPECT_GT(num_rendered, 100);
}

TEST(ChatTemplateTest, HostileMessagesAreErrorsOrText) {
  absl::StatusOr<ChatTemplate> parsed =
      ChatTemplate::Parse(ReadAll(GoldenDir() + "/templates/qwen3.txt"));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  for (const char* messages :
       {"[]", "null", "3", "{}", "[3]", "[[]]", "[{}]", R"([{"role": 3, "content": []}])",
        R"([{"role": "user", "content": null}])",
        R"([{"role": "assistant", "content": "", "tool_calls": 3}])",
        R"([{"role": "assistant", "content": "", "tool_calls": [{"function": 1}]}])",
        R"([{"role": "user"}, {"content": "x"}])", "18446744073709551615"}) {
    parsed->Render(Json::parse(messages), Json::object(), true).status().IgnoreError();
  }
  Json deep = Json::array();
  for (int i = 0; i < 5'000; ++i) deep = Json::array({std::move(deep)});
  EXPECT_FALSE(parsed->Render(deep, Json::object(), true).ok());
}

}  // namespace
}  // namespace zipage
