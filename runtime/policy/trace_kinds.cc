#include "runtime/policy/trace_kinds.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <utility>

namespace misa::policy {
namespace {

constexpr std::pair<TraceKind, std::string_view> kNames[] = {
    {TraceKind::kZigZag, "zigzag"}, {TraceKind::kThreePass, "three-pass"}, {TraceKind::kForwardOnly, "forward-only"},
    {TraceKind::kPhases, "phases"}, {TraceKind::kMixed, "mixed"},
};
constexpr uint32_t kMostUnits = 1u << 20;
constexpr uint64_t kLeastUnitBytes = 16;
constexpr uint64_t kMostUnitBytes = uint64_t{1} << 36;
constexpr int kStepsOfAPhase = 3;

// The library's distributions differ between systems; the engine does not.
uint64_t Below(std::mt19937_64* random, uint64_t limit) { return (*random)() % limit; }

std::vector<uint64_t> UnitSizes(const TraceOptions& options, std::mt19937_64* random) {
  std::vector<uint64_t> sizes(options.units, options.unit_bytes);
  if (options.mixed_sizes || options.kind == TraceKind::kMixed) {
    for (uint64_t& size : sizes) {
      const uint64_t octave = Below(random, 6);
      const uint64_t least = (options.unit_bytes / 8) << octave;
      size = least + Below(random, least);
    }
  }
  return sizes;
}

class Builder {
 public:
  explicit Builder(Trace* trace) : trace_(trace) {}
  void Use(uint32_t facet, uint8_t access = kRead) { trace_->entries.push_back({{{facet, access}}, 1, 0}); }
  void Forward(const std::vector<uint32_t>& facets, uint8_t access = kRead) {
    for (const uint32_t facet : facets) {
      Use(facet, access);
    }
  }
  void Backward(const std::vector<uint32_t>& facets, uint8_t access = kRead) {
    for (size_t i = facets.size(); i-- > 0;) {
      Use(facets[i], access);
    }
  }

 private:
  Trace* trace_;
};

void BuildPhases(uint32_t units, uint8_t update, Builder* builder) {
  std::vector<uint32_t> all(units);
  std::iota(all.begin(), all.end(), 0u);
  const auto at = [&](uint32_t quarters) { return all.begin() + static_cast<std::ptrdiff_t>(units) * quarters / 4; };
  for (const uint32_t head : {2u, 3u}) {
    std::vector<uint32_t> task(all.begin(), at(2));
    task.insert(task.end(), at(head), at(head + 1));
    for (int step = 0; step < kStepsOfAPhase; ++step) {
      builder->Forward(task);
      builder->Backward(task, update);
    }
  }
  builder->Forward(all);
}

// Weights are facet 3i, gradients 3i + 1, optimizer state 3i + 2.
void BuildTrainingStep(uint32_t units, Trace* trace) {
  for (uint32_t i = 0; i < units; ++i) {
    trace->entries.push_back(
        {{{3 * i, kRead | kWrite}, {3 * i + 1, kRead | kDiscard}, {3 * i + 2, kRead | kWrite}}, 1, 0});
    trace->entries.push_back({{{3 * i, kRead}}, 1, 0});
  }
  for (uint32_t i = units; i-- > 0;) {
    trace->entries.push_back({{{3 * i, kRead}}, 1, 0});
    trace->entries.push_back({{{3 * i + 1, kCreate | kWrite}}, 1, 0});
  }
}

}  // namespace

std::optional<TraceKind> TraceKindFromName(std::string_view name) {
  for (const auto& [kind, known] : kNames) {
    if (known == name) {
      return kind;
    }
  }
  return std::nullopt;
}

std::string_view NameOf(TraceKind kind) {
  for (const auto& [known, name] : kNames) {
    if (known == kind) {
      return name;
    }
  }
  return "";
}

Result<GeneratedTrace> GenerateTrace(const TraceOptions& options) {
  Result<GeneratedTrace> result;
  if (options.units < 2 || options.units > kMostUnits) {
    result.error = "A trace has 2 to " + std::to_string(kMostUnits) + " units, and " + std::to_string(options.units) +
                   " were asked for.";
    return result;
  }
  if (options.unit_bytes < kLeastUnitBytes || options.unit_bytes > kMostUnitBytes) {
    result.error = "A unit has " + std::to_string(kLeastUnitBytes) + " to 2^36 bytes, and " +
                   std::to_string(options.unit_bytes) + " were asked for.";
    return result;
  }
  std::mt19937_64 random(options.seed);
  const std::vector<uint64_t> sizes = UnitSizes(options, &random);
  GeneratedTrace& made = result.value;
  std::vector<double> unit_ranks(options.units);
  for (uint32_t i = 0; i < options.units; ++i) {
    unit_ranks[i] = static_cast<double>(i) / (options.units - 1);
  }
  for (size_t i = unit_ranks.size(); i-- > 1;) {
    std::swap(unit_ranks[i], unit_ranks[Below(&random, i + 1)]);
  }
  for (uint32_t i = 0; i < options.units; ++i) {
    const size_t facets = options.kind == TraceKind::kMixed ? 3 : 1;
    for (size_t f = 0; f < facets; ++f) {
      made.facet_bytes.push_back(f == 2 ? 2 * sizes[i] : sizes[i]);
      made.ranks.push_back(unit_ranks[i]);
    }
  }
  made.total_bytes = std::accumulate(made.facet_bytes.begin(), made.facet_bytes.end(), uint64_t{0});

  std::vector<uint32_t> all(options.units);
  std::iota(all.begin(), all.end(), 0u);
  const uint8_t update = options.writes ? kRead | kWrite : kRead;
  Builder builder(&made.trace);
  switch (options.kind) {
    case TraceKind::kZigZag:
      builder.Forward(all);
      builder.Backward(all, update);
      break;
    case TraceKind::kThreePass:
      builder.Forward(all);
      builder.Backward(all);
      builder.Forward(all, update);
      break;
    case TraceKind::kForwardOnly:
      builder.Forward(all, update);
      break;
    case TraceKind::kPhases:
      BuildPhases(options.units, update, &builder);
      break;
    case TraceKind::kMixed:
      BuildTrainingStep(options.units, &made.trace);
      break;
  }
  return result;
}

}  // namespace misa::policy
