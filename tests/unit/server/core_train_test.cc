// Reports, plans, budgets.
#include <gmock/gmock.h>

#include <limits>

#include "tests/unit/server/core_harness.h"

namespace misa::server {
namespace {

using ::testing::HasSubstr;

class CoreTrainTest : public ::testing::Test {
 protected:
  void Begin(int modules = 6, uint64_t budget = 4 * kMiB, v1::Mode mode = v1::MODE_EXACT) {
    lease_ = h_.Attach(budget, mode);
    ASSERT_TRUE(h_.last_reply().error.ok()) << h_.last_reply().error.sentence;
    h_.Register(lease_, MakeModules(modules));
    ASSERT_TRUE(h_.last_reply().error.ok()) << h_.last_reply().error.sentence;
    h_.Handle(TrainOpened{1, CoreHarness::Token(lease_)});
  }
  void Report(const v1::StepReport& report) {
    TrainMessage message{1, {}};
    *message.request.mutable_report() = report;
    h_.Handle(message);
  }
  void Trace(int modules = 6) {
    v1::StepReport report;
    *report.mutable_trace() = MakeTrace(modules);
    Report(report);
  }
  void Acknowledge(uint64_t version, bool accepted) {
    TrainMessage message{1, {}};
    message.request.mutable_acknowledgement()->set_version(version);
    message.request.mutable_acknowledgement()->set_accepted(accepted);
    message.request.mutable_acknowledgement()->set_reason("no room");
    h_.Handle(message);
  }
  v1::Session Describe() {
    h_.Handle(AdminCall{h_.NewCall(), v1::ListSessionsRequest()});
    return h_.last<v1::ListSessionsResponse>().sessions(0);
  }
  void SetBudget(uint64_t bytes) {
    v1::SetBudgetRequest request;
    request.set_session("s1");
    request.set_budget_bytes(bytes);
    h_.Handle(AdminCall{h_.NewCall(), request});
  }

