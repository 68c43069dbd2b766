// Trace files as JSON, as a Chrome trace for Perfetto, and as text. Pure functions of their inputs.
#pragma once

#include <string>

#include "nlohmann/json.hpp"
#include "runtime/trace/trace_file.h"

namespace misa::cli {

// Everything the file holds, and of each section its digest, seconds and bytes used, for programs. Schema "misa.trace/1".
nlohmann::json TraceToJson(const trace::TraceFile& file);

// What TraceToJson wrote; keys it does not know are left alone. A sentence that names the key where one is missing or
// of another type.
policy::Result<trace::TraceFile> TraceFromJson(const nlohmann::json& json);

// A section is a process of the timeline, a position a slice, the bytes of other tensors a counter.
nlohmann::json TraceToPerfetto(const trace::TraceFile& file);

// A table of the sections, and one of the facets that take the most bytes.
std::string TraceText(const trace::TraceFile& file, bool color);

}  // namespace misa::cli
