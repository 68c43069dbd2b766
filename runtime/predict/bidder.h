// Several predictors side by side; the one that was right most often lately is believed.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/predict/period_predictor.h"
#include "runtime/predict/ppm_predictor.h"
#include "runtime/predict/predictor.h"

namespace misa::predict {

struct BidderOptions {
  // Symbols over which accuracy is taken: each one weighs 1 - 1/window of the one after it.
  double window = 64;
};

// "" or what is wrong with the options.
std::string Check(const BidderOptions& options);

// How often a predictor was right; silence counts as wrong.
struct Standing {
  const char* name = "";
  double accuracy = 0;  // over the window, in [0, 1]
  uint64_t right = 0;   // in all
};

class Bidder final : public Predictor {
 public:
  static constexpr size_t kMostPredictors = 8;

  // The cheapest predictor first: of equals it is believed. Check(options) is empty; at most kMostPredictors.
  Bidder(const BidderOptions& options, std::vector<std::unique_ptr<Predictor>> predictors);

  const char* name() const override { return "bidder"; }
  void Observe(Symbol symbol) override;
  // Of those that say anything the best.
  std::optional<Symbol> Predict() const override;
  size_t memory_bytes() const override;

  uint64_t observed() const { return observed_; }
  // In the order of the predictors; the last one is the bidder's own.
  std::vector<Standing> standings() const;

 private:
  struct Bid {
    double right = 0;  // weighted
    uint64_t count = 0;
    void Fold(bool was_right, double keep);
  };

  const double keep_;
  std::vector<std::unique_ptr<Predictor>> predictors_;
  std::vector<Bid> bids_;  // by predictor, then the bidder's own
  double weight_ = 0;
  uint64_t observed_ = 0;
};

struct StepPredictorOptions {
  PeriodOptions period{256};
  PpmOptions ppm;
  BidderOptions bidder;
};

// "" or what is wrong with the options.
std::string Check(const StepPredictorOptions& options);

// What trainer and daemon predict a session's next step with; `more` are dearer ones that bid too.
std::unique_ptr<Bidder> MakeStepBidder(const StepPredictorOptions& options,
                                       std::vector<std::unique_ptr<Predictor>> more = {});

}  // namespace misa::predict
