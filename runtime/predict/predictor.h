// What comes next in a sequence of symbols: the traces of a session's steps, or the modules that one step touches.
// Pure functions of what was observed: no clock, no I/O, no randomness; the same symbols give the same predictions
// everywhere.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace misa::predict {

// Any value; digests of traces are used as they are.
using Symbol = uint64_t;

class Predictor {
 public:
  virtual ~Predictor() = default;
  // For reports and labels of metrics; the same for the whole life.
  virtual const char* name() const = 0;
  virtual void Observe(Symbol symbol) = 0;
  // The symbol that follows the last one observed; none where there is nothing to go by.
  virtual std::optional<Symbol> Predict() const = 0;
  // Of the object and all it holds; never above what its options allow, however much is observed.
  virtual size_t memory_bytes() const = 0;
};

}  // namespace misa::predict
