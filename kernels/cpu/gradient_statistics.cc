#include "kernels/cpu/gradient_statistics.h"

#include <algorithm>
#include <cstring>

namespace misa::kernels {
namespace {

// Independent partial sums: wide enough for any vector unit, the same everywhere.
constexpr size_t kLanes = 16;
// Copied in parts that stay in the first-level cache between the copy and the sums.
constexpr size_t kBlock = 2048;

float FromBfloat16(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

float FromFloat16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
  uint32_t exponent = (bits >> 10) & 0x1fu;
  uint32_t mantissa = bits & 0x3ffu;
  uint32_t wide;
  if (exponent == 0x1f) {
    wide = sign | 0x7f800000u | (mantissa << 13);
  } else if (exponent == 0 && mantissa == 0) {
    wide = sign;
  } else {
    if (exponent == 0) {  // subnormal: shift until the leading one is implicit
      exponent = 1;
      while ((mantissa & 0x400u) == 0) {
        mantissa <<= 1;
        --exponent;
      }
      mantissa &= 0x3ffu;
    }
    wide = sign | ((exponent + 112) << 23) | (mantissa << 13);
  }
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

float Load(const float* p) { return *p; }
double Load(const double* p) { return *p; }
struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};
float Load(const Bfloat16* p) { return FromBfloat16(p->bits); }
float Load(const Float16* p) { return FromFloat16(p->bits); }

template <typename T>
Sums Run(const T* source, T* target, size_t count) {
  double sum[kLanes] = {};
  double squares[kLanes] = {};
  for (size_t begin = 0; begin < count; begin += kBlock) {
    const size_t size = std::min(kBlock, count - begin);
    const T* at = source + begin;
    if (target != nullptr) std::memcpy(target + begin, at, size * sizeof(T));
    size_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      for (size_t lane = 0; lane < kLanes; ++lane) {
        const double value = Load(at + i + lane);
        sum[lane] += value;
        squares[lane] += value * value;
      }
    }
    for (size_t lane = 0; i + lane < size; ++lane) {
      const double value = Load(at + i + lane);
      sum[lane] += value;
      squares[lane] += value * value;
    }
  }
  Sums result;
  for (size_t lane = 0; lane < kLanes; ++lane) {
    result.sum += sum[lane];
    result.sum_squares += squares[lane];
  }
  return result;
}

}  // namespace

Sums MeasureAndCopy(const void* source, void* target, size_t count, Element element) {
  switch (element) {
    case Element::kFloat32: return Run(static_cast<const float*>(source), static_cast<float*>(target), count);
    case Element::kFloat64: return Run(static_cast<const double*>(source), static_cast<double*>(target), count);
    case Element::kBfloat16: return Run(static_cast<const Bfloat16*>(source), static_cast<Bfloat16*>(target), count);
    case Element::kFloat16: return Run(static_cast<const Float16*>(source), static_cast<Float16*>(target), count);
  }
  return {};
}

}  // namespace misa::kernels
