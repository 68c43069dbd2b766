// misactl's commands: each asks the daemon and writes to the given streams. Data goes to `out`, messages to `error`.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>

#include "absl/status/status.h"
#include "client/cli/admin_client.h"
#include "misa/v1/admin.pb.h"

namespace misa::cli {

enum ExitCode {
  kExitDone = 0,
  // The daemon refused, or does not serve (`health`).
  kExitRefused = 1,
  // No daemon, or misactl was called wrongly.
  kExitNoDaemon = 2,
};

struct Output {
  std::ostream& out;
  std::ostream& error;
  bool json = false;
  // Titles of tables in bold: a terminal, and NO_COLOR is not set.
  bool color = false;
};

// Texts for people, apart from the calls so that they can be tested.
std::string NodeText(const v1::GetNodeResponse& node, bool color);
std::string SessionsText(const v1::ListSessionsResponse& sessions, bool color);
std::string ModulesText(const v1::ListModulesResponse& modules, bool color);
std::string EventTitles(bool color);
std::string EventLine(const v1::Event& event);

ExitCode ExitCodeOf(const absl::Status& status);
// Writes the sentence as a message and gives the status' exit code.
ExitCode Fail(const Output& output, const absl::Status& status);

ExitCode Status(AdminClient& client, const Output& output);
ExitCode Sessions(AdminClient& client, const Output& output);
ExitCode Modules(AdminClient& client, const Output& output, const std::string& session);
ExitCode Events(AdminClient& client, const Output& output, uint32_t backlog, bool follow);
ExitCode Health(AdminClient& client, const Output& output);
ExitCode Budget(AdminClient& client, const Output& output, const std::string& session, const std::string& size);
ExitCode Drain(AdminClient& client, const Output& output, const std::string& reason);
ExitCode Snapshot(AdminClient& client, const Output& output);

}  // namespace misa::cli
