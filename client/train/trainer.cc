#include "client/train/trainer.h"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>

#include "client/core/meter.h"
#include "client/train/model.h"
#include "runtime/memory/byte_size.h"

namespace misa::train {
namespace {

using Clock = std::chrono::steady_clock;

std::string ReadText(const std::string& path, int64_t sequence) {
  const auto unreadable = [&] {
    return std::runtime_error("The text " + path + " cannot be read (" + std::strerror(errno) + "): name a file with --text.");
  };
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen(path.c_str(), "rb"), &std::fclose);
  if (file == nullptr) throw unreadable();
  std::string text;
  char part[1 << 16];
  while (const size_t got = std::fread(part, 1, sizeof(part), file.get())) text.append(part, got);
  if (std::ferror(file.get()) != 0) throw unreadable();
  if (static_cast<int64_t>(text.size()) < sequence + 1) {
    throw std::runtime_error("The text " + path + " has " + std::to_string(text.size()) + " bytes, but a sequence of " +
                             std::to_string(sequence) + " needs at least one byte more than that: give a longer text or a "
                             "smaller --sequence.");
  }
  return text;
}

// Windows into the text at random places; the same ones for the same seed, whatever else happens.
class Batches {
 public:
  Batches(std::string text, int64_t batch, int64_t sequence, uint64_t seed)
      : text_(std::move(text)), batch_(batch), sequence_(sequence), generator_(seed) {}

  // Inputs and targets, [batch, sequence] of int64.
  std::pair<at::Tensor, at::Tensor> Next() {
    at::Tensor inputs = at::empty({batch_, sequence_}, at::kLong);
    at::Tensor targets = at::empty({batch_, sequence_}, at::kLong);
    auto* in = inputs.mutable_data_ptr<int64_t>();
    auto* out = targets.mutable_data_ptr<int64_t>();
    const uint64_t places = text_.size() - static_cast<size_t>(sequence_);
    for (int64_t b = 0; b < batch_; ++b) {
      const char* window = text_.data() + generator_() % places;
      for (int64_t i = 0; i < sequence_; ++i) {
        *in++ = static_cast<unsigned char>(window[i]);
        *out++ = static_cast<unsigned char>(window[i + 1]);
      }
    }
    return {std::move(inputs), std::move(targets)};
  }

