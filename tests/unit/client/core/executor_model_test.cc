// Random work against a model: a byte array for every facet. Whatever moves, leaves, fails or dies, the bytes are right.
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <random>
#include <thread>

#include "tests/unit/client/core/executor_rig.h"

namespace misa::testing {
namespace {

using policy::Action;
using policy::kCreate;
using policy::kRead;
using policy::kWrite;

struct ModelOptions {
  uint64_t seed = 1;
  uint64_t chunk_bytes = 4096;
  uint64_t budget_chunks = 12;
  int steps = 3000;
  bool stress = false;
  bool demand_only = false;
  bool plans = false;
  bool faults = false;
  uint32_t delay = 2;
};

std::string Name(const ::testing::TestParamInfo<ModelOptions>& info) {
  const ModelOptions& o = info.param;
  return std::string(o.stress ? "Stress" : o.demand_only ? "Demand" : o.plans ? "Plans" : "Free") +
         (o.faults ? "Faults" : "") + "Chunk" + std::to_string(o.chunk_bytes) + "Seed" + std::to_string(o.seed);
}

class Model {
 public:
  static constexpr uint64_t kFacets = 10;

  explicit Model(const ModelOptions& o)
      : o_(o),
        budget_(o.budget_chunks * o.chunk_bytes),
        random_(o.seed),
        rig_({.chunk_bytes = o.chunk_bytes,
              .space_bytes = 2 * o.budget_chunks * o.chunk_bytes,
              .disk_bytes = 64 * o.chunk_bytes,
              .budget_bytes = budget_,
              .seed = o.seed,
              .executor = {.stress = o.stress, .demand_only = o.demand_only}}),
        truth_(kFacets) {
    for (uint64_t i = 0; i < kFacets; ++i) rig_.Add(1 + i % 4);
    rig_.link->Delay(o.delay);
  }

  void Run() {
    for (int step = 0; step < o_.steps; ++step) {
      SCOPED_TRACE("step " + std::to_string(step));
      One();
      if (::testing::Test::HasFatalFailure()) return;
      ASSERT_LE(rig_.meter.peak_bytes(), budget_);
      ASSERT_EQ(rig_.owner.breach(), "");
    }
    Finish();
  }

 private:
  struct Held {
    std::vector<policy::Use> uses;
  };

  uint64_t Below(uint64_t limit) { return random_() % limit; }

  bool IsHeld(uint32_t id) const {
    for (const Held& held : held_) {
      for (const auto& use : held.uses) {
        if (use.facet == id) return true;
      }
    }
    return false;
  }

  void One() {
    switch (Below(o_.plans ? 13 : 12)) {
      case 0:
      case 1:
      case 2:
      case 3:
      case 4: return UseGroup(/*hold=*/Below(6) == 0);
      case 5: return Create();
      case 6:
        if (Below(3) == 0) Discard();
        return;
      case 7: {
        if (Below(4) != 0) return;
        rig_.executor->UnloadAll();
        if (Below(2) == 0) {
          ASSERT_TRUE(rig_.executor->Drain());
        }
        return;
      }
      case 8: return OtherTensors();
      case 9: return Let();
      case 10: return rig_.executor->EndStep();
      case 11:
        if (Below(5) == 0) ChangeBudget();
        if (o_.faults) rig_.link->FailSometimes(Below(3) == 0 ? 0.3 : 0, Below(2) == 0 ? EIO : ENOSPC);
        return;
      default: return OfferAnything();
    }
  }

