// Guards of a session's training: what its losses say, and which modules keep their place.
#include <algorithm>
#include <cstdio>

#include "runtime/guard/keep_order.h"
#include "runtime/policy/batch_input.h"
#include "server/core/core.h"

namespace misa::server {
namespace {

// Modules are judged anew after so many steps: a plan is not free, and importance moves slowly.
constexpr uint64_t kJudgeSteps = 10;

std::vector<guard::KeepCandidate> Candidates(const ModuleRegistry& registry) {
  std::vector<guard::KeepCandidate> candidates(registry.modules().size());
  for (const ModuleRegistry::Facet& facet : registry.facets()) candidates[facet.module].bytes += facet.bytes;
  return candidates;
}

std::string Number(double value) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g", value);
  return text;
}

}  // namespace

void Core::BeginGuards(Session* session) const {
  session->guards.stability = guard::LossStability(policy_.guards.stability);
  session->guards.swings = guard::SwingGuard(policy_.guards.swings, policy_.guards.response);
}

policy::ImportanceTracker::Options Core::TrackerOptions(const Session& session) const {
  policy::ImportanceTracker::Options options;
  options.signal = policy_.signal;
  options.cold = policy_.cold;
  options.window = policy_.window;
  const guard::Thresholds base{policy_.alpha, policy_.hot};
  const guard::Thresholds raised = policy_.guards.watch_swings ? session.guards.swings.Apply(base) : base;
  options.alpha = raised.alpha;
  options.hot = raised.hot;
  return options;
}

void Core::SetTracker(Session* session) const {
  session->tracker->SetOptions(TrackerOptions(*session));
  const std::vector<v1::Module>& modules = session->registry.modules();
  for (size_t i = 0; i < modules.size(); ++i) {
    const bool sparse = guard::IsSparseAttention(modules[i].name(), modules[i].kind(), policy_.guards.sparse_attention);
    session->tracker->SetWindow(i, sparse ? guard::SparseWindow(policy_.window) : 0);
  }
}

bool Core::ImportanceInForce(const Session& session) const {
  if (!policy_.guards.wait_for_stable_loss || session.guards.stability.stable()) return true;
  // Of a trainer that tells no loss nothing better is known than that two windows have passed.
  return !session.guards.loss_known && session.reports >= 2 * uint64_t{policy_.guards.stability.window};
}

void Core::FoldGuards(Session* session, const v1::StepReport& report) {
  if (report.rows() > 0) session->guards.rows = report.rows();
  if (report.has_loss()) FoldLoss(session, report);
  if ((session->reports - 1) % kJudgeSteps == 0) JudgeModules(session, report.has_trace());
}

void Core::FoldLoss(Session* session, const v1::StepReport& report) {
  SessionGuards& guards = session->guards;
  const bool was_stable = guards.stability.stable();
  const std::string sentence = guards.stability.Observe(report.loss());
  if (!sentence.empty()) {
    if (!guards.loss_refused)
      Problem(session, "loss_refused", "step " + std::to_string(report.step()) + ": " + sentence);
    guards.loss_refused = true;
    return;
  }
  guards.loss_refused = false;
  guards.loss_known = true;
  guards.loss = report.loss();
  if (!was_stable && guards.stability.stable()) {
    Emit("loss_stable", session->name,
         "after " + std::to_string(guards.stability.observed()) + " losses, at " + Number(guards.loss));
  }
  if (!policy_.guards.watch_swings) return;
  const guard::SwingGuard::Change change = guards.swings.Observe(report.loss());
  if (change == guard::SwingGuard::Change::kNone) return;
  const policy::ImportanceTracker::Options options = TrackerOptions(*session);
  if (session->tracker) session->tracker->SetOptions(options);
  const std::string now = "alpha is " + Number(options.alpha) + " and the hot threshold " + Number(options.hot);
  if (change == guard::SwingGuard::Change::kRaised) {
    const guard::Swing& swing = guards.swings.swing();
    Emit("loss_swings", session->name,
         "with a period of " + std::to_string(swing.period_steps) + " steps and an autocorrelation of " +
             Number(swing.correlation) + ": " + now);
  } else {
    Emit("loss_calm", session->name, "its swings have ended: " + now + " again");
  }
}

