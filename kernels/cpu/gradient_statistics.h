// Gradient statistics in one pass over memory, on the CPU.
#pragma once

#include <cstddef>
#include <cstdint>

namespace misa::kernels {

enum class Element : uint8_t { kFloat32, kFloat64, kBfloat16, kFloat16 };

struct Sums {
  double sum = 0;
  double sum_squares = 0;
};

// Sums of `count` elements at `source` in double precision. Where `target` is not null the elements are copied there in
// the same pass (the ranges must not overlap). The order of additions is fixed, so that equal input gives equal bits on
// every machine and for every alignment.
Sums MeasureAndCopy(const void* source, void* target, size_t count, Element element);

}  // namespace misa::kernels
