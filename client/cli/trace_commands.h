// misactl trace: record a session's trace, show a file, convert one.
#pragma once

#include <string>

#include "client/cli/commands.h"
#include "runtime/trace/trace_file.h"

namespace misa::cli {

// A file in either form: binary, or the JSON that `trace convert --to json` writes.
policy::Result<trace::TraceFile> ReadTrace(const std::string& path);

// Asks the daemon; `path` "" makes the file SESSION.trace in the working folder.
ExitCode TraceRecord(AdminClient& client, const Output& output, const std::string& session, const std::string& path);
ExitCode TraceShow(const Output& output, const std::string& path);
// `format` is "binary", "json" or "perfetto"; `to` "" or "-" is the output itself.
ExitCode TraceConvert(const Output& output, const std::string& path, const std::string& format, const std::string& to);

}  // namespace misa::cli
