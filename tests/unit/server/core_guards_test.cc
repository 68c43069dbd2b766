// Losses, modules that keep their place, batches.
#include <gmock/gmock.h>

#include <cmath>
#include <limits>
#include <set>

#include "tests/unit/server/core_harness.h"

namespace misa::server {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class CoreGuardsTest : public ::testing::Test {
 protected:
  void Begin(const CoreOptions& options, const v1::RegisterModulesRequest& modules, uint64_t budget = 4 * kMiB) {
    h_.emplace(options);
    lease_ = h_->Attach(budget);
    h_->Register(lease_, modules);
    ASSERT_TRUE(h_->last_reply().error.ok()) << h_->last_reply().error.sentence;
    h_->Handle(TrainOpened{1, CoreHarness::Token(lease_)});
  }
  void Report(v1::StepReport report) {
    report.set_step(++step_);
    TrainMessage message{1, {}};
    *message.request.mutable_report() = std::move(report);
    h_->Handle(message);
  }
  void Loss(double loss) {
    v1::StepReport report;
    report.set_loss(loss);
    Report(report);
  }
  v1::GuardStatus Guards() {
    h_->Handle(AdminCall{h_->NewCall(), v1::ListSessionsRequest()});
    return h_->last<v1::ListSessionsResponse>().sessions(0).guards();
  }
  std::string LastCause(const std::string& kind) const {
    std::string cause;
    for (const v1::Event& event : h_->events) {
      if (event.kind() == kind) cause = event.cause();
    }
    return cause;
  }
  // Facets that the newest plan moves.
  std::set<uint32_t> Moved() const {
    std::set<uint32_t> moved;
    for (const v1::PlanAction& action : h_->sent.back().response.plan().actions()) moved.insert(action.facet());
    return moved;
  }
  // Steps whose statistics make the modules' importance rise with their index.
  v1::StepReport Statistics(int modules) {
    v1::StepReport report;
    for (int i = 0; i < modules; ++i) {
      v1::ModuleStatistics* item = report.add_statistics();
      item->set_module(static_cast<uint32_t>(i));
      item->set_sum_squares(1.0 + i);
      item->set_count(1);
    }
    return report;
  }

