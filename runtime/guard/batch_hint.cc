#include "runtime/guard/batch_hint.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace misa::guard {
namespace {

double Difference(uint64_t from, uint64_t taken) {
  return from >= taken ? static_cast<double>(from - taken) : -static_cast<double>(taken - from);
}

uint64_t Rows(double share, uint64_t rows) {
  // A little more than exact division gives back: 12 rows at 4/3 are 16, not 15.
  const double count = std::floor(share * static_cast<double>(rows) * (1 + 1e-12));
  return count < 9e18 ? static_cast<uint64_t>(std::max(count, 0.0)) : std::numeric_limits<uint64_t>::max() / 2;
}

std::string Change(uint64_t now, uint64_t then) {
  if (then == now) return "as many as now";
  return std::to_string(then > now ? then - now : now - then) + (then > now ? " more" : " fewer");
}

}  // namespace

BatchHint HintBatch(const BatchInput& input) {
  BatchHint hint;
  uint64_t other_peak = 0;
  for (const BatchPosition& position : input.positions) other_peak = std::max(other_peak, position.other_bytes);
  if (other_peak == 0 || input.budget_bytes == 0) return hint;
  hint.known = true;
  const uint64_t usable = input.budget_bytes - std::min(input.budget_bytes, input.reserve_bytes);
  hint.most_share = std::numeric_limits<double>::infinity();
  for (const BatchPosition& position : input.positions) {
    if (position.other_bytes == 0) continue;
    const double room = Difference(usable, position.managed_bytes);
    hint.most_share = std::min(hint.most_share, std::max(0.0, room / static_cast<double>(position.other_bytes)));
  }
  const double spare = Difference(usable, input.peak_bytes);
  hint.free_share = std::clamp(1 + spare / static_cast<double>(other_peak), 0.0, hint.most_share);
  char text[256];
  if (input.rows == 0) {
    std::snprintf(text, sizeof text,
                  "A batch of %.2f times the rows fits into the memory that is free, one of %.2f times at most.",
                  hint.free_share, hint.most_share);
    hint.sentence = text;
    return hint;
  }
  hint.free_rows = Rows(hint.free_share, input.rows);
  hint.most_rows = Rows(hint.most_share, input.rows);
  hint.sentence = "The memory that is free holds a batch of " + std::to_string(hint.free_rows) + " rows (" +
                  Change(input.rows, hint.free_rows) + "); at most " + std::to_string(hint.most_rows) +
                  " fit, and then more modules come and go.";
  return hint;
}

}  // namespace misa::guard
