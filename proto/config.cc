#include "proto/config.h"

#include <xxhash.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <charconv>
#include <iostream>
#include <iterator>
#include <memory>
#include <numeric>
#include <variant>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "glog/logging.h"
#include "proto/contradictions.h"
#include "proto/toml.h"

namespace zipage {
namespace {

using Member = std::variant<std::string Config::*, int Config::*, int64_t Config::*,
                            double Config::*, bool Config::*>;

// Both ends are allowed.
struct Range {
  double min;
  double max;
};
struct Choices {
  const char* names;  // Separated by ", ".
};
using Limits = std::variant<std::monostate, Range, Choices>;
constexpr Limits kAny;  // Any value that parses.

enum InDigest : bool { kLocal = false, kInDigest = true };

struct Option {
  const char* name;
  Member member;
  Limits limits;
  InDigest in_digest;
  const char* help;
};

constexpr double kDaySeconds = 86400;

// In the order of --help. An option is in the digest if results or shapes that ranks must share
// depend on it.
constexpr Option kOptions[] = {
    {"model", &Config::model, kAny, kLocal,
     "Folder of a Hugging Face model with config.json, safetensors and tokenizer.json."},
    {"served_model_name", &Config::served_model_name, kAny, kLocal,
     "Name of the model in results; empty takes the name of its folder."},
    {"tp", &Config::tp, Range{1, 64}, kInDigest, "Tensor-parallel ranks, one worker process each."},
    {"device", &Config::device, Choices{"auto, cpu, cuda"}, kInDigest,
     "Where workers compute; auto is a GPU if there is one."},
    {"dtype", &Config::dtype, Choices{"auto, float32, bfloat16, float16"}, kInDigest,
     "Type of weights and activations; auto takes what suits model and device best."},
    {"max_model_len", &Config::max_model_len, Range{0, 1 << 30}, kInDigest,
     "Positions a sequence may have, prompt and output together; 0 takes the model's limit."},
    {"max_num_seqs", &Config::max_num_seqs, Range{1, 65536}, kInDigest,
     "Sequences that run at once."},
    {"max_num_batched_tokens", &Config::max_num_batched_tokens, Range{1, 1048576}, kInDigest,
     "Tokens of one step, prefill and decode together; at least max_num_seqs."},
    {"kvcache_block_size", &Config::kvcache_block_size, Range{16, 256}, kInDigest,
     "Positions in one block of KV cache."},
    {"num_kvcache_blocks", &Config::num_kvcache_blocks, Range{0, 2147483647}, kLocal,
     "Blocks of KV cache; 0 takes as many as memory holds."},
    {"kv_cache_memory_gb", &Config::kv_cache_memory_gb, Range{0, 1 << 20}, kLocal,
     "Memory for KV cache per rank in GiB; 0 takes a share of what the device has free."},
    {"gpu_memory_utilization", &Config::gpu_memory_utilization, Range{0.01, 1}, kLocal,
     "Share of the device's memory that the engine may take; on the CPU, of the free memory that "
     "the automatic KV cache may take."},
    {"swap_space_gb", &Config::swap_space_gb, Range{0, 1 << 20}, kLocal,
     "Host memory per rank for swapped sequences in GiB; 0 recomputes them instead."},
    {"enable_prefix_cache", &Config::enable_prefix_cache, kAny, kLocal,
     "Share full blocks between sequences that begin alike."},
    {"compression_policy", &Config::compression_policy,
     Choices{"auto, none, paper, pinned_score, pinned_random, recency"}, kInDigest,
     "What KV compression keeps: auto as the best one measured; none everything; paper what "
     "attention looks at and no other key resembles; pinned_score the prompt, a score_share by "
     "attention and the rest at random; pinned_random the prompt and the rest at random; recency "
     "the newest."},
    {"max_cache_blocks_per_seq", &Config::max_cache_blocks_per_seq, Range{1, 65536}, kInDigest,
     "Full blocks a sequence keeps after a compression; it never holds more than one above that. A "
     "request's kv_budget, in tokens, replaces it."},
    {"query_cache_len", &Config::query_cache_len, Range{1, 64}, kInDigest,
     "Newest positions whose queries score the others and that are always kept; at most "
     "kvcache_block_size."},
    {"pin_prompt", &Config::pin_prompt, Choices{"auto, on, off"}, kInDigest,
     "Always keep the prompt, up to half the budget; auto is on for pinned_score and "
     "pinned_random."},
    {"score_share", &Config::score_share, Range{0, 1}, kInDigest,
     "pinned_score: share of the slots beside prompt and window that go to the highest scores; the "
     "others are drawn at random."},
    {"use_global_score", &Config::use_global_score, kAny, kInDigest,
     "paper, pinned_score: remember scores from one compression to the next, decayed by "
     "decay_factor."},
    {"decay_factor", &Config::decay_factor, Range{0, 1}, kInDigest,
     "Share of a remembered score that counts at the next compression."},
    {"max_norm", &Config::max_norm, kAny, kInDigest,
     "paper, pinned_score: divide attention score and similarity by their maximum."},
    {"enable_pooling", &Config::enable_pooling, kAny, kInDigest,
     "paper, pinned_score: spread each score over its neighbours at a sequence's first "
     "compression."},
    {"continues_pooling", &Config::continues_pooling, kAny, kInDigest,
     "Pool at every compression, not at the first alone; needs enable_pooling."},
    {"pooling_size", &Config::pooling_size, Range{1, 255}, kInDigest,
     "Slots that the pooling takes the maximum over; odd."},
    {"use_similarity", &Config::use_similarity, kAny, kInDigest,
     "paper: lower the score of keys that resemble others."},
    {"lightning_similarity", &Config::lightning_similarity, kAny, kInDigest,
     "use_similarity: compare keys within a block only; off: with all others, at quadratic "
     "cost."},
    {"similarity_lambda", &Config::similarity_lambda, Range{0, 1}, kInDigest,
     "use_similarity: weight of the attention score against the similarity."},
    {"similarity_temperature", &Config::similarity_temperature, Range{0.001, 1000}, kInDigest,
     "use_similarity: temperature of the softmax over the similarities."},
    {"use_attention_sink", &Config::use_attention_sink, kAny, kInDigest,
     "Always keep the first sink_len slots."},
    {"sink_len", &Config::sink_len, Range{1, 65536}, kInDigest,
     "Slots that use_attention_sink keeps."},
    {"compress_prefill", &Config::compress_prefill, kAny, kInDigest,
     "Compress prompts longer than the budget while they are prefilled; off: when the block in "
     "which the prompt ends is full."},
    {"enable_async_compress", &Config::enable_async_compress, kAny, kInDigest,
     "A compressing sequence sits out while the others go on; off: it is compressed before the "
     "step."},
    {"enable_hybrid_engine", &Config::enable_hybrid_engine, kAny, kInDigest,
     "Admit sequences beyond those whose blocks are guaranteed while blocks are free."},
    {"adaptive_kv_budget", &Config::adaptive_kv_budget, kAny, kInDigest,
     "Keep the full cache while blocks are free and compress only under memory pressure; results "
     "then depend on the load."},
    {"layer_stride", &Config::layer_stride, Range{1, 1024}, kInDigest,
     "Layers compressed together; fewer need less scratch memory."},
    {"repetition_penalty", &Config::repetition_penalty, Range{0, 100}, kInDigest,
     "Repetition penalty of requests that give none; 0 takes the model's own default, 1 is "
     "none."},
    {"repetition_ngram_size", &Config::repetition_ngram_size, Range{0, 1024}, kInDigest,
     "End a sequence, with finish_reason \"repetition\", when the last so many tokens of its "
     "output have occurred in it repetition_ngram_count times; 0 is off."},
    {"repetition_ngram_count", &Config::repetition_ngram_count, Range{2, 1000000}, kInDigest,
     "Occurrences at which repetition_ngram_size ends a sequence."},
    {"seed", &Config::seed, kAny, kInDigest,
     "Base of the sampling seeds of requests that give none."},
    {"generation_config", &Config::generation_config, Choices{"auto, none"}, kInDigest,
     "auto takes sampling defaults from the model's generation_config.json, none does not."},
    {"collective", &Config::collective, Choices{"auto, shm, gloo"}, kInDigest,
     "How CPU ranks add up: shared memory or TCP; auto is shm for ranks of one host."},
    {"cpu_threads", &Config::cpu_threads, Range{0, 1024}, kLocal,
     "Threads of one CPU worker; 0 divides the cores among the ranks."},
    {"init_timeout_s", &Config::init_timeout_s, Range{0.001, kDaySeconds}, kLocal,
     "Seconds for workers to load weights and become ready."},
    {"heartbeat_timeout_s", &Config::heartbeat_timeout_s, Range{0, kDaySeconds}, kLocal,
     "Seconds without a heartbeat after which a worker counts as hung; 0 is never."},
    {"step_timeout_s", &Config::step_timeout_s, Range{0, kDaySeconds}, kLocal,
     "Seconds that one step may take; 0 is no limit."},
    {"collective_timeout_s", &Config::collective_timeout_s, Range{0.001, kDaySeconds}, kLocal,
     "Seconds a rank waits for the others in a collective."},
    {"drain_timeout_s", &Config::drain_timeout_s, Range{0, kDaySeconds}, kLocal,
     "Seconds that running requests get to finish after SIGTERM; 0 stops at once."},
    {"max_line_mb", &Config::max_line_mb, Range{0.001, 1024}, kLocal,
     "Longest line of a job file in MiB; longer ones become error records."},
    {"job_endpoint", &Config::job_endpoint, kAny, kLocal,
     "Where jobs arrive besides the Unix socket in the run directory: ipc://PATH or "
     "tcp://ADDRESS:PORT; empty is nowhere."},
    {"curve_key_file", &Config::curve_key_file, kAny, kLocal,
     "File of the job socket's own CURVE keys; empty is no encryption."},
    {"curve_allowed_clients_file", &Config::curve_allowed_clients_file, kAny, kLocal,
     "File of the public keys of clients the job socket lets in, one a line."},
    {"insecure_tcp", &Config::insecure_tcp, kAny, kLocal,
     "Take a tcp:// job_endpoint without CURVE keys: whoever reaches the port can run jobs."},
};

// The value as text that SetFromText reads back exactly.
std::string Text(const Config& config, const Option& option) {
  return std::visit(
      [&config](auto member) -> std::string {
        const auto& value = config.*member;
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, std::string>) {
          return value;
        } else if constexpr (std::is_same_v<T, bool>) {
          return value ? "true" : "false";
        } else {
          char buffer[32];
          return {buffer, std::to_chars(buffer, std::end(buffer), value).ptr};
        }
      },
      option.member);
}

absl::Status SetFromText(const Option& option, const std::string& text, Config* config) {
  return std::visit(
      [&](auto member) {
        auto& value = config->*member;
        using T = std::decay_t<decltype(value)>;
        const char* wanted = nullptr;
        if constexpr (std::is_same_v<T, std::string>) {
          value = text;
        } else if constexpr (std::is_same_v<T, bool>) {
          if (!absl::SimpleAtob(text, &value)) wanted = "true or false";
        } else if constexpr (std::is_same_v<T, double>) {
          if (!absl::SimpleAtod(text, &value)) wanted = "a number";
        } else {
          if (!absl::SimpleAtoi(text, &value)) wanted = "a whole number";
        }
        if (wanted == nullptr) return absl::OkStatus();
        return absl::InvalidArgumentError(
            absl::StrFormat("%s is \"%s\"; give %s", option.name, text, wanted));
      },
      option.member);
}

// What --help shows for the value.
std::string TypeName(const Option& option) {
  if (const auto* choices = std::get_if<Choices>(&option.limits)) {
    return absl::StrCat("{", choices->names, "}");
  }
  if (std::holds_alternative<std::string Config::*>(option.member)) return "TEXT";
  return std::holds_alternative<double Config::*>(option.member) ? "NUMBER" : "INT";
}

// "; did you mean PREFIXname?" for the option of `app` nearest to `name`, or the only one that
// begins like it; a hint at --help if there is none.
std::string Suggestion(const CLI::App& app, std::string_view name, const char* prefix) {
  std::string nearest;
  std::vector<std::string> beginning;
  size_t best = std::max<size_t>(2, name.size() / 4) + 1;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& candidate : option->get_lnames()) {
      if (!name.empty() && absl::StartsWith(candidate, ToAbsl(name))) {
        beginning.push_back(candidate);
      }
      const size_t distance = EditDistance(name, candidate);
      if (distance >= best) continue;
      best = distance;
      nearest = candidate;
    }
  }
  if (nearest.empty() && beginning.size() == 1) nearest = beginning.front();
  if (nearest.empty()) return "; --help lists all";
  return absl::StrCat("; did you mean ", prefix, nearest, "?");
}

