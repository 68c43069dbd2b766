// What the next step of a session is: predictors bid, and phases that come back keep their plans up to date.
#include <algorithm>
#include <utility>

#include "server/core/core.h"

namespace misa::server {
namespace {

// One who learns costs a thread's time and a library's memory. He is asked once so many steps have shown that the
// others fall short of this accuracy: of steps that repeat exactly there is nothing left to learn.
constexpr uint64_t kStepsBeforeLearning = 128;
constexpr double kGoodEnough = 0.9;
// Steps that he may still have to see; older ones are left out.
constexpr size_t kMostUnseen = 256;
// A plan is acknowledged as soon as it has arrived; after so many steps without a word it is not waited for any more.
constexpr uint64_t kStepsForAnAnswer = 4;
// A phase that could not be planned is tried again after so many steps, doubled each time.
constexpr uint64_t kStepsBeforeRetry = 4;
constexpr uint32_t kMostRetryDoublings = 10;

}  // namespace

void Core::FoldStep(Session* session, uint64_t digest) {
  if (digest == 0) return;
  if (!session->bidder) {
    std::vector<std::unique_ptr<predict::Predictor>> more;
    if (learned_prediction_) {
      auto learned = std::make_unique<predict::AwaitedPredictor>("lstm");
      session->learned = learned.get();
      more.push_back(std::move(learned));
    }
    session->bidder = predict::MakeStepBidder(options_.prediction, std::move(more));
  }
  session->bidder->Observe(digest);
  Session::Phase* phase = session->phases.Touch(digest);
  if (phase->last_report != 0 && session->last_digest != digest && !std::exchange(phase->returned, true) &&
      session->has_trace) {
    session->smallest_bytes = SmallestOf(*session, session->budget_bytes);
    arbitrate_ = true;
  }
  phase->last_report = session->reports;
  session->last_digest = digest;
  // Its plan was given up for another phase's when it was not known to come back.
  if (phase->returned && phase->outdated) PlanPhase(session);
  if (session->learned == nullptr) return;
  if (session->unseen.size() >= kMostUnseen) session->unseen.erase(session->unseen.begin());
  session->unseen.push_back(digest);
  WantPrediction(session);
}

void Core::WantPrediction(Session* session) {
  if (!learned_prediction_ || session->learned == nullptr || session->prediction_in_flight || session->unseen.empty())
    return;
  if (!session->learning) {
    if (session->bidder->observed() < kStepsBeforeLearning) return;
    for (const predict::Standing& standing : session->bidder->standings()) {
      if (standing.accuracy >= kGoodEnough) return;
    }
    session->learning = true;
  }
  session->prediction_in_flight = true;
  Do(ComputePrediction{session->lease, session->bidder->observed(), std::exchange(session->unseen, {})});
}

void Core::On(const PredictionMade& event) {
  if (!event.problem.empty() && std::exchange(learned_prediction_, false)) {
    Emit("predictor_unavailable", "", event.problem);
    Do(LogLine{Level::kWarning, event.problem});
  }
  const auto found = sessions_.find(event.lease);
  if (found == sessions_.end()) return;
  Session* session = &found->second;
  session->prediction_in_flight = false;
  if (!learned_prediction_ || session->learned == nullptr) return;
  // One that took longer than a step comes too late to count.
  if (event.digest) session->learned->Arrive(event.observed, *event.digest);
  WantPrediction(session);
}

std::vector<predict::Standing> Core::Standings(const Session& session) {
  std::vector<predict::Standing> standings;
  if (!session.bidder) return standings;
  standings = session.bidder->standings();
  // Who was never asked has no accuracy.
  if (session.learned != nullptr && !session.learning) standings.erase(standings.end() - 2);
  return standings;
}

void Core::KeepPhase(Session* session) {
  session->phases.Touch(session->trace_digest)->trace = session->trace;
  size_t entries = 0;
  for (auto& phase : session->phases.items()) {
    entries += phase.value.trace.entries.size();
    // The newest is always kept: it is no longer than a trace may be.
    if (entries > kMaxTraceEntries) phase.value.trace = {};
  }
}

void Core::MovePhases(Session* session, const std::vector<ModuleRegistry::Facet>& before) {
  for (auto& phase : session->phases.items()) {
    if (!session->registry.MoveFacets(before, &phase.value.trace)) phase.value.trace = {};
  }
}

void Core::NotePlanSent(Session* session) {
  if (Session::Phase* phase = session->phases.Find(session->plan_trace_digest)) phase->failures = 0;
  // One that was not acknowledged yet may have given way to this one before it went out.
  const uint64_t before = std::exchange(session->unanswered_digest, session->plan_trace_digest);
  if (before == 0 || before == session->unanswered_digest) return;
  if (Session::Phase* phase = session->phases.Find(before)) phase->outdated = true;
}

void Core::PhaseFailed(Session* session, uint64_t digest) {
  Session::Phase* phase = session->phases.Find(digest);
  if (phase == nullptr) return;
  phase->outdated = true;
  phase->failures = std::min(phase->failures + 1, kMostRetryDoublings);
  phase->retry_report = session->reports + (kStepsBeforeRetry << phase->failures);
}

void Core::PlanPhase(Session* session) {
  if (session->plan_in_flight || session->stream == 0) return;
  if (session->unanswered_digest != 0 && session->steps_since_plan < kStepsForAnAnswer) return;
  for (auto& phase : session->phases.items()) {
    if (!phase.value.outdated || !phase.value.returned || phase.value.trace.entries.empty()) continue;
    if (phase.value.failures > 0 && session->reports < phase.value.retry_report) continue;
    policy::PlanInput input = MakeInput(*session, session->budget_bytes);
    input.trace = phase.value.trace;
    StartPlan(session, phase.digest, std::move(input));
    return;
  }
}

bool Core::Alternates(const Session& session) {
  size_t returned = 0;
  for (const auto& phase : session.phases.items()) returned += phase.value.returned;
  return returned > 1;
}

uint64_t Core::SmallestOf(const Session& session, uint64_t budget_bytes) const {
  policy::PlanInput input = MakeInput(session, budget_bytes);
  uint64_t smallest = policy::SmallestBudget(input);
  for (const auto& phase : session.phases.items()) {
    if (!phase.value.returned || phase.value.trace.entries.empty()) continue;
    input.trace = phase.value.trace;
    smallest = std::max(smallest, policy::SmallestBudget(input));
  }
  return smallest;
}

}  // namespace misa::server
