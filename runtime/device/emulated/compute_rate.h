// How fast this processor multiplies matrices, for twins whose configuration does not say it.
#pragma once

namespace misa::device {

// float32 operations a second (a multiplication and an addition are two) of one thread in a register-blocked
// multiplication on data in the first cache, the best of several runs within about `seconds`. A trainer's own library
// reaches a little less on matrices of a model's size.
double MeasureComputeRate(double seconds);

}  // namespace misa::device
