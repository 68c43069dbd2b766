// misactl: what a misad on this machine does, and the few things that can be asked of it.
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <string>

#include "CLI/CLI.hpp"
#include "absl/time/time.h"
#include "client/cli/admin_client.h"
#include "client/cli/commands.h"
#include "client/cli/simulate.h"
#include "client/cli/plan.h"
#include "client/cli/simulate_sessions.h"
#include "client/cli/trace_commands.h"

namespace {

constexpr char kExamples[] =
    "Examples:\n"
    "  misactl status                          the daemon, its device, pool and link\n"
    "  misactl sessions                        who trains, under which budget, how fast\n"
    "  misactl modules --session s1            where each module's weights, gradients and state are\n"
    "  misactl events --follow                 loads, unloads, plans, attaches as they happen\n"
    "  misactl events --backlog 100 --json     the last 100 events as JSON lines\n"
    "  misactl budget s1 2GiB                  change a session's budget from its next step on\n"
    "  misactl budget s1 auto                  let misad choose it, beside the other sessions'\n"
    "  misactl health                          exit status 0 when misad serves: for containers\n"
    "  misactl snapshot > snapshot.json        everything the daemon knows\n"
    "  misactl simulate sessions --seeds 1000  a thousand simulated nodes with faults\n"
    "  misactl simulate --trace three-pass     what cache policies would load, beside the bound\n"
    "  misactl plan --model llama-7b --device rtx-3090 --checkpointing full   will it fit, how fast\n"
    "  misactl trace record s1 -o s1.trace     the order in which a session's step uses its modules\n"
    "  misactl trace convert s1.trace --to perfetto -o s1.json\n"
    "\n"
    "Exit status: 0 done, 1 refused or not serving, 2 no daemon or wrong usage.\n";

// Options before the name of the command, or after it.
void AddCommonOptions(CLI::App* app, std::string* runtime_directory, double* timeout_seconds, bool* json) {
  app->add_option("--runtime-dir", *runtime_directory,
                  "Folder of the daemon's sockets (default: $MISA_RUNTIME_DIR, else /run/misa)")
      ->type_name("FOLDER");
  app->add_option("--timeout", *timeout_seconds, "Seconds to wait for an answer (default: 5)")
      ->type_name("SECONDS")
      ->check(CLI::Range(0.01, 3600.0));
  app->add_flag("--json", *json, "One JSON object instead of a table; sizes in bytes, times in seconds");
}

void AddSimulateOptions(CLI::App* app, misa::cli::SimulateOptions* options) {
  app->require_subcommand(0, 1);
  app->add_option("--trace", options->trace,
                  "zigzag, three-pass, forward-only, phases or mixed (default: zigzag), or a trace file")
      ->type_name("KIND|FILE");
  app->add_option("--mode", options->mode, "Of a trace file: train (default), eval or accumulate")->type_name("MODE");
  app->add_option("--budget", options->budget, "Of a trace file: room on the device, in place of its session's: 4GiB")
      ->type_name("SIZE");
  app->add_option("--policy", options->policy,
                  "lru, lru-threshold, belady, planner, optimum (few units only), or all (default)")
      ->type_name("POLICY");
  app->add_option("--units", options->units, "Modules (default: 40)")->type_name("COUNT");
  app->add_option("--capacity", options->capacity, "Room on the device, in units of mean size (default: 38)")
      ->type_name("UNITS");
  app->add_option("--unit-bytes", options->unit_bytes, "Bytes of a unit (default: 1000000)")->type_name("BYTES");
  app->add_flag("--mixed-sizes", options->mixed_sizes, "Units of an eighth up to eight times the size, drawn");
  app->add_flag("--writes", options->writes, "The last pass over a unit writes it, so that it cannot just be dropped");
  app->add_option("--periods", options->periods, "Periods to go through at most until all repeats (default: 400)")
      ->type_name("COUNT");
  app->add_option("--seed", options->seed, "Of sizes and importance ranks (default: 1)")->type_name("SEED");
}

void AddPlanOptions(CLI::App* plan, misa::cli::PlanOptions* options) {
  plan->add_option("--model", options->model, "A known model (any other name lists them) or a Hugging Face config.json")
      ->required()
      ->type_name("NAME|FILE");
  plan->add_option("--device", options->device, "A known device (any other name lists them)")->type_name("NAME");
  plan->add_option("--device-file", options->device_file,
                   "Or its description: JSON with name, capacity_bytes, flops_per_second, h2d_bytes_per_second, "
                   "d2h_bytes_per_second, total_bytes_per_second, host_bytes")
      ->type_name("FILE");
  plan->add_option("--optimizer", options->optimizer, "adamw (default), sgd, sgd-momentum, adafactor, lion, adamw-8bit, …");
  plan->add_option("--precision", options->precision,
                   "bf16-mixed (default), bf16-mixed-fp32-gradients, fp16-mixed, bf16, fp32");
  plan->add_option("--batch", options->batch, "Sequences a step (default: 1)")->type_name("COUNT");
  plan->add_option("--sequence", options->sequence, "Tokens of one (default: 2048, or the model's longest)")
      ->type_name("COUNT");
  plan->add_option("--micro-batch", options->micro_batch,
                   "Sequences that go through a block at once, all of a batch before the next block (default: the batch)")
      ->type_name("COUNT");
  plan->add_option("--checkpointing", options->checkpointing, "none (default) or full: each block is computed again");
  plan->add_option("--attention", options->attention, "fused (default) or unfused: scores are kept");
  plan->add_option("--budget", options->budget,
                   "Device memory for state and activations (default: 0.9 of the device's, less what libraries take)")
      ->type_name("BYTES");
  plan->add_option("--mode", options->mode, "exact, sampled or quantized (default: each of them)");
  plan->add_option("--step", options->step, "deferred, in_backward or eager (default: the first two)");
  plan->add_option("--delta", options->delta, "Share of the parameters that a sampled round trains (default: 0.03)");
  plan->add_option("--utilization", options->utilization, "Share of the device's arithmetic that is reached");
  plan->add_option("--host-memory", options->host_memory, "Memory of the tier below; what it lacks does not fit")
      ->type_name("BYTES");
}

}  // namespace

