#include "runtime/device/emulated/compute_rate.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>

namespace misa::device {
namespace {

constexpr size_t kDepth = 256;  // of the product; both panels stay in the first cache
constexpr size_t kRows = 6;
constexpr size_t kVectors = 2;
constexpr size_t kWidest = 16;

struct Panels {
  alignas(64) std::array<float, kDepth * kRows> a;
  alignas(64) std::array<float, kDepth * kVectors * kWidest> b;
  alignas(64) std::array<float, kRows * kVectors * kWidest> c;
};

typedef float Vector4 __attribute__((vector_size(16), may_alias));
typedef float Vector8 __attribute__((vector_size(32), may_alias));
typedef float Vector16 __attribute__((vector_size(64), may_alias));

// kRows x (kVectors vectors) of the product, sums in registers.
template <typename Vector>
[[gnu::always_inline]] inline void Multiply(Panels* panels) {
  Vector sums[kRows][kVectors] = {};
  const Vector* b = reinterpret_cast<const Vector*>(panels->b.data());
  const float* a = panels->a.data();
  for (size_t k = 0; k < kDepth; ++k) {
    for (size_t row = 0; row < kRows; ++row) {
      for (size_t v = 0; v < kVectors; ++v) sums[row][v] += a[k * kRows + row] * b[k * kVectors + v];
    }
  }
  Vector* c = reinterpret_cast<Vector*>(panels->c.data());
  for (size_t row = 0; row < kRows; ++row) {
    for (size_t v = 0; v < kVectors; ++v) c[row * kVectors + v] += sums[row][v];
  }
}

#if defined(__x86_64__)
[[gnu::target("avx512f"), gnu::noinline]] void MultiplyWide(Panels* panels) { Multiply<Vector16>(panels); }
[[gnu::target("avx2,fma"), gnu::noinline]] void MultiplyMiddle(Panels* panels) { Multiply<Vector8>(panels); }
#endif
[[gnu::noinline]] void MultiplyNarrow(Panels* panels) { Multiply<Vector4>(panels); }

}  // namespace

double MeasureComputeRate(double seconds) {
  using Clock = std::chrono::steady_clock;
  void (*multiply)(Panels*) = MultiplyNarrow;
  size_t lanes = 4;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) {
    multiply = MultiplyWide;
    lanes = 16;
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    multiply = MultiplyMiddle;
    lanes = 8;
  }
#endif
  static Panels panels;
  panels.a.fill(0.5f);
  panels.b.fill(0.25f);
  const double operations = 2.0 * static_cast<double>(kDepth * kRows * kVectors * lanes);
  constexpr int kCalls = 2000;
  double best = 0;
  const auto start = Clock::now();
  do {
    panels.c.fill(0);
    const auto begin = Clock::now();
    for (int call = 0; call < kCalls; ++call) multiply(&panels);
    const double passed = std::chrono::duration<double>(Clock::now() - begin).count();
    best = std::max(best, kCalls * operations / std::max(passed, 1e-9));
  } while (std::chrono::duration<double>(Clock::now() - start).count() < seconds);
  return best;
}

}  // namespace misa::device
