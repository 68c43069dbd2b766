#include "runtime/policy/portable_math.h"

#include <cmath>

namespace misa::policy {

double PortableExp(double x) {
  if (!(x < 0)) {
    return 1;
  }
  if (x < -745.2) {
    return 0;  // under the smallest subnormal
  }
  // Cody and Waite, Software Manual for the Elementary Functions (1980), chapter 6: exp(x) = 2^k * exp(r) with
  // r = x - k * ln 2 taken in two parts, the first of which has so few bits that its product with k is exact.
  constexpr double kInverseLn2 = 1.4426950408889634;
  constexpr double kLn2High = 0.693145751953125;
  constexpr double kLn2Low = 1.42860682030941723212e-6;
  const double k = std::floor(x * kInverseLn2 + 0.5);
  const double high = x - k * kLn2High;
  const double r = high - k * kLn2Low;
  // |r| <= ln(2) / 2: the 14th term of the series is under 2^-60.
  double sum = 1;
  for (int term = 14; term >= 1; --term) {
    sum = 1 + r * sum / term;
  }
  return std::ldexp(sum, static_cast<int>(k));  // a change of the exponent, exact
}

}  // namespace misa::policy
