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
// std::monostate: any value that parses.
using Limits = std::variant<std::monostate, Range, Choices>;

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
    {"model",
     &Config::model,
     {},
     kLocal,
     "Folder of a Hugging Face model with config.json, safetensors and tokenizer.json."},
    {"served_model_name",
     &Config::served_model_name,
     {},
     kLocal,
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
    {"enable_prefix_cache",
     &Config::enable_prefix_cache,
     {},
     kLocal,
     "Share full blocks between sequences that begin alike; --no_enable_prefix_cache turns it "
     "off."},
    {"seed",
     &Config::seed,
     {},
     kInDigest,
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
    {"job_endpoint",
     &Config::job_endpoint,
     {},
     kLocal,
     "Where jobs arrive besides the Unix socket in the run directory: ipc://PATH or "
     "tcp://ADDRESS:PORT; empty is nowhere"},
    {"curve_key_file",
     &Config::curve_key_file,
     {},
     kLocal,
     "File of the job socket's own CURVE keys; empty is no encryption."},
    {"curve_allowed_clients_file",
     &Config::curve_allowed_clients_file,
     {},
     kLocal,
     "File of the public keys of clients the job socket lets in, one a line."},
    {"insecure_tcp",
     &Config::insecure_tcp,
     {},
     kLocal,
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

// "; did you mean PREFIXname?" for the option of `app` nearest to `name`; empty if none is near.
std::string Suggestion(const CLI::App& app, std::string_view name, const char* prefix) {
  std::string nearest;
  size_t best = std::max<size_t>(2, name.size() / 4) + 1;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& candidate : option->get_lnames()) {
      const size_t distance = EditDistance(name, candidate);
      if (distance >= best) continue;
      best = distance;
      nearest = candidate;
    }
  }
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

absl::Status CheckJobEndpoint(const Config& config) {
  const std::string& endpoint = config.job_endpoint;
  const bool tcp = absl::StartsWith(endpoint, "tcp://");
  if (!endpoint.empty() && !tcp && !absl::StartsWith(endpoint, "ipc://")) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job_endpoint is \"%s\"; give ipc://PATH or tcp://ADDRESS:PORT", endpoint));
  }
  const bool keys = !config.curve_key_file.empty();
  if (keys == config.curve_allowed_clients_file.empty()) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s is given without %s; CURVE needs both",
                        keys ? "curve_key_file" : "curve_allowed_clients_file",
                        keys ? "curve_allowed_clients_file" : "curve_key_file"));
  }
  if (keys && config.insecure_tcp) {
    return absl::InvalidArgumentError(
        "insecure_tcp contradicts curve_key_file; give one of the two");
  }
  if (tcp && !keys && !config.insecure_tcp) {
    return absl::InvalidArgumentError(
        absl::StrFormat("job_endpoint %s is open to the network; give curve_key_file and "
                        "curve_allowed_clients_file, or insecure_tcp to accept everyone",
                        endpoint));
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
                    option.help);
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
  if (config.max_model_len == 1) {
    return absl::InvalidArgumentError(
        "max_model_len is 1; give at least 2, one position of prompt and one of output, or 0");
  }
  if (config.max_num_batched_tokens < config.max_num_seqs) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "max_num_batched_tokens is %d, but %d sequences (max_num_seqs) decode one token each in a "
        "step; raise the one or lower the other",
        config.max_num_batched_tokens, config.max_num_seqs));
  }
  if (config.num_kvcache_blocks > 0 && config.kv_cache_memory_gb > 0) {
    return absl::InvalidArgumentError(absl::StrFormat(
        "num_kvcache_blocks %d and kv_cache_memory_gb %g both size the KV cache; give one",
        config.num_kvcache_blocks, config.kv_cache_memory_gb));
  }
  return CheckJobEndpoint(config);
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
