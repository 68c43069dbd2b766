// Sequences that repeat exactly: perfect after two periods, and silent where there is none.
#pragma once

#include <string>

#include "runtime/predict/history.h"

namespace misa::predict {

struct PeriodOptions {
  // Symbols that are remembered; half as many is the longest period that can be found.
  size_t window = 1024;
};

// "" or what is wrong with the options.
std::string Check(const PeriodOptions& options);

class PeriodPredictor final : public Predictor {
 public:
  // Check(options) is empty.
  explicit PeriodPredictor(const PeriodOptions& options = {});

  const char* name() const override { return "period"; }
  void Observe(Symbol symbol) override;
  std::optional<Symbol> Predict() const override;
  size_t memory_bytes() const override { return sizeof(*this) + history_.memory_bytes(); }

  // 0: none.
  size_t period() const { return period_; }

 private:
  History history_;
  size_t period_ = 0;
};

// What was last comes again: a period of one that needs no proof. The yardstick of every other predictor of whole
// steps.
class LastPredictor final : public Predictor {
 public:
  const char* name() const override { return "last"; }
  void Observe(Symbol symbol) override { last_ = symbol; }
  std::optional<Symbol> Predict() const override { return last_; }
  size_t memory_bytes() const override { return sizeof(*this); }

 private:
  std::optional<Symbol> last_;
};

}  // namespace misa::predict
