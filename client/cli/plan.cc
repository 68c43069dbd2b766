#include "client/cli/plan.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/format.h"
#include "runtime/memory/byte_size.h"

namespace misa::cli {

using capacity::Mode;
using capacity::Prediction;
using capacity::Training;
using capacity::Update;
using nlohmann::json;

namespace {

constexpr Mode kModes[] = {Mode::kExact, Mode::kSampled, Mode::kQuantized};
constexpr Update kUpdates[] = {Update::kDeferred, Update::kInBackward, Update::kEager};

template <typename Values, typename Name>
bool FindByName(const Values& values, Name name_of, const std::string& name, std::string* known,
                std::decay_t<decltype(*std::begin(values))>* found) {
  bool there = false;
  for (const auto& value : values) {
    absl::StrAppend(known, known->empty() ? "" : ", ", name_of(value));
    if (name == name_of(value)) {
      *found = value;
      there = true;
    }
  }
  return there;
}

policy::Result<capacity::ModelShape> FindShape(const std::string& name) {
  policy::Result<capacity::ModelShape> result;
  if (const capacity::ModelShape* known = capacity::FindModel(name)) {
    result.value = *known;
    return result;
  }
  std::error_code ignored;
  if (!std::filesystem::exists(name, ignored)) {
    result.error = absl::StrCat("There is no model \"", name, "\", and no file of that name. Known are ",
                                capacity::KnownModelNames(), "; or give a Hugging Face config.json.");
    return result;
  }
  const policy::Result<std::string> text = trace::ReadBytes(name);
  if (!text.ok()) {
    result.error = text.error;
    return result;
  }
  result = capacity::ParseModelConfig(text.value);
  if (!result.ok()) {
    result.error = absl::StrCat(name, ": ", result.error);
  }
  return result;
}

policy::Result<capacity::DeviceProfile> FindProfile(const PlanOptions& options) {
  policy::Result<capacity::DeviceProfile> result;
  if (options.device.empty() == options.device_file.empty()) {
    result.error = absl::StrCat("Name the device by either --device or --device-file. Known are ",
                                capacity::KnownDeviceNames(), ".");
    return result;
  }
  if (!options.device_file.empty()) {
    const policy::Result<std::string> text = trace::ReadBytes(options.device_file);
    if (!text.ok()) {
      result.error = text.error;
      return result;
    }
    result = capacity::ParseDevice(text.value);
    if (!result.ok()) result.error = absl::StrCat(options.device_file, ": ", result.error);
    return result;
  }
  const capacity::DeviceProfile* known = capacity::FindDevice(options.device);
  if (known == nullptr) {
    result.error = absl::StrCat("There is no device \"", options.device, "\". Known are ",
                                capacity::KnownDeviceNames(), "; describe any other with --device-file.");
    return result;
  }
  result.value = *known;
  return result;
}

// What a mode is planned with, and the name it has in the table.
std::string ModeText(const Training& training) {
  std::string text = capacity::ModeName(training.mode);
  if (training.mode != Mode::kExact) absl::StrAppend(&text, absl::StrFormat(" %.3g %%", training.delta * 100));
  return text;
}

std::string Gigabytes(double bytes) { return absl::StrFormat("%.1f GB", bytes / 1e9); }

std::string SecondsOrDash(double seconds) { return seconds > 0 ? FormatSeconds(seconds) : "-"; }
std::string TokensText(double tokens_per_second) {
  return tokens_per_second > 0 ? absl::StrFormat("%.0f", tokens_per_second) : "-";
}

json SecondsOrNull(double seconds) { return seconds > 0 ? json(seconds) : json(nullptr); }

json ModeJson(const PlanAnswer& answer, const PlannedMode& planned) {
  const Training& training = planned.training;
  const Prediction& p = planned.prediction;
  json suggestions = json::array();
  for (const capacity::Suggestion& suggestion : p.suggestions) {
    suggestions.push_back({{"change", suggestion.change},
                           {"smallest_budget_bytes", suggestion.smallest_budget_bytes},
                           {"host_bytes", suggestion.host_bytes},
                           {"step_seconds", suggestion.step_seconds},
                           {"tokens_per_second", suggestion.tokens_per_second}});
  }
  json out = {{"mode", capacity::ModeName(training.mode)},
              {"step", capacity::UpdateName(training.update)},
              {"fits", p.fits},
              {"reason", p.reason},
              {"limited_by", p.limited_by},
              {"budget_bytes", p.budget_bytes},
              {"smallest_budget_bytes", p.smallest_budget_bytes},
              {"peak_bytes", p.peak_bytes},
              {"parts",
               {{"weights_bytes", p.parts.weights_bytes},
                {"gradients_bytes", p.parts.gradients_bytes},
                {"optimizer_bytes", p.parts.optimizer_bytes},
                {"activations_bytes", p.parts.activations_bytes},
                {"reserve_bytes", p.parts.reserve_bytes},
                {"base_line_bytes", p.parts.base_line_bytes}}},
              {"plain_bytes", p.plain_bytes},
              {"host_bytes", p.host_bytes},
              {"step_seconds", SecondsOrNull(p.step_seconds)},
              {"compute_seconds", p.compute_seconds},
              {"stall_seconds", p.fits ? json(p.stall_seconds) : json(nullptr)},
              {"bound_step_seconds", SecondsOrNull(p.bound_step_seconds)},
              {"tokens_per_second", SecondsOrNull(p.tokens_per_second)},
              {"loaded_bytes", p.loaded_bytes},
              {"unloaded_bytes", p.unloaded_bytes},
              {"bound_load_bytes", p.bound_load_bytes},
              {"bound_unload_bytes", p.bound_unload_bytes},
              {"trained_parameter_count", p.trained_parameters},
              {"tokens_per_step", p.tokens},
              {"hidden_from_batch", p.hidden_from_batch ? json(*p.hidden_from_batch) : json(nullptr)},
              {"suggestions", std::move(suggestions)}};
  if (training.mode != Mode::kExact) {
    out["delta"] = training.delta;
    // What a round's trained parameters take at most: delta of all of them, each with all its state.
    out["active_set_limit_bytes"] = training.delta * answer.state.total();
  }
  return out;
}

}  // namespace

policy::Result<PlanAnswer> MakePlanAnswer(const PlanOptions& options) {
  policy::Result<PlanAnswer> result;
  const auto fail = [&](const std::string& sentence) {
    result.value = {};
    result.error = sentence;
    return result;
  };
  PlanAnswer& answer = result.value;

  const policy::Result<capacity::ModelShape> shape = FindShape(options.model);
  if (!shape.ok()) return fail(shape.error);
  policy::Result<capacity::Model> model = capacity::BuildModel(shape.value);
  if (!model.ok()) return fail(model.error);
  answer.model = std::move(model.value);
  const policy::Result<capacity::DeviceProfile> device = FindProfile(options);
  if (!device.ok()) return fail(device.error);
  answer.device = device.value;
  if (options.utilization) answer.device.utilization = *options.utilization;
  if (!options.host_memory.empty()) {
    const std::string wrong = ParseByteSize(options.host_memory, &answer.device.host_bytes);
    if (!wrong.empty()) return fail(absl::StrCat("--host-memory: ", wrong, "."));
  }
  if (const std::string wrong = capacity::CheckDevice(answer.device); !wrong.empty()) return fail(wrong);

  Training training;
  training.optimizer = options.optimizer;
  training.precision = options.precision;
  training.batch = options.batch;
  training.sequence = options.sequence.value_or(0);
  if (options.sequence && *options.sequence == 0) return fail("A sequence has at least 1 token.");
  if (options.micro_batch && (*options.micro_batch == 0 || *options.micro_batch > options.batch)) {
    return fail(absl::StrCat("A micro-batch has at least 1 sequence and at most the ", options.batch, " of the batch."));
  }
  training.micro_batch = options.micro_batch.value_or(0);
  if (options.checkpointing != "none" && options.checkpointing != "full") {
    return fail(absl::StrCat("There is no checkpointing \"", options.checkpointing, "\"; known are none, full."));
  }
  training.checkpointing = options.checkpointing == "full";
  if (options.attention != "fused" && options.attention != "unfused") {
    return fail(absl::StrCat("There is no attention \"", options.attention, "\"; known are fused, unfused."));
  }
  training.fused_attention = options.attention == "fused";
  std::vector<Mode> modes(std::begin(kModes), std::end(kModes));
  if (!options.mode.empty()) {
    std::string known;
    Mode mode = Mode::kExact;
    if (!FindByName(kModes, capacity::ModeName, options.mode, &known, &mode)) {
      return fail(absl::StrCat("There is no mode \"", options.mode, "\"; known are ", known, "."));
    }
    modes = {mode};
  }
  std::vector<Update> updates = {Update::kDeferred, Update::kInBackward};
  if (!options.step.empty()) {
    std::string known;
    Update update = Update::kDeferred;
    if (!FindByName(kUpdates, capacity::UpdateName, options.step, &known, &update)) {
      return fail(absl::StrCat("There is no step \"", options.step, "\"; known are ", known, "."));
    }
    updates = {update};
  }
  if (options.delta) {
    if (modes.size() == 1 && modes[0] == Mode::kExact) {
      return fail("--delta is the share that a round of sampled training trains; mode exact trains every parameter.");
    }
    training.delta = *options.delta;
  }
  uint64_t budget_bytes = 0;
  if (!options.budget.empty()) {
    const std::string wrong = ParseByteSize(options.budget, &budget_bytes);
    if (!wrong.empty()) return fail(absl::StrCat("--budget: ", wrong, "."));
    if (budget_bytes == 0) return fail("A budget of 0 bytes holds nothing.");
  }

  const policy::Result<capacity::StateBytes> state =
      capacity::StateOf(answer.model, training.optimizer, training.precision);
  if (!state.ok()) return fail(state.error);
  answer.state = state.value;
  for (const Mode mode : modes) {
    for (const Update update : updates) {
      // Sampled rounds train so little that when it is stepped hardly matters; one line of each is enough.
      if (options.step.empty() && mode != Mode::kExact && update != Update::kDeferred) continue;
      training.mode = mode;
      training.update = update;
      policy::Result<Prediction> prediction =
          capacity::Predict({answer.model, answer.device, training, budget_bytes});
      if (!prediction.ok()) return fail(prediction.error);
      answer.modes.push_back({training, std::move(prediction.value)});
      answer.modes.back().training.sequence =
          answer.modes.back().prediction.tokens / std::max<uint64_t>(1, training.batch);
    }
  }
  return result;
}

std::string PlanText(const PlanAnswer& answer, bool color) {
  const Training& training = answer.modes.front().training;
  const policy::LinkRates link = capacity::LinkOf(answer.device);
  std::string text = absl::StrFormat(
      "%s: %s parameters in %d blocks, %s with %s: %s of training state (weights %s, gradients %s, optimizer %s)\n",
      Printable(answer.model.shape.name), FormatCount(answer.model.parameter_count), answer.model.shape.layers,
      training.precision, training.optimizer, Gigabytes(answer.state.total()), Gigabytes(answer.state.weights),
      Gigabytes(answer.state.gradients), Gigabytes(answer.state.optimizer));
  absl::StrAppendFormat(&text, "%s: %s, budget %s; %.3g TFLOP/s at a utilization of %.2f; link %s up, %s down, %s both ways\n",
                        Printable(answer.device.name), FormatByteSize(answer.device.capacity_bytes),
                        FormatByteSize(answer.modes.front().prediction.budget_bytes),
                        answer.device.flops_per_second * answer.device.utilization / 1e12, answer.device.utilization,
                        FormatRate(link.load), FormatRate(link.unload), FormatRate(link.duplex_load + link.duplex_unload));
  absl::StrAppendFormat(&text, "batch %d of %d tokens, %s%s, %s attention\n\n", training.batch, training.sequence,
                        training.micro_batch > 0 ? absl::StrCat(training.micro_batch, " at once through a block, ") : "",
                        training.checkpointing ? "full checkpointing" : "no checkpointing",
                        training.fused_attention ? "fused" : "unfused");

  Table speed({{"MODE"},
               {"STEP"},
               {"FITS"},
               {"LEAST BUDGET", Alignment::kRight},
               {"WITHOUT MISA", Alignment::kRight},
               {"STEP TIME", Alignment::kRight},
               {"COMPUTE", Alignment::kRight},
               {"BOUND", Alignment::kRight},
               {"TOKENS/S", Alignment::kRight},
               {"UP A STEP", Alignment::kRight},
               {"DOWN", Alignment::kRight},
               {"HOST", Alignment::kRight},
               {"LIMITED BY"}});
  Table parts({{"PEAK OF"},
               {"STEP"},
               {"WEIGHTS", Alignment::kRight},
               {"GRADIENTS", Alignment::kRight},
               {"OPTIMIZER", Alignment::kRight},
               {"ACTIVATIONS", Alignment::kRight},
               {"RESERVE", Alignment::kRight},
               {"LIBRARIES", Alignment::kRight},
               {"TOGETHER", Alignment::kRight}});
  std::string notes;
  bool quantized = false;
  for (const PlannedMode& planned : answer.modes) {
    const Prediction& p = planned.prediction;
    const std::string mode = ModeText(planned.training);
    const std::string step = capacity::UpdateName(planned.training.update);
    quantized = quantized || planned.training.mode == Mode::kQuantized;
    const auto gb = [](uint64_t bytes) { return Gigabytes(static_cast<double>(bytes)); };
    speed.AddRow({mode, step, p.fits ? "yes" : "no", gb(p.smallest_budget_bytes), gb(p.plain_bytes),
                  SecondsOrDash(p.step_seconds), SecondsOrDash(p.compute_seconds), SecondsOrDash(p.bound_step_seconds),
                  TokensText(p.tokens_per_second), p.fits ? gb(p.loaded_bytes) : "-", p.fits ? gb(p.unloaded_bytes) : "-",
                  gb(p.host_bytes), p.limited_by});
    parts.AddRow({mode, step, gb(p.parts.weights_bytes), gb(p.parts.gradients_bytes), gb(p.parts.optimizer_bytes),
                  gb(p.parts.activations_bytes), gb(p.parts.reserve_bytes), gb(p.parts.base_line_bytes),
                  gb(p.peak_bytes)});
    if (p.hidden_from_batch) {
      absl::StrAppend(&notes, mode, ", ", step, ": the link hides behind the compute from batch ",
                      *p.hidden_from_batch, " on (of the doublings tried)\n");
    }
    if (!p.fits) {
      absl::StrAppend(&notes, mode, ", ", step, ": ", p.reason, p.suggestions.empty() ? " No single change, and no pair "
                      "of those known here, makes it fit.\n" : " It fits with:\n");
      for (const capacity::Suggestion& suggestion : p.suggestions) {
        absl::StrAppend(&notes, "  ", suggestion.change, ": ", gb(suggestion.smallest_budget_bytes), " at least, ",
                        FormatSeconds(suggestion.step_seconds), " a step, ", TokensText(suggestion.tokens_per_second),
                        " tokens/s\n");
      }
    }
  }
  absl::StrAppend(&text, speed.Render(color), "\n", parts.Render(color));
  if (!notes.empty()) absl::StrAppend(&text, "\n", notes);
  if (quantized) {
    absl::StrAppend(&text, "\nMode quantized (frozen modules as int8) is planned here; trainers do not offer it yet.\n");
  }
  return text;
}

json PlanJson(const PlanAnswer& answer) {
  const Training& training = answer.modes.front().training;
  const capacity::DeviceProfile& device = answer.device;
  json out = ModeJson(answer, answer.modes.front());
  out["schema"] = "misa.plan/1";
  out["model"] = {{"name", Printable(answer.model.shape.name)},
                  {"parameter_count", answer.model.parameter_count},
                  {"block_count", answer.model.shape.layers},
                  {"block_parameter_count", answer.model.block_parameter_count}};
  out["device"] = {{"name", Printable(device.name)},
                   {"capacity_bytes", device.capacity_bytes},
                   {"flops_per_second", device.flops_per_second},
                   {"utilization", device.utilization},
                   {"h2d_bytes_per_second", device.h2d_bytes_per_second},
                   {"d2h_bytes_per_second", device.d2h_bytes_per_second},
                   {"total_bytes_per_second", device.total_bytes_per_second},
                   {"memory_bytes_per_second", device.memory_bytes_per_second},
                   {"host_bytes", device.host_bytes}};
  out["training"] = {{"optimizer", training.optimizer},
                     {"precision", training.precision},
                     {"batch", training.batch},
                     {"sequence", training.sequence},
                     {"micro_batch", training.micro_batch > 0 ? training.micro_batch : training.batch},
                     {"checkpointing", training.checkpointing ? "full" : "none"},
                     {"attention", training.fused_attention ? "fused" : "unfused"}};
  out["state"] = {{"weights_bytes", answer.state.weights},
                  {"gradients_bytes", answer.state.gradients},
                  {"optimizer_bytes", answer.state.optimizer},
                  {"total_bytes", answer.state.total()}};
  out["modes"] = json::array();
  for (const PlannedMode& planned : answer.modes) out["modes"].push_back(ModeJson(answer, planned));
  return out;
}

ExitCode Plan(const Output& output, const PlanOptions& options) {
  const policy::Result<PlanAnswer> answer = MakePlanAnswer(options);
  if (!answer.ok()) {
    output.error << "misactl: " << Printable(answer.error) << "\n";
    return kExitNoDaemon;
  }
  if (output.json) {
    output.out << PlanJson(answer.value).dump(-1, ' ', false, json::error_handler_t::replace) << "\n";
  } else {
    output.out << PlanText(answer.value, output.color);
  }
  return kExitDone;
}

}  // namespace misa::cli
