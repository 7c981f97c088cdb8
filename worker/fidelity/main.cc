// zipage-fidelity: how much of the full cache's predictions compression settings keep.

#include <glog/logging.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "proto/config.h"
#include "worker/fidelity/fidelity.h"
#include "worker/fidelity/settings.h"

namespace {

using zipage::Config;
using zipage::FidelityReport;
using zipage::FidelitySetting;

constexpr char kDescription[] =
    "Replays texts through the full KV cache and through compression settings, on the CPU, and "
    "reports how often and how far their next-token predictions differ.\n"
    "Example: zipage-fidelity --model DIR --input answers.jsonl --kvcache_block_size 32 \\\n"
    "  --max_cache_blocks_per_seq 4 --setting paper:compression_policy=paper \\\n"
    "  --setting half:compression_policy=paper,similarity_lambda=0.5\n";

constexpr char kFooter[] =
    "Input lines: what an engine wrote for requests with return_token_ids, or\n"
    "  {\"id\": TEXT, \"prompt_token_ids\": [INT...], \"output_token_ids\": [INT...],\n"
    "   \"recall_tokens\": INT, \"seed\": INT}\n"
    "The last two may be absent. recall_tokens: the last so many output tokens count as recalled "
    "if\n"
    "each is the most probable one; seed: of the policies that draw at random.\n"
    "Exit status: 0 done; 1 failed; 2 wrong options or arguments.";

struct Flags {
  std::string input;
  std::string json;
  std::vector<std::string> settings;
};

int Fail(const absl::Status& status, int exit_status) {
  absl::FPrintF(stderr, "zipage-fidelity: %s\n", status.message());
  return exit_status;
}

absl::StatusOr<std::vector<FidelitySetting>> ParseSettings(const Flags& flags, const Config& base) {
  std::vector<FidelitySetting> settings;
  std::vector<std::string> texts = flags.settings;
  if (texts.empty()) texts.push_back(ResolveCompression(base).compression_policy);
  for (const std::string& text : texts) {
    ZIPAGE_ASSIGN_OR_RETURN(FidelitySetting setting, zipage::ParseSetting(text, base));
    for (const FidelitySetting& other : settings) {
      if (other.name != setting.name) continue;
      return absl::InvalidArgumentError(
          absl::StrCat("setting ", setting.name, " is given twice; give each its own name"));
    }
    settings.push_back(std::move(setting));
  }
  return settings;
}

absl::Status CheckFlags(const Flags& flags, const Config& base) {
  ZIPAGE_RETURN_IF_ERROR(zipage::Validate(base));
  ZIPAGE_RETURN_IF_ERROR(zipage::CheckReplayable(base));
  if (!flags.input.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError("input is missing; give a file of token ids by --input FILE");
}

absl::Status WriteFile(const std::string& path, const std::string& text) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  file << text;
  file.close();
  if (file) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("json is \"", path, "\", which cannot be written; give another file"));
}

// Tells of every tenth of the work.
void PrintProgress(int64_t done, int64_t total) {
  static int64_t tenths = 0;
  const int64_t now = 10 * done / total;
  if (now == tenths) return;
  tenths = now;
  absl::FPrintF(stderr, "%d of %d predicted tokens\n", done, total);
}

int Run(int argc, char** argv) {
  Config base;
  Flags flags;
  CLI::App app(kDescription, "zipage-fidelity");
  zipage::AddOptions(&app, &base);
  app.add_option("--input", flags.input, "Texts to replay, as token ids (JSON Lines). Required");
  app.add_option("--json", flags.json, "File for all numbers; it is replaced");
  app.add_option("--setting", flags.settings,
                 "NAME:key=value,key=value: a setting to compare, with these options in place of "
                 "those given as flags; may be repeated. Default: the flags' own")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->expected(1)
      ->type_name("NAME:OPTIONS");
  app.footer(kFooter);
  const absl::Status parsed = zipage::ParseCommandLine(&app, argc, argv);
  if (absl::IsCancelled(parsed)) return 0;
  if (!parsed.ok()) return Fail(parsed, 2);
  const absl::Status checked = CheckFlags(flags, base);
  if (!checked.ok()) return Fail(checked, 2);
  const absl::StatusOr<std::vector<FidelitySetting>> settings = ParseSettings(flags, base);
  if (!settings.ok()) return Fail(settings.status(), 2);
  // Found out before the work, not after it.
  if (!flags.json.empty()) {
    const absl::Status writable = WriteFile(flags.json, "");
    if (!writable.ok()) return Fail(writable, 2);
  }
  const absl::StatusOr<FidelityReport> report =
      zipage::RunFidelity(base, *settings, flags.input, &PrintProgress);
  if (!report.ok()) return Fail(report.status(), 1);
  absl::PrintF("%s", zipage::ReportTable(*report));
  if (flags.json.empty()) return 0;
  const absl::Status written = WriteFile(flags.json, zipage::ReportJson(*report));
  return written.ok() ? 0 : Fail(written, 1);
}

}  // namespace

int main(int argc, char** argv) {
  // As in an engine, threads that wait must not spin; the OpenMP library reads this when it is
  // loaded.
  if (getenv("OMP_WAIT_POLICY") == nullptr) {
    setenv("OMP_WAIT_POLICY", "passive", 1);
    execv("/proc/self/exe", argv);
  }
  FLAGS_logtostderr = true;
  google::InitGoogleLogging(argv[0]);
  try {
    return Run(argc, argv);
  } catch (const std::bad_alloc&) {
    return Fail(absl::ResourceExhaustedError("out of memory; free some, or compare fewer settings"),
                1);
  } catch (const std::exception& e) {
    return Fail(absl::InternalError(e.what()), 1);
  }
}
