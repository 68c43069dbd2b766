#include "client/cli/simulate_sessions.h"

#include <chrono>
#include <limits>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/format.h"
#include "nlohmann/json.hpp"
#include "server/sim/node.h"

namespace misa::cli {

CLI::App* AddSimulateSessions(CLI::App* simulate, SimulateSessionsOptions* options) {
  CLI::App* app = simulate->add_subcommand(
      "sessions",
      "Whole nodes in virtual time: the daemon's core between trainers, an operator, faults and restarts\n\n"
      "Examples:\n"
      "  misactl simulate sessions --seeds 10000        ten thousand nodes; the first broken invariant ends it\n"
      "  misactl simulate sessions --seed 42 --seeds 1  seed 42 again, exactly as before\n"
      "  misactl simulate sessions --seed 42 --log      and all that happens in it\n");
  app->add_option("--seed", options->seed, "The first seed (default: 1)")->type_name("SEED");
  app->add_option("--seeds", options->seeds, "How many seeds, one node each (default: 1000)")
      ->type_name("COUNT")
      ->check(CLI::PositiveNumber);
  app->add_option("--steps", options->steps, "End once so many training steps were simulated")->type_name("COUNT");
  app->add_option("--trainers", options->trainers, "At most so many trainers come to a node (default: 6)")
      ->type_name("COUNT")
      ->check(CLI::Range(2, 256));
  app->add_option("--seconds", options->seconds, "Virtual seconds of arrivals and faults in a node (default: 1.5)")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.01, 3600.0));
  app->add_flag("--log", options->log, "Everything that happens in the first seed, and only that seed");
  return app;
}

ExitCode SimulateSessions(const SimulateSessionsOptions& options, const Output& output) {
  server::NodeOptions node;
  node.trainers = options.trainers;
  node.seconds = options.seconds;
  const uint64_t seeds = options.log ? 1 : options.seeds;
  if (options.seed > std::numeric_limits<uint64_t>::max() - seeds) {
    output.error << "misactl: --seed and --seeds together go beyond the largest seed.\n";
    return kExitNoDaemon;
  }
  node.log = options.log;
  server::NodeResult total;
  uint64_t done = 0;
  std::string violation;
  std::string tail;
  const auto start = std::chrono::steady_clock::now();
  for (; done < seeds && (options.steps == 0 || total.steps < options.steps); ++done) {
    node.seed = options.seed + done;
    const server::NodeResult result = server::SimulateNode(node);
    for (const std::string& line : result.log) output.out << line << "\n";
    total.events += result.events;
    total.steps += result.steps;
    total.sessions += result.sessions;
    total.plans += result.plans;
    total.restarts += result.restarts;
    total.virtual_seconds += result.virtual_seconds;
    if (result.violation.empty()) continue;
    violation = result.violation;
    tail = server::DescribeViolation(node, result);
    ++done;
    break;
  }
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  const double per_second = seconds > 0 ? 1 / seconds : 0;
  if (output.json) {
    nlohmann::json object = {{"schema", "misa.simulate-sessions/1"},
                             {"first_seed", options.seed},
                             {"seeds", done},
                             {"steps", total.steps},
                             {"events", total.events},
                             {"sessions", total.sessions},
                             {"plans", total.plans},
                             {"restarts", total.restarts},
                             {"virtual_seconds", total.virtual_seconds},
                             {"seconds", seconds},
                             {"steps_per_minute", static_cast<double>(total.steps) * per_second * 60},
                             {"events_per_second", static_cast<double>(total.events) * per_second},
                             {"violation", nullptr}};
    if (!violation.empty()) object["violation"] = {{"seed", node.seed}, {"sentence", violation}};
    output.out << object.dump() << "\n";
  } else {
    output.out << absl::StrFormat(
        "%s nodes, %s sessions, %s steps, %s events, %s plans, %s restarts in %s of virtual time\n", FormatCount(done),
        FormatCount(total.sessions), FormatCount(total.steps), FormatCount(total.events), FormatCount(total.plans),
        FormatCount(total.restarts), FormatSeconds(total.virtual_seconds));
    output.out << absl::StrFormat(
        "%s: %s steps a minute, %s events a second\n", FormatSeconds(seconds),
        FormatCount(static_cast<uint64_t>(static_cast<double>(total.steps) * per_second * 60)),
        FormatCount(static_cast<uint64_t>(static_cast<double>(total.events) * per_second)));
    if (violation.empty()) output.out << "every invariant held\n";
  }
  if (violation.empty()) return kExitDone;
  output.error << "an invariant was violated; the seed replays it: misactl simulate sessions --seeds 1 --seed "
               << node.seed << "\n"
               << tail;
  return kExitRefused;
}

}  // namespace misa::cli
