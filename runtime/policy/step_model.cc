#include "runtime/policy/step_model.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace misa::policy {
namespace {

// Sums of bytes stay far from the end of a signed word.
constexpr uint64_t kMostBytes = uint64_t{1} << 60;
constexpr size_t kMostPositions = size_t{1} << 28;
constexpr uint8_t kAllAccess = kRead | kWrite | kCreate | kDiscard;

uint64_t SaturatingAdd(uint64_t a, uint64_t b) {
  return a > std::numeric_limits<uint64_t>::max() - b ? std::numeric_limits<uint64_t>::max() : a + b;
}

std::string CheckRate(const char* name, double rate) {
  if (std::isfinite(rate) && rate > 0) {
    return "";
  }
  return std::string("The link's ") + name + " rate must be a finite number of bytes per second above 0, and is " +
         std::to_string(rate) + ".";
}

std::string Check(const PlanInput& input) {
  for (const auto& [name, rate] :
       {std::pair{"load", input.link.load}, std::pair{"unload", input.link.unload},
        std::pair{"duplex load", input.link.duplex_load}, std::pair{"duplex unload", input.link.duplex_unload}}) {
    if (std::string error = CheckRate(name, rate); !error.empty()) {
      return error;
    }
  }
  uint64_t total = 0;
  for (size_t facet = 0; facet < input.facet_bytes.size(); ++facet) {
    const uint64_t bytes = input.facet_bytes[facet];
    if (bytes == 0) {
      return "Facet " + std::to_string(facet) + " has a size of 0 bytes; every facet must have at least 1.";
    }
    if (bytes > kMostBytes - total) {
      return "The facets have more than 2^60 bytes together.";
    }
    total += bytes;
  }
  const std::vector<TraceEntry>& entries = input.trace.entries;
  if (entries.empty()) {
    return "The trace has no positions, so there is no step to plan.";
  }
  if (entries.size() > kMostPositions) {
    return "The trace has " + std::to_string(entries.size()) + " positions, more than 2^28.";
  }
  for (size_t p = 0; p < entries.size(); ++p) {
    const std::string where = "Position " + std::to_string(p);
    if (!std::isfinite(entries[p].compute_seconds) || entries[p].compute_seconds < 0) {
      return where + " has a compute time of " + std::to_string(entries[p].compute_seconds) +
             " seconds; it must be finite and at least 0.";
    }
    for (const Use& use : entries[p].uses) {
      if (use.facet >= input.facet_bytes.size()) {
        return where + " uses facet " + std::to_string(use.facet) + ", and there are " +
               std::to_string(input.facet_bytes.size()) + " facets.";
      }
      if (use.access == 0 || (use.access & ~kAllAccess) != 0) {
        return where + " uses facet " + std::to_string(use.facet) + " with the unknown access " +
               std::to_string(use.access) + ".";
      }
    }
  }
  return "";
}

std::string CheckOffers(const PlanInput& input) {
  for (const Offer& offer : input.offers) {
    const std::string what =
        offer.kind == Offer::kRecompute ? "The offer to recompute facet " : "The offer of an int8 copy of facet ";
    if (offer.kind != Offer::kRecompute && offer.kind != Offer::kInt8) {
      return "An offer for facet " + std::to_string(offer.facet) + " is of the unknown kind " +
             std::to_string(offer.kind) + ".";
    }
    if (offer.facet >= input.facet_bytes.size()) {
      return what + std::to_string(offer.facet) + " is for none of the " + std::to_string(input.facet_bytes.size()) +
             " facets.";
    }
    if (!std::isfinite(offer.seconds) || offer.seconds < 0) {
      return what + std::to_string(offer.facet) + " costs " + std::to_string(offer.seconds) +
             " seconds; it must be finite and at least 0.";
    }
    if (offer.kind == Offer::kInt8 && (offer.bytes == 0 || offer.bytes >= input.facet_bytes[offer.facet])) {
      return what + std::to_string(offer.facet) + " takes " + std::to_string(offer.bytes) + " of its " +
             std::to_string(input.facet_bytes[offer.facet]) + " bytes; it must take at least 1, and less than all.";
    }
  }
  return "";
}

// The flags of a position's uses of one facet taken together, in order of first mention.
void AppendUses(const TraceEntry& entry, uint32_t position, std::vector<uint32_t>* slot, std::vector<FacetUse>* uses) {
  const uint32_t first = static_cast<uint32_t>(uses->size());
  for (const Use& use : entry.uses) {
    const uint32_t known = (*slot)[use.facet];
    if (known >= first && known < uses->size() && (*uses)[known].facet == use.facet) {
      (*uses)[known].access |= use.access;
      continue;
    }
    (*slot)[use.facet] = static_cast<uint32_t>(uses->size());
    FacetUse flat;
    flat.facet = use.facet;
    flat.position = position;
    flat.access = use.access;
    uses->push_back(flat);
  }
}

struct Fullest {
  size_t position = 0;
  uint64_t facets = 0;  // bytes of its facets
  uint64_t total = 0;   // with other tensors and reserve
};

Fullest FindFullest(const PlanInput& input) {
  Fullest fullest;
  std::vector<size_t> seen(input.facet_bytes.size(), std::numeric_limits<size_t>::max());
  for (size_t p = 0; p < input.trace.entries.size(); ++p) {
    const TraceEntry& entry = input.trace.entries[p];
    uint64_t facets = 0;
    for (const Use& use : entry.uses) {
      if (use.facet < seen.size() && seen[use.facet] != p) {
        seen[use.facet] = p;
        facets = SaturatingAdd(facets, input.facet_bytes[use.facet]);
      }
    }
    const uint64_t total = SaturatingAdd(SaturatingAdd(facets, entry.other_bytes), input.reserve_bytes);
    if (p == 0 || total > fullest.total) {
      fullest = {p, facets, total};
    }
  }
  return fullest;
}

}  // namespace

