#include "runtime/guard/loss_stability.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <limits>
#include <numeric>

namespace misa::guard {
namespace {

constexpr uint32_t kLeastWindow = 4;
constexpr uint32_t kMostWindow = 100000;
constexpr size_t kSavedFields = 6;

}  // namespace

std::string CheckStability(const StabilityOptions& options) {
  if (options.window < kLeastWindow || options.window > kMostWindow) {
    return "The window over which a loss is judged must be from 4 to 100000 steps, and is " +
           std::to_string(options.window) + ".";
  }
  if (!(options.tolerance > 0) || !std::isfinite(options.tolerance)) {
    return "The tolerance of a stable loss must be a finite number above 0, and is " +
           std::to_string(options.tolerance) + ".";
  }
  if (options.hold == 0) return "A loss is stable after at least 1 judgement, and hold is 0.";
  return "";
}

LossStability::LossStability(StabilityOptions options) {
  if (CheckStability(options).empty()) options_ = options;
}

std::string LossStability::Observe(double loss) {
  if (!std::isfinite(loss)) {
    held_ = 0;
    return "The loss is not a finite number (" + std::to_string(loss) +
           "), so it says nothing about whether training is stable; the weights may be damaged already. Look at the "
           "learning rate and the data of this step, and go back to a checkpoint if it stays so.";
  }
  lowest_ = observed_ == 0 ? loss : std::min(lowest_, loss);
  highest_ = observed_ == 0 ? loss : std::max(highest_, loss);
  ++observed_;
  if (losses_.size() == options_.window) losses_.erase(losses_.begin());
  losses_.push_back(loss);
  if (stable_ || losses_.size() < options_.window) return "";
  const auto middle = losses_.begin() + static_cast<ptrdiff_t>(losses_.size() / 2);
  const double older = std::accumulate(losses_.begin(), middle, 0.0) / static_cast<double>(middle - losses_.begin());
  const double newer = std::accumulate(middle, losses_.end(), 0.0) / static_cast<double>(losses_.end() - middle);
  // Finite losses may be so large that their sum or span is not; such a training is not stable.
  const double scale = std::max(std::abs(older), highest_ - lowest_);
  const double distance = std::abs(newer - older);
  change_ = distance == 0 ? 0 : std::isfinite(scale) ? distance / scale : 1;
  held_ = std::isfinite(scale) && change_ <= options_.tolerance ? held_ + 1 : 0;
  stable_ = held_ >= options_.hold;
  return "";
}

std::vector<double> LossStability::Save() const {
  std::vector<double> saved = {lowest_, highest_,           static_cast<double>(observed_), static_cast<double>(held_),
                               change_, stable_ ? 1.0 : 0.0};
  saved.insert(saved.end(), losses_.begin(), losses_.end());
  return saved;
}

std::string LossStability::Restore(const std::vector<double>& saved) {
  const bool finite = std::all_of(saved.begin(), saved.end(), [](double v) { return std::isfinite(v); });
  const double most = std::numeric_limits<uint32_t>::max();
  if (!finite || saved.size() < kSavedFields || saved.size() - kSavedFields > options_.window || saved[2] < 0 ||
      saved[2] > most || saved[3] < 0 || saved[3] > most ||
      saved[2] < static_cast<double>(saved.size() - kSavedFields)) {
    return "The saved judgement of the loss is damaged, or was made with another window.";
  }
  lowest_ = saved[0];
  highest_ = saved[1];
  observed_ = static_cast<uint64_t>(saved[2]);
  held_ = static_cast<uint32_t>(saved[3]);
  change_ = saved[4];
  stable_ = saved[5] != 0;
  losses_.assign(saved.begin() + kSavedFields, saved.end());
  return "";
}

}  // namespace misa::guard
