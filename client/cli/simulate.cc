#include "client/cli/simulate.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/format.h"
#include "nlohmann/json.hpp"
#include "runtime/memory/byte_size.h"
#include "runtime/policy/trace_kinds.h"
#include "runtime/policy/yardsticks.h"
#include "runtime/trace/trace_file.h"

namespace misa::cli {
namespace {

constexpr policy::CachePolicy kPolicies[] = {policy::CachePolicy::kLru, policy::CachePolicy::kLruThreshold,
                                             policy::CachePolicy::kBelady, policy::CachePolicy::kPlanner,
                                             policy::CachePolicy::kOptimum};
constexpr char kAll[] = "all";
constexpr double kDefaultCapacity = 38;

struct Row {
  policy::CachePolicy policy;
  std::string error;  // of this policy alone
  policy::CacheAnswer answer;
  double plan_seconds = 0;
};

ExitCode Refuse(const Output& output, const std::string& sentence) {
  output.error << "misactl: " << Printable(sentence) << "\n";
  return kExitRefused;
}

double SecondsSince(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

Row Ask(const policy::CacheQuestion& question) {
  Row row{question.policy, "", {}, 0};
  policy::Result<policy::CacheAnswer> answer;
  const auto start = std::chrono::steady_clock::now();
  if (question.policy == policy::CachePolicy::kPlanner) {
    const policy::Result<policy::Plan> plan = policy::MakePlan(policy::CacheInput(question));
    row.plan_seconds = SecondsSince(start);
    answer.error = plan.error;
    if (plan.ok()) answer = policy::AskCache(question, plan.value);
  } else {
    answer = policy::AskCache(question);
    // Replacement on demand plans nothing.
    row.plan_seconds = question.policy == policy::CachePolicy::kOptimum ? SecondsSince(start) : 0;
  }
  row.error = answer.error;
  row.answer = std::move(answer.value);
  return row;
}

nlohmann::ordered_json ToJson(const Row& row, const policy::Bound& bound) {
  nlohmann::ordered_json json;
  json["policy"] = policy::NameOf(row.policy);
  if (!row.error.empty()) {
    json["error"] = row.error;
    return json;
  }
  json["misses_per_period"] = row.answer.misses_per_period;
  json["loaded_bytes_per_period"] = row.answer.loaded_bytes_per_period;
  json["unloaded_bytes_per_period"] = row.answer.unloaded_bytes_per_period;
  json["bound_bytes_per_period"] = bound.load_bytes;
  json["bound_unloaded_bytes_per_period"] = bound.unload_bytes;
  json["plan_seconds"] = row.plan_seconds;
  json["cycle_periods"] = row.answer.cycle_periods;
  json["repeats"] = row.answer.repeats;
  return json;
}

std::string Ratio(double bytes, uint64_t bound) {
  if (bound == 0) return bytes == 0 ? "1" : "-";
  return absl::StrFormat("%.3f", bytes / static_cast<double>(bound));
}

std::string Text(const std::vector<Row>& rows, const policy::Bound& bound, bool color) {
  const auto right = Alignment::kRight;
  Table table({{"POLICY"},
               {"MISSES", right},
               {"LOADED", right},
               {"/ BOUND", right},
               {"UNLOADED", right},
               {"CYCLE", right},
               {"PLANNED IN", right}});
  std::string notes;
  for (const Row& row : rows) {
    if (!row.error.empty()) {
      notes += std::string(policy::NameOf(row.policy)) + ": " + Printable(row.error) + "\n";
      continue;
    }
    table.AddRow({std::string(policy::NameOf(row.policy)), absl::StrFormat("%.4g", row.answer.misses_per_period),
                  FormatByteSize(static_cast<uint64_t>(std::llround(row.answer.loaded_bytes_per_period))),
                  Ratio(row.answer.loaded_bytes_per_period, bound.load_bytes),
                  FormatByteSize(static_cast<uint64_t>(std::llround(row.answer.unloaded_bytes_per_period))),
                  row.answer.repeats ? absl::StrCat(row.answer.cycle_periods) : "none",
                  row.plan_seconds > 0 ? FormatSeconds(row.plan_seconds) : "-"});
  }
  return absl::StrCat("Bound: ", FormatByteSize(bound.load_bytes), " loaded, ", FormatByteSize(bound.unload_bytes),
                      " unloaded. Each a period, in the steady state.\n\n", table.Render(color), notes);
}

// What is asked about, whoever made it.
struct Subject {
  policy::CacheQuestion question;
  uint64_t total_bytes = 0;
  uint64_t units = 0;
};

// A period made from a seed. More room than everything takes changes nothing.
policy::Result<Subject> Generate(const SimulateOptions& options, policy::TraceKind kind) {
  policy::Result<Subject> subject;
  const double capacity = options.capacity.value_or(kDefaultCapacity);
  if (!(std::isfinite(capacity) && capacity > 0)) {
    subject.error = absl::StrCat("The capacity must be a number of units above 0, and is ", capacity, ".");
    return subject;
  }
  const policy::Result<policy::GeneratedTrace> made = policy::GenerateTrace(
      {kind, options.units, options.unit_bytes, options.mixed_sizes, options.writes, options.seed});
  subject.error = made.error;
  if (!made.ok()) return subject;
  policy::CacheQuestion& question = subject.value.question;
  question.facet_bytes = made.value.facet_bytes;
  question.trace = made.value.trace;
  question.ranks = made.value.ranks;
  const double share = std::min(1.0, capacity / options.units);
  question.capacity_bytes = static_cast<uint64_t>(static_cast<double>(made.value.total_bytes) * share);
  subject.value.total_bytes = made.value.total_bytes;
  subject.value.units = options.units;
  return subject;
}

// A recorded period, in the room its session had or was given here. No importance was recorded: all modules are warm.
policy::Result<Subject> Open(const SimulateOptions& options) {
  policy::Result<Subject> subject;
  const policy::Result<std::string> bytes = trace::ReadBytes(options.trace);
  const policy::Result<trace::TraceFile> file =
      bytes.ok() ? trace::Decode(bytes.value) : policy::Result<trace::TraceFile>{{}, bytes.error};
  subject.error = file.error;
  if (!file.ok()) return subject;
  trace::TraceMode mode = trace::TraceMode::kTrain;
  if (!trace::ModeOfName(options.mode, &mode)) {
    subject.error = absl::StrCat("There is no mode \"", options.mode, "\": there are train, eval and accumulate.");
    return subject;
  }
  const trace::Section* section = file.value.Find(mode);
  if (section == nullptr) {
    subject.error = absl::StrCat(options.trace, " holds no period of mode ", options.mode, ".");
    return subject;
  }
  uint64_t room_bytes = file.value.budget_bytes - std::min(file.value.reserve_bytes, file.value.budget_bytes);
  if (!options.budget.empty()) {
    subject.error = ParseByteSize(options.budget, &room_bytes);
    if (!subject.ok()) return subject;
  }
  policy::CacheQuestion& question = subject.value.question;
  for (const trace::FacetInfo& facet : file.value.facets) {
    question.facet_bytes.push_back(facet.bytes);
    subject.value.total_bytes += facet.bytes;
  }
  question.trace = section->trace;
  question.capacity_bytes = room_bytes;
  if (options.capacity) {
    subject.error = "A trace file's room is given in bytes: use --budget 4GiB in place of --capacity.";
    return subject;
  }
  if (room_bytes == 0) {
    subject.error = absl::StrCat(options.trace, " does not say how much room there was; give it with --budget 4GiB.");
    return subject;
  }
  subject.value.units = file.value.facets.size();
  return subject;
}

}  // namespace

ExitCode Simulate(const SimulateOptions& options, const Output& output) {
  const std::optional<policy::CachePolicy> one = policy::CachePolicyFromName(options.policy);
  if (!one && options.policy != kAll) {
    return Refuse(output, absl::StrCat("There is no policy \"", options.policy,
                                       "\": there are lru, lru-threshold, belady, planner, optimum, and all."));
  }
  const std::optional<policy::TraceKind> kind = policy::TraceKindFromName(options.trace);
  policy::Result<Subject> subject;
  if (kind) {
    subject = Generate(options, *kind);
  } else if (access(options.trace.c_str(), F_OK) == 0) {
    subject = Open(options);
  } else {
    subject.error =
        absl::StrCat("There is no kind of trace \"", options.trace,
                     "\", nor a file of that name: there are zigzag, three-pass, forward-only, phases and mixed.");
  }
  if (!subject.ok()) return Refuse(output, subject.error);
  policy::CacheQuestion& question = subject.value.question;
  question.most_periods = options.periods;
  const policy::Result<policy::Bound> bound = policy::LowerBound(policy::CacheInput(question));
  if (!bound.ok()) return Refuse(output, bound.error);

  std::vector<Row> rows;
  for (const policy::CachePolicy policy : kPolicies) {
    if (one && *one != policy) continue;
    question.policy = policy;
    rows.push_back(Ask(question));
  }
  if (one && !rows[0].error.empty()) return Refuse(output, rows[0].error);
  if (!output.json) {
    output.out << Text(rows, bound.value, output.color);
    return kExitDone;
  }
  nlohmann::ordered_json json;
  json["trace"] = options.trace;
  json["units"] = subject.value.units;
  json["capacity_bytes"] = question.capacity_bytes;
  json["total_bytes"] = subject.value.total_bytes;
  json["seed"] = options.seed;
  if (one) {
    json.update(ToJson(rows[0], bound.value));
  } else {
    json["rows"] = nlohmann::ordered_json::array();
    for (const Row& row : rows) json["rows"].push_back(ToJson(row, bound.value));
  }
  output.out << json.dump() << "\n";
  return kExitDone;
}

}  // namespace misa::cli
