// One fixed piece of work, once for every operation of the link that can fail in it.
#include <gtest/gtest.h>

#include <cerrno>
#include <cstring>
#include <optional>

#include "tests/unit/client/core/executor_rig.h"

namespace misa::testing {
namespace {

using policy::kRead;
using policy::kWrite;

constexpr uint64_t kChunk = 4096;
constexpr uint64_t kBudget = 7 * kChunk;

struct Outcome {
  uint64_t operations = 0;
  int sentences = 0;
};

// Goes on after every failure, as a user who catches the error would, and checks all content at the end.
Outcome Work(uint64_t failing, int error) {
  Rig rig({.budget_bytes = kBudget});
  if (failing > 0) rig.link->FailNthOfBoth(failing, error);
  Outcome outcome;
  std::vector<std::optional<uint64_t>> truth;
  uint64_t pattern = 0;
  const auto note = [&](const std::string& sentence) {
    if (sentence.empty()) return true;
    ++outcome.sentences;
    EXPECT_EQ(sentence.find("other bytes"), std::string::npos) << sentence;
    return false;
  };
  const auto write = [&](uint32_t id) {
    ++pattern;
    if (truth[id] ? note(rig.Write(id, pattern)) : note(rig.Create(id, pattern))) truth[id] = pattern;
  };
  const auto read = [&](uint32_t id) {
    if (truth[id]) note(rig.Check(id, *truth[id]));
  };
  for (uint64_t size : {2, 2, 1, 3, 1, 2}) {
    truth.emplace_back();
    write(rig.Add(size));
  }
  for (uint32_t id = 0; id < truth.size(); ++id) read(id);
  for (uint32_t id : {0, 2, 4}) write(id);
  for (uint32_t id = 0; id < truth.size(); ++id) read(id);
  if (note(rig.executor->MakeRoom(3 * kChunk))) {
    for (uint32_t id = 0; id < truth.size(); ++id) read(id);
    rig.meter.SubtractOther(3 * kChunk);
  }
  rig.Discard(3);
  truth[3].reset();
  write(3);
  rig.SendAway();
  // Two at once, the second of which may be the one that fails.
  for (uint32_t id : {0, 2, 4}) {
    if (!truth[id] || !truth[id + 1]) continue;
    const policy::Use both[] = {{id, kRead}, {id + 1, kRead | kWrite}};
    if (!note(rig.executor->Use(both, 2, true))) continue;
    for (const auto& use : both) rig.owner.BeginTouch(use.facet);
    EXPECT_TRUE(rig.Holds(id, *truth[id]));
    EXPECT_TRUE(rig.Holds(id + 1, *truth[id + 1]));
    for (const auto& use : both) rig.owner.EndTouch(use.facet);
    rig.executor->EndUse(both, 2);
  }
  rig.SendAway();
  outcome.operations = rig.link->submitted();
  if (!rig.executor->TakeProblem().empty()) ++outcome.sentences;
  EXPECT_LE(rig.meter.peak_bytes(), kBudget);
  // The link works again: everything is there, whatever was refused on the way.
  rig.SendAway();
  for (uint32_t id = 0; id < truth.size(); ++id) {
    EXPECT_EQ(rig.facet(id).pins.load(), 0);
    if (truth[id]) {
      EXPECT_EQ(rig.Check(id, *truth[id]), "");
    }
  }
  return outcome;
}

class EveryFailurePoint : public ::testing::TestWithParam<int> {};

TEST_P(EveryFailurePoint, LeavesTheContentAndASentence) {
  const Outcome whole = Work(0, 0);
  EXPECT_EQ(whole.sentences, 0);
  ASSERT_GT(whole.operations, 20u);
  for (uint64_t n = 1; n <= whole.operations; ++n) {
    SCOPED_TRACE("operation " + std::to_string(n));
    // What fails may change how many operations follow, so the last ones may not come to pass.
    const Outcome outcome = Work(n, GetParam());
    if (outcome.operations >= n) {
      EXPECT_GT(outcome.sentences, 0);
    }
    if (HasFailure()) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Errors, EveryFailurePoint, ::testing::Values(EIO, ENOSPC),
                         [](const auto& info) { return std::string(info.param == EIO ? "Eio" : "Enospc"); });

}  // namespace
}  // namespace misa::testing