  // A sentence is right only where there is a reason for it, and it leaves everything as it was.
  void Judge(const std::string& error, const std::vector<policy::Use>& uses) {
    if (o_.faults && error.find("smallest budget") == std::string::npos) {
      const bool names = std::any_of(uses.begin(), uses.end(), [&](const policy::Use& use) {
        return error.find(rig_.facet(use.facet).name) != std::string::npos;
      });
      ASSERT_TRUE(names) << error;
      return;
    }
    // Without faults only the budget can be the reason, and the sentence's way out works.
    const std::string words = "smallest budget that works here is ";
    const size_t at = error.find(words);
    ASSERT_NE(at, std::string::npos) << error;
    const uint64_t smallest = std::stoull(error.substr(at + words.size()));
    ASSERT_GT(smallest, budget_) << error;
    if (o_.faults) return;
    rig_.meter.SetBudget(smallest);
    ASSERT_EQ(rig_.executor->Use(uses.data(), uses.size(), false), "") << "after: " << error;
    ASSERT_LE(rig_.meter.peak_bytes(), smallest);
    Look(uses);
    rig_.executor->EndUse(uses.data(), uses.size());
    rig_.meter.SetBudget(budget_);
    while (!rig_.executor->FitBudget().empty()) Let();
    rig_.meter.ResetPeak();
  }

  void Look(const std::vector<policy::Use>& uses) {
    for (const auto& use : uses) {
      if (!truth_[use.facet]) continue;
      ASSERT_EQ(std::memcmp(rig_.facet(use.facet).address, truth_[use.facet]->data(), truth_[use.facet]->size()), 0)
          << "facet " << use.facet << " holds other bytes than were written";
    }
  }

  void Scribble(uint32_t id, bool whole) {
    std::vector<char>& truth = *truth_[id];
    const uint64_t from = whole ? 0 : Below(truth.size());
    const uint64_t bytes = whole ? truth.size() : 1 + Below(truth.size() - from);
    const auto value = static_cast<char>(random_());
    char* memory = rig_.facet(id).address;
    for (uint64_t i = from; i < from + bytes; ++i) {
      truth[i] = static_cast<char>(value + static_cast<char>(i * 31 + (i >> 12)));
      memory[i] = truth[i];
    }
  }

  void UseGroup(bool hold) {
    std::vector<policy::Use> uses;
    const uint64_t count = 1 + Below(3);
    for (uint64_t i = 0; i < count; ++i) {
      const auto id = static_cast<uint32_t>(Below(kFacets));
      const bool twice = std::any_of(uses.begin(), uses.end(), [&](const auto& use) { return use.facet == id; });
      if (!truth_[id] || twice) continue;
      uses.push_back({id, static_cast<uint8_t>(Below(2) == 0 ? kRead : kRead | kWrite)});
    }
    if (uses.empty()) return;
    const std::string error = rig_.executor->Use(uses.data(), uses.size(), Below(8) != 0);
    if (!error.empty()) return Judge(error, uses);
    for (const auto& use : uses) rig_.owner.BeginTouch(use.facet);
    Look(uses);
    for (const auto& use : uses) {
      if (use.access & kWrite) Scribble(use.facet, Below(4) == 0);
    }
    Held held{uses};
    if (hold && held_.size() < 2) {
      held_.push_back(held);
    } else {
      End(held);
    }
  }

  void End(const Held& held) {
    Look(held.uses);
    for (const auto& use : held.uses) rig_.owner.EndTouch(use.facet);
    rig_.executor->EndUse(held.uses.data(), held.uses.size());
  }

  // Lets something go: a use that was held on to, or other tensors.
  void Let() {
    if (!held_.empty()) {
      const Held held = held_.front();
      held_.erase(held_.begin());
      End(held);
    } else if (!others_.empty()) {
      rig_.meter.SubtractOther(others_.back());
      others_.pop_back();
    }
  }

  void Create() {
    const auto id = static_cast<uint32_t>(Below(kFacets));
    if (truth_[id]) return;
    const policy::Use use{id, kCreate | kWrite};
    const std::string error = rig_.executor->Use(&use, 1, true);
    if (!error.empty()) {
      ASSERT_EQ(rig_.state(id), FacetState::kEmpty);
      Judge(error, {use});
      // Judge may have made it after all, with a budget that is large enough; it has no content of the model's.
      if (rig_.state(id) != FacetState::kEmpty) rig_.Discard(id);
      return;
    }
    rig_.owner.BeginTouch(id);
    truth_[id].emplace(rig_.facet(id).bytes);
    Scribble(id, true);
    rig_.owner.EndTouch(id);
    rig_.executor->EndUse(&use, 1);
  }