  CoreHarness h_;
  LeaseId lease_ = 0;
};

TEST_F(CoreTrainTest, PlansATraceInTheTrainersOwnIds) {
  Begin();
  Trace();
  ASSERT_EQ(h_.sent.size(), 1u);
  const v1::Plan& plan = h_.sent[0].response.plan();
  EXPECT_EQ(plan.version(), 1u);
  EXPECT_GT(plan.actions_size(), 0);
  for (const v1::PlanAction& action : plan.actions()) {
    EXPECT_GE(action.facet(), 10u);
    EXPECT_LT(action.facet(), 16u);
  }
  Acknowledge(1, true);
  EXPECT_EQ(Describe().plan_version(), 1u);
  EXPECT_GT(Describe().bound_step_seconds(), 0.0);
  // Nothing changed: nothing is sent.
  for (int i = 0; i < 10; ++i) Report({});
  EXPECT_EQ(h_.sent.size(), 1u);
}

TEST_F(CoreTrainTest, ARefusedPlanLeavesTheOldOneInForce) {
  Begin();
  Trace();
  Acknowledge(1, true);
  Trace();
  Acknowledge(2, false);
  EXPECT_EQ(Describe().plan_version(), 1u);
  EXPECT_THAT(Describe().last_problem(), HasSubstr("plan 2: no room"));
  EXPECT_EQ(h_.CountEvents("plan_refused"), 1);
  Acknowledge(9, true);  // never sent
  EXPECT_EQ(Describe().plan_version(), 1u);
}

TEST_F(CoreTrainTest, APlanThatCannotBeMadeIsAnEvent) {
  Begin(6, kMiB / 2);
  Trace();
  EXPECT_TRUE(h_.sent.empty());
  EXPECT_EQ(h_.CountEvents("plan_failed"), 1);
  EXPECT_NE(Describe().last_problem(), "");
}

TEST_F(CoreTrainTest, RefusesTracesThatMakeNoSense) {
  Begin();
  v1::StepReport report;
  *report.mutable_trace() = MakeTrace(6);
  report.mutable_trace()->mutable_entries(3)->set_facets(0, 999);
  Report(report);
  EXPECT_THAT(Describe().last_problem(), HasSubstr("facet 999, which is not registered"));
  *report.mutable_trace() = MakeTrace(6);
  report.mutable_trace()->set_digest(1);
  Report(report);
  EXPECT_THAT(Describe().last_problem(), HasSubstr("its digest is not that of its entries"));
  *report.mutable_trace() = MakeTrace(6);
  report.mutable_trace()->mutable_entries(0)->add_facets(11);
  Report(report);
  EXPECT_THAT(Describe().last_problem(), HasSubstr("2 facets and 1 access flags"));
  EXPECT_TRUE(h_.sent.empty());
  EXPECT_EQ(h_.CountEvents("plan_failed"), 3);
}

TEST_F(CoreTrainTest, GivesTheTraceAsAFile) {
  Begin();
  const auto get = [&](const std::string& name) {
    v1::GetTraceRequest request;
    request.set_session(name);
    h_.Handle(AdminCall{h_.NewCall(), request});
    return h_.last_reply().error;
  };
  EXPECT_THAT(get("s1").sentence, HasSubstr("has no trace yet"));
  EXPECT_EQ(get("s9").code, Code::kNotFound);
  Trace();
  ASSERT_TRUE(get("s1").ok());
  const auto file = trace::Decode(h_.last<v1::GetTraceResponse>().file());
  ASSERT_EQ(file.error, "");
  EXPECT_EQ(file.value.budget_bytes, 4 * kMiB);
  ASSERT_EQ(file.value.facets.size(), 6u);
  EXPECT_EQ(file.value.facets[2], (trace::FacetInfo{"m2", trace::FacetKind::kWeights, kMiB}));
  ASSERT_EQ(file.value.sections.size(), 1u);
  EXPECT_EQ(file.value.sections[0].trace.entries.size(), 12u);
  EXPECT_EQ(file.value.sections[0].trace.entries[6].uses[0].facet, 5u);
}

TEST_F(CoreTrainTest, KeepsTheTraceOfEachMode) {
  Begin();
  Trace();
  v1::StepReport report;
  v1::ModeTrace* eval = report.add_mode_traces();
  eval->set_mode(v1::TRACE_MODE_EVAL);
  *eval->mutable_trace() = MakeTrace(4);
  Report(report);
  *report.mutable_mode_traces(0)->mutable_trace() = MakeTrace(3);
  Report(report);
  EXPECT_EQ(h_.sent.size(), 1u);  // no plan follows from them
  v1::GetTraceRequest request;
  request.set_session("s1");
  h_.Handle(AdminCall{h_.NewCall(), request});
  const auto file = trace::Decode(h_.last<v1::GetTraceResponse>().file());
  ASSERT_EQ(file.error, "");
  ASSERT_EQ(file.value.sections.size(), 2u);
  EXPECT_EQ(file.value.Find(trace::TraceMode::kTrain)->trace.entries.size(), 12u);
  EXPECT_EQ(file.value.Find(trace::TraceMode::kEval)->trace.entries.size(), 6u);
  // What makes no sense is refused, and the one before stays.
  report.mutable_mode_traces(0)->mutable_trace()->mutable_entries(0)->set_facets(0, 999);
  Report(report);
  EXPECT_THAT(Describe().last_problem(), HasSubstr("facet 999, which is not registered"));
  report.mutable_mode_traces(0)->set_mode(v1::TRACE_MODE_TRAIN);
  *report.mutable_mode_traces(0)->mutable_trace() = MakeTrace(6);
  Report(report);
  EXPECT_THAT(Describe().last_problem(), HasSubstr("of mode 1"));
  EXPECT_EQ(h_.CountEvents("plan_failed"), 0);
}

TEST_F(CoreTrainTest, PlansAgainWhenTheLinkHasMoved) {
  Begin();
  Trace();
  v1::StepReport report;
  report.mutable_measured_link()->set_load_bytes_per_second(1.2e9);
  for (int i = 0; i < 8; ++i) Report(report);
  EXPECT_EQ(h_.sent.size(), 1u);  // within a quarter
  report.mutable_measured_link()->set_load_bytes_per_second(3e8);
  Report(report);
  EXPECT_EQ(h_.sent.size(), 2u);
  // At most every few steps, whatever the rates do.
  report.mutable_measured_link()->set_load_bytes_per_second(3e9);
  for (int i = 0; i < 4; ++i) Report(report);
  EXPECT_EQ(h_.sent.size(), 2u);
  Report(report);
  EXPECT_EQ(h_.sent.size(), 3u);
  report.mutable_measured_link()->set_load_bytes_per_second(std::numeric_limits<double>::quiet_NaN());
  for (int i = 0; i < 8; ++i) Report(report);
  EXPECT_EQ(h_.CountEvents("plan_failed"), 0);
}

TEST_F(CoreTrainTest, ALowerBudgetIsGivenBackOnceTheTrainerLivesWithinIt) {
  Begin();
  Trace();
  Acknowledge(1, true);
  SetBudget(3 * kMiB);
  ASSERT_TRUE(h_.last_reply().error.ok()) << h_.last_reply().error.sentence;
  ASSERT_EQ(h_.sent.size(), 3u);
  EXPECT_EQ(h_.sent[1].response.budget().budget_bytes(), 3 * kMiB);
  EXPECT_EQ(h_.sent[2].response.plan().version(), 2u);
  EXPECT_EQ(h_.Node().leased_bytes(), 4 * kMiB);
  v1::StepReport report;
  report.set_device_peak_bytes(3 * kMiB);
  Report(report);
  EXPECT_EQ(h_.Node().leased_bytes(), 4 * kMiB);
  report.set_budget_serial(h_.sent[1].response.budget().serial());
  report.set_device_peak_bytes(4 * kMiB);
  Report(report);
  EXPECT_EQ(h_.Node().leased_bytes(), 4 * kMiB);  // the peak is still above
  report.set_device_peak_bytes(3 * kMiB);
  Report(report);
  EXPECT_EQ(h_.Node().leased_bytes(), 3 * kMiB);
  SetBudget(4 * kMiB);
  EXPECT_TRUE(h_.last_reply().error.ok());
  EXPECT_EQ(h_.Node().leased_bytes(), 4 * kMiB);
  SetBudget(5 * kMiB);
  EXPECT_EQ(h_.last_reply().error.code, Code::kPrecondition);
  SetBudget(kMiB / 2);
  EXPECT_EQ(h_.last_reply().error.code, Code::kPrecondition);
}

TEST_F(CoreTrainTest, ATraceOutlivesAnotherLayoutOfItsFacets) {
  Begin(6, 8 * kMiB);
  Trace();
  ASSERT_EQ(h_.sent.size(), 1u);
  // A module that comes in between moves the places of the others, and one has another size.
  v1::RegisterModulesRequest request = MakeModules(6, kMiB);
  v1::Facet* optimizer = request.mutable_modules(0)->add_facets();
  optimizer->set_id(99);
  optimizer->set_kind(v1::FACET_KIND_OPTIMIZER);
  optimizer->set_device_bytes(kMiB);
  request.mutable_modules(5)->mutable_facets(0)->set_device_bytes(3 * kMiB);
  h_.Register(lease_, request);
  ASSERT_EQ(h_.sent.size(), 2u);  // planned anew without a word of the trainer
  EXPECT_EQ(h_.sent[1].response.plan().trace_digest(), h_.sent[0].response.plan().trace_digest());
  SetBudget(2 * kMiB);
  EXPECT_EQ(h_.last_reply().error.code, Code::kPrecondition);  // 3 MiB are needed at once
}

TEST_F(CoreTrainTest, APlanThatFailedIsTriedAgainLaterAndLater) {
  Begin(6, kMiB / 2 + kMiB / 4);
  Trace();
  EXPECT_EQ(h_.CountEvents("plan_failed"), 1);
  for (int i = 0; i < 8; ++i) Report({});
  EXPECT_EQ(h_.CountEvents("plan_failed"), 2);
  for (int i = 0; i < 15; ++i) Report({});
  EXPECT_EQ(h_.CountEvents("plan_failed"), 2);
  Report({});
  EXPECT_EQ(h_.CountEvents("plan_failed"), 3);
}

TEST_F(CoreTrainTest, AChangeWhileAPlanIsMadeMakesAnother) {
  Begin();
  h_.hold = true;
  Trace();
  Trace(5);
  EXPECT_EQ(h_.held.size(), 1u);
  h_.hold = false;
  h_.Answer();
  ASSERT_EQ(h_.sent.size(), 1u);  // the outdated one is not sent
  EXPECT_EQ(h_.CountEvents("plan_sent"), 1);
}

TEST_F(CoreTrainTest, ANewStreamTakesOver) {
  Begin();
  h_.Handle(TrainOpened{2, CoreHarness::Token(lease_)});
  ASSERT_EQ(h_.finished.size(), 1u);
  EXPECT_EQ(h_.finished[0].stream, 1u);
  h_.Handle(TrainClosed{1});
  TrainMessage message{2, {}};
  *message.request.mutable_report()->mutable_trace() = MakeTrace(6);
  h_.Handle(message);
  ASSERT_EQ(h_.sent.size(), 1u);
  EXPECT_EQ(h_.sent[0].stream, 2u);
  h_.Handle(TrainOpened{3, "nobody"});
  EXPECT_EQ(h_.finished.back().error.code, Code::kUnauthenticated);
}

TEST_F(CoreTrainTest, StatisticsThatAreNotFiniteAreRefusedOnceAStep) {
  Begin();
  v1::StepReport report;
  for (uint32_t i = 0; i < 6; ++i) {
    v1::ModuleStatistics* statistics = report.add_statistics();
    statistics->set_module(i);
    statistics->set_count(2);
    statistics->set_sum_squares(i == 0 ? 2.0 : std::numeric_limits<double>::infinity());
  }
  Report(report);
  EXPECT_EQ(h_.CountEvents("statistics_refused"), 1);
  h_.Handle(AdminCall{h_.NewCall(), v1::ListModulesRequest()});
  const auto modules = h_.last<v1::ListModulesResponse>();
  EXPECT_EQ(modules.modules(0).importance(), 1.0);
  EXPECT_EQ(modules.modules(1).importance(), 0.0);
}

TEST_F(CoreTrainTest, FollowsTheSamplerAndTellsWhenItParts) {
  Begin(6, 4 * kMiB, v1::MODE_SAMPLED);
  std::vector<policy::SamplerModule> modules;
  for (int i = 0; i < 6; ++i) modules.push_back({"m" + std::to_string(i), 100});
  policy::ModuleSampler sampler({0.5, 1, 0.1, 2, 3}, modules);
  for (int step = 0; step < 7; ++step) {
    v1::StepReport report;
    report.set_step(static_cast<uint64_t>(step));
    report.set_round(sampler.round());
    for (const uint32_t module : sampler.active()) {
      report.add_active_modules(module);
      v1::ModuleStatistics* statistics = report.add_statistics();
      statistics->set_module(module);
      statistics->set_count(10);
      statistics->set_sum_squares(1.0 + module);
      ASSERT_EQ(sampler.Observe(module, {0, 1.0 + module, 10}), "");
    }
    sampler.EndStep();
    report.set_sampler_digest(sampler.Digest());
    Report(report);
    ASSERT_EQ(h_.CountEvents("sampler_mismatch"), 0) << step;
  }
  v1::StepReport report;
  report.set_step(7);
  report.set_sampler_digest(12345);
  Report(report);
  report.set_step(8);
  Report(report);
  EXPECT_EQ(h_.CountEvents("sampler_mismatch"), 1);
  EXPECT_THAT(Describe().last_problem(), HasSubstr("sampler"));
}

TEST_F(CoreTrainTest, AResumedSamplerIsFollowedFromWhereItGoesOn) {
  std::vector<policy::SamplerModule> modules;
  for (int i = 0; i < 6; ++i) modules.push_back({"m" + std::to_string(i), 100});
  policy::ModuleSampler sampler({0.5, 1, 0.1, 2, 3}, modules);
  const auto step = [&](v1::StepReport* report) {
    for (const uint32_t module : sampler.active()) {
      if (report != nullptr) {
        v1::ModuleStatistics* statistics = report->add_statistics();
        statistics->set_module(module);
        statistics->set_count(10);
        statistics->set_sum_squares(1.0 + module);
      }
      ASSERT_EQ(sampler.Observe(module, {0, 1.0 + module, 10}), "");
    }
    sampler.EndStep();
  };
  for (int i = 0; i < 5; ++i) step(nullptr);  // in the middle of a round

  Begin(6, 4 * kMiB, v1::MODE_SAMPLED);
  const std::vector<uint8_t> state = sampler.Serialize();
  v1::RegisterModulesRequest resume;
  resume.set_sampler_state(std::string(state.begin(), state.end() - 1) + "x");
  h_.Register(lease_, resume);
  EXPECT_EQ(h_.last_reply().error.code, Code::kInvalid);  // damaged: the mirror stays as it was
  resume.set_sampler_state(std::string(state.begin(), state.end()));
  h_.Register(lease_, resume);
  ASSERT_TRUE(h_.last_reply().error.ok()) << h_.last_reply().error.sentence;
  for (int i = 1; i < 6; ++i) {
    v1::StepReport report;
    report.set_step(static_cast<uint64_t>(i));
    report.set_round(sampler.round());
    step(&report);
    report.set_sampler_digest(sampler.Digest());
    Report(report);
  }
  EXPECT_EQ(h_.CountEvents("sampler_mismatch"), 0);
  EXPECT_EQ(h_.CountEvents("sampler_unmirrored"), 0);
  v1::StepReport report;
  report.set_step(6);
  report.set_sampler_digest(12345);
  Report(report);
  EXPECT_EQ(h_.CountEvents("sampler_mismatch"), 1);  // it was followed
}

TEST_F(CoreTrainTest, FollowsTasksWithTheirWeights) {
  Begin(6, 4 * kMiB, v1::MODE_SAMPLED);
  std::vector<policy::SamplerModule> modules;
  for (int i = 0; i < 6; ++i) modules.push_back({"m" + std::to_string(i), 100});
  policy::ModuleSampler sampler({0.5, 1, 0.1, 2, 3}, modules);
  EXPECT_EQ(Describe().tasks_size(), 0);
  for (int step = 0; step < 8; ++step) {
    v1::StepReport report;
    report.set_step(static_cast<uint64_t>(step));
    report.set_round(sampler.round());
    for (const uint32_t module : sampler.active()) {
      v1::ModuleStatistics* statistics = report.add_statistics();
      statistics->set_module(module);
      statistics->set_count(10);
      statistics->set_sum_squares(step % 2 == 0 ? 1.0 + module : 100.0 - module);
      ASSERT_EQ(sampler.Observe(module, {0, statistics->sum_squares(), 10}), "");
    }
    uint32_t task = 0;
    if (step > 0) {
      report.set_task(step % 2 == 0 ? "even" : "odd");
      report.set_task_weight(step % 2 == 0 ? 3 : 1);
      ASSERT_EQ(sampler.EnterTask(report.task(), report.task_weight(), &task), "");
    }
    sampler.EndStep(1, task);
    report.set_sampler_digest(sampler.Digest());
    Report(report);
    ASSERT_EQ(h_.CountEvents("sampler_mismatch"), 0) << step;
  }
  const v1::Session session = Describe();
  ASSERT_EQ(session.tasks_size(), 3);
  EXPECT_EQ(session.tasks(0).name(), "");
  EXPECT_EQ(session.tasks(1).name(), "odd");
  EXPECT_EQ(session.tasks(1).steps(), 4u);
  EXPECT_EQ(session.tasks(2).weight(), 3);
  EXPECT_DOUBLE_EQ(session.tasks(2).share(), 0.6);
  h_.Handle(MetricsCall{h_.NewCall()});
  EXPECT_EQ(h_.last<Figures>().session_figures[0].tasks, 2u);

  // What cannot be a task counts for none, and is told of.
  v1::StepReport report;
  report.set_step(8);
  report.set_task("odd");
  report.set_task_weight(std::numeric_limits<double>::quiet_NaN());
  Report(report);
  EXPECT_THAT(Describe().last_problem(), HasSubstr("counts for no task: The weight of task \"odd\""));
  EXPECT_EQ(Describe().tasks(0).steps(), 2u);
  EXPECT_EQ(Describe().tasks(1).weight(), 1);
}

TEST_F(CoreTrainTest, DoesNotCryOutOverASamplerThatItCannotFollow) {
  Begin(6, 4 * kMiB, v1::MODE_SAMPLED);
  v1::StepReport report;
  report.set_step(300);
  report.set_round(6);
  report.set_sampler_digest(12345);
  Report(report);
  EXPECT_EQ(h_.CountEvents("sampler_unmirrored"), 1);  // resumed
  EXPECT_EQ(h_.CountEvents("sampler_mismatch"), 0);
}

TEST_F(CoreTrainTest, TotalsOutliveTheirSession) {
  Begin();
  v1::StepReport report;
  report.set_step_seconds(0.02);
  report.set_stall_seconds(0.005);
  report.set_demand_loads(3);
  report.set_prefetch_loaded_bytes(77);
  Report(report);
  Report(report);
  h_.Handle(LeaseClosed{lease_, "process ended"});
  h_.Handle(MetricsCall{h_.NewCall()});
  const Figures figures = h_.last<Figures>();
  EXPECT_EQ(figures.sessions, 0u);
  EXPECT_EQ(figures.totals.steps, 2u);
  EXPECT_EQ(figures.totals.demand_loads, 6u);
  EXPECT_EQ(figures.totals.prefetch_loaded_bytes, 154u);
  EXPECT_DOUBLE_EQ(figures.totals.stall_seconds, 0.01);
  EXPECT_EQ(figures.totals.step_seconds_counts[7], 2u);  // up to 30 ms
}

}  // namespace
}  // namespace misa::server
