// One period of a step: which facets are used together, in which order, and for how long the compute runs between.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace misa::policy {

// How a use treats a facet's content; the same values as misa.v1.Access.
enum Access : uint8_t {
  kRead = 1,
  kWrite = 2,
  kCreate = 4,   // the content is born here: nothing has to be loaded
  kDiscard = 8,  // the content is dead after this use: nothing has to be kept
};

struct Use {
  uint32_t facet = 0;
  uint8_t access = kRead;

  bool operator==(const Use&) const = default;
};

// One position of a step: facets that must be on the device at the same time.
struct TraceEntry {
  std::vector<Use> uses;
  double compute_seconds = 0;  // from this position to the next one, stalls taken out
  uint64_t other_bytes = 0;    // peak of unmanaged tensors from this position to the next one
};

// A period; position entries.size() is position 0 of the next period.
struct Trace {
  std::vector<TraceEntry> entries;
};

// FNV-1a over the sequence of (facets, access); times and bytes do not count.
uint64_t Digest(const Trace& trace);

}  // namespace misa::policy