  void Discard() {
    const auto id = static_cast<uint32_t>(Below(kFacets));
    if (IsHeld(id)) return;
    rig_.Discard(id);
    truth_[id].reset();
  }

  void OtherTensors() {
    if (Below(2) == 0 && !others_.empty()) {
      rig_.meter.SubtractOther(others_.back());
      others_.pop_back();
      return;
    }
    const uint64_t bytes = 1 + Below(3 * o_.chunk_bytes);
    const std::string error = rig_.executor->MakeRoom(bytes);
    if (error.empty()) {
      others_.push_back(bytes);
    } else if (!o_.faults) {
      ASSERT_NE(error.find("smallest budget"), std::string::npos) << error;
    }
  }

  void ChangeBudget() {
    budget_ = (o_.budget_chunks / 2 + Below(o_.budget_chunks / 2 + 1)) * o_.chunk_bytes + Below(3);
    rig_.meter.SetBudget(budget_);
    // Faults pause an unload that failed for a while: what cannot leave must not be counted against the executor.
    std::string error;
    while (!(error = rig_.executor->FitBudget()).empty()) {
      if (held_.empty() && others_.empty()) {
        ASSERT_TRUE(o_.faults) << error;
        budget_ = rig_.meter.total_bytes();
        rig_.meter.SetBudget(budget_);
      }
      Let();
    }
    ASSERT_LE(rig_.meter.total_bytes(), budget_);
    rig_.meter.ResetPeak();
  }

  // Plans are advice: nonsense costs time, never bytes.
  void OfferAnything() {
    if (rig_.steps.empty()) return;
    const StepSummary& last = rig_.steps.back();
    const size_t positions = last.trace->entries.size();
    std::vector<Action> actions;
    for (uint64_t i = 0; i < Below(20); ++i) {
      actions.push_back({static_cast<uint32_t>(Below(positions + 2)), Below(2) == 0 ? Action::kLoad : Action::kUnload,
                         static_cast<uint32_t>(Below(kFacets))});
    }
    if (Below(3) != 0) {
      std::sort(actions.begin(), actions.end(), [](const Action& a, const Action& b) { return a.position < b.position; });
    }
    rig_.Offer(actions, last.step);
  }

  void Finish() {
    rig_.link->FailSometimes(0, 0);
    while (!held_.empty() || !others_.empty()) Let();
    ASSERT_TRUE(rig_.executor->Drain());
    rig_.executor->UnloadAll();
    ASSERT_TRUE(rig_.executor->Drain());
    budget_ = DeviceMeter::kUnlimited;
    rig_.meter.SetBudget(budget_);
    for (uint32_t id = 0; id < kFacets; ++id) {
      const policy::Use use{id, kRead};
      if (!truth_[id]) continue;
      ASSERT_EQ(rig_.executor->Use(&use, 1, true), "");
      Look({use});
      rig_.executor->EndUse(&use, 1);
    }
    // All of it was exercised, not only the way that needs nothing.
    const ExecutorCounters totals = rig_.executor->totals();
    EXPECT_GT(totals.unloads, 20u);
    EXPECT_GT(totals.loads_demand, 20u);
    EXPECT_GT(totals.drops, 0u);
    if (o_.plans && o_.steps > 1000) {
      EXPECT_GT(totals.loads_prefetch, 0u);
    } else if (!o_.plans) {
      EXPECT_EQ(totals.loads_prefetch, 0u);
    }
  }

