#include "runtime/policy/trace.h"

#include "runtime/policy/fnv.h"

namespace misa::policy {

uint64_t Digest(const Trace& trace) {
  Fnv hash;
  for (const TraceEntry& entry : trace.entries) {
    // The number of uses separates positions: {a, b} is another step than {a}, {b}.
    hash.Add64(entry.uses.size());
    for (const Use& use : entry.uses) {
      hash.Add64(use.facet);
      hash.Add64(use.access);
    }
  }
  return hash.value();
}

}  // namespace misa::policy
