#include "tests/unit/runtime/policy/workloads.h"

#include <algorithm>
#include <random>

namespace misa::policy {
namespace {

PlanInput Facets(const TrainingStep& step) {
  PlanInput input;
  for (uint32_t i = 0; i < step.matrices; ++i) {
    input.facet_bytes.insert(input.facet_bytes.end(), {step.weight_bytes, step.weight_bytes, 2 * step.weight_bytes});
  }
  input.budget_bytes = step.budget_bytes;
  input.link = step.link;
  return input;
}

// Other tensors after `matrices` of the forward.
uint64_t Other(const TrainingStep& step, uint32_t matrices) {
  return step.least_other_bytes + (step.most_other_bytes - step.least_other_bytes) * matrices / step.matrices;
}

void AppendBackward(const TrainingStep& step, Trace* trace) {
  const double seconds = step.compute_seconds * 2 / 3 / step.matrices;
  for (uint32_t i = step.matrices; i-- > 0;) {
    trace->entries.push_back({{{3 * i, kRead}}, seconds / 2, Other(step, i + 1)});
    trace->entries.push_back({{{3 * i + 1, kCreate | kWrite}}, seconds / 2, Other(step, i)});
  }
}

}  // namespace

PlanInput Deferred(const TrainingStep& step) {
  PlanInput input = Facets(step);
  const double seconds = step.compute_seconds / 3 / step.matrices;
  for (uint32_t i = 0; i < step.matrices; ++i) {
    input.trace.entries.push_back(
        {{{3 * i, kRead | kWrite}, {3 * i + 1, kRead | kDiscard}, {3 * i + 2, kRead | kWrite}},
         seconds * 0.1,
         Other(step, i)});
    input.trace.entries.push_back({{{3 * i, kRead}}, seconds * 0.9, Other(step, i + 1)});
  }
  AppendBackward(step, &input.trace);
  return input;
}

PlanInput InBackward(const TrainingStep& step) {
  PlanInput input = Facets(step);
  const double forward = step.compute_seconds / 3 / step.matrices;
  for (uint32_t i = 0; i < step.matrices; ++i) {
    input.trace.entries.push_back({{{3 * i, kRead}}, forward, Other(step, i + 1)});
  }
  for (uint32_t i = step.matrices; i-- > 0;) {
    input.trace.entries.push_back({{{3 * i, kRead}}, forward * 1.8, Other(step, i + 1)});
    // The gradient is one of the other tensors here.
    input.trace.entries.push_back({{{3 * i, kRead | kWrite}, {3 * i + 2, kRead | kWrite}},
                                   forward * 0.2,
                                   Other(step, i) + step.weight_bytes});
  }
  return input;
}

PlanInput Eager(const TrainingStep& step) {
  PlanInput input = Facets(step);
  const double seconds = step.compute_seconds / 3 / step.matrices;
  for (uint32_t i = 0; i < step.matrices; ++i) {
    input.trace.entries.push_back({{{3 * i, kRead}}, seconds, Other(step, i + 1)});
  }
  AppendBackward(step, &input.trace);
  for (uint32_t i = 0; i < step.matrices; ++i) {
    input.trace.entries.push_back(
        {{{3 * i, kRead | kWrite}, {3 * i + 1, kRead | kDiscard}, {3 * i + 2, kRead | kWrite}},
         seconds * 0.1,
         step.least_other_bytes});
  }
  return input;
}

PlanInput UnitTrace(const std::vector<uint32_t>& order, uint64_t capacity) {
  PlanInput input;
  input.facet_bytes.assign(*std::max_element(order.begin(), order.end()) + 1, 1);
  for (const uint32_t facet : order) {
    input.trace.entries.push_back({{{facet, kRead}}, 1, 0});
  }
  input.budget_bytes = capacity;
  input.link = {1000, 1000, 1000, 1000};
  return input;
}

PlanInput RandomTrace(uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto below = [&](uint64_t limit) { return random() % limit; };
  PlanInput input;
  const bool equal = below(4) == 0;
  const uint64_t facets = 1 + below(12);
  for (uint64_t i = 0; i < facets; ++i) {
    input.facet_bytes.push_back(equal ? 8 : 1 + below(20));
  }
  const uint64_t positions = 1 + below(24);
  const uint64_t most_other = below(3) == 0 ? 0 : below(40);
  const bool still = below(10) == 0;
  for (uint64_t p = 0; p < positions; ++p) {
    TraceEntry entry;
    const uint64_t uses = below(4);
    for (uint64_t u = 0; u < uses; ++u) {
      // Reads most often; the other flags in all combinations.
      uint8_t access = kRead;
      if (below(2) == 0) {
        access = static_cast<uint8_t>(1 + below(15));
      }
      entry.uses.push_back({static_cast<uint32_t>(below(facets)), access});
    }
    entry.compute_seconds = still || below(8) == 0 ? 0 : static_cast<double>(below(1000)) / 100;
    entry.other_bytes = most_other == 0 ? 0 : below(most_other);
    input.trace.entries.push_back(entry);
  }
  input.reserve_bytes = below(3);
  uint64_t total = 0;
  for (const uint64_t bytes : input.facet_bytes) {
    total += bytes;
  }
  input.budget_bytes = SmallestBudget(input) + (below(3) == 0 ? 0 : below(total + 1));
  const double load = 1 + static_cast<double>(below(50)) / 10;
  const double unload = 1 + static_cast<double>(below(50)) / 10;
  input.link = {load, unload, load * 0.7, unload * 0.6};
  return input;
}

}  // namespace misa::policy