// Reads the options' TOML for CLI11, whose own reader cuts strings at '#' and ','.
class TomlReader : public CLI::Config {
 public:
  explicit TomlReader(const CLI::App* app) : app_(app) {}

  std::string to_config(const CLI::App*, bool, bool, std::string) const override { return ""; }

  std::vector<CLI::ConfigItem> from_config(std::istream& input) const override {
    const std::string text{std::istreambuf_iterator<char>(input), {}};
    const absl::StatusOr<std::vector<TomlEntry>> entries = ParseToml(text);
    if (!entries.ok()) throw CLI::ConfigError(std::string(entries.status().message()));
    std::vector<CLI::ConfigItem> items;
    for (const TomlEntry& entry : *entries) {
      const CLI::Option* option = app_->get_option_no_throw("--" + entry.key);
      if (option == nullptr || !option->get_configurable()) {
        throw CLI::ConfigError(absl::StrFormat("line %d: unknown key %s%s", entry.line, entry.key,
                                               Suggestion(*app_, entry.key, "")));
      }
      CLI::ConfigItem& item = items.emplace_back();
      item.name = entry.key;
      item.inputs = {entry.value};
    }
    return items;
  }

 private:
  const CLI::App* app_;
};

// The arguments behind argv[0], flag names with underscores. `--name=` becomes two arguments: CLI11
// would take the next one for the missing value.
std::vector<std::string> NormalizedArguments(int argc, char** argv) {
  std::vector<std::string> arguments;
  int i = 1;
  for (; i < argc && std::string_view(argv[i]) != "--"; ++i) {
    std::string argument = argv[i];
    if (absl::StartsWith(argument, "--")) {
      const size_t name_end = std::min(argument.find('='), argument.size());
      std::replace(argument.begin() + 2, argument.begin() + static_cast<ptrdiff_t>(name_end), '-',
                   '_');
      if (name_end + 1 == argument.size()) {
        argument.pop_back();
        arguments.push_back(argument);
        argument.clear();
      }
    }
    arguments.push_back(argument);
  }
  arguments.insert(arguments.end(), argv + std::min(i, argc), argv + argc);
  return arguments;
}

