// What the next step is: who bids how well, and the plans of phases that come back.
#include <gmock/gmock.h>

#include <algorithm>
#include <map>

#include "tests/unit/server/core_harness.h"

namespace misa::server {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

class CorePredictTest : public ::testing::Test {
 protected:
  void Begin(bool learned = false, uint64_t budget = 4 * kMiB) {
    CoreOptions options = CoreHarness::Defaults();
    options.learned_prediction = learned;
    h_.emplace(options);
    lease_ = h_->Attach(budget);
    h_->Register(lease_, MakeModules(6));
    h_->Handle(TrainOpened{1, CoreHarness::Token(lease_)});
  }
  void Report(const v1::StepReport& report) {
    TrainMessage message{1, {}};
    *message.request.mutable_report() = report;
    h_->Handle(message);
  }
  void Step(uint64_t digest) {
    v1::StepReport report;
    report.set_trace_digest(digest);
    Report(report);
  }
  // The digest that its plan names.
  uint64_t Trace(const v1::Trace& trace) {
    v1::StepReport report;
    *report.mutable_trace() = trace;
    Report(report);
    return h_->sent.back().response.plan().trace_digest();
  }
  void Acknowledge(bool accepted = true) {
    TrainMessage message{1, {}};
    message.request.mutable_acknowledgement()->set_version(h_->sent.back().response.plan().version());
    message.request.mutable_acknowledgement()->set_accepted(accepted);
    h_->Handle(message);
  }
  void SetBudget(uint64_t bytes) {
    v1::SetBudgetRequest request;
    request.set_session("s1");
    request.set_budget_bytes(bytes);
    h_->Handle(AdminCall{h_->NewCall(), request});
  }
  std::map<std::string, double> Accuracies() {
    h_->Handle(MetricsCall{h_->NewCall()});
    std::map<std::string, double> accuracies;
    for (const SessionFigures& session : h_->last<Figures>().session_figures) {
      for (const predict::Standing& standing : session.predictors) accuracies[standing.name] = standing.accuracy;
    }
    return accuracies;
  }
  std::vector<uint64_t> PlannedSince(size_t from) const {
    std::vector<uint64_t> digests;
    for (size_t i = from; i < h_->sent.size(); ++i) {
      if (h_->sent[i].response.has_plan()) digests.push_back(h_->sent[i].response.plan().trace_digest());
    }
    return digests;
  }

