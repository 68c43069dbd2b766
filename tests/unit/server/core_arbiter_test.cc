// Budgets that the daemon chooses: who comes, who goes, who waits.
#include <gmock/gmock.h>

#include <limits>
#include <map>

#include "tests/unit/server/core_harness.h"

namespace misa::server {
namespace {

using ::testing::HasSubstr;

// Sessions that train: each step they have what they were told of, one boundary later.
class CoreArbiterTest : public ::testing::Test {
 protected:
  // The pool has 100 MiB, 10 of which are kept from elastic budgets.
  LeaseId Start(uint64_t least = 0, uint64_t most = 0, double weight = 0) {
    const LeaseId lease = h_.AttachElastic(least, most, weight);
    Serve(lease);
    return lease;
  }
  void Serve(LeaseId lease) {
    h_.Handle(TrainOpened{lease, CoreHarness::Token(lease)});
    in_force_[lease] = Budget(lease);
  }
  // One step of everybody.
  void Step() {
    for (auto& [lease, bytes] : in_force_) {
      TrainMessage message{lease, {}};
      message.request.mutable_report()->set_budget_serial(serial_[lease]);
      message.request.mutable_report()->set_device_peak_bytes(bytes);
      SetSlowLink(message.request.mutable_report());
      h_.Handle(message);
      for (const SendTrain& sent : h_.sent) {
        if (sent.stream != lease || !sent.response.has_budget()) continue;
        bytes = sent.response.budget().budget_bytes();
        serial_[lease] = sent.response.budget().serial();
      }
    }
  }
  void Steps(int count = 6) {
    for (int i = 0; i < count; ++i) Step();
  }
  void End(LeaseId lease) {
    in_force_.erase(lease);
    h_.Handle(LeaseClosed{lease, "process ended"});
  }
  v1::Session Describe(LeaseId lease) {
    h_.Handle(AdminCall{h_.NewCall(), v1::ListSessionsRequest()});
    const auto list = h_.last<v1::ListSessionsResponse>();
    for (const v1::Session& session : list.sessions()) {
      if (session.pid() == 100 + static_cast<int32_t>(lease)) return session;
    }
    return {};
  }
  uint64_t Budget(LeaseId lease) { return Describe(lease).budget_bytes(); }
  void SetBudget(const std::string& session, uint64_t bytes, bool automatic = false) {
    v1::SetBudgetRequest request;
    request.set_session(session);
    request.set_budget_bytes(bytes);
    request.set_automatic(automatic);
    h_.Handle(AdminCall{h_.NewCall(), request});
  }
  void Trace(LeaseId lease, int modules, uint64_t facet_bytes) {
    h_.Register(lease, MakeModules(modules, facet_bytes));
    TrainMessage message{lease, {}};
    *message.request.mutable_report()->mutable_trace() = MakeTrace(modules);
    message.request.mutable_report()->set_budget_serial(serial_[lease]);
    SetSlowLink(message.request.mutable_report());
    h_.Handle(message);
  }
  // No load hides behind the compute.
  static void SetSlowLink(v1::StepReport* report) {
    report->mutable_measured_link()->set_load_bytes_per_second(1e8);
    report->mutable_measured_link()->set_unload_bytes_per_second(1e8);
  }