std::string UnexpectedArgument(const CLI::App& app) {
  const std::vector<std::string> rest = app.remaining();
  const auto flag = std::find_if(rest.begin(), rest.end(), [](const std::string& argument) {
    return argument.size() > 1 && argument[0] == '-';
  });
  if (flag == rest.end()) {
    return absl::StrFormat("unexpected argument \"%s\"; options begin with --",
                           rest.empty() ? "" : rest.front());
  }
  const std::string name = flag->substr(0, flag->find('='));
  return absl::StrCat("unknown option ", name,
                      Suggestion(app, name.substr(std::min<size_t>(2, name.size())), "--"));
}

absl::Status CheckLimits(const Config& config, const Option& option) {
  const std::string text = Text(config, option);
  if (const auto* range = std::get_if<Range>(&option.limits)) {
    double value = 0;
    CHECK(absl::SimpleAtod(text, &value)) << option.name << " has a range but is no number";
    if (value >= range->min && value <= range->max) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrFormat("%s is %s; give %.10g to %.10g", option.name,
                                                      text, range->min, range->max));
  }
  if (const auto* choices = std::get_if<Choices>(&option.limits)) {
    for (const absl::string_view name : absl::StrSplit(choices->names, ", ")) {
      if (name == text) return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is \"%s\"; give one of %s", option.name, text, choices->names));
  }
  return absl::OkStatus();
}

}  // namespace