  std::optional<CoreHarness> h_;
  LeaseId lease_ = 0;
};

TEST_F(CorePredictTest, ExposesHowWellEachPredictorDoes) {
  Begin();
  EXPECT_THAT(Accuracies(), IsEmpty());
  Report({});  // a trainer that says nothing of its trace
  EXPECT_THAT(Accuracies(), IsEmpty());
  for (int i = 0; i < 200; ++i) Step(10 + i % 2);
  const auto accuracies = Accuracies();
  ASSERT_EQ(accuracies.size(), 4u);
  EXPECT_LT(accuracies.at("last"), 0.01);
  EXPECT_GT(accuracies.at("period"), 0.9);
  EXPECT_GT(accuracies.at("ppm"), 0.9);
  EXPECT_GT(accuracies.at("bidder"), 0.9);
}

TEST_F(CorePredictTest, ABudgetChangePlansEveryPhaseThatComesBackAnew) {
  Begin();
  const uint64_t a = Trace(MakeTrace(6));
  Acknowledge();
  const uint64_t b = Trace(MakeTrace(5));
  Acknowledge();
  for (int i = 0; i < 6; ++i) Step(i % 2 == 0 ? a : b);
  EXPECT_EQ(h_->sent.size(), 2u) << "what both have, they keep";
  SetBudget(3 * kMiB);
  EXPECT_THAT(PlannedSince(2), ElementsAre(b)) << "one after another: the next one when this one has arrived";
  Acknowledge();
  EXPECT_THAT(PlannedSince(2), ElementsAre(b, a));
  EXPECT_EQ(h_->sent.back().response.plan().periods(), 1u);
  Acknowledge();
  EXPECT_THAT(PlannedSince(2), ElementsAre(b, a));
}

TEST_F(CorePredictTest, APlanThatMayHaveGivenWayToANewerOneIsMadeAgain) {
  Begin();
  const uint64_t a = Trace(MakeTrace(6));
  const uint64_t b = Trace(MakeTrace(5));  // before the first was acknowledged
  for (int i = 0; i < 4; ++i) Step(i % 2 == 0 ? a : b);
  EXPECT_THAT(PlannedSince(0), ElementsAre(a, b));
  Acknowledge();
  EXPECT_THAT(PlannedSince(0), ElementsAre(a, b, a));
}

TEST_F(CorePredictTest, APhaseThatDoesNotComeBackIsNotPlannedAgain) {
  Begin();
  const uint64_t a = Trace(MakeTrace(6));
  Acknowledge();
  const uint64_t b = Trace(MakeTrace(5));
  Acknowledge();
  Step(a);
  for (int i = 0; i < 6; ++i) Step(b);
  SetBudget(3 * kMiB);
  Acknowledge();
  EXPECT_THAT(PlannedSince(2), ElementsAre(b));
  Step(a);  // and then it does
  EXPECT_THAT(PlannedSince(2), ElementsAre(b, a));
}

TEST_F(CorePredictTest, APhaseWhosePlanWasRefusedIsTriedAgainLaterAndLater) {
  Begin();
  const uint64_t a = Trace(MakeTrace(6));
  Acknowledge(false);
  const uint64_t b = Trace(MakeTrace(5));
  Acknowledge();
  for (int i = 0; i < 4; ++i) Step(i % 2 == 0 ? a : b);
  EXPECT_THAT(PlannedSince(0), ElementsAre(a, b)) << "not at once";
  for (int i = 0; i < 8; ++i) Step(i % 2 == 0 ? a : b);
  EXPECT_THAT(PlannedSince(0), ElementsAre(a, b, a));
  Acknowledge(false);
  for (int i = 0; i < 8; ++i) Step(i % 2 == 0 ? a : b);
  EXPECT_EQ(std::ranges::count(PlannedSince(0), a), 2);
}

TEST_F(CorePredictTest, ABudgetHasToHoldEveryPhase) {
  Begin();
  v1::Trace wide = MakeTrace(6);
  for (uint32_t facet = 11; facet < 13; ++facet) {
    wide.mutable_entries(0)->add_facets(facet);
    wide.mutable_entries(0)->add_access(v1::ACCESS_READ);
  }
  const uint64_t a = Trace(wide);
  Acknowledge();
  const uint64_t b = Trace(MakeTrace(5));
  Acknowledge();
  for (int i = 0; i < 4; ++i) Step(i % 2 == 0 ? a : b);
  SetBudget(2 * kMiB);
  EXPECT_EQ(h_->last_reply().error.code, Code::kPrecondition);
  EXPECT_THAT(h_->last_reply().error.sentence, HasSubstr("needs 3MiB"));
}

TEST_F(CorePredictTest, PhasesOutliveAnotherLayoutOfTheirFacets) {
  Begin(false, 8 * kMiB);
  const uint64_t a = Trace(MakeTrace(6));
  Acknowledge();
  const uint64_t b = Trace(MakeTrace(5));
  Acknowledge();
  for (int i = 0; i < 4; ++i) Step(i % 2 == 0 ? a : b);
  v1::RegisterModulesRequest request = MakeModules(6);
  v1::Facet* optimizer = request.mutable_modules(0)->add_facets();
  optimizer->set_id(99);
  optimizer->set_kind(v1::FACET_KIND_OPTIMIZER);
  optimizer->set_device_bytes(kMiB);
  h_->Register(lease_, request);
  Acknowledge();
  EXPECT_THAT(PlannedSince(2), ElementsAre(b, a));
  for (const v1::PlanAction& action : h_->sent.back().response.plan().actions()) EXPECT_NE(action.facet(), 99u);
}

TEST_F(CorePredictTest, WhoLearnsIsAskedOnlyWhereOthersFallShort) {
  Begin(/*learned=*/true);
  for (int i = 0; i < 200; ++i) Step(10 + i % 3);
  EXPECT_THAT(h_->predictions, IsEmpty()) << "there is a period";
  EXPECT_EQ(Accuracies().count("lstm"), 0u);
  for (uint64_t i = 0; i < 100; ++i) Step(1 + i * i * 7919 % 1009);
  ASSERT_EQ(h_->predictions.size(), 1u) << "one question at a time";
  const ComputePrediction asked = h_->predictions[0];
  EXPECT_EQ(asked.lease, lease_);
  EXPECT_LE(asked.digests.size(), 256u);
  EXPECT_GE(asked.digests.size(), 100u) << "it sees what was before";
  EXPECT_EQ(Accuracies().at("lstm"), 0);
  // In time, and right; the steps that came meanwhile are shown next.
  h_->Handle(PredictionMade{lease_, asked.observed, 5, ""});
  ASSERT_EQ(h_->predictions.size(), 2u);
  EXPECT_EQ(h_->predictions[1].observed, 300u);
  EXPECT_EQ(h_->predictions[1].digests.size(), 300 - asked.observed);
  h_->Handle(PredictionMade{lease_, 300, 77, ""});
  Step(77);
  EXPECT_GT(Accuracies().at("lstm"), 0);
  h_->Handle(LeaseClosed{lease_, "process ended"});
  EXPECT_THAT(h_->forgotten, ElementsAre(lease_));
  h_->Handle(PredictionMade{lease_, 301, 1, ""});  // nobody is left to hear it
}

TEST_F(CorePredictTest, AMissingPredictorIsToldOnceAndGoneWithout) {
  Begin(/*learned=*/true);
  for (uint64_t i = 0; i < 140; ++i) Step(1 + i * i * 7919 % 1009);
  ASSERT_EQ(h_->predictions.size(), 1u);
  h_->Handle(PredictionMade{lease_, h_->predictions[0].observed, {}, "the predictor x could not be loaded"});
  EXPECT_EQ(h_->CountEvents("predictor_unavailable"), 1);
  for (uint64_t i = 0; i < 40; ++i) Step(1 + i * i * 7919 % 1013);
  EXPECT_EQ(h_->predictions.size(), 1u);
  EXPECT_EQ(h_->CountEvents("predictor_unavailable"), 1);
  EXPECT_GT(Trace(MakeTrace(6)), 0u) << "plans are made as before";
}

TEST_F(CorePredictTest, StepsThatAreNotSeenAreLimited) {
  Begin(/*learned=*/true);
  for (uint64_t i = 0; i < 3000; ++i) Step(1 + i * i * 7919 % 100'003);
  ASSERT_EQ(h_->predictions.size(), 1u);
  h_->Handle(PredictionMade{lease_, h_->predictions[0].observed, {}, ""});
  ASSERT_EQ(h_->predictions.size(), 2u);
  EXPECT_EQ(h_->predictions[1].digests.size(), 256u);
  EXPECT_EQ(h_->predictions[1].digests.back(), 1 + 2999ull * 2999 * 7919 % 100'003);
}

}  // namespace
}  // namespace misa::server
