// Denser sampling under gradient accumulation. A round is counted in optimizer steps; with n micro-batches to a step it
// would take n times as much data, and modules that are left out would fall n times as far behind before the next draw.
#pragma once

#include <algorithm>
#include <cstdint>

namespace misa::guard {

// However many micro-batches there are, a round keeps an eighth of its optimizer steps: an optimizer's moments, which
// begin anew with a module's round, need some.
inline constexpr uint32_t kMostCountedSteps = 8;

// As how many inner steps of a round an optimizer step of so many micro-batches counts (ModuleSampler::EndStep).
inline uint32_t CountedSteps(uint32_t micro_batches, uint32_t most = kMostCountedSteps) {
  return std::clamp<uint32_t>(micro_batches, 1, std::max<uint32_t>(most, 1));
}

}  // namespace misa::guard