int main(int argc, char** argv) {
  using namespace misa::cli;

  std::string runtime_directory;
  double timeout_seconds = 5;
  bool json = false;
  std::string session;
  std::string size;
  std::string reason = "asked for with misactl drain";
  uint32_t backlog = 50;
  bool follow = false;
  std::string trace_path;
  std::string trace_format;
  std::string output_path;
  PlanOptions plan_options;

  CLI::App app{std::string(kExamples)};
  app.name("misactl");
  app.set_version_flag("--version", MISA_VERSION);
  app.require_subcommand(1);
  app.fallthrough();
  AddCommonOptions(&app, &runtime_directory, &timeout_seconds, &json);

  CLI::App* status = app.add_subcommand("status", "The daemon, its device, pool, disk and link");
  CLI::App* sessions = app.add_subcommand("sessions", "One line for each session");
  CLI::App* modules = app.add_subcommand("modules", "One line for each module: where it is, how much it matters");
  modules->add_option("--session", session, "Only this session's modules")->type_name("SESSION");
  CLI::App* events = app.add_subcommand("events", "What happened, the newest last");
  events->add_option("--backlog", backlog, "How many past events to show (default: 50)")->type_name("COUNT");
  events->add_flag("-f,--follow", follow, "Go on with events as they happen, until interrupted");
  CLI::App* health = app.add_subcommand("health", "Exit status 0 when the daemon serves, else 1");
  CLI::App* budget = app.add_subcommand("budget", "Change how much device memory a session may hold");
  budget->add_option("session", session, "The session, as `misactl sessions` names it")->required();
  budget->add_option("bytes", size, "The new budget: 2GiB, 512MiB, 1500000000, or auto")->required();
  CLI::App* drain = app.add_subcommand("drain", "Take no new sessions from now on; those that run go on");
  drain->add_option("reason", reason, "Why, for the log and the trainers");
  CLI::App* snapshot = app.add_subcommand("snapshot", "Everything the daemon knows, as one JSON object");
  SimulateOptions simulated;
  CLI::App* simulate =
      app.add_subcommand("simulate", "What cache policies load and unload a period; no daemon is asked");
  AddSimulateOptions(simulate, &simulated);
  CLI::App* plan = app.add_subcommand("plan", "Will a training fit a device, in which mode, and how fast; asks no daemon");
  AddPlanOptions(plan, &plan_options);
  CLI::App* trace = app.add_subcommand("trace", "The order and times in which a step uses its modules: record, show, convert");
  trace->require_subcommand(1);
  CLI::App* trace_record = trace->add_subcommand("record", "Write the trace of a session into a file");
  trace_record->add_option("session", session, "The session, as `misactl sessions` names it")->required();
  trace_record->add_option("-o,--output", output_path, "The file (default: SESSION.trace)")->type_name("FILE");
  CLI::App* trace_show = trace->add_subcommand("show", "What a trace file holds");
  trace_show->add_option("file", trace_path, "The file")->required();
  CLI::App* trace_convert = trace->add_subcommand("convert", "A trace file in another format");
  trace_convert->add_option("file", trace_path, "The file: binary or JSON")->required();
  trace_convert->add_option("--to", trace_format, "json, perfetto (Chrome trace JSON) or binary")
      ->required()
      ->check(CLI::IsMember({"json", "perfetto", "binary"}));
  trace_convert->add_option("-o,--output", output_path, "Where to (default: the terminal)")->type_name("FILE");
  SimulateSessionsOptions nodes;
  CLI::App* simulate_sessions = AddSimulateSessions(simulate, &nodes);

  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? kExitDone : kExitNoDaemon;
  }

  // gRPC's own log lines say nothing that misactl does not say as a sentence.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  const bool color = isatty(STDOUT_FILENO) == 1 && std::getenv("NO_COLOR") == nullptr;
  const Output output{std::cout, std::cerr, json, color};
  AdminClient client(AdminClient::RuntimeDirectory(runtime_directory), absl::Seconds(timeout_seconds));

  ExitCode code = kExitDone;
  if (status->parsed()) code = Status(client, output);
  if (sessions->parsed()) code = Sessions(client, output);
  if (modules->parsed()) code = Modules(client, output, session);
  if (events->parsed()) code = Events(client, output, backlog, follow);
  if (health->parsed()) code = Health(client, output);
  if (budget->parsed()) code = Budget(client, output, session, size);
  if (drain->parsed()) code = Drain(client, output, reason);
  if (snapshot->parsed()) code = Snapshot(client, output);
  if (simulate_sessions->parsed()) code = SimulateSessions(nodes, output);
  if (simulate->parsed() && simulate->get_subcommands().empty()) code = Simulate(simulated, output);
  if (plan->parsed()) code = Plan(output, plan_options);
  if (trace_record->parsed()) code = TraceRecord(client, output, session, output_path);
  if (trace_show->parsed()) code = TraceShow(output, trace_path);
  if (trace_convert->parsed()) code = TraceConvert(output, trace_path, trace_format, output_path);
  std::cout.flush();
  return code;
}
