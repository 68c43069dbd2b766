// FindOptimum against a slower way to the same number, and on cases known by hand.
#include "runtime/policy/optimum.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "tests/unit/runtime/policy/workloads.h"

namespace misa::policy {
namespace {

using ::testing::HasSubstr;

Optimum Find(const PlanInput& input) {
  const Result<StepModel> model = BuildStepModel(input);
  EXPECT_TRUE(model.ok()) << model.error;
  const Result<Optimum> optimum = FindOptimum(model.value);
  EXPECT_TRUE(optimum.ok()) << optimum.error;
  return optimum.value;
}

// Least bytes loaded in so many periods from an empty device, by trying every set that may be on the device at each
// position: all facets' subsets, whoever must or need not leave.
std::vector<int64_t> LeastLoads(const StepModel& model, int periods) {
  constexpr int64_t kNever = std::numeric_limits<int64_t>::max() / 4;
  const uint32_t sets = 1u << model.bytes.size();
  std::vector<int64_t> size(sets, 0);
  for (uint32_t set = 1; set < sets; ++set) {
    for (size_t f = 0; f < model.bytes.size(); ++f) {
      size[set] += (set >> f & 1) != 0 ? model.bytes[f] : 0;
    }
  }
  std::vector<int64_t> least(sets, kNever);
  least[0] = 0;
  std::vector<int64_t> sums;
  for (int period = 0; period < periods; ++period) {
    for (size_t p = 0; p < model.positions(); ++p) {
      // Dropping any facet costs no load.
      for (size_t f = 0; f < model.bytes.size(); ++f) {
        for (uint32_t set = 0; set < sets; ++set) {
          if ((set >> f & 1) != 0) {
            least[set & ~(1u << f)] = std::min(least[set & ~(1u << f)], least[set]);
          }
        }
      }
      std::vector<int64_t> next(sets, kNever);
      for (uint32_t set = 0; set < sets; ++set) {
        uint32_t after = set;
        int64_t loads = 0;
        for (uint32_t u = model.first_use[p]; u < model.first_use[p + 1]; ++u) {
          const FacetUse& use = model.uses[u];
          loads += (set >> use.facet & 1) == 0 && use.needs_content ? model.bytes[use.facet] : 0;
          after |= 1u << use.facet;
        }
        if (least[set] >= kNever || size[after] > model.capacity[p]) {
          continue;
        }
        for (uint32_t u = model.first_use[p]; u < model.first_use[p + 1]; ++u) {
          after &= model.uses[u].discards() ? ~(1u << model.uses[u].facet) : ~0u;
        }
        next[after] = std::min(next[after], least[set] + loads);
      }
      least = std::move(next);
    }
    sums.push_back(*std::min_element(least.begin(), least.end()));
  }
  return sums;
}

// Whether the optimum needs a cycle of several periods.
bool ExpectExact(const PlanInput& input, const std::string& name) {
  const Optimum optimum = Find(input);
  const size_t periods = 12 * optimum.periods;
  const std::vector<int64_t> sums = LeastLoads(BuildStepModel(input).value, static_cast<int>(2 * periods));
  EXPECT_EQ(sums[2 * periods - 1] - sums[periods - 1], static_cast<int64_t>(optimum.loaded_bytes) * 12) << name;
  return optimum.periods > 1;
}

TEST(Optimum, IsWhatTryingEverySetComesTo) {
  int tried = 0;
  for (uint64_t seed = 0; seed < 250; ++seed) {
    const PlanInput input = RandomTrace(seed);
    if (input.facet_bytes.size() <= 8) {
      ExpectExact(input, "seed " + std::to_string(seed));
      ++tried;
    }
  }
  EXPECT_GT(tried, 100);
}

TEST(Optimum, IsExactWhereItIsACycle) {
  int cycles = 0;
  for (uint64_t seed = 0; seed < 100; ++seed) {
    std::mt19937_64 random(seed);
    PlanInput input;
    const uint32_t facets = 3 + static_cast<uint32_t>(random() % 5);
    uint64_t total = 0;
    for (uint32_t f = 0; f < facets; ++f) {
      input.facet_bytes.push_back(3 + random() % 4);
      input.trace.entries.push_back({{{f, kRead}}, 1, 0});
      total += input.facet_bytes.back();
    }
    input.budget_bytes = 6 + random() % (total - 6);
    input.link = {1, 1, 1, 1};
    cycles += ExpectExact(input, "seed " + std::to_string(seed)) ? 1 : 0;
  }
  EXPECT_GT(cycles, 20);
}

TEST(Optimum, OfAForwardPassIsACycle) {
  // 6 units, 4 fit: 2 * 6 / 5 loads a period.
  const Optimum optimum = Find(UnitTrace({0, 1, 2, 3, 4, 5}, 4));
  EXPECT_DOUBLE_EQ(static_cast<double>(optimum.loaded_bytes) / optimum.periods, 2.4);
  EXPECT_EQ(optimum.misses, optimum.loaded_bytes);
}

TEST(Optimum, PrefersToUnloadLess) {
  // Either facet must go at the third; a dirty one would have to be copied down.
  PlanInput input;
  input.facet_bytes = {10, 10, 10};
  input.trace.entries = {{{{0, kRead | kWrite}}, 1, 0}, {{{1, kRead}}, 1, 0}, {{{2, kRead}}, 1, 0}};
  input.budget_bytes = 20;
  input.link = {1, 1, 1, 1};
  const Optimum optimum = Find(input);
  EXPECT_EQ(optimum.loaded_bytes / optimum.periods, 15u) << "3 loads in 2 periods";
}

TEST(Optimum, RefusesWhatIsTooLarge) {
  std::vector<uint32_t> order(40);
  for (uint32_t i = 0; i < order.size(); ++i) {
    order[i] = i;
  }
  StepModel model = BuildStepModel(UnitTrace(order, 20)).value;
  EXPECT_THAT(FindOptimum(model).error, HasSubstr("up to 32 facets"));
  order.resize(24);
  model = BuildStepModel(UnitTrace(order, 12)).value;
  EXPECT_THAT(FindOptimum(model, 2000).error, HasSubstr("more than 2000 states"));
}

}  // namespace
}  // namespace misa::policy
