// Prediction by partial matching: counts of what followed the last k symbols, the last k - 1, … and none. (Cleary and
// Witten, IEEE Transactions on Communications 32(4), 1984.) The context that is surest of one successor is believed,
// which need not be the longest: what was seen once in a long context says less than what was seen often in a short
// one.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "runtime/predict/history.h"

namespace misa::predict {

struct PpmOptions {
  // Symbols of the longest context; 0 only counts symbols.
  size_t order = 4;
  // Contexts that are remembered; of those that share a place the one that was used longest ago goes.
  size_t contexts = 1024;
};

// "" or what is wrong with the options.
std::string Check(const PpmOptions& options);

class PpmPredictor final : public Predictor {
 public:
  // Symbols that are counted after one context; the rarest gives way to a new one.
  static constexpr size_t kSuccessors = 8;

  // Check(options) is empty.
  explicit PpmPredictor(const PpmOptions& options = {});

  const char* name() const override { return "ppm"; }
  void Observe(Symbol symbol) override;
  std::optional<Symbol> Predict() const override;
  size_t memory_bytes() const override;

 private:
  struct Context {
    uint64_t tag = 0;   // of its symbols; 0: free
    uint64_t used = 0;  // count of observations at its last use
    std::array<Symbol, kSuccessors> symbols{};
    std::array<uint16_t, kSuccessors> counts{};  // 0: free

    void Count(Symbol symbol);
  };

  // Over the newest `length` symbols, never 0.
  uint64_t Tag(size_t length) const;
  const Context* Find(uint64_t tag) const;
  Context* FindOrAdd(uint64_t tag);

  const size_t order_;
  History history_;
  std::vector<Context> table_;
  uint64_t observed_ = 0;
};

}  // namespace misa::predict
