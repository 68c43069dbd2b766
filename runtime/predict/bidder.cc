#include "runtime/predict/bidder.h"

#include <cassert>
#include <utility>

namespace misa::predict {
namespace {

constexpr double kMostWindow = 1e6;

}  // namespace

std::string Check(const BidderOptions& options) {
  // Negated, so that a value that is not a number is refused too.
  if (options.window >= 1 && options.window <= kMostWindow) return "";
  return "accuracy was to be taken over " + std::to_string(options.window) +
         " symbols; the window lies between 1 and " + std::to_string(static_cast<int>(kMostWindow));
}

Bidder::Bidder(const BidderOptions& options, std::vector<std::unique_ptr<Predictor>> predictors)
    : keep_(1 - 1 / options.window), predictors_(std::move(predictors)), bids_(predictors_.size() + 1) {
  assert(predictors_.size() <= kMostPredictors);
}

void Bidder::Bid::Fold(bool was_right, double keep) {
  right = right * keep + (was_right ? 1 : 0);
  count += was_right;
}

void Bidder::Observe(Symbol symbol) {
  bids_.back().Fold(Predict() == symbol, keep_);
  for (size_t i = 0; i < predictors_.size(); ++i) {
    bids_[i].Fold(predictors_[i]->Predict() == symbol, keep_);
    predictors_[i]->Observe(symbol);
  }
  weight_ = weight_ * keep_ + 1;
  ++observed_;
}

std::optional<Symbol> Bidder::Predict() const {
  std::optional<Symbol> best;
  double most = -1;
  for (size_t i = 0; i < predictors_.size(); ++i) {
    if (bids_[i].right <= most) continue;
    const std::optional<Symbol> said = predictors_[i]->Predict();
    if (!said) continue;
    best = said;
    most = bids_[i].right;
  }
  return best;
}

std::vector<Standing> Bidder::standings() const {
  std::vector<Standing> standings;
  for (size_t i = 0; i < bids_.size(); ++i) {
    const char* name = i < predictors_.size() ? predictors_[i]->name() : this->name();
    standings.push_back({name, weight_ > 0 ? bids_[i].right / weight_ : 0, bids_[i].count});
  }
  return standings;
}

size_t Bidder::memory_bytes() const {
  size_t bytes = sizeof(*this) + bids_.capacity() * sizeof(Bid) + predictors_.capacity() * sizeof(void*);
  for (const auto& predictor : predictors_) bytes += predictor->memory_bytes();
  return bytes;
}

std::string Check(const StepPredictorOptions& options) {
  std::string problem = Check(options.period);
  if (problem.empty()) problem = Check(options.ppm);
  if (problem.empty()) problem = Check(options.bidder);
  return problem;
}

std::unique_ptr<Bidder> MakeStepBidder(const StepPredictorOptions& options,
                                       std::vector<std::unique_ptr<Predictor>> more) {
  std::vector<std::unique_ptr<Predictor>> predictors;
  predictors.push_back(std::make_unique<LastPredictor>());
  predictors.push_back(std::make_unique<PeriodPredictor>(options.period));
  predictors.push_back(std::make_unique<PpmPredictor>(options.ppm));
  for (auto& predictor : more) predictors.push_back(std::move(predictor));
  return std::make_unique<Bidder>(options.bidder, std::move(predictors));
}

}  // namespace misa::predict
