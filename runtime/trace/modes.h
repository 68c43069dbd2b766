// The periods that a step has inside it: evaluation and accumulation repeat between two optimizer steps.
#pragma once

#include <vector>

#include "runtime/policy/trace.h"
#include "runtime/trace/trace_file.h"

namespace misa::trace {

// `step` is what was used from one optimizer step to the next; its period over the steps is a matter of its digest. Within
// it, exact:
//   eval        one forward, where at least two followed each other before the training forward (the first carries what
//               the optimizer step left to do, so it is another sequence);
//   accumulate  one forward and backward that adds to gradients, where a step has at least one beyond the first.
// A section's trace is one period, times and bytes of one occurrence; an eval's may begin in the middle of the forward.
// Sections come in the order of TraceMode; a mode that the step does not have is not there.
// Where gradients are no facets, a forward and backward is told from a forward by using its weights twice.
std::vector<Section> FindModes(const policy::Trace& step, const std::vector<FacetKind>& kinds);

}  // namespace misa::trace