uint64_t SmallestBudget(const PlanInput& input) {
  return input.trace.entries.empty() ? input.reserve_bytes : FindFullest(input).total;
}

Result<StepModel> BuildStepModel(const PlanInput& input) {
  Result<StepModel> result;
  result.error = Check(input);
  if (result.ok()) {
    result.error = CheckOffers(input);
  }
  if (!result.ok()) {
    return result;
  }
  const Fullest fullest = FindFullest(input);
  if (input.budget_bytes < fullest.total) {
    const TraceEntry& entry = input.trace.entries[fullest.position];
    result.error = "Position " + std::to_string(fullest.position) + " needs " + std::to_string(fullest.total) +
                   " bytes at once (" + std::to_string(fullest.facets) + " of facets, " +
                   std::to_string(entry.other_bytes) + " of other tensors, " + std::to_string(input.reserve_bytes) +
                   " of reserve) and the budget is " + std::to_string(input.budget_bytes) +
                   "; the smallest budget that works is " + std::to_string(fullest.total) + " bytes.";
    return result;
  }

  StepModel& model = result.value;
  const size_t positions = input.trace.entries.size();
  model.link = input.link;
  model.bytes.assign(input.facet_bytes.begin(), input.facet_bytes.end());
  model.used.assign(positions, 0);
  std::vector<uint32_t> slot(model.bytes.size(), 0);
  for (size_t p = 0; p < positions; ++p) {
    const TraceEntry& entry = input.trace.entries[p];
    model.first_use.push_back(static_cast<uint32_t>(model.uses.size()));
    AppendUses(entry, static_cast<uint32_t>(p), &slot, &model.uses);
    for (size_t u = model.first_use.back(); u < model.uses.size(); ++u) {
      model.used[p] += model.bytes[model.uses[u].facet];
    }
    // A budget above all that there is changes nothing, and keeps sums of bytes small.
    const uint64_t room = input.budget_bytes - input.reserve_bytes - entry.other_bytes;
    model.capacity.push_back(static_cast<int64_t>(std::min(room, kMostBytes)));
    model.compute.push_back(entry.compute_seconds);
    model.compute_total += entry.compute_seconds;
  }
  model.first_use.push_back(static_cast<uint32_t>(model.uses.size()));

  // Link every use with the facet's next one, around the period: seen backwards twice, the second time knows them all.
  constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();
  std::vector<uint32_t> later(model.bytes.size(), kNone);
  for (int round = 0; round < 2; ++round) {
    for (uint32_t u = static_cast<uint32_t>(model.uses.size()); u-- > 0;) {
      FacetUse& use = model.uses[u];
      if (later[use.facet] != kNone) {
        use.next = later[use.facet];
        model.uses[use.next].previous = u;
      }
      later[use.facet] = u;
    }
  }
  for (FacetUse& use : model.uses) {
    const uint32_t next = model.uses[use.next].position;
    use.distance = next > use.position ? next - use.position : static_cast<uint32_t>(next + positions - use.position);
    // After a discard there is nothing to load, whether the next use says that it creates or not.
    use.next_needs_content = !use.discards() && (model.uses[use.next].access & kCreate) == 0;
  }
  for (FacetUse& use : model.uses) {
    use.needs_content = model.uses[use.previous].next_needs_content;
  }
  return result;
}

}  // namespace misa::policy
