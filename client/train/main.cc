// misa-train: a small transformer language model trained in LibTorch, with its memory managed by misa.
#include <unistd.h>

#include <climits>
#include <cstdio>
#include <exception>
#include <fstream>
#include <iostream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "CLI/CLI.hpp"
#include "client/train/trainer.h"
#include "runtime/memory/byte_size.h"

namespace {

using misa::train::TrainOptions;
using misa::train::TrainResult;

constexpr char kExamples[] =
    "Trains a transformer language model over the bytes of a text.\n"
    "\n"
    "Examples:\n"
    "  misa-train --text book.txt --mode plain                    as without misa; shows the memory it needs\n"
    "  misa-train --text book.txt --budget 200MiB                 the same bits in 200 MiB of it\n"
    "  misa-train --text book.txt --budget 200MiB --step eager    each step inside the optimizer's place\n"
    "  misa-train --text book.txt --budget 150MiB --mode sampled --delta 0.1 --inner-steps 20\n"
    "  misa-train --text book.txt --budget 200MiB --daemon required --job books --json report.json\n"
    "\n"
    "Exit status: 0 trained, 1 stopped by an error, 2 wrong usage.\n";

// misad as built beside this program; "" where there is none.
std::string DaemonBesides() {
  char path[PATH_MAX];
  const ssize_t length = readlink("/proc/self/exe", path, sizeof(path));
  if (length <= 0 || std::getenv("MISA_DAEMON") != nullptr) return "";
  std::string name(path, static_cast<size_t>(length));
  name = name.substr(0, name.rfind('/')) + "/misad";
  return access(name.c_str(), X_OK) == 0 ? name : "";
}

// What an error says, without the stack that torch puts behind its own.
std::string FirstSentence(const std::exception& error) {
  const std::string text = error.what();
  const size_t end = text.find("\nException raised from");
  return end == std::string::npos ? text : text.substr(0, end);
}

nlohmann::ordered_json Figures(const TrainOptions& options, const std::string& mode, const std::string& step,
                               const TrainResult& result) {
  nlohmann::ordered_json json;
  json["mode"] = mode;
  json["step_mode"] = options.manage ? nlohmann::ordered_json(step) : nullptr;
  json["steps"] = result.steps;
  json["batch"] = options.batch;
  json["sequence"] = options.sequence;
  json["width"] = options.width;
  json["layers"] = options.layers;
  json["heads"] = options.heads;
  json["learning_rate"] = options.learning_rate;
  json["seed"] = options.seed;
  json["threads"] = result.threads;
  json["parameter_count"] = result.parameter_count;
  json["loss_first"] = result.loss_first;
  json["loss_last"] = result.loss_last;
  json["step_seconds_median"] = result.step_seconds_median;
  json["tokens_per_second"] = result.tokens_per_second;
  json["device_peak_bytes"] = result.device_peak_bytes;
  json["budget_bytes"] = result.report ? nlohmann::ordered_json(result.report->budget_bytes) : nullptr;
  json["state_sha256"] = options.digest ? nlohmann::ordered_json(result.state_sha256) : nullptr;
  if (result.report) {
    const misa::RunReport& r = *result.report;
    json["session"] = result.session.session;
    json["private_daemon"] = result.session.private_daemon;
    json["stall_seconds_median"] = r.stall_seconds_median;
    json["bound_step_seconds"] = r.bound_step_seconds;
    json["h2d_bytes_per_step"] = r.h2d_bytes_per_step;
    json["d2h_bytes_per_step"] = r.d2h_bytes_per_step;
    json["bound_h2d_bytes_per_step"] = r.bound_h2d_bytes_per_step;
    json["bound_d2h_bytes_per_step"] = r.bound_d2h_bytes_per_step;
    json["device_stddev_bytes"] = r.device_stddev_bytes;
    json["demand_loads"] = r.demand_loads;
    json["prefetch_loads"] = r.prefetch_loads;
    json["prefetch_hits"] = r.prefetch_hits;
    json["unloads"] = r.unloads;
    json["drops"] = r.drops;
    json["departures"] = r.departures;
    json["plan_version"] = r.plan_version;
    json["module_count"] = r.module_count;
    json["weights_bytes"] = r.weights_bytes;
    json["gradients_bytes"] = r.gradients_bytes;
    json["optimizer_bytes"] = r.optimizer_bytes;
    json["notices"] = r.notices;
    json["stall_seconds"] = r.stall_seconds;
    json["device"] = {{"kind", r.device_kind},
                      {"name", r.device_name},
                      {"capacity_bytes", r.device_capacity_bytes},
                      {"h2d_bytes_per_second", r.h2d_bytes_per_second},
                      {"d2h_bytes_per_second", r.d2h_bytes_per_second},
                      {"total_bytes_per_second", r.total_bytes_per_second}};
  } else {
    json["stall_seconds_median"] = 0.0;
  }
  json["step_seconds"] = result.step_seconds;
  json["losses"] = result.losses;
  if (result.report) json["timeline"] = result.report->timeline;
  return json;
}

void PrintSummary(const TrainOptions& options, const TrainResult& result) {
  const auto mebibytes = [](double bytes) { return bytes / (1 << 20); };
  std::printf("\nloss              %.4f -> %.4f in %lld steps\n", result.loss_first, result.loss_last,
              static_cast<long long>(result.steps));
  std::printf("step              %.4f s median, %.0f tokens/s, %d threads\n", result.step_seconds_median,
              result.tokens_per_second, result.threads);
  std::printf("device peak       %.1f MiB", mebibytes(static_cast<double>(result.device_peak_bytes)));
  if (result.report) std::printf(" of %s", misa::FormatByteSize(result.report->budget_bytes).c_str());
  std::printf("\n");
  if (result.report) {
    const misa::RunReport& r = *result.report;
    std::printf("moved a step      %.1f MiB in, %.1f MiB out\n", mebibytes(r.h2d_bytes_per_step),
                mebibytes(r.d2h_bytes_per_step));
    std::printf("stalls            %.4f s a step median; %llu loads ahead of use, %llu on demand\n", r.stall_seconds_median,
                static_cast<unsigned long long>(r.prefetch_loads), static_cast<unsigned long long>(r.demand_loads));
  }
  if (options.digest) std::printf("state SHA-256     %s\n", result.state_sha256.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  TrainOptions options;
  misa::ManageOptions manage;
  std::string budget;
  std::string mode = "exact";
  std::string step = "deferred";
  std::string daemon = "auto";
  std::string json_file;
  bool no_digest = false;

  CLI::App app{std::string(kExamples)};
  app.name("misa-train");
  app.set_version_flag("--version", MISA_VERSION);
  app.option_defaults()->always_capture_default();
  app.add_option("--text", options.text_file, "File whose bytes are learnt")->required()->type_name("FILE");
  app.add_option("--steps", options.steps, "Training steps")->check(CLI::Range(1, 1 << 30));
  app.add_option("--batch", options.batch, "Sequences a step")->check(CLI::Range(1, 1 << 20));
  app.add_option("--sequence", options.sequence, "Bytes a sequence")->check(CLI::Range(1, 1 << 20));
  app.add_option("--width", options.width, "Width of the model")->check(CLI::Range(1, 1 << 20));
  app.add_option("--layers", options.layers, "Blocks of the model")->check(CLI::Range(1, 1 << 16));
  app.add_option("--heads", options.heads, "Heads of each attention")->check(CLI::Range(1, 1 << 16));
  app.add_option("--learning-rate", options.learning_rate, "AdamW's learning rate")->check(CLI::PositiveNumber);
  app.add_option("--warmup-steps", options.warmup_steps, "Steps in which the learning rate rises to it")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--clip", options.clip_norm, "Largest norm of all gradients together; 0 for any")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--seed", options.seed, "Of weights, batches and draws");
  app.add_option("--threads", options.threads, "Compute threads; 0 for torch's own choice. Bits differ between counts")
      ->check(CLI::Range(0, 4096));
  app.add_option("--report-every", options.report_every, "Steps between two lines; 0 for about twenty lines")
      ->check(CLI::NonNegativeNumber);
  app.add_option("--budget", budget, "What may be on the device at once: 200MiB, 1.5GiB, … Needed unless --mode plain")
      ->type_name("BYTES");
  app.add_option("--mode", mode, "plain: without misa; exact: the same bits as plain; sampled: by importance")
      ->check(CLI::IsMember({"plain", "exact", "sampled"}));
  app.add_option("--step", step, "When a module's optimizer step happens")
      ->check(CLI::IsMember({"deferred", "in_backward", "eager"}));
  app.add_option("--daemon", daemon, "auto: the node's misad, else a private one; required: the node's; private")
      ->check(CLI::IsMember({"auto", "required", "private"}));
  app.add_option("--job", manage.job, "A name for people")->type_name("NAME");
  app.add_option("--runtime-dir", manage.runtime_directory,
                 "Folder of the daemon's sockets (default: $MISA_RUNTIME_DIR, else /run/misa)")
      ->type_name("FOLDER");
  app.add_option("--disk", manage.disk_directory, "Disk folder of a private daemon (default: $MISA_DISK_DIR, else /var/tmp)")
      ->type_name("FOLDER");
  std::string chunk;
  app.add_option("--chunk", chunk, "Chunk size of a private daemon (default: its own)")->type_name("BYTES");
  app.add_option("--delta", manage.sampling.delta, "Sampled: share of the blocks' matrices that a round trains");
  app.add_option("--eta", manage.sampling.eta, "Sampled: how strongly importance decides; 0 draws uniformly");
  app.add_option("--inner-steps", manage.sampling.inner_steps, "Sampled: steps of a round");
  app.add_option("--json", json_file, "Writes the figures there")->type_name("FILE");
  app.add_flag("--no-digest", no_digest, "Leave out the SHA-256 of the state at the end");
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return app.exit(error) == 0 ? 0 : 2;
  }

