// Has the loss settled? Importance from the first steps of a training says how far modules are from where they begin,
// not what they are worth; what is decided by it waits until the loss no longer moves.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace misa::guard {

struct StabilityOptions {
  uint32_t window = 50;     // losses that are looked at, at least 4; seed: 50-100
  double tolerance = 0.05;  // how far the means of the window's halves may be apart, above 0
  uint32_t hold = 10;       // judgements in a row that must agree, at least 1

  bool operator==(const StabilityOptions&) const = default;
};

// "" or a sentence for options that are impossible.
std::string CheckStability(const StabilityOptions& options);

// Stable: the mean of the newer half of the last `window` losses is within `tolerance` of the older half's, relative to
// the larger of that mean and the way the loss has come (highest less lowest, so that a loss that goes to 0 settles as
// well), for `hold` losses in a row. Once stable it stays so: a later change of the data is no early training.
class LossStability {
 public:
  // Impossible options are left out in favour of the defaults; ask CheckStability for the sentence.
  explicit LossStability(StabilityOptions options = {});

  // A sentence for a loss that is not finite: it is left out, and what agreed in a row so far no longer counts.
  std::string Observe(double loss);
  bool stable() const { return stable_; }
  uint64_t observed() const { return observed_; }
  // Of the last judgement, in the units of `tolerance`; -1 before the window is full.
  double change() const { return change_; }

  // The whole state, for an exact resume.
  std::vector<double> Save() const;
  // A sentence for what Save did not give with these options; nothing changes then.
  std::string Restore(const std::vector<double>& saved);

 private:
  StabilityOptions options_;
  std::vector<double> losses_;  // the last `window`, oldest first
  double lowest_ = 0;
  double highest_ = 0;
  uint64_t observed_ = 0;
  uint32_t held_ = 0;
  double change_ = -1;
  bool stable_ = false;
};

}  // namespace misa::guard
