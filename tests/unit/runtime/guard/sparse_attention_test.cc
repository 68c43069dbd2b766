#include "runtime/guard/sparse_attention.h"

#include <gtest/gtest.h>

#include <cmath>

#include "runtime/policy/importance.h"

namespace misa::guard {
namespace {

TEST(SparseAttention, HasTwoThirdsOfTheWindow) {
  EXPECT_EQ(SparseWindow(30), 20u);
  EXPECT_EQ(SparseWindow(50), 33u);
  EXPECT_EQ(SparseWindow(1), 1u);
  EXPECT_EQ(SparseWindow(0), 1u);
  EXPECT_EQ(SparseWindow(4'000'000'000u), 2'666'666'666u);
}

TEST(SparseAttention, IsKnownByName) {
  const auto& words = SparseAttentionWords();
  EXPECT_TRUE(IsSparseAttention("longformer.encoder.layer.0.attention.self.query", "attention.query", words));
  EXPECT_TRUE(IsSparseAttention("blocks.2.sparse_attention.key", "attention.key", words));
  EXPECT_TRUE(IsSparseAttention("h.0.Local_Attn.q", "attention.query", words));
  EXPECT_FALSE(IsSparseAttention("longformer.encoder.layer.0.output.dense", "ffn.down", words)) << "no attention";
  EXPECT_FALSE(IsSparseAttention("blocks.2.attention.key", "attention.key", words));
  EXPECT_TRUE(IsSparseAttention("blocks.2.attention.key", "attention.key", {"blocks.2"})) << "declared";
  EXPECT_FALSE(IsSparseAttention("blocks.2.attention.key", "attention.key", {""}));
}

// A small training of four sparse-attention modules, one for each block of the context; the data dwells on another
// block every 60 steps. Modules that importance calls cold are left out and fall behind while the data is theirs. Mean
// loss.
double MeanLoss(uint32_t window) {
  constexpr size_t kModules = 4;
  policy::ImportanceTracker tracker(kModules, {.signal = policy::Signal::kSquaredNorm, .window = window});
  std::vector<double> behind(kModules, 0);
  double sum = 0;
  const int kSteps = 2400;
  for (int step = 0; step < kSteps; ++step) {
    const size_t at = static_cast<size_t>(step / 60) % kModules;
    for (size_t i = 0; i < kModules; ++i) {
      const double gradient = i == at ? 1 : 0.05 * static_cast<double>(i + 1);
      tracker.Observe(i, {0, 10 * gradient * gradient, 10});
    }
    const auto& heat = tracker.UpdateHeat();
    behind[at] += 0.01;
    for (size_t i = 0; i < kModules; ++i) {
      if (heat[i] != policy::ImportanceTracker::Heat::kCold) behind[i] *= 0.8;
      sum += behind[i] * behind[i];
    }
  }
  return sum / kSteps;
}

TEST(SparseAttention, AShorterWindowFollowsTheBlocksThatALongOneMisses) {
  const double without = MeanLoss(30);
  const double with = MeanLoss(SparseWindow(30));
  EXPECT_LT(with, 0.75 * without);
}

}  // namespace
}  // namespace misa::guard