  try {
    options.digest = !no_digest;
    if (mode != "plain") {
      if (budget.empty()) {
        std::cerr << "misa-train: --mode " << mode << " needs a --budget, such as 200MiB; --mode plain trains without.\n";
        return 2;
      }
      manage.budget = budget;
      manage.mode = mode == "sampled" ? misa::Mode::kSampled : misa::Mode::kExact;
      manage.step = step == "in_backward" ? misa::StepTime::kInBackward
                    : step == "eager"     ? misa::StepTime::kEager
                                          : misa::StepTime::kDeferred;
      manage.daemon = daemon == "required"  ? misa::DaemonChoice::kRequired
                      : daemon == "private" ? misa::DaemonChoice::kPrivate
                                            : misa::DaemonChoice::kAuto;
      manage.sampling.seed = options.seed;
      manage.daemon_binary = DaemonBesides();
      if (!chunk.empty()) manage.chunk_bytes = misa::Budget(chunk).bytes();
      options.manage = manage;
    }
    const TrainResult result = misa::train::Train(options, [](const std::string& line) {
      std::cout << line << std::endl;  // flushed: somebody watches
    });
    PrintSummary(options, result);
    if (!json_file.empty()) {
      std::ofstream out(json_file);
      out << Figures(options, mode, step, result).dump(1) << "\n";
      out.close();
      if (!out) {
        std::cerr << "misa-train: the training is done, but " << json_file << " could not be written.\n";
        return 1;
      }
    }
    return 0;
  } catch (const std::exception& error) {
    std::cout.flush();
    std::cerr << "misa-train: " << FirstSentence(error) << "\n";
    return 1;
  }
}
