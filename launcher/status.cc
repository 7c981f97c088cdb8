// zipage-status: what an engine, its workers and its jobs are doing.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>
#include <variant>

#include "absl/strings/str_format.h"
#include "launcher/client.h"
#include "launcher/exit_status.h"
#include "launcher/progress.h"
#include "launcher/run_directory.h"
#include "proto/config.h"

namespace {

int Fail(const absl::Status& status, int exit_status) {
  absl::FPrintF(stderr, "zipage-status: %s\n", status.message());
  return exit_status;
}

absl::StatusOr<zipage::EngineStatus> Ask(const zipage::EngineAddress& address) {
  ZIPAGE_ASSIGN_OR_RETURN(const std::unique_ptr<zipage::JobClient> client,
                          zipage::JobClient::Connect(address));
  ZIPAGE_ASSIGN_OR_RETURN(zipage::ClientReply reply, client->Call(zipage::GetStatus{}));
  if (const auto* refused = std::get_if<zipage::Refused>(&reply)) {
    return absl::FailedPreconditionError(refused->message);
  }
  if (auto* status = std::get_if<zipage::EngineStatus>(&reply)) return std::move(*status);
  return absl::InternalError(absl::StrFormat(
      "the engine at %s answered something else than its status; are both of one version?",
      address.endpoint));
}

}  // namespace

// Memory alone makes this throw, and then ending is right.
int main(int argc, char** argv) {  // NOLINT(bugprone-exception-escape)
  CLI::App app("Shows what a Zipage engine, its workers and its jobs are doing.");
  zipage::EngineSelection selection;
  bool json = false;
  app.add_option("--engine", selection.engine,
                 "Run directory of the engine. Default: the only one of this user that runs");
  app.add_option("--endpoint", selection.endpoint,
                 "Job socket of the engine, such as tcp://HOST:PORT");
  app.add_option("--curve_server_key", selection.curve_server_key,
                 "Public key of an engine behind CURVE, 40 characters");
  app.add_option("--curve_key_file", selection.curve_key_file, "File with the own CURVE key pair");
  app.add_flag("--json", json, "Print one JSON object");
  if (absl::Status parsed = zipage::ParseCommandLine(&app, argc, argv); !parsed.ok()) {
    if (absl::IsCancelled(parsed)) return zipage::kExitComplete;
    return Fail(parsed, zipage::kExitUsage);
  }
  const absl::StatusOr<zipage::EngineAddress> address =
      zipage::FindEngine(selection, zipage::RunBases());
  if (!address.ok()) return Fail(address.status(), zipage::kExitUsage);
  const absl::StatusOr<zipage::EngineStatus> status = Ask(*address);
  if (!status.ok()) return Fail(status.status(), zipage::kExitFailed);
  if (!json && !address->run_directory.empty()) {
    absl::PrintF("engine   %s\n", address->run_directory);
  }
  absl::PrintF("%s%s", json ? zipage::StatusJson(*status) : zipage::StatusTable(*status),
               json ? "\n" : "");
  return zipage::kExitComplete;
}