  const ModelOptions o_;
  uint64_t budget_;
  std::mt19937_64 random_;
  Rig rig_;
  std::vector<std::optional<std::vector<char>>> truth_;
  std::vector<Held> held_;
  std::vector<uint64_t> others_;
};

class ExecutorModel : public ::testing::TestWithParam<ModelOptions> {};

TEST_P(ExecutorModel, BytesAreRightWhateverHappens) { Model(GetParam()).Run(); }

INSTANTIATE_TEST_SUITE_P(
    Seeds, ExecutorModel,
    ::testing::Values(ModelOptions{.seed = 1}, ModelOptions{.seed = 2, .delay = 0}, ModelOptions{.seed = 3, .delay = 5},
                      ModelOptions{.seed = 4, .stress = true}, ModelOptions{.seed = 5, .demand_only = true},
                      ModelOptions{.seed = 6, .plans = true}, ModelOptions{.seed = 7, .plans = true, .delay = 5},
                      ModelOptions{.seed = 8, .faults = true}, ModelOptions{.seed = 9, .plans = true, .faults = true},
                      // Chunks large enough that spare ones are given back in parts.
                      ModelOptions{.seed = 10, .chunk_bytes = 1 << 20, .budget_chunks = 16, .steps = 400},
                      ModelOptions{.seed = 11, .chunk_bytes = 1 << 20, .budget_chunks = 16, .steps = 400, .plans = true},
                      ModelOptions{.seed = 12, .stress = true, .faults = true}),
    Name);

// Threads with facets of their own, one small budget and other tensors that come and go.
TEST(ExecutorThreads, BytesAreRightWhateverTheOthersDo) {
  constexpr uint64_t kChunk = 4096;
  constexpr uint64_t kThreads = 3;
  constexpr uint64_t kEach = 5;
  // What all threads may hold at once: two facets of two chunks each, and one chunk of other tensors.
  constexpr uint64_t kBudget = kThreads * (2 * 2 + 1) * kChunk;
  Rig rig({.budget_bytes = kBudget});
  rig.link->Delay(3);
  for (uint64_t i = 0; i < kThreads * kEach; ++i) rig.Add(1 + i % 2);
  const auto work = [&](uint64_t thread) {
    std::mt19937_64 random(thread + 100);
    std::vector<std::optional<uint64_t>> truth(kEach);
    const auto first = static_cast<uint32_t>(thread * kEach);
    for (int step = 0; step < 500; ++step) {
      const auto i = static_cast<uint32_t>(random() % kEach);
      const auto j = static_cast<uint32_t>((i + 1 + random() % (kEach - 1)) % kEach);
      const uint64_t what = random() % 12;
      if (!truth[i]) {
        truth[i] = random();
        ASSERT_EQ(rig.Create(first + i, *truth[i]), "");
      } else if (what == 0) {
        rig.Discard(first + i);
        truth[i].reset();
      } else if (what == 1) {
        ASSERT_EQ(rig.executor->MakeRoom(kChunk), "");
        ASSERT_EQ(rig.Check(first + i, *truth[i]), "");
        rig.meter.SubtractOther(kChunk);
      } else if (what == 2) {
        rig.executor->UnloadAll();
      } else if (what == 3 && thread == 0) {
        rig.executor->EndStep();
      } else if (what < 7) {
        truth[i] = random();
        ASSERT_EQ(rig.Write(first + i, *truth[i]), "");
      } else if (truth[j]) {
        const policy::Use both[] = {{first + i, kRead}, {first + j, kRead}};
        ASSERT_EQ(rig.executor->Use(both, 2, true), "");
        for (const auto& use : both) rig.owner.BeginTouch(use.facet);
        EXPECT_TRUE(rig.Holds(first + i, *truth[i]));
        EXPECT_TRUE(rig.Holds(first + j, *truth[j]));
        for (const auto& use : both) rig.owner.EndTouch(use.facet);
        rig.executor->EndUse(both, 2);
      }
    }
  };
  std::vector<std::thread> threads;
  for (uint64_t t = 0; t < kThreads; ++t) threads.emplace_back(work, t);
  for (auto& thread : threads) thread.join();
  EXPECT_LE(rig.meter.peak_bytes(), kBudget);
}

}  // namespace
}  // namespace misa::testing
