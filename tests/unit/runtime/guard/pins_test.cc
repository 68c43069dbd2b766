#include "runtime/guard/pins.h"

#include <gtest/gtest.h>

#include "runtime/policy/importance.h"
#include "runtime/sim/random.h"

namespace misa::guard {
namespace {

TEST(Pins, KnowExpertsByTheirNames) {
  for (const char* name : {"model.layers.0.block_sparse_moe.experts.3.w1", "layers.1.mlp.experts.gate_up_proj",
                           "h.2.mlp.expert_7.fc1", "blocks.0.experts2.up", "layers.4.mlp.shared_expert.up_proj",
                           "layers.4.mlp.shared_experts.down_proj", "Layers.0.Experts.1.W1"}) {
    EXPECT_TRUE(IsExpert(name)) << name;
  }
  for (const char* name : {"layers.0.mlp.gate", "expertise.0.weight", "blocks.1.ffn.up", "unexpert.fc1", ""}) {
    EXPECT_FALSE(IsExpert(name)) << name;
  }
}

TEST(Pins, AreExpertsEmbeddingsAndNormsByDefault) {
  EXPECT_TRUE(IsPinned("layers.0.experts.1.w1", "ffn.up", DefaultPins()));
  EXPECT_TRUE(IsPinned("wte", "embedding", DefaultPins()));
  EXPECT_TRUE(IsPinned("layers.0.norm1", "norm", DefaultPins()));
  EXPECT_TRUE(IsPinned("layers.0.small", "small", DefaultPins())) << "where norms and biases are";
  EXPECT_FALSE(IsPinned("layers.0.ffn.up", "ffn.up", DefaultPins()));
  EXPECT_FALSE(IsPinned("lm_head", "head", DefaultPins()));
  EXPECT_TRUE(IsPinned("layers.0.ffn.up", "ffn.up", {"layers.0.ffn.up"})) << "by its name";
  EXPECT_TRUE(IsPinned("layers.0.ffn.up", "ffn.up", {"head", "ffn.up"})) << "by its kind";
  EXPECT_FALSE(IsPinned("wte", "embedding", {}));
}

// A small mixture of experts: a step routes to two of eight, some rarely, and needs those on the device. Modules that
// importance calls cold leave it. Steps that had to wait for one.
int Stalls(const std::vector<std::string>& pins) {
  constexpr size_t kExperts = 8;
  policy::ImportanceTracker tracker(kExperts, {.window = 10});
  sim::Random random(4);
  std::vector<bool> resident(kExperts, true);
  int stalls = 0;
  for (int step = 0; step < 1000; ++step) {
    std::vector<bool> routed(kExperts, false);
    for (int token = 0; token < 2; ++token) {
      // The square favours the first ones.
      const double share = random.Share();
      routed[static_cast<size_t>(share * share * kExperts)] = true;
    }
    for (size_t i = 0; i < kExperts; ++i) {
      if (routed[i] && !resident[i]) ++stalls;
      if (routed[i]) resident[i] = true;
      // Of a step that did not use it, an expert's gradient is zero.
      const double scale = routed[i] ? 1 : 0;
      tracker.Observe(i, {0, 16 * scale, 16});
    }
    const auto& heat = tracker.UpdateHeat();
    for (size_t i = 0; i < kExperts; ++i) {
      const std::string name = "layers.0.experts." + std::to_string(i) + ".w1";
      if (heat[i] == policy::ImportanceTracker::Heat::kCold && !IsPinned(name, "ffn.up", pins)) resident[i] = false;
    }
  }
  return stalls;
}

TEST(Pins, KeepRarelyRoutedExpertsFromBeingWaitedFor) {
  EXPECT_GT(Stalls({}), 100);
  EXPECT_EQ(Stalls(DefaultPins()), 0);
}

}  // namespace
}  // namespace misa::guard