size_t EditDistance(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t substitute = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({substitute, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row[b.size()];
}

void AddOptions(CLI::App* app, Config* config) {
  app->set_config("--config", "", "TOML file with the same options as keys; flags win over it.")
      ->type_name("FILE");
  app->config_formatter(std::make_shared<TomlReader>(app));
  app->set_version_flag("--version", absl::StrCat("zipage ", kVersion));
  for (const Option& option : kOptions) {
    if (const auto* flag = std::get_if<bool Config::*>(&option.member)) {
      app->add_flag(absl::StrFormat("--%s,!--no_%s", option.name, option.name), config->**flag,
                    absl::StrCat(option.help, config->**flag ? " Default: on." : " Default: off."));
      continue;
    }
    std::string help = option.help;
    if (const auto* range = std::get_if<Range>(&option.limits)) {
      absl::StrAppendFormat(&help, " %.10g to %.10g.", range->min, range->max);
    }
    app->add_option_function<std::string>(
           absl::StrCat("--", option.name),
           [&option, config](const std::string& text) {
             const absl::Status status = SetFromText(option, text, config);
             if (!status.ok()) throw CLI::ValidationError(std::string(status.message()));
           },
           help)
        ->type_name(TypeName(option))
        ->default_str(Text(*config, option))
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  }
}

absl::Status ParseCommandLine(CLI::App* app, int argc, char** argv) {
  std::vector<std::string> arguments = NormalizedArguments(argc, argv);
  const auto config_file = [app] {
    const CLI::Option* option = app->get_config_ptr();
    return option == nullptr || option->empty() ? std::string() : option->results().back();
  };
  try {
    std::reverse(arguments.begin(), arguments.end());  // CLI11 takes them from the back.
    app->parse(std::move(arguments));
    return absl::OkStatus();
  } catch (const CLI::Success& e) {  // --help and --version
    app->exit(e, std::cout, std::cerr);
    return absl::CancelledError("help or version was printed");
  } catch (const CLI::ExtrasError&) {
    return absl::InvalidArgumentError(UnexpectedArgument(*app));
  } catch (const CLI::ConfigError& e) {
    return absl::InvalidArgumentError(absl::StrCat(config_file(), " ", e.what()));
  } catch (const CLI::FileError&) {
    return absl::InvalidArgumentError(
        absl::StrFormat("config is \"%s\", which cannot be read; give a TOML file", config_file()));
  } catch (const CLI::Error& e) {
    return absl::InvalidArgumentError(e.what());
  }
}

absl::Status Validate(const Config& config) {
  if (config.model.empty()) {
    return absl::InvalidArgumentError(
        "model is missing; give the folder of a model by --model DIR");
  }
  for (const Option& option : kOptions) ZIPAGE_RETURN_IF_ERROR(CheckLimits(config, option));
  return CheckContradictions(config);
}

Config ResolveCompression(Config config) {
  // deploy/FIDELITY.md has the figures.
  if (config.compression_policy == "auto") config.compression_policy = "paper";
  if (config.pin_prompt == "auto") {
    const bool pins =
        config.compression_policy == "pinned_score" || config.compression_policy == "pinned_random";
    config.pin_prompt = pins ? "on" : "off";
  }
  return config;
}

std::string ToToml(const Config& config) {
  std::string toml;
  for (const Option& option : kOptions) {
    const bool quoted = std::holds_alternative<std::string Config::*>(option.member);
    const std::string text = Text(config, option);
    absl::StrAppend(&toml, option.name, " = ", quoted ? TomlString(text) : text, "\n");
  }
  return toml;
}

uint64_t Digest(const Config& config) {
  std::string canonical;
  for (const Option& option : kOptions) {
    if (option.in_digest == kLocal) continue;
    // Quoted, so that no value can pass for another option.
    absl::StrAppend(&canonical, option.name, "=", TomlString(Text(config, option)), "\n");
  }
  return XXH3_64bits(canonical.data(), canonical.size());
}

}  // namespace zipage
