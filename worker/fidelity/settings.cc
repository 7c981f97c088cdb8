#include "worker/fidelity/settings.h"

#include <CLI/CLI.hpp>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace zipage {
namespace {

// Name of the first option of those that all settings share which differs; "" if none does.
std::string ChangedSharedOption(const Config& a, const Config& b) {
  if (a.model != b.model) return "model";
  if (a.tp != b.tp) return "tp";
  if (a.device != b.device) return "device";
  if (a.dtype != b.dtype) return "dtype";
  if (a.max_model_len != b.max_model_len) return "max_model_len";
  if (a.cpu_threads != b.cpu_threads) return "cpu_threads";
  if (a.seed != b.seed) return "seed";
  return "";
}

absl::Status Apply(const std::vector<std::string>& changes, Config* config) {
  std::vector<std::string> arguments = {"setting"};
  for (const std::string& change : changes) {
    const size_t equals = change.find('=');
    if (equals == std::string::npos || equals == 0 || change[0] == '-') {
      return absl::InvalidArgumentError(
          absl::StrCat("\"", change, "\" is no option; give key=value"));
    }
    arguments.push_back("--" + change);
  }
  CLI::App app;
  AddOptions(&app, config);
  // A setting is options of the engine and nothing else.
  app.set_help_flag();
  app.set_version_flag();
  app.set_config();
  std::vector<char*> argv;
  argv.reserve(arguments.size());
  for (std::string& argument : arguments) argv.push_back(argument.data());
  return ParseCommandLine(&app, static_cast<int>(argv.size()), argv.data());
}

absl::Status Fill(const std::string& changes, const Config& base, Config* config) {
  *config = base;
  if (!changes.empty()) {
    const std::vector<std::string> list = absl::StrSplit(changes, ',');
    ZIPAGE_RETURN_IF_ERROR(Apply(list, config));
  }
  ZIPAGE_RETURN_IF_ERROR(Validate(*config));
  const std::string shared = ChangedSharedOption(base, *config);
  if (!shared.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat(shared, " is the same for all settings; give it as --", shared));
  }
  return CheckReplayable(*config);
}

}  // namespace

absl::StatusOr<FidelitySetting> ParseSetting(const std::string& text, const Config& base) {
  const size_t colon = std::min(text.find(':'), text.size());
  FidelitySetting setting;
  setting.name = text.substr(0, colon);
  if (setting.name.empty() || setting.name.find('=') != std::string::npos) {
    return absl::InvalidArgumentError(
        absl::StrCat("setting is \"", text, "\"; give NAME:key=value,key=value"));
  }
  const std::string changes = colon < text.size() ? text.substr(colon + 1) : "";
  const absl::Status status = Fill(changes, base, &setting.config);
  if (!status.ok()) {
    return absl::Status(status.code(),
                        absl::StrCat("setting ", setting.name, ": ", status.message()));
  }
  setting.config = ResolveCompression(std::move(setting.config));
  return setting;
}

absl::Status CheckReplayable(const Config& config) {
  if (config.tp != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("tp is ", config.tp, ", but a replay runs on one rank; leave tp out"));
  }
  if (config.adaptive_kv_budget) {
    return absl::InvalidArgumentError(
        "adaptive_kv_budget is on, which leaves it to the load when to compress, but a replay has "
        "none; leave it out");
  }
  return absl::OkStatus();
}

}  // namespace zipage
