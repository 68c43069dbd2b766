// A predictor that computes elsewhere: what it says counts if it comes before the symbol itself.
#pragma once

#include "runtime/predict/predictor.h"

namespace misa::predict {

class AwaitedPredictor final : public Predictor {
 public:
  // `name` outlives the predictor.
  explicit AwaitedPredictor(const char* name) : name_(name) {}

  const char* name() const override { return name_; }
  void Observe(Symbol symbol) override;
  std::optional<Symbol> Predict() const override { return awaited_; }
  size_t memory_bytes() const override { return sizeof(*this); }

  // What follows the first `observed` symbols. False, and nothing changed, where more or fewer have been observed.
  bool Arrive(uint64_t observed, Symbol symbol);
  uint64_t observed() const { return observed_; }

 private:
  const char* name_;
  uint64_t observed_ = 0;
  std::optional<Symbol> awaited_;
};

}  // namespace misa::predict
