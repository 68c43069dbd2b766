#include "client/cli/commands.h"

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/format.h"
#include "runtime/memory/byte_size.h"

namespace misa::cli {

namespace {

// Without --follow, the past events are all there once the stream has been silent for this long.
constexpr absl::Duration kBacklogSilence = absl::Milliseconds(500);

std::string OrDash(const std::string& text) { return text.empty() ? "-" : Printable(text); }

ExitCode Show(const Output& output, const google::protobuf::Message& message, const std::string& text) {
  if (output.json) {
    output.out << ToJson(message).dump() << "\n";
  } else {
    output.out << text;
  }
  return kExitDone;
}

// "load 1.1 GB/s, unload 3.2 GB/s, both at once 800 MB/s + 800 MB/s"
std::string LinkText(const v1::LinkRates& link) {
  return absl::StrCat("load ", FormatRate(link.load_bytes_per_second()), ", unload ",
                      FormatRate(link.unload_bytes_per_second()), ", both at once ",
                      FormatRate(link.duplex_load_bytes_per_second()), " + ",
                      FormatRate(link.duplex_unload_bytes_per_second()));
}

// What the guards have to say of a session, in lines; nothing where its trainer tells them nothing.
std::string GuardsText(const v1::Session& session) {
  const v1::GuardStatus& guards = session.guards();
  std::string text;
  const std::string who = absl::StrCat("session ", Printable(session.session()), ": ");
  if (guards.has_loss()) {
    absl::StrAppend(&text, who, absl::StrFormat("loss %.4g, ", guards.loss()),
                    guards.loss_stable() ? "stable" : "not stable yet");
    if (guards.swing_level() > 0) {
      absl::StrAppend(&text, absl::StrFormat("; it swings with a period of %d steps: alpha is raised to %.3g, hot to %.3g",
                                             guards.swing_period_steps(), guards.alpha(), guards.hot()));
    }
    text += "\n";
  }
  if (guards.kept_modules() > 0) {
    absl::StrAppend(&text, who, guards.kept_modules(), " modules of ", FormatByteSize(guards.kept_bytes()),
                    " keep their place on the device\n");
  }
  if (guards.rows() > 0 && guards.most_share() > 0) {
    absl::StrAppend(&text, who, "a batch has ", guards.rows(), " rows; ", guards.free_rows(), " fit into the memory that is free, ",
                    guards.most_rows(), " at most\n");
  }
  return text;
}

}  // namespace

ExitCode ExitCodeOf(const absl::Status& status) {
  if (status.ok()) return kExitDone;
  return status.code() == absl::StatusCode::kUnavailable ? kExitNoDaemon : kExitRefused;
}

ExitCode Fail(const Output& output, const absl::Status& status) {
  output.error << "misactl: " << Printable(std::string(status.message())) << "\n";
  return ExitCodeOf(status);
}

std::string NodeText(const v1::GetNodeResponse& node, bool color) {
  std::string text;
  const auto line = [&](absl::string_view name, const std::string& value) {
    absl::StrAppendFormat(&text, "%-12s%s\n", name, value);
  };
  line("misad", absl::StrCat(Printable(node.version()), ", up for ", FormatSeconds(node.uptime_seconds()),
                             node.draining() ? ", draining: no new sessions" : ""));
  line("device", absl::StrCat(Printable(node.device_kind()), ", ", Printable(node.device_name()), ", ",
                              Printable(node.device_uuid())));
  line("pool", absl::StrCat(FormatByteSize(node.capacity_bytes()), ": ", FormatByteSize(node.leased_bytes()),
                            " leased, ", FormatByteSize(node.free_bytes()), " free, ",
                            FormatByteSize(node.reclaiming_bytes()), " being reclaimed"));
  line(node.below().empty() ? "disk" : node.below(), absl::StrCat(FormatByteSize(node.disk_reserved_bytes()), " reserved of ",
                            FormatByteSize(node.disk_capacity_bytes())));
  line("link", LinkText(node.link()));
  line("sessions", absl::StrCat(node.sessions()));
  if (node.events_dropped() > 0) {
    line("events", absl::StrCat(node.events_dropped(), " dropped: readers of the event stream were too slow"));
  }
  if (node.orphans_size() > 0) {
    absl::StrAppend(&text, "\n", FormatByteSize(node.orphaned_bytes()),
                    " are held by trainers of an earlier daemon until they end:\n");
    Table table({{"SESSION"}, {"PID", Alignment::kRight}, {"HOLDS", Alignment::kRight}});
    for (const v1::Orphan& orphan : node.orphans()) {
      table.AddRow({OrDash(orphan.session()), absl::StrCat(orphan.pid()), FormatByteSize(orphan.bytes())});
    }
    absl::StrAppend(&text, table.Render(color));
  }
  return text;
}

std::string SessionsText(const v1::ListSessionsResponse& sessions, bool color) {
  if (sessions.sessions_size() == 0) return "no sessions\n";
  Table table({{"SESSION"},
               {"JOB"},
               {"RANK", Alignment::kRight},
               {"PID", Alignment::kRight},
               {"MODE"},
               {"WEIGHT", Alignment::kRight},
               {"BUDGET", Alignment::kRight},
               {"DEVICE", Alignment::kRight},
               {"PEAK", Alignment::kRight},
               {"DISK", Alignment::kRight},
               {"MODULES", Alignment::kRight},
               {"STEP", Alignment::kRight},
               {"STEP TIME", Alignment::kRight},
               {"STALL", Alignment::kRight},
               {"BOUND", Alignment::kRight},
               {"PLAN", Alignment::kRight},
               {"ATTACHED", Alignment::kRight}});
  std::string notes;
  std::string problems;
  for (const v1::Session& session : sessions.sessions()) {
    // A bound of 0: no plan was made yet.
    const std::string bound = session.bound_step_seconds() > 0 ? FormatSeconds(session.bound_step_seconds()) : "-";
    table.AddRow({OrDash(session.session()), OrDash(session.job()), absl::StrCat(session.rank()),
                  absl::StrCat(session.pid()), FormatMode(session.mode()), absl::StrFormat("%.3g", session.weight()),
                  FormatByteSize(session.budget_bytes()) + (session.elastic() ? " auto" : ""),
                  FormatByteSize(session.device_bytes()), FormatByteSize(session.device_peak_bytes()),
                  FormatByteSize(session.disk_bytes()), absl::StrCat(session.module_count()),
                  absl::StrCat(session.step()), FormatSeconds(session.step_seconds()),
                  FormatSeconds(session.stall_seconds()), bound, absl::StrCat(session.plan_version()),
                  FormatSeconds(session.attached_seconds())});
    if (session.tasks_size() > 0) {
      std::string tasks;
      for (const v1::Task& task : session.tasks()) {
        absl::StrAppend(&tasks, tasks.empty() ? "" : ", ", task.name().empty() ? "(none)" : Printable(task.name()),
                        absl::StrFormat(" %.0f %% (weight %.3g, %d steps)", task.share() * 100, task.weight(), task.steps()));
      }
      absl::StrAppend(&notes, "session ", Printable(session.session()), ": tasks ", tasks, "\n");
    }
    absl::StrAppend(&notes, GuardsText(session));
    if (!session.last_problem().empty()) {
      absl::StrAppend(&problems, "session ", Printable(session.session()), ": ", Printable(session.last_problem()),
                      "\n");
    }
  }
  return table.Render(color) + notes + problems;
}

std::string ModulesText(const v1::ListModulesResponse& modules, bool color) {
  if (modules.modules_size() == 0) return "no modules\n";
  Table table({{"SESSION"},
               {"MODULE"},
               {"KIND"},
               {"PARAMETERS", Alignment::kRight},
               {"WEIGHTS"},
               {"GRADIENTS"},
               {"OPTIMIZER"},
               {"ON DEVICE", Alignment::kRight},
               {"IMPORTANCE", Alignment::kRight},
               {"RANK", Alignment::kRight},
               {"TRAINED"}});
  for (const v1::ModuleStatus& module : modules.modules()) {
    table.AddRow({OrDash(module.session()), OrDash(module.name()), OrDash(module.kind()),
                  FormatCount(module.parameter_count()), FormatResidency(module.weights()),
                  FormatResidency(module.gradients()), FormatResidency(module.optimizer()),
                  FormatByteSize(module.device_bytes()), absl::StrFormat("%.3g", module.importance()),
                  absl::StrFormat("%.2f", module.importance_rank()), module.active() ? "yes" : "no"});
  }
  return table.Render(color);
}

std::string EventTitles(bool color) {
  const std::string titles =
      absl::StrFormat("%-27s  %-18s  %-10s  %-30s  %10s  %s", "TIME", "KIND", "SESSION", "MODULE", "BYTES", "CAUSE");
  return color ? absl::StrCat("\033[1m", titles, "\033[0m\n") : titles + "\n";
}

std::string EventLine(const v1::Event& event) {
  std::string line = absl::StrFormat("%-27s  %-18s  %-10s  %-30s  %10s  %s", OrDash(event.time()), OrDash(event.kind()),
                                     OrDash(event.session()), OrDash(event.module()),
                                     event.bytes() > 0 ? FormatByteSize(event.bytes()) : "-", Printable(event.cause()));
  absl::StripTrailingAsciiWhitespace(&line);
  return line + "\n";
}

ExitCode Status(AdminClient& client, const Output& output) {
  const auto node = client.GetNode();
  if (!node.ok()) return Fail(output, node.status());
  return Show(output, *node, NodeText(*node, output.color));
}

ExitCode Sessions(AdminClient& client, const Output& output) {
  const auto sessions = client.ListSessions();
  if (!sessions.ok()) return Fail(output, sessions.status());
  return Show(output, *sessions, SessionsText(*sessions, output.color));
}

ExitCode Modules(AdminClient& client, const Output& output, const std::string& session) {
  const auto modules = client.ListModules(session);
  if (!modules.ok()) return Fail(output, modules.status());
  return Show(output, *modules, ModulesText(*modules, output.color));
}

ExitCode Events(AdminClient& client, const Output& output, uint32_t backlog, bool follow) {
  if (!output.json) output.out << EventTitles(output.color) << std::flush;
  uint32_t shown = 0;
  const auto on_event = [&](const v1::Event& event) {
    output.out << (output.json ? ToJson(event).dump() + "\n" : EventLine(event)) << std::flush;
    ++shown;
    return output.out.good() && (follow || shown < backlog);
  };
  if (!follow && backlog == 0) return kExitDone;
  const absl::Duration idle_limit = follow ? absl::InfiniteDuration() : kBacklogSilence;
  absl::Status status = client.WatchEvents(backlog, idle_limit, on_event);
  // A followed stream comes to its own deadline once a day and is taken up again.
  while (follow && status.ok() && output.out.good()) status = client.WatchEvents(0, idle_limit, on_event);
  return status.ok() ? kExitDone : Fail(output, status);
}

ExitCode Health(AdminClient& client, const Output& output) {
  const auto serving = client.IsServing();
  const bool healthy = serving.ok() && *serving;
  if (output.json) {
    nlohmann::json object = {{"serving", healthy}};
    if (!serving.ok()) object["problem"] = std::string(serving.status().message());
    output.out << object.dump() << "\n";
  } else if (serving.ok()) {
    output.out << (healthy ? "serving\n" : "not serving\n");
  } else {
    Fail(output, serving.status());
  }
  return healthy ? kExitDone : kExitRefused;
}

ExitCode Budget(AdminClient& client, const Output& output, const std::string& session, const std::string& size) {
  uint64_t budget_bytes = 0;
  const bool automatic = size == "auto";
  const std::string problem = automatic ? "" : ParseByteSize(size, &budget_bytes);
  if (!problem.empty()) {
    output.error << "misactl: " << Printable(problem) << ".\n";
    return kExitNoDaemon;
  }
  const absl::Status status = client.SetBudget(session, automatic ? std::nullopt : std::optional(budget_bytes));
  if (!status.ok()) return Fail(output, status);
  if (output.json) {
    nlohmann::json object = {{"session", session}, {"budget_bytes", budget_bytes}};
    if (automatic) object["budget_bytes"] = nullptr;
    output.out << object.dump() << "\n";
  } else if (automatic) {
    output.out << "misad chooses the budget of session " << Printable(session) << " from now on\n";
  } else {
    output.out << "session " << Printable(session) << " may hold " << FormatByteSize(budget_bytes)
               << " from its next step on\n";
  }
  return kExitDone;
}

ExitCode Drain(AdminClient& client, const Output& output, const std::string& reason) {
  const absl::Status status = client.Drain(reason);
  if (!status.ok()) return Fail(output, status);
  if (output.json) {
    output.out << nlohmann::json({{"draining", true}, {"reason", reason}}).dump() << "\n";
  } else {
    output.out << "misad drains: it takes no new sessions, and those that run go on\n";
  }
  return kExitDone;
}

ExitCode Snapshot(AdminClient& client, const Output& output) {
  const auto snapshot = client.CaptureSnapshot();
  if (!snapshot.ok()) return Fail(output, snapshot.status());
  const nlohmann::json parsed = nlohmann::json::parse(*snapshot, nullptr, /*allow_exceptions=*/false);
  if (parsed.is_discarded()) {
    return Fail(output, absl::InternalError("misad sent a snapshot that is not JSON; its version may differ."));
  }
  output.out << (output.json ? parsed.dump() : parsed.dump(2)) << "\n";
  return kExitDone;
}

}  // namespace misa::cli
