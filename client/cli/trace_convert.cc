#include "client/cli/trace_convert.h"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/format.h"
#include "runtime/memory/byte_size.h"

namespace misa::cli {

using nlohmann::json;
using trace::FacetInfo;
using trace::Section;
using trace::TraceFile;

namespace {

constexpr char kSchema[] = "misa.trace/1";
// Rows of facets in the text for people.
constexpr size_t kShownFacets = 20;

constexpr std::pair<uint8_t, char> kAccessLetters[] = {
    {policy::kRead, 'r'}, {policy::kWrite, 'w'}, {policy::kCreate, 'c'}, {policy::kDiscard, 'd'}};

std::string AccessText(uint8_t access) {
  std::string text;
  for (const auto& [flag, letter] : kAccessLetters) {
    if ((access & flag) != 0) text += letter;
  }
  return text;
}

// 0 where a letter is none.
uint8_t AccessOfText(const std::string& text) {
  uint8_t access = 0;
  for (const char c : text) {
    const auto* found = std::find_if(std::begin(kAccessLetters), std::end(kAccessLetters),
                                     [&](const auto& pair) { return pair.second == c; });
    if (found == std::end(kAccessLetters)) return 0;
    access |= found->first;
  }
  return access;
}

std::string FacetName(const TraceFile& file, uint32_t facet) {
  return absl::StrCat(file.facets[facet].name, " ", trace::KindName(file.facets[facet].kind));
}

struct Figures {
  double seconds = 0;
  uint64_t uses = 0;
  uint64_t facets = 0;        // distinct
  uint64_t facet_bytes = 0;   // of them
  uint64_t other_bytes = 0;   // most at a position
  uint64_t needed_bytes = 0;  // most at a position: its facets and other tensors
};

Figures Measure(const TraceFile& file, const Section& section) {
  Figures figures;
  std::vector<bool> seen(file.facets.size(), false);
  for (const policy::TraceEntry& entry : section.trace.entries) {
    figures.seconds += entry.compute_seconds;
    figures.uses += entry.uses.size();
    figures.other_bytes = std::max(figures.other_bytes, entry.other_bytes);
    for (const policy::Use& use : entry.uses) {
      if (!seen[use.facet]) {
        seen[use.facet] = true;
        ++figures.facets;
        figures.facet_bytes += file.facets[use.facet].bytes;
      }
    }
  }
  policy::PlanInput input = trace::PlanInputOf(file, section);
  input.reserve_bytes = 0;
  figures.needed_bytes = policy::SmallestBudget(input);
  return figures;
}

bool IsCount(const json& value) { return value.is_number_integer() && (value.is_number_unsigned() || value >= 0); }

std::string DigestText(const policy::Trace& trace) { return absl::StrFormat("%016x", policy::Digest(trace)); }

// Names that came from elsewhere may hold any bytes; JSON is UTF-8.
std::string Utf8(const std::string& text) {
  const json quoted = json(text);
  return json::parse(quoted.dump(-1, ' ', false, json::error_handler_t::replace)).get<std::string>();
}

}  // namespace

json TraceToJson(const TraceFile& file) {
  json out = {{"schema", kSchema},
              {"label", Utf8(file.label)},
              {"budget_bytes", file.budget_bytes},
              {"reserve_bytes", file.reserve_bytes},
              {"link",
               {{"load_bytes_per_second", file.link.load},
                {"unload_bytes_per_second", file.link.unload},
                {"duplex_load_bytes_per_second", file.link.duplex_load},
                {"duplex_unload_bytes_per_second", file.link.duplex_unload}}},
              {"facets", json::array()},
              {"sections", json::array()}};
  for (const FacetInfo& facet : file.facets) {
    out["facets"].push_back(
        {{"name", Utf8(facet.name)}, {"kind", trace::KindName(facet.kind)}, {"bytes", facet.bytes}});
  }
  for (const Section& section : file.sections) {
    const Figures figures = Measure(file, section);
    json entries = json::array();
    for (const policy::TraceEntry& entry : section.trace.entries) {
      json uses = json::array();
      for (const policy::Use& use : entry.uses) uses.push_back({use.facet, AccessText(use.access)});
      entries.push_back({{"compute_seconds", entry.compute_seconds},
                         {"other_bytes", entry.other_bytes},
                         {"uses", std::move(uses)}});
    }
    out["sections"].push_back({{"mode", trace::ModeName(section.mode)},
                               {"digest", DigestText(section.trace)},
                               {"compute_seconds", figures.seconds},
                               {"facet_count", figures.facets},
                               {"facet_bytes", figures.facet_bytes},
                               {"other_bytes", figures.other_bytes},
                               {"smallest_budget_bytes", figures.needed_bytes},
                               {"entries", std::move(entries)}});
  }
  return out;
}

policy::Result<TraceFile> TraceFromJson(const json& in) {
  policy::Result<TraceFile> result;
  const auto fail = [&](const std::string& what) {
    result.value = {};
    result.error = "The trace cannot be read from JSON: " + what + ".";
    return result;
  };
  // at() and get() throw json::exception, whose text names the key or the type.
  try {
    if (in.value("schema", "") != kSchema) return fail(absl::StrCat("its schema is not \"", kSchema, "\""));
    TraceFile& file = result.value;
    // get<uint64_t>() would take -1 and 1.5 as well.
    const auto bytes = [](const json& value, const char* key) {
      const json& number = value.at(key);
      if (!IsCount(number)) {
        throw json::other_error::create(0, absl::StrCat("\"", key, "\" is not a whole number of at least 0"), &number);
      }
      return number.get<uint64_t>();
    };
    file.label = in.value("label", "");
    file.budget_bytes = bytes(in, "budget_bytes");
    file.reserve_bytes = bytes(in, "reserve_bytes");
    const json& link = in.at("link");
    file.link = {link.at("load_bytes_per_second").get<double>(), link.at("unload_bytes_per_second").get<double>(),
                 link.at("duplex_load_bytes_per_second").get<double>(),
                 link.at("duplex_unload_bytes_per_second").get<double>()};
    for (const json& item : in.at("facets")) {
      FacetInfo facet{item.at("name").get<std::string>(), trace::FacetKind::kUnknown, bytes(item, "bytes")};
      const auto kind = item.at("kind").get<std::string>();
      if (!trace::KindOfName(kind, &facet.kind)) return fail(absl::StrCat("there is no kind \"", kind, "\""));
      file.facets.push_back(std::move(facet));
    }
    for (const json& item : in.at("sections")) {
      Section section;
      const auto mode = item.at("mode").get<std::string>();
      if (!trace::ModeOfName(mode, &section.mode)) return fail(absl::StrCat("there is no mode \"", mode, "\""));
      for (const json& line : item.at("entries")) {
        policy::TraceEntry entry;
        entry.compute_seconds = line.at("compute_seconds").get<double>();
        entry.other_bytes = bytes(line, "other_bytes");
        for (const json& use : line.at("uses")) {
          const uint8_t access = AccessOfText(use.at(1).get<std::string>());
          const json& facet = use.at(0);
          if (!IsCount(facet) || facet.get<uint64_t>() >= file.facets.size()) {
            return fail(absl::StrCat("a use is of facet ", facet.dump(), ", and there are ", file.facets.size()));
          }
          if (access == 0) return fail("a use's access is not made of the letters r, w, c and d");
          entry.uses.push_back({facet.get<uint32_t>(), access});
        }
        section.trace.entries.push_back(std::move(entry));
      }
      file.sections.push_back(std::move(section));
    }
  } catch (const json::exception& error) {
    return fail(error.what());
  }
  if (const std::string wrong = trace::Check(result.value); !wrong.empty()) return fail(wrong);
  return result;
}

json TraceToPerfetto(const TraceFile& file) {
  json events = json::array();
  for (const Section& section : file.sections) {
    const int process = static_cast<int>(section.mode);
    events.push_back({{"ph", "M"},
                      {"pid", process},
                      {"name", "process_name"},
                      {"args", {{"name", trace::ModeName(section.mode)}}}});
    events.push_back(
        {{"ph", "M"}, {"pid", process}, {"tid", 1}, {"name", "thread_name"}, {"args", {{"name", "positions"}}}});
    double seconds = 0;
    for (size_t i = 0; i < section.trace.entries.size(); ++i) {
      const policy::TraceEntry& entry = section.trace.entries[i];
      json uses = json::object();
      for (const policy::Use& use : entry.uses) uses[Utf8(FacetName(file, use.facet))] = AccessText(use.access);
      const std::string name =
          entry.uses.empty() ? absl::StrCat("position ", i) : Utf8(file.facets[entry.uses.front().facet].name);
      events.push_back({{"ph", "X"},
                        {"pid", process},
                        {"tid", 1},
                        {"name", name},
                        {"ts", seconds * 1e6},
                        {"dur", entry.compute_seconds * 1e6},
                        {"args", {{"position", i}, {"uses", std::move(uses)}}}});
      events.push_back({{"ph", "C"},
                        {"pid", process},
                        {"name", "other tensors"},
                        {"ts", seconds * 1e6},
                        {"args", {{"bytes", entry.other_bytes}}}});
      seconds += entry.compute_seconds;
    }
  }
  return {{"displayTimeUnit", "ms"}, {"otherData", {{"label", Utf8(file.label)}}}, {"traceEvents", std::move(events)}};
}

std::string TraceText(const TraceFile& file, bool color) {
  std::string text = absl::StrCat(Printable(file.label.empty() ? "a trace" : file.label), ": ", file.facets.size(),
                                  " facets");
  if (file.budget_bytes > 0) absl::StrAppend(&text, ", budget ", FormatByteSize(file.budget_bytes));
  if (file.link.load > 0) {
    absl::StrAppend(&text, ", link ", FormatRate(file.link.load), " up and ", FormatRate(file.link.unload), " down");
  }
  absl::StrAppend(&text, "\n\n");
  Table sections({{"MODE"},
                  {"DIGEST"},
                  {"POSITIONS", Alignment::kRight},
                  {"USES", Alignment::kRight},
                  {"COMPUTE", Alignment::kRight},
                  {"FACETS", Alignment::kRight},
                  {"THEIR BYTES", Alignment::kRight},
                  {"OTHER TENSORS", Alignment::kRight},
                  {"SMALLEST BUDGET", Alignment::kRight}});
  for (const Section& section : file.sections) {
    const Figures figures = Measure(file, section);
    sections.AddRow({trace::ModeName(section.mode), DigestText(section.trace),
                     absl::StrCat(section.trace.entries.size()), absl::StrCat(figures.uses),
                     FormatSeconds(figures.seconds), absl::StrCat(figures.facets), FormatByteSize(figures.facet_bytes),
                     FormatByteSize(figures.other_bytes), FormatByteSize(figures.needed_bytes)});
  }
  absl::StrAppend(&text, sections.Render(color), "\n");

  std::vector<uint64_t> uses(file.facets.size(), 0);
  for (const Section& section : file.sections) {
    for (const policy::TraceEntry& entry : section.trace.entries) {
      for (const policy::Use& use : entry.uses) ++uses[use.facet];
    }
  }
  std::vector<uint32_t> order(file.facets.size());
  for (uint32_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](uint32_t a, uint32_t b) { return file.facets[a].bytes > file.facets[b].bytes; });
  Table facets({{"FACET"}, {"MODULE"}, {"KIND"}, {"BYTES", Alignment::kRight}, {"USES", Alignment::kRight}});
  for (size_t i = 0; i < std::min(order.size(), kShownFacets); ++i) {
    const FacetInfo& facet = file.facets[order[i]];
    facets.AddRow({absl::StrCat(order[i]), Printable(facet.name), trace::KindName(facet.kind),
                   FormatByteSize(facet.bytes), absl::StrCat(uses[order[i]])});
  }
  absl::StrAppend(&text, facets.Render(color));
  if (order.size() > kShownFacets) {
    absl::StrAppend(&text, "… and ", order.size() - kShownFacets, " smaller ones; --json has them all\n");
  }
  return text;
}

}  // namespace misa::cli
