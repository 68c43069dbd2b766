// One training run of the language model, with misa or without. Nothing of torch is included here.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "client/torch/manage.h"

namespace misa::train {

struct TrainOptions {
  std::string text_file;
  int64_t steps = 200;
  int64_t batch = 8;
  int64_t sequence = 128;
  int64_t width = 256;
  int64_t layers = 4;
  int64_t heads = 4;
  double learning_rate = 3e-4;
  int64_t warmup_steps = 0;
  double clip_norm = 0;  // 0: gradients are not clipped
  uint64_t seed = 0;
  int threads = 0;       // 0: torch's own choice
  int64_t report_every = 0;  // steps between two lines; 0: about twenty lines in all
  bool digest = true;
  // Without: plain training, metered only.
  std::optional<ManageOptions> manage;
};

struct TrainResult {
  int64_t steps = 0;
  int threads = 0;
  uint64_t parameter_count = 0;
  double loss_first = 0;
  double loss_last = 0;
  std::vector<double> losses;
  // Wall time of whole iterations; the median is over all but the first three, where there are more than six.
  std::vector<double> step_seconds;
  double step_seconds_median = 0;
  double tokens_per_second = 0;  // at the median
  uint64_t device_peak_bytes = 0;
  std::string state_sha256;      // "" without digest
  std::optional<RunReport> report;
  SessionInfo session;
};

// `print` gets one line at a time. Throws std::exception with a sentence; options are checked before anything is made.
TrainResult Train(const TrainOptions& options, const std::function<void(const std::string& line)>& print);

}  // namespace misa::train
