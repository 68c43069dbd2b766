#include "client/cli/trace_commands.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/cli/format.h"
#include "client/cli/trace_convert.h"
#include "runtime/memory/byte_size.h"

namespace misa::cli {

namespace {

ExitCode FailWith(const Output& output, const std::string& sentence) {
  return Fail(output, absl::InvalidArgumentError(sentence));
}

// A session's name becomes part of a file's: nothing in it may lead elsewhere.
std::string FileName(const std::string& session) {
  std::string name = session;
  std::replace_if(
      name.begin(), name.end(), [](unsigned char c) { return std::isalnum(c) == 0 && c != '-' && c != '_'; }, '_');
  return name + ".trace";
}

}  // namespace

policy::Result<trace::TraceFile> ReadTrace(const std::string& path) {
  policy::Result<std::string> bytes = trace::ReadBytes(path);
  policy::Result<trace::TraceFile> result;
  if (!bytes.ok()) {
    result.error = bytes.error;
    return result;
  }
  if (trace::LooksLikeTraceFile(bytes.value)) {
    result = trace::Decode(bytes.value);
  } else {
    const nlohmann::json parsed = nlohmann::json::parse(bytes.value, nullptr, /*allow_exceptions=*/false);
    if (parsed.is_object()) {
      result = TraceFromJson(parsed);
    } else {
      result.error = "It is neither a trace file nor a trace in JSON.";
    }
  }
  if (!result.ok()) result.error = absl::StrCat(path, ": ", result.error);
  return result;
}

ExitCode TraceRecord(AdminClient& client, const Output& output, const std::string& session, const std::string& path) {
  const auto bytes = client.GetTrace(session);
  if (!bytes.ok()) return Fail(output, bytes.status());
  const policy::Result<trace::TraceFile> file = trace::Decode(*bytes);
  if (!file.ok()) return FailWith(output, absl::StrCat("misad sent a trace that cannot be read. ", file.error));
  const std::string to = path.empty() ? FileName(session) : path;
  if (const std::string problem = trace::WriteBytes(to, *bytes); !problem.empty()) return FailWith(output, problem);
  if (output.json) {
    nlohmann::json object = {{"file", to}, {"bytes", bytes->size()}, {"sections", nlohmann::json::array()}};
    for (const trace::Section& section : file.value.sections) {
      object["sections"].push_back(
          {{"mode", trace::ModeName(section.mode)}, {"positions", section.trace.entries.size()}});
    }
    output.out << object.dump() << "\n";
    return kExitDone;
  }
  std::string sections;
  for (const trace::Section& section : file.value.sections) {
    absl::StrAppend(&sections, sections.empty() ? "" : ", ", trace::ModeName(section.mode), " ",
                    section.trace.entries.size(), " positions");
  }
  output.out << to << ": " << sections << ", " << FormatByteSize(bytes->size()) << "\n";
  return kExitDone;
}

ExitCode TraceShow(const Output& output, const std::string& path) {
  const policy::Result<trace::TraceFile> file = ReadTrace(path);
  if (!file.ok()) return FailWith(output, file.error);
  if (output.json) {
    output.out << TraceToJson(file.value).dump() << "\n";
  } else {
    output.out << TraceText(file.value, output.color);
  }
  return kExitDone;
}

ExitCode TraceConvert(const Output& output, const std::string& path, const std::string& format, const std::string& to) {
  const policy::Result<trace::TraceFile> file = ReadTrace(path);
  if (!file.ok()) return FailWith(output, file.error);
  std::string bytes;
  if (format == "binary") {
    policy::Result<std::string> encoded = trace::Encode(file.value);
    if (!encoded.ok()) return FailWith(output, encoded.error);
    bytes = std::move(encoded.value);
  } else if (format == "json") {
    bytes = TraceToJson(file.value).dump() + "\n";
  } else if (format == "perfetto") {
    bytes = TraceToPerfetto(file.value).dump() + "\n";
  } else {
    return FailWith(output, absl::StrCat("There is no format \"", format, "\"; there are binary, json and perfetto."));
  }
  if (to.empty() || to == "-") {
    output.out << bytes;
    return kExitDone;
  }
  if (const std::string problem = trace::WriteBytes(to, bytes); !problem.empty()) return FailWith(output, problem);
  return kExitDone;
}

}  // namespace misa::cli
