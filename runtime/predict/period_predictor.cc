#include "runtime/predict/period_predictor.h"

#include "runtime/trace/period.h"

namespace misa::predict {
namespace {

constexpr size_t kLeastWindow = 4;
constexpr size_t kMostWindow = 1 << 20;

}  // namespace

std::string Check(const PeriodOptions& options) {
  if (options.window >= kLeastWindow && options.window <= kMostWindow) return "";
  return "a period is looked for in " + std::to_string(options.window) + " symbols; the window lies between " +
         std::to_string(kLeastWindow) + " and " + std::to_string(kMostWindow);
}

PeriodPredictor::PeriodPredictor(const PeriodOptions& options) : history_(options.window) {}

void PeriodPredictor::Observe(Symbol symbol) {
  const bool expected = Predict() == symbol;
  history_.Add(symbol);
  // A period that holds is not looked for again: in a sequence that repeats an observation costs one comparison.
  if (period_ == 0 || !expected) period_ = trace::FindLongestPeriod(history_.symbols());
}

std::optional<Symbol> PeriodPredictor::Predict() const {
  if (period_ == 0) return std::nullopt;
  return history_.FromEnd(period_ - 1);
}

}  // namespace misa::predict