  std::optional<CoreHarness> h_;
  LeaseId lease_ = 0;
  uint64_t step_ = 0;
};

TEST_F(CoreGuardsTest, ALossThatIsNoNumberIsOneEventForARowOfThem) {
  Begin(CoreHarness::Defaults(), MakeModules(3));
  Loss(3);
  for (int i = 0; i < 5; ++i) Loss(std::nan(""));
  EXPECT_EQ(h_->CountEvents("loss_refused"), 1);
  EXPECT_THAT(LastCause("loss_refused"), HasSubstr("step 2: The loss is not a finite number"));
  EXPECT_EQ(Guards().loss(), 3);
  Loss(2);
  Loss(std::numeric_limits<double>::infinity());
  EXPECT_EQ(h_->CountEvents("loss_refused"), 2);
  EXPECT_EQ(Guards().loss(), 2);
}

TEST_F(CoreGuardsTest, ImportanceIsInForceOnceTheLossIsStable) {
  Begin(CoreHarness::Defaults(), MakeModules(3));
  for (int i = 0; i < 58; ++i) Loss(3);
  EXPECT_FALSE(Guards().loss_stable());
  EXPECT_FALSE(Guards().importance_in_force());
  Loss(3);
  EXPECT_TRUE(Guards().loss_stable());
  EXPECT_TRUE(Guards().importance_in_force());
  EXPECT_EQ(h_->CountEvents("loss_stable"), 1);
  EXPECT_THAT(LastCause("loss_stable"), HasSubstr("after 59 losses, at 3"));
}

TEST_F(CoreGuardsTest, WithoutALossTwoWindowsHaveToPass) {
  Begin(CoreHarness::Defaults(), MakeModules(3));
  for (int i = 0; i < 99; ++i) Report({});
  EXPECT_FALSE(Guards().importance_in_force());
  Report({});
  EXPECT_TRUE(Guards().importance_in_force());
  Loss(5);
  EXPECT_FALSE(Guards().importance_in_force()) << "now there is one to wait for";
}

TEST_F(CoreGuardsTest, SwingsRaiseAlphaAndHotUntilTheyHaveEnded) {
  Begin(CoreHarness::Defaults(), MakeModules(3));
  for (int i = 0; i < 96; ++i) Loss(3 + std::sin(i * 6.283185307 / 12));
  v1::GuardStatus guards = Guards();
  EXPECT_EQ(guards.swing_level(), 1u);
  EXPECT_EQ(guards.swing_period_steps(), 12u);
  EXPECT_DOUBLE_EQ(guards.alpha(), 0.375);
  EXPECT_DOUBLE_EQ(guards.hot(), 0.8);
  EXPECT_THAT(LastCause("loss_swings"), HasSubstr("period of 12 steps"));
  // A change of the policy keeps what is raised.
  v1::SetPolicyRequest policy;
  policy.set_alpha(0.2);
  h_->Handle(AdminCall{h_->NewCall(), policy});
  EXPECT_DOUBLE_EQ(Guards().alpha(), 0.3);
  for (int i = 0; i < 400; ++i) Loss(3);
  guards = Guards();
  EXPECT_EQ(guards.swing_level(), 0u);
  EXPECT_DOUBLE_EQ(guards.alpha(), 0.2);
  EXPECT_EQ(h_->CountEvents("loss_calm"), 1);
}

TEST_F(CoreGuardsTest, SwingsAreLeftAloneWhereTheConfigurationSaysSo) {
  CoreOptions options = CoreHarness::Defaults();
  options.policy.guards.watch_swings = false;
  Begin(options, MakeModules(3));
  for (int i = 0; i < 200; ++i) Loss(3 + std::sin(i * 6.283185307 / 12));
  EXPECT_EQ(h_->CountEvents("loss_swings"), 0);
  EXPECT_DOUBLE_EQ(Guards().alpha(), 0.25);
}

TEST_F(CoreGuardsTest, ModulesThatTheTrainerPinsAreNotPlanned) {
  v1::RegisterModulesRequest modules = MakeModules(8);
  Begin(CoreHarness::Defaults(), modules, 6 * kMiB);
  v1::StepReport report;
  *report.mutable_trace() = MakeTrace(8);
  Report(report);
  EXPECT_THAT(Moved(), Not(IsEmpty()));
  EXPECT_EQ(Guards().kept_modules(), 0u);

  for (const int pinned : {2, 5}) modules.mutable_modules(pinned)->set_pinned(true);
  Begin(CoreHarness::Defaults(), modules, 6 * kMiB);
  Report(report);
  EXPECT_THAT(Moved(), Not(Contains(12u)));
  EXPECT_THAT(Moved(), Not(Contains(15u)));
  EXPECT_THAT(Moved(), Not(IsEmpty()));
  EXPECT_EQ(Guards().kept_modules(), 2u);
  EXPECT_EQ(Guards().kept_bytes(), 2 * kMiB);
}

TEST_F(CoreGuardsTest, PinsGiveWayStepByStepAsTheBudgetShrinks) {
  v1::RegisterModulesRequest modules = MakeModules(8);
  for (int i = 0; i < 8; ++i) modules.mutable_modules(i)->set_pinned(true);
  Begin(CoreHarness::Defaults(), modules, 8 * kMiB);
  v1::StepReport report = Statistics(8);
  *report.mutable_trace() = MakeTrace(8);
  Report(report);
  uint32_t before = 9;
  for (const uint64_t budget : {8, 6, 4, 2}) {
    v1::SetBudgetRequest request;
    request.set_session("s1");
    request.set_budget_bytes(budget * kMiB);
    h_->Handle(AdminCall{h_->NewCall(), request});
    ASSERT_TRUE(h_->last_reply().error.ok()) << h_->last_reply().error.sentence;
    const uint32_t kept = Guards().kept_modules();
    EXPECT_LT(kept, before) << budget;
    EXPECT_EQ(kept, (budget - 1) / 2) << "half of what the step does not need at once";
    before = kept;
  }
}

TEST_F(CoreGuardsTest, HotModulesKeepTheirPlaceOnceTheLossIsStable) {
  CoreOptions options = CoreHarness::Defaults();
  options.policy.keep_hot = true;
  v1::RegisterModulesRequest modules = MakeModules(8);
  modules.mutable_modules(0)->set_kind("embedding");
  Begin(options, modules, 6 * kMiB);
  v1::StepReport first = Statistics(8);
  *first.mutable_trace() = MakeTrace(8);
  first.set_loss(3);
  Report(first);
  EXPECT_EQ(Guards().kept_modules(), 1u) << "the embedding; importance waits";
  EXPECT_THAT(Moved(), Not(Contains(10u)));
  for (int i = 0; i < 70; ++i) {
    v1::StepReport report = Statistics(8);
    report.set_loss(3);
    Report(report);
  }
  ASSERT_TRUE(Guards().importance_in_force());
  EXPECT_EQ(Guards().kept_modules(), 2u) << "of the hot ones one more fits into half the room";
  EXPECT_THAT(Moved(), Not(Contains(10u)));
  EXPECT_THAT(Moved(), Not(Contains(17u))) << "the most important one";
}

TEST_F(CoreGuardsTest, BatchesAreHintedFromTheTraceAndTheFreeMemory) {
  Begin(CoreHarness::Defaults(), MakeModules(3), 8 * kMiB);
  EXPECT_EQ(Guards().most_share(), 0);
  v1::StepReport report;
  *report.mutable_trace() = MakeTrace(3);
  report.mutable_trace()->mutable_entries(2)->set_other_bytes(kMiB);
  report.set_device_peak_bytes(4 * kMiB);
  report.set_rows(4);
  Report(report);
  const v1::GuardStatus guards = Guards();
  EXPECT_DOUBLE_EQ(guards.most_share(), 7);
  EXPECT_DOUBLE_EQ(guards.free_share(), 5);
  EXPECT_EQ(guards.free_rows(), 20u);
  EXPECT_EQ(guards.most_rows(), 28u);
}

// The trainer's side of mode sampled: what it reports of a step, and how its sampler goes on.
TEST_F(CoreGuardsTest, TheMirrorWaitsWithTheTrainerAndCountsItsStepsAsItDoes) {
  h_.emplace(CoreHarness::Defaults());
  lease_ = h_->Attach(4 * kMiB, v1::MODE_SAMPLED);
  h_->Register(lease_, MakeModules(6));
  h_->Handle(TrainOpened{1, CoreHarness::Token(lease_)});
  std::vector<policy::SamplerModule> modules;
  for (int i = 0; i < 6; ++i) modules.push_back({"m" + std::to_string(i), 100});
  policy::ModuleSampler sampler({0.5, 1, 0.1, 2, 3}, modules);
  for (int step = 0; step < 12; ++step) {
    v1::StepReport report = Statistics(6);
    const bool waits = step < 5;
    report.set_sampling_waits(waits);
    report.set_counted_steps(step % 2 == 0 ? 0 : 2);
    if (!waits) {
      for (const uint32_t module : sampler.active()) sampler.Observe(module, {0, 1.0 + module, 1});
      sampler.EndStep(step % 2 == 0 ? 1 : 2);
    }
    report.set_round(sampler.round());
    report.set_sampler_digest(sampler.Digest());
    Report(report);
    ASSERT_EQ(h_->CountEvents("sampler_mismatch") + h_->CountEvents("sampler_unmirrored"), 0) << step;
  }
  v1::StepReport report;
  report.set_sampler_digest(sampler.Digest());
  Report(report);
  EXPECT_EQ(h_->CountEvents("sampler_mismatch"), 1)
      << "it was followed: here the trainer's stood still and said nothing";
}

TEST_F(CoreGuardsTest, DependenciesThatCannotBeAreRefusedWithTheModules) {
  const auto attach = [&](const std::vector<std::pair<std::string, std::string>>& needs) {
    h_.emplace(CoreHarness::Defaults());
    h_->Handle(LeaseOpened{1, "token1", 101, 0, 7, "test"});
    AttachCall call{h_->NewCall(), "token1", {}};
    call.request.set_protocol_version(1);
    call.request.set_budget_bytes(4 * kMiB);
    call.request.set_mode(v1::MODE_SAMPLED);
    v1::SamplingOptions* sampling = call.request.mutable_sampling();
    sampling->set_delta(0.5);
    sampling->set_alpha(0.1);
    sampling->set_inner_steps(2);
    for (const auto& [module, other] : needs) {
      v1::ModuleDependency* dependency = sampling->add_dependencies();
      dependency->set_module(module);
      dependency->set_kind(v1::DEPENDENCY_KIND_NEEDS);
      dependency->set_other(other);
    }
    h_->Handle(call);
    EXPECT_TRUE(h_->last_reply().error.ok()) << h_->last_reply().error.sentence;
    h_->Register(1, MakeModules(6));
    return h_->last_reply().error;
  };
  EXPECT_TRUE(attach({{"m0", "m1"}}).ok());
  const Error error = attach({{"m0", "nothing"}});
  EXPECT_EQ(error.code, Code::kInvalid);
  EXPECT_THAT(error.sentence, HasSubstr("the module \"nothing\", and there is none of this name"));
}

TEST_F(CoreGuardsTest, SparseAttentionHasAShorterWindow) {
  CoreOptions options = CoreHarness::Defaults();
  options.policy.window = 3;
  options.policy.alpha = 1;
  options.policy.signal = policy::Signal::kSquaredNorm;
  v1::RegisterModulesRequest modules = MakeModules(2);
  for (int i = 0; i < 2; ++i) modules.mutable_modules(i)->set_kind("attention.query");
  modules.mutable_modules(1)->set_name("longformer.query");
  Begin(options, modules);
  for (const double value : {6.0, 0.0, 0.0}) {
    v1::StepReport report;
    for (uint32_t i = 0; i < 2; ++i) {
      v1::ModuleStatistics* item = report.add_statistics();
      item->set_module(i);
      item->set_sum_squares(value);
      item->set_count(1);
    }
    Report(report);
  }
  h_->Handle(AdminCall{h_->NewCall(), v1::ListModulesRequest()});
  const v1::ListModulesResponse listed = h_->last<v1::ListModulesResponse>();
  EXPECT_DOUBLE_EQ(listed.modules(0).importance(), 2);
  EXPECT_DOUBLE_EQ(listed.modules(1).importance(), 0) << "the first step is out of its window of two";
}

}  // namespace
}  // namespace misa::server
