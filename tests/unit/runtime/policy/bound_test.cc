// LowerBound against an exact linear program, and on steps whose bound is known by hand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "runtime/policy/planner.h"
#include "tests/unit/runtime/policy/workloads.h"

namespace misa::policy {
namespace {

// max sum(y) with y >= 0, rows * y <= limits, limits >= 0: the simplex method on a dense tableau, with Bland's rule, so
// that it ends.
double Maximum(std::vector<std::vector<double>> rows, std::vector<double> limits, size_t variables) {
  const size_t count = rows.size();
  const double tiny = 1e-9;
  std::vector<size_t> basis(count);
  std::vector<double> gain(variables + count, 0);
  std::fill(gain.begin(), gain.begin() + static_cast<std::ptrdiff_t>(variables), 1.0);
  for (size_t r = 0; r < count; ++r) {
    rows[r].resize(variables + count, 0);
    rows[r][variables + r] = 1;
    basis[r] = variables + r;
  }
  double value = 0;
  for (int step = 0; step < 100000; ++step) {
    size_t enter = 0;
    while (enter < gain.size() && gain[enter] <= tiny) {
      ++enter;
    }
    if (enter == gain.size()) {
      return value;
    }
    size_t leave = count;
    for (size_t r = 0; r < count; ++r) {
      if (rows[r][enter] > tiny) {
        const double ratio = limits[r] / rows[r][enter];
        const double best = leave == count ? 0 : limits[leave] / rows[leave][enter];
        if (leave == count || ratio < best - tiny || (ratio < best + tiny && basis[r] < basis[leave])) {
          leave = r;
        }
      }
    }
    if (leave == count) {
      break;
    }
    const double pivot = rows[leave][enter];
    for (double& cell : rows[leave]) {
      cell /= pivot;
    }
    limits[leave] /= pivot;
    for (size_t r = 0; r < count; ++r) {
      const double factor = rows[r][enter];
      if (r != leave && factor != 0) {
        for (size_t c = 0; c < rows[r].size(); ++c) {
          rows[r][c] -= factor * rows[leave][c];
        }
        limits[r] -= factor * limits[leave];
      }
    }
    const double factor = gain[enter];
    for (size_t c = 0; c < gain.size(); ++c) {
      gain[c] -= factor * rows[leave][c];
    }
    value += factor * limits[leave];
    basis[leave] = enter;
  }
  ADD_FAILURE() << "the simplex method does not end";
  return value;
}

struct Program {
  double total = 0;
  std::vector<std::vector<bool>> covers;  // positions by variable
  std::vector<double> sizes;
};

uint8_t AccessAt(const PlanInput& input, uint32_t facet, size_t position) {
  uint8_t access = 0;
  for (const Use& use : input.trace.entries[position % input.trace.entries.size()].uses) {
    access |= use.facet == facet ? use.access : 0;
  }
  return access;
}

// By walking positions from each use on: what must be kept to save a load (`chains` false) or a copy down (true).
Program Build(const PlanInput& input, bool chains) {
  Program program;
  const size_t count = input.trace.entries.size();
  for (uint32_t f = 0; f < input.facet_bytes.size(); ++f) {
    for (size_t p = 0; p < count; ++p) {
      const uint8_t first = AccessAt(input, f, p);
      if (first == 0 || (first & kDiscard) != 0 || (chains && (first & (kWrite | kCreate)) == 0)) {
        continue;
      }
      std::vector<bool> pending(count, false);
      std::vector<bool> covered(count, false);
      bool reads = false;
      for (size_t q = p + 1; q <= p + count; ++q) {
        const uint8_t access = AccessAt(input, f, q);
        if (access == 0) {
          pending[q % count] = true;
          continue;
        }
        if ((access & kCreate) != 0) {
          break;
        }
        reads = true;
        for (size_t i = 0; i < count; ++i) {
          covered[i] = covered[i] || pending[i];
        }
        if (!chains || (access & (kWrite | kDiscard)) != 0) {
          break;
        }
      }
      if (reads) {
        program.total += static_cast<double>(input.facet_bytes[f]);
        program.sizes.push_back(static_cast<double>(input.facet_bytes[f]));
        program.covers.push_back(covered);
      }
    }
  }
  return program;
}

double Exact(const PlanInput& input, bool chains) {
  const Program program = Build(input, chains);
  const size_t variables = program.sizes.size();
  std::vector<std::vector<double>> rows;
  std::vector<double> limits;
  for (size_t v = 0; v < variables; ++v) {
    rows.emplace_back(variables, 0);
    rows.back()[v] = 1;
    limits.push_back(program.sizes[v]);
  }
  for (size_t p = 0; p < input.trace.entries.size(); ++p) {
    double room = static_cast<double>(input.budget_bytes - input.reserve_bytes - input.trace.entries[p].other_bytes);
    for (uint32_t f = 0; f < input.facet_bytes.size(); ++f) {
      room -= AccessAt(input, f, p) != 0 ? static_cast<double>(input.facet_bytes[f]) : 0;
    }
    rows.emplace_back(variables, 0);
    for (size_t v = 0; v < variables; ++v) {
      rows.back()[v] = program.covers[v][p] ? 1 : 0;
    }
    limits.push_back(room);
  }
  return program.total - Maximum(rows, limits, variables);
}

TEST(LowerBound, LoadsAreTheLinearProgramsOptimum) {
  int loading = 0;
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    const PlanInput input = RandomTrace(seed);
    const double exact = Exact(input, false);
    const Result<Bound> bound = LowerBound(input);
    ASSERT_TRUE(bound.ok()) << bound.error;
    ASSERT_LE(static_cast<double>(bound.value.load_bytes), exact + 1e-6) << "seed " << seed;
    ASSERT_GE(static_cast<double>(bound.value.load_bytes), std::floor(exact * 0.97 - 1e-6)) << "seed " << seed;
    loading += exact > 0 ? 1 : 0;
  }
  EXPECT_GT(loading, 300);
}

TEST(LowerBound, UnloadsAreNotAboveTheLinearProgramsOptimum) {
  double sum = 0;
  double exact_sum = 0;
  for (uint64_t seed = 0; seed < 1500; ++seed) {
    const PlanInput input = RandomTrace(seed);
    const double exact = Exact(input, true);
    const Result<Bound> bound = LowerBound(input);
    ASSERT_LE(static_cast<double>(bound.value.unload_bytes), exact + 1e-6) << "seed " << seed;
    sum += static_cast<double>(bound.value.unload_bytes);
    exact_sum += exact;
  }
  // It gives the facet's own uses inside a chain back to the room, and loses a little by it.
  EXPECT_GT(sum, 0.9 * exact_sum);
}

TEST(LowerBound, FormulasOfATrainingStep) {
  // Deferred, constant other bytes: with m bytes kept all period long, H2D >= 2W + O + G less what is kept, which saves
  // a weight's two loads or one of the others. Nothing but the largest position fits: all is loaded at each use.
  TrainingStep step;
  step.least_other_bytes = step.most_other_bytes = 0;
  step.budget_bytes = 4 * step.weight_bytes;
  const Result<Bound> bound = LowerBound(Deferred(step));
  ASSERT_TRUE(bound.ok()) << bound.error;
  const uint64_t weights = step.matrices * step.weight_bytes;
  EXPECT_LE(bound.value.load_bytes, 2 * weights + 2 * weights + weights);
  EXPECT_GE(bound.value.load_bytes, (2 * weights + 2 * weights + weights) * 9 / 10);
  EXPECT_LE(bound.value.unload_bytes, 4 * weights);
  EXPECT_GE(bound.value.unload_bytes, 4 * weights * 9 / 10);
}

TEST(LowerBound, TimeIsTheLargestOfItsTerms) {
  // Two facets that never fit together: each is loaded at its use.
  PlanInput input;
  input.facet_bytes = {100, 100};
  input.trace.entries = {{{{0, kRead}}, 1, 0}, {{{1, kRead}}, 1, 0}};
  input.budget_bytes = 100;
  input.link = {10, 10, 10, 10};
  EXPECT_EQ(LowerBound(input).value.load_bytes, 200u);
  EXPECT_DOUBLE_EQ(LowerBound(input).value.step_seconds, 20) << "the link";
  input.link = {1000, 10, 1000, 10};
  EXPECT_DOUBLE_EQ(LowerBound(input).value.step_seconds, 2) << "the compute";
}

TEST(LowerBound, TimeOfAPassThatNeedsMoreThanTheDeviceHolds) {
  // Ten facets used at once after a long compute on an eleventh: nine of ten cannot wait on the device, and the compute
  // after the pass does not hide their loads.
  PlanInput input;
  input.facet_bytes.assign(11, 10);
  input.trace.entries.push_back({{{10, kRead}}, 5, 80});
  for (uint32_t f = 0; f < 10; ++f) {
    input.trace.entries.push_back({{{f, kRead}}, 0.1, 0});
  }
  input.budget_bytes = 100;
  input.link = {10, 10, 10, 10};
  // From the start of position 0 (20 bytes held, the eleventh among them) to that of the last: 110 - 20 bytes.
  EXPECT_NEAR(LowerBound(input).value.step_seconds, 9 + 0.1, 1e-9);
  const Result<Plan> plan = MakePlan(input);
  EXPECT_GE(plan.value.step_seconds, LowerBound(input).value.step_seconds);
}

TEST(LowerBound, ALinkFasterOneWayThanBothTogether) {
  // 100 bytes down only matter at the fast single rate: both at once would be the slower way.
  PlanInput input;
  input.facet_bytes = {100, 100};
  input.trace.entries = {{{{0, kCreate | kWrite}}, 0, 0}, {{{1, kCreate | kWrite}}, 0, 0},
                         {{{0, kRead | kDiscard}}, 0, 0}, {{{1, kRead | kDiscard}}, 0, 0}};
  input.budget_bytes = 100;
  input.link = {10, 100, 5, 5};
  const Bound bound = LowerBound(input).value;
  EXPECT_EQ(bound.load_bytes, bound.unload_bytes);
  const double bytes = static_cast<double>(bound.load_bytes);
  EXPECT_NEAR(bound.step_seconds, bytes / 10 + bytes / 100, 0.02 * bound.step_seconds);
}

}  // namespace
}  // namespace misa::policy