  CoreHarness h_;
  std::map<LeaseId, uint64_t> in_force_;
  std::map<LeaseId, uint64_t> serial_;
};

TEST_F(CoreArbiterTest, OneHasAllButTheWatermark) {
  const LeaseId lease = Start();
  EXPECT_EQ(Budget(lease), 90 * kMiB);
  EXPECT_TRUE(Describe(lease).elastic());
  EXPECT_EQ(Describe(lease).weight(), 1.0);
  // Its memfd can take all of the pool; the budget says how much of it may have pages.
  EXPECT_EQ(h_.Node().leased_bytes(), 90 * kMiB);
}

TEST_F(CoreArbiterTest, BudgetsShiftAsSessionsComeAndGo) {
  const LeaseId first = Start();
  const size_t replies = h_.replies.size();
  const LeaseId second = h_.AttachElastic(0, 0, 2);
  EXPECT_EQ(h_.replies.size(), replies);  // it waits for what the first gives back
  EXPECT_EQ(Budget(first), 30 * kMiB);    // which was told so
  Steps();
  Serve(second);
  EXPECT_EQ(Budget(second), 60 * kMiB);
  EXPECT_EQ(h_.Node().leased_bytes(), 90 * kMiB);
  End(second);
  EXPECT_EQ(Budget(first), 90 * kMiB);
  Steps();
  EXPECT_EQ(in_force_[first], 90 * kMiB);
  EXPECT_TRUE(h_.errors.empty());
}

TEST_F(CoreArbiterTest, WhoComesStartsInTheWatermarkWhereOthersAreSlow) {
  Start();
  const size_t replies = h_.replies.size();
  const LeaseId second = h_.AttachElastic(4 * kMiB);
  h_.now.monotonic_seconds += 2;
  h_.Handle(Tick{});
  EXPECT_EQ(h_.replies.size(), replies);
  h_.now.monotonic_seconds += 2;
  h_.Handle(Tick{});
  Serve(second);
  EXPECT_EQ(Budget(second), 10 * kMiB);
  Steps();
  EXPECT_EQ(Budget(second), 45 * kMiB);
}

TEST_F(CoreArbiterTest, WhoWaitsForSomebodyWhoGivesNothingIsRefusedInTime) {
  Start();
  h_.AttachElastic(40 * kMiB);
  h_.now.monotonic_seconds += 16;
  h_.Handle(Tick{});
  EXPECT_EQ(h_.last_reply().error.code, Code::kExhausted);
  EXPECT_THAT(h_.last_reply().error.sentence, HasSubstr("did not within 15 s"));
}

TEST_F(CoreArbiterTest, AFixedBudgetIsMadeRoomForAndStays) {
  const LeaseId elastic = Start(20 * kMiB);
  const size_t replies = h_.replies.size();
  const LeaseId fixed = h_.Attach(50 * kMiB);
  EXPECT_EQ(h_.replies.size(), replies);
  Steps();
  Serve(fixed);
  EXPECT_EQ(Budget(fixed), 50 * kMiB);
  EXPECT_EQ(Budget(elastic), 40 * kMiB);
  Start();
  Steps(20);
  EXPECT_EQ(Budget(fixed), 50 * kMiB);
  // More than the elastic ones can give is refused at once.
  h_.Attach(40 * kMiB);
  EXPECT_EQ(h_.last_reply().error.code, Code::kExhausted);
}

TEST_F(CoreArbiterTest, NobodyGoesBelowWhatItsStepNeeds) {
  const LeaseId first = Start();
  Trace(first, 3, 40 * kMiB);
  EXPECT_GE(Describe(first).least_budget_bytes(), 40 * kMiB);
  const LeaseId second = h_.AttachElastic(0, 0, 100);
  Steps(10);
  Serve(second);
  Steps(10);
  EXPECT_GE(Budget(first), 40 * kMiB);
  EXPECT_EQ(Budget(first) + Budget(second), h_.Node().leased_bytes());
}

TEST_F(CoreArbiterTest, AStepThatTurnsOutToNeedMoreGetsIt) {
  const LeaseId first = Start();
  const LeaseId second = h_.AttachElastic(0, 0, 8);
  Steps();
  Serve(second);
  EXPECT_EQ(Budget(first), 10 * kMiB);
  TrainMessage message{first, {}};
  message.request.mutable_budget_request()->set_bytes(30 * kMiB);
  h_.Handle(message);
  EXPECT_EQ(h_.CountEvents("budget_asked"), 1);
  Steps();
  EXPECT_EQ(Budget(first), 30 * kMiB);
  EXPECT_EQ(in_force_[first], 30 * kMiB);
  EXPECT_EQ(Budget(second), 60 * kMiB);
}

TEST_F(CoreArbiterTest, WhatAnOperatorSetsStaysUntilItIsHandedBack) {
  const LeaseId first = Start();
  SetBudget("s1", 20 * kMiB);
  EXPECT_TRUE(h_.last_reply().error.ok());
  Steps();
  EXPECT_EQ(Budget(first), 20 * kMiB);
  const LeaseId second = Start();
  EXPECT_EQ(Budget(second), 70 * kMiB);
  EXPECT_FALSE(Describe(first).elastic());
  SetBudget("s1", 0, true);
  Steps(10);
  EXPECT_EQ(Budget(first), 45 * kMiB);
  EXPECT_EQ(Budget(second), 45 * kMiB);
}

TEST_F(CoreArbiterTest, TheInfluenceOfBytesIsMeasuredAndCounts) {
  const LeaseId first = Start();
  Trace(first, 4, 2 * kMiB);  // 8 MiB are all that it can use
  ASSERT_GE(Describe(first).influence_size(), 2);
  EXPECT_NEAR(Describe(first).influence(Describe(first).influence_size() - 1).stall_seconds(), 0, 1e-9);
  const LeaseId second = h_.AttachElastic();
  Steps(10);
  Serve(second);
  Trace(second, 20, 4 * kMiB);
  Steps(20);
  EXPECT_LT(Budget(first), 15 * kMiB);
  EXPECT_GT(Budget(second), 75 * kMiB);
}

TEST_F(CoreArbiterTest, RefusesRangesAndWeightsThatMakeNoSense) {
  h_.AttachElastic(20 * kMiB, 10 * kMiB);
  EXPECT_EQ(h_.last_reply().error.code, Code::kInvalid);
  h_.AttachElastic(200 * kMiB, 300 * kMiB);
  EXPECT_FALSE(h_.last_reply().error.ok());
  h_.AttachElastic(0, 0, -1);
  EXPECT_EQ(h_.last_reply().error.code, Code::kInvalid);
  h_.AttachElastic(0, 0, std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(h_.last_reply().error.code, Code::kInvalid);
  EXPECT_EQ(h_.Node().free_bytes(), 100 * kMiB);
}

TEST_F(CoreArbiterTest, ALargerBudgetIsAnnouncedOnceTheJournalKnowsOfIt) {
  const LeaseId first = Start();
  const LeaseId second = h_.AttachElastic();
  Steps();
  Serve(second);
  h_.hold = true;
  End(second);
  h_.Answer();  // its memory is free
  const size_t sent = h_.sent.size();
  EXPECT_EQ(h_.journal.at(0).bytes, 90 * kMiB);
  EXPECT_EQ(h_.sent.size(), sent);
  h_.Answer();  // and that is on the disk
  ASSERT_GT(h_.sent.size(), sent);
  EXPECT_EQ(h_.sent[sent].response.budget().budget_bytes(), 90 * kMiB);
  (void)first;
}

TEST_F(CoreArbiterTest, ANewStreamIsToldOfTheBudget) {
  const LeaseId first = Start();
  const LeaseId second = h_.AttachElastic();
  Steps();
  Serve(second);
  h_.Handle(TrainClosed{first});
  End(second);
  h_.sent.clear();
  h_.Handle(TrainOpened{77, CoreHarness::Token(first)});
  ASSERT_FALSE(h_.sent.empty());
  EXPECT_EQ(h_.sent[0].response.budget().budget_bytes(), 90 * kMiB);
}

}  // namespace
}  // namespace misa::server
