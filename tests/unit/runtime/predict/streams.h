// Sequences of modules that steps touch, for tests and the benchmark of predictors.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/predict/predictor.h"

namespace misa::predict {

// dense        forward and backward over the same blocks in every step
// layer-drop   each block is left out of a step, forward and backward, with one chance in ten
// tasks        three tasks take turns on one trunk, each with a head of its own and for a random number of steps
// moe          in each block a router picks one of eight experts; batches come in kinds that last for some steps
// The same seed gives the same symbols everywhere. Empty for another kind.
std::vector<Symbol> MakeStream(const std::string& kind, uint64_t seed, size_t length);

}  // namespace misa::predict
