#include "runtime/trace/modes.h"

#include <gmock/gmock.h>

#include <random>

namespace misa::trace {
namespace {

using policy::Trace;
constexpr uint32_t kModules = 5;

// Facet 3m is the weights of module m, 3m + 1 its gradients, 3m + 2 its optimizer state.
std::vector<FacetKind> Kinds() {
  std::vector<FacetKind> kinds;
  for (uint32_t m = 0; m < kModules; ++m) {
    kinds.insert(kinds.end(), {FacetKind::kWeights, FacetKind::kGradients, FacetKind::kOptimizer});
  }
  return kinds;
}

struct Steps {
  bool gradients = true;  // are facets
  enum { kDeferred, kEager, kInBackward } optimizer = kDeferred;

  Trace trace;

  void Update(uint32_t m) {
    policy::TraceEntry entry{{{3 * m, policy::kRead | policy::kWrite}, {3 * m + 2, policy::kRead | policy::kWrite}}, 1, 0};
    if (gradients && optimizer != kInBackward) entry.uses.push_back({3 * m + 1, policy::kRead | policy::kDiscard});
    trace.entries.push_back(entry);
  }
  void Forward(bool first) {
    for (uint32_t m = 0; m < kModules; ++m) {
      if (first && optimizer == kDeferred) Update(m);
      trace.entries.push_back({{{3 * m, policy::kRead}}, 1, 0});
    }
  }
  void Backward(bool first) {
    for (uint32_t m = kModules; m-- > 0;) {
      trace.entries.push_back({{{3 * m, policy::kRead}}, 1, 0});
      if (gradients) {
        const uint8_t access = first ? policy::kCreate | policy::kWrite : policy::kRead | policy::kWrite;
        trace.entries.push_back({{{3 * m + 1, access}}, 1, 0});
      }
      if (optimizer == kInBackward) Update(m);
    }
  }
  // `evals` forwards, then `micro_batches` forwards and backwards.
  Steps& Step(int evals, int micro_batches) {
    bool first = true;
    for (int i = 0; i < evals; ++i, first = false) Forward(first);
    for (int i = 0; i < micro_batches; ++i, first = false) {
      Forward(first);
      Backward(i == 0);
    }
    if (optimizer == kEager) {
      for (uint32_t m = 0; m < kModules; ++m) {
        Update(m);
        trace.entries.push_back({{{3 * m, policy::kRead | policy::kWrite}}, 1, 0});  // as optimizers of several passes do
      }
    }
    return *this;
  }
};

std::vector<TraceMode> Modes(const std::vector<Section>& sections) {
  std::vector<TraceMode> modes;
  for (const Section& section : sections) modes.push_back(section.mode);
  return modes;
}

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class FindModesTest : public ::testing::TestWithParam<std::tuple<bool, int>> {
 protected:
  Steps Make() const {
    Steps steps;
    steps.gradients = std::get<0>(GetParam());
    steps.optimizer = static_cast<decltype(steps.optimizer)>(std::get<1>(GetParam()));
    return steps;
  }
};

TEST_P(FindModesTest, APlainStepHasNone) { EXPECT_THAT(FindModes(Make().Step(0, 1).trace, Kinds()), IsEmpty()); }

TEST_P(FindModesTest, FindsOneForwardOfSeveralEvaluations) {
  for (const int evals : {2, 3, 10}) {
    const std::vector<Section> found = FindModes(Make().Step(evals, 1).trace, Kinds());
    ASSERT_THAT(Modes(found), ElementsAre(TraceMode::kEval)) << evals;
    // Any rotation of the forward.
    const auto& entries = found[0].trace.entries;
    ASSERT_EQ(entries.size(), kModules);
    for (size_t i = 0; i < entries.size(); ++i) {
      ASSERT_EQ(entries[i].uses.size(), 1u);
      EXPECT_EQ(entries[i].uses[0].facet, (entries[0].uses[0].facet + 3 * i) % (3 * kModules));
      EXPECT_EQ(entries[i].uses[0].access, policy::kRead);
    }
  }
}

TEST_P(FindModesTest, FindsOneMicroBatchOfSeveral) {
  if (std::get<1>(GetParam()) == Steps::kInBackward) GTEST_SKIP() << "a step in backward does not accumulate";
  for (const int micro_batches : {2, 3, 4, 9}) {
    const std::vector<Section> found = FindModes(Make().Step(0, micro_batches).trace, Kinds());
    if (micro_batches == 2 && !std::get<0>(GetParam()) && std::get<1>(GetParam()) == Steps::kDeferred) {
      // The first has the updates in it, and no gradient tells the second from it: nothing repeats.
      EXPECT_THAT(found, IsEmpty());
      continue;
    }
    ASSERT_THAT(Modes(found), ElementsAre(TraceMode::kAccumulate)) << micro_batches;
    EXPECT_EQ(found[0].trace.entries.size(), (std::get<0>(GetParam()) ? 3u : 2u) * kModules);
  }
}

TEST_P(FindModesTest, FindsBothInOneStep) {
  if (std::get<1>(GetParam()) == Steps::kInBackward) GTEST_SKIP() << "a step in backward does not accumulate";
  const std::vector<Section> found = FindModes(Make().Step(3, 4).trace, Kinds());
  EXPECT_THAT(Modes(found), ElementsAre(TraceMode::kEval, TraceMode::kAccumulate));
}

INSTANTIATE_TEST_SUITE_P(Steps, FindModesTest, ::testing::Combine(::testing::Bool(), ::testing::Values(0, 1, 2)));

TEST(FindModes, TakesNothingFromTracesWithoutPeriods) {
  EXPECT_THAT(FindModes({}, Kinds()), IsEmpty());
  Trace unknown;
  unknown.entries.assign(100, {{{99, policy::kRead}}, 1, 0});
  EXPECT_THAT(FindModes(unknown, Kinds()), IsEmpty());
  std::mt19937_64 random(7);
  for (int round = 0; round < 300; ++round) {
    Trace trace;
    for (uint64_t i = random() % 400; i > 0; --i) {
      trace.entries.push_back({{{static_cast<uint32_t>(random() % (3 * kModules)), static_cast<uint8_t>(1 + random() % 15)}}, 0, 0});
    }
    for (const Section& section : FindModes(trace, Kinds())) {
      EXPECT_LE(section.trace.entries.size(), trace.entries.size());
      EXPECT_FALSE(section.trace.entries.empty());
    }
  }
}

}  // namespace
}  // namespace misa::trace
