#include "runtime/predict/awaited_predictor.h"

namespace misa::predict {

void AwaitedPredictor::Observe(Symbol symbol) {
  ++observed_;
  awaited_.reset();
}

bool AwaitedPredictor::Arrive(uint64_t observed, Symbol symbol) {
  if (observed != observed_) return false;
  awaited_ = symbol;
  return true;
}

}  // namespace misa::predict