void Core::JudgeModules(Session* session, bool planned_anyway) {
  const std::vector<v1::Module>& modules = session->registry.modules();
  const bool asked = std::any_of(modules.begin(), modules.end(), [](const v1::Module& m) { return m.pinned(); });
  SessionGuards& guards = session->guards;
  std::vector<uint32_t> order;
  if (session->tracker && (asked || policy_.keep_hot)) {
    const bool by_importance = policy_.keep_hot && ImportanceInForce(*session);
    std::vector<guard::KeepCandidate> candidates = Candidates(session->registry);
    const std::vector<double> ranks = session->tracker->Ranks();
    const std::vector<policy::ImportanceTracker::Heat>& heat = session->tracker->UpdateHeat();
    for (size_t i = 0; i < modules.size(); ++i) {
      candidates[i].rank = ranks[i];
      candidates[i].hot = by_importance && heat[i] == policy::ImportanceTracker::Heat::kHot;
      candidates[i].critical =
          modules[i].pinned() ||
          (policy_.keep_hot && guard::IsPinned(modules[i].name(), modules[i].kind(), policy_.guards.pins));
    }
    if (guards.dependencies.needs.size() != modules.size() && session->sampling.dependencies_size() > 0) {
      std::vector<std::string> names;
      for (const v1::Module& module : modules) names.push_back(module.name());
      // Those that cannot be were refused when the modules were registered.
      guard::Resolve(names, DependenciesOf(session->sampling), &guards.dependencies);
      // What is never trained in one round may stay on the device together.
      for (std::vector<uint32_t>& apart : guards.dependencies.apart) apart.clear();
    }
    order = guard::KeepOrder(candidates, guards.dependencies);
  }
  if (order == guards.order) return;
  guards.order = std::move(order);
  if (session->has_trace && !planned_anyway) WantPlan(session);
}

// Half of what the step does not need at once: the rest is where the others come and go.
size_t Core::KeptModules(const Session& session, const policy::PlanInput& input) const {
  const uint64_t smallest = policy::SmallestBudget(input);
  const uint64_t room = input.budget_bytes > smallest ? (input.budget_bytes - smallest) / 2 : 0;
  return guard::KeepCount(session.guards.order, Candidates(session.registry), session.guards.dependencies, room);
}

std::vector<uint32_t> Core::PinnedFacets(const Session& session, const policy::PlanInput& input) const {
  std::vector<uint32_t> facets;
  if (session.guards.order.empty()) return facets;
  const size_t count = KeptModules(session, input);
  std::vector<bool> kept(session.registry.modules().size(), false);
  for (size_t i = 0; i < count; ++i) kept[session.guards.order[i]] = true;
  for (uint32_t f = 0; f < session.registry.facets().size(); ++f) {
    if (kept[session.registry.facets()[f].module]) facets.push_back(f);
  }
  return facets;
}

v1::GuardStatus Core::DescribeGuards(const Session& session) const {
  const SessionGuards& guards = session.guards;
  v1::GuardStatus out;
  if (guards.loss_known) out.set_loss(guards.loss);
  out.set_loss_stable(guards.stability.stable());
  out.set_importance_in_force(ImportanceInForce(session));
  out.set_swing_level(guards.swings.level());
  if (guards.swings.level() > 0) out.set_swing_period_steps(guards.swings.swing().period_steps);
  const policy::ImportanceTracker::Options options = TrackerOptions(session);
  out.set_alpha(options.alpha);
  out.set_hot(options.hot);
  out.set_rows(guards.rows);
  if (!session.has_trace) return out;
  const policy::PlanInput input = MakeInput(session, session.budget_bytes);
  if (!guards.order.empty()) {
    const size_t count = KeptModules(session, input);
    const std::vector<guard::KeepCandidate> candidates = Candidates(session.registry);
    out.set_kept_modules(static_cast<uint32_t>(count));
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; ++i) bytes += candidates[guards.order[i]].bytes;
    out.set_kept_bytes(bytes);
  }
  const guard::BatchHint hint = guard::HintBatch(
      policy::BatchInputOf(input, session.last.device_peak_bytes(), guards.rows));
  if (hint.known) {
    out.set_free_share(hint.free_share);
    out.set_most_share(hint.most_share);
    out.set_free_rows(hint.free_rows);
    out.set_most_rows(hint.most_rows);
  }
  return out;
}

}  // namespace misa::server
