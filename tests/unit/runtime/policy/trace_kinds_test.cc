// The kinds of traces: their orders, their sizes, and that a seed makes the same ones again.
#include "runtime/policy/trace_kinds.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

namespace misa::policy {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

GeneratedTrace Make(const TraceOptions& options) {
  const Result<GeneratedTrace> made = GenerateTrace(options);
  EXPECT_TRUE(made.ok()) << made.error;
  return made.value;
}

std::vector<uint32_t> Order(const Trace& trace) {
  std::vector<uint32_t> order;
  for (const TraceEntry& entry : trace.entries) {
    order.push_back(entry.uses.at(0).facet);
  }
  return order;
}

TraceOptions Kind(TraceKind kind, uint32_t units) {
  TraceOptions options;
  options.kind = kind;
  options.units = units;
  return options;
}

TEST(TraceKinds, Orders) {
  EXPECT_THAT(Order(Make(Kind(TraceKind::kZigZag, 3)).trace), ElementsAre(0, 1, 2, 2, 1, 0));
  EXPECT_THAT(Order(Make(Kind(TraceKind::kThreePass, 3)).trace), ElementsAre(0, 1, 2, 2, 1, 0, 0, 1, 2));
  EXPECT_THAT(Order(Make(Kind(TraceKind::kForwardOnly, 3)).trace), ElementsAre(0, 1, 2));
  const std::vector<uint32_t> phases = Order(Make(Kind(TraceKind::kPhases, 8)).trace);
  EXPECT_EQ(phases.size(), 3 * 12 + 3 * 12 + 8u) << "three steps of six units, twice, and one evaluation";
  EXPECT_EQ(std::count(phases.begin(), phases.end(), 0u), 13) << "the trunk";
  EXPECT_EQ(std::count(phases.begin(), phases.end(), 7u), 7) << "a head";
}

TEST(TraceKinds, WritesUpdateInTheLastPassOverAUnit) {
  TraceOptions options = Kind(TraceKind::kZigZag, 2);
  options.writes = true;
  std::vector<int> access;
  for (const TraceEntry& entry : Make(options).trace.entries) {
    access.push_back(entry.uses[0].access);
  }
  EXPECT_THAT(access, ElementsAre(kRead, kRead, kRead | kWrite, kRead | kWrite));
}

TEST(TraceKinds, EqualUnitsAreEqualAndMixedOnesAreNot) {
  const GeneratedTrace equal = Make(Kind(TraceKind::kZigZag, 5));
  EXPECT_THAT(equal.facet_bytes, ElementsAre(1'000'000, 1'000'000, 1'000'000, 1'000'000, 1'000'000));
  EXPECT_EQ(equal.total_bytes, 5'000'000u);
  TraceOptions options = Kind(TraceKind::kZigZag, 200);
  options.mixed_sizes = true;
  const GeneratedTrace mixed = Make(options);
  EXPECT_GT(std::set(mixed.facet_bytes.begin(), mixed.facet_bytes.end()).size(), 190u);
  EXPECT_GE(*std::min_element(mixed.facet_bytes.begin(), mixed.facet_bytes.end()), 125'000u);
  EXPECT_LT(*std::max_element(mixed.facet_bytes.begin(), mixed.facet_bytes.end()), 8'000'000u);
}

TEST(TraceKinds, AMixedTraceIsATrainingStep) {
  const GeneratedTrace made = Make(Kind(TraceKind::kMixed, 4));
  EXPECT_EQ(made.facet_bytes.size(), 12u);
  EXPECT_EQ(made.trace.entries.size(), 16u);
  for (size_t unit = 0; unit < 4; ++unit) {
    EXPECT_EQ(made.facet_bytes[3 * unit + 2], 2 * made.facet_bytes[3 * unit]);
  }
}

TEST(TraceKinds, ASeedMakesTheSameAgain) {
  for (const TraceKind kind : {TraceKind::kZigZag, TraceKind::kPhases, TraceKind::kMixed}) {
    TraceOptions options = Kind(kind, 30);
    options.mixed_sizes = true;
    options.seed = 7;
    const GeneratedTrace first = Make(options);
    EXPECT_EQ(Digest(first.trace), Digest(Make(options).trace));
    EXPECT_EQ(first.facet_bytes, Make(options).facet_bytes);
    EXPECT_EQ(first.ranks, Make(options).ranks);
    options.seed = 8;
    EXPECT_NE(first.facet_bytes, Make(options).facet_bytes);
    EXPECT_NE(first.ranks, Make(options).ranks);
  }
}

TEST(TraceKinds, RanksAreAPermutationOfEvenOnes) {
  std::vector<double> ranks = Make(Kind(TraceKind::kZigZag, 5)).ranks;
  std::sort(ranks.begin(), ranks.end());
  EXPECT_THAT(ranks, ElementsAre(0, 0.25, 0.5, 0.75, 1));
}

TEST(TraceKinds, RefusesWhatIsNoTrace) {
  EXPECT_THAT(GenerateTrace(Kind(TraceKind::kZigZag, 0)).error, HasSubstr("2 to 1048576 units"));
  EXPECT_THAT(GenerateTrace(Kind(TraceKind::kZigZag, (1u << 20) + 1)).error, HasSubstr("units"));
  TraceOptions options;
  options.unit_bytes = 0;
  EXPECT_THAT(GenerateTrace(options).error, HasSubstr("bytes"));
  options.unit_bytes = uint64_t{1} << 40;
  EXPECT_THAT(GenerateTrace(options).error, HasSubstr("bytes"));
}

TEST(TraceKinds, NamesGoBothWays) {
  for (const char* name : {"zigzag", "three-pass", "forward-only", "phases", "mixed"}) {
    EXPECT_EQ(NameOf(*TraceKindFromName(name)), name);
  }
  EXPECT_FALSE(TraceKindFromName("spiral"));
}

}  // namespace
}  // namespace misa::policy