 private:
  const std::string text_;
  const int64_t batch_;
  const int64_t sequence_;
  std::mt19937_64 generator_;
};

void CheckOptions(const TrainOptions& options) {
  if (options.width % options.heads != 0) {
    throw std::runtime_error("A width of " + std::to_string(options.width) + " cannot be divided among " +
                             std::to_string(options.heads) + " heads: choose --width as a multiple of --heads.");
  }
  if (options.clip_norm > 0 && options.manage && options.manage->step == StepTime::kInBackward) {
    throw std::runtime_error(
        "--clip needs all gradients before the first module steps, but with --step in_backward each module steps as soon as "
        "its own is complete: use --step deferred or leave --clip out.");
  }
}

double Median(std::vector<double> values) {
  if (values.size() > 6) values.erase(values.begin(), values.begin() + 3);
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t half = values.size() / 2;
  return values.size() % 2 == 1 ? values[half] : (values[half - 1] + values[half]) / 2;
}

std::string StepLine(int64_t step, int64_t steps, double loss, double tokens_per_second) {
  const DeviceMeter& meter = DeviceMeter::Get();
  const auto mebibytes = [](uint64_t bytes) { return static_cast<double>(bytes) / (1 << 20); };
  char line[160];
  std::snprintf(line, sizeof(line), "step %*lld/%lld  loss %.4f  %8.0f tokens/s  device %8.1f MiB  peak %8.1f MiB",
                static_cast<int>(std::to_string(steps).size()), static_cast<long long>(step), static_cast<long long>(steps),
                loss, tokens_per_second, mebibytes(meter.total_bytes()), mebibytes(meter.peak_bytes()));
  return line;
}

void TrainLoop(const TrainOptions& options, LanguageModelImpl& model, torch::optim::AdamW& optimizer, Managed* run,
               Batches& batches, const std::function<void(const std::string& line)>& print, TrainResult* result) {
  const int64_t every = options.report_every > 0 ? options.report_every : std::max<int64_t>(1, options.steps / 20);
  Clock::time_point last_line = Clock::now();
  int64_t last_step = 0;
  for (int64_t step = 1; step <= options.steps; ++step) {
    const Clock::time_point start = Clock::now();
    if (step <= options.warmup_steps) {
      const double share = static_cast<double>(step) / static_cast<double>(options.warmup_steps);
      for (auto& group : optimizer.param_groups()) group.options().set_lr(options.learning_rate * share);
    }
    const auto [inputs, targets] = batches.Next();
    optimizer.zero_grad();
    double value = 0;
    {
      const at::Tensor logits = model.forward(inputs);
      const at::Tensor loss = at::cross_entropy_loss(logits.view({-1, kVocabulary}), targets.view({-1}));
      value = loss.item<double>();
      loss.backward();
    }
    if (options.clip_norm > 0) torch::nn::utils::clip_grad_norm_(model.parameters(), options.clip_norm);
    if (run != nullptr) {
      run->Step();
    } else {
      optimizer.step();
    }
    const Clock::time_point now = Clock::now();
    result->losses.push_back(value);
    result->step_seconds.push_back(std::chrono::duration<double>(now - start).count());
    if (step == 1 || step % every == 0 || step == options.steps) {
      const double seconds = std::chrono::duration<double>(now - last_line).count();
      const auto tokens = static_cast<double>((step - last_step) * options.batch * options.sequence);
      print(StepLine(step, options.steps, value, tokens / seconds));
      last_line = now;
      last_step = step;
    }
  }
}

// After a failure, whose sentence is the one to show.
void EndQuietly(Managed& run) {
  try {
    run.Close(AtEnd::kKeepManaged);
  } catch (const std::exception&) {
  }
}

}  // namespace

TrainResult Train(const TrainOptions& options, const std::function<void(const std::string& line)>& print) {
  CheckOptions(options);
  // Before the first tensor, so that the budget knows all of them.
  InstallMeter();
  if (options.threads > 0) at::set_num_threads(options.threads);
  Batches batches(ReadText(options.text_file, options.sequence), options.batch, options.sequence, options.seed);
  at::manual_seed(options.seed);
  LanguageModel model(ModelOptions{options.sequence, options.width, options.layers, options.heads});
  torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(options.learning_rate));

  TrainResult result;
  result.steps = options.steps;
  result.threads = at::get_num_threads();
  for (const at::Tensor& parameter : model->parameters()) result.parameter_count += parameter.numel();
  print(std::to_string(result.parameter_count) + " parameters, " +
        FormatByteSize(result.parameter_count * 4 * sizeof(float)) + " with gradients and AdamW's state; " +
        (options.manage ? "managed by misa within " + FormatByteSize(options.manage->budget.bytes()) : "plain, without misa"));

  std::optional<Managed> run;
  if (options.manage) {
    run.emplace(Manage(*model, optimizer, *options.manage));
    result.session = run->session();
  } else {
    DeviceMeter::Get().ResetPeak();
  }

  try {
    TrainLoop(options, *model, optimizer, run ? &*run : nullptr, batches, print, &result);
    // The process ends soon: reading back what does not fit would be for nothing.
    if (run) run->Close(AtEnd::kKeepManaged);
  } catch (const std::exception&) {
    if (run) EndQuietly(*run);
    throw;
  }
  if (run) result.report = run->Report();
  if (options.digest) result.state_sha256 = StateSha256(*model, optimizer);
  // With the digest's look at the state: the budget bounds that too.
  result.device_peak_bytes = DeviceMeter::Get().peak_bytes();
  result.loss_first = result.losses.front();
  result.loss_last = result.losses.back();
  result.step_seconds_median = Median(result.step_seconds);
  result.tokens_per_second = static_cast<double>(options.batch * options.sequence) / result.step_seconds_median;
  return result;
}

}  // namespace misa::train
