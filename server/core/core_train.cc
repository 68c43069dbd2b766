// The Train stream: reports folded in, plans made and sent.
#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/memory/byte_size.h"
#include "runtime/policy/session_plan.h"
#include "server/core/core.h"

namespace misa::server {
namespace {

// A plan is made again when a measured rate has moved by this share of what the last plan was made with, and not before
// so many steps: rates settle over the first steps, and a plan is not free.
constexpr double kLinkMoved = 0.25;
constexpr uint64_t kStepsBeforeReplan = 5;
// A plan that could not be made, or was refused, is tried again after so many steps, doubled each time.
constexpr uint64_t kStepsBeforeRetry = 4;
constexpr uint32_t kMostRetryDoublings = 10;
// Steps of a plan that goes on with other loads from step to step, where no one step that repeats is as short.
constexpr uint32_t kMostCyclePeriods = 4;

double Positive(double measured, double otherwise) {
  return std::isfinite(measured) && measured > 0 ? measured : otherwise;
}

bool Moved(double now, double before) { return before <= 0 || std::abs(now / before - 1) > kLinkMoved; }

double Sane(double seconds) { return std::isfinite(seconds) && seconds > 0 ? seconds : 0; }

// A trainer's trace in dense facet indices, or why it is none.
struct CheckedTrace {
  std::string refusal;
  policy::Trace by_index;
  uint64_t digest = 0;  // over the trainer's own ids
};

CheckedTrace CheckTrace(const ModuleRegistry& registry, const v1::Trace& trace) {
  CheckedTrace checked;
  const auto refuse = [&](const std::string& sentence) {
    checked.refusal = sentence;
    return checked;
  };
  if (trace.entries_size() == 0) return refuse("it has no entries");
  if (static_cast<size_t>(trace.entries_size()) > kMaxTraceEntries) {
    return refuse("it has " + std::to_string(trace.entries_size()) + " entries, and the most is " +
                  std::to_string(kMaxTraceEntries));
  }
  policy::Trace by_id;
  by_id.entries.reserve(trace.entries_size());
  checked.by_index.entries.reserve(trace.entries_size());
  for (int at = 0; at < trace.entries_size(); ++at) {
    const v1::TraceEntry& entry = trace.entries(at);
    if (entry.facets_size() != entry.access_size()) {
      return refuse("position " + std::to_string(at) + " has " + std::to_string(entry.facets_size()) + " facets and " +
                    std::to_string(entry.access_size()) + " access flags");
    }
    policy::TraceEntry id_entry;
    id_entry.compute_seconds = entry.compute_seconds();
    id_entry.other_bytes = entry.other_bytes();
    policy::TraceEntry index_entry = id_entry;
    for (int use = 0; use < entry.facets_size(); ++use) {
      const std::optional<uint32_t> index = registry.Index(entry.facets(use));
      const uint32_t access = entry.access(use);
      if (!index) {
        return refuse("position " + std::to_string(at) + " uses facet " + std::to_string(entry.facets(use)) +
                      ", which is not registered");
      }
      if (access == 0 || access > 15) {
        return refuse("position " + std::to_string(at) + " has the unknown access flags " + std::to_string(access));
      }
      id_entry.uses.push_back({entry.facets(use), static_cast<uint8_t>(access)});
      index_entry.uses.push_back({*index, static_cast<uint8_t>(access)});
    }
    by_id.entries.push_back(std::move(id_entry));
    checked.by_index.entries.push_back(std::move(index_entry));
  }
  checked.digest = policy::Digest(by_id);
  if (trace.digest() != 0 && trace.digest() != checked.digest) {
    return refuse("its digest is not that of its entries; trainer and daemon may be of different versions");
  }
  return checked;
}

}  // namespace

void Core::On(const TrainOpened& event) {
  const auto by_token = by_token_.find(event.token);
  if (event.token.empty() || by_token == by_token_.end()) {
    Do(FinishTrain{event.stream, {Code::kUnauthenticated, "the Train stream carries no token that a lease holds"}});
    return;
  }
  Session* session = &sessions_.at(by_token->second);
  if (!session->attached()) {
    Do(FinishTrain{event.stream, {Code::kPrecondition, "the session is not attached; call Attach before Train"}});
    return;
  }
  if (session->stream != 0) {
    // A trainer that lost its stream opens a new one before the old one's end is noticed here.
    by_stream_.erase(session->stream);
    Do(FinishTrain{session->stream, {Code::kPrecondition, "a newer Train stream of this session took over"}});
  }
  session->stream = event.stream;
  by_stream_[event.stream] = session->lease;
  Do(ReadTrain{event.stream});
  if (draining_) {
    v1::TrainResponse notice;
    notice.mutable_drain()->set_reason("misad is draining");
    Do(SendTrain{event.stream, std::move(notice)});
  }
  // What a lost stream may have swallowed, or was decided before there was one.
  if (session->budget_serial != 0 && session->announce_serial == 0) Announce(session);
  if (session->has_trace && session->sent_version != session->accepted_version) WantPlan(session);
}

void Core::On(const TrainClosed& event) {
  const auto found = by_stream_.find(event.stream);
  if (found == by_stream_.end()) return;
  Session* session = &sessions_.at(found->second);
  if (session->stream == event.stream) session->stream = 0;
  by_stream_.erase(found);
  // The session lives as long as its lease: a stream may come back.
}

void Core::On(const TrainMessage& event) {
  const auto found = by_stream_.find(event.stream);
  if (found == by_stream_.end()) return;
  Session* session = &sessions_.at(found->second);
  if (event.request.has_report()) {
    FoldReport(session, event.request.report());
  } else if (event.request.has_budget_request()) {
    // What the trace knows of its other tensors was another batch's: from here on this is the least.
    session->asked_bytes = std::max(session->asked_bytes, std::min(event.request.budget_request().bytes(), session->most_bytes));
    arbitrate_ = true;
    Emit("budget_asked", session->name, "a step needs it at once", event.request.budget_request().bytes());
  } else if (event.request.has_acknowledgement()) {
    const v1::PlanAcknowledgement& acknowledgement = event.request.acknowledgement();
    const std::string version = "plan " + std::to_string(acknowledgement.version());
    if (acknowledgement.version() == 0 || acknowledgement.version() > session->sent_version) {
      Problem(session, "trainer_problem", version + " was acknowledged and never sent; the acknowledgement is ignored");
    } else if (acknowledgement.accepted()) {
      session->accepted_version = acknowledgement.version();
      session->plan_failures = 0;
      Emit("plan_accepted", session->name, version);
    } else {
      ++session->plan_failures;
      if (acknowledgement.version() == session->sent_version) PhaseFailed(session, session->unanswered_digest);
      Problem(session, "plan_refused", version + ": " + acknowledgement.reason());
    }
    if (acknowledgement.version() == session->sent_version) {
      session->unanswered_digest = 0;
      PlanPhase(session);
    }
  }
  Do(ReadTrain{event.stream});
}

void Core::FoldReport(Session* session, const v1::StepReport& report) {
  ++session->reports;
  ++session->steps_since_plan;
  session->last = report;
  session->last.clear_trace();
  session->last.clear_mode_traces();
  session->last.clear_statistics();
  session->last.clear_residency();

  const double seconds = Sane(report.step_seconds());
  totals_.steps += 1;
  totals_.step_seconds_sum += seconds;
  const size_t bucket = static_cast<size_t>(
      std::lower_bound(kStepSecondsBuckets.begin(), kStepSecondsBuckets.end(), seconds) - kStepSecondsBuckets.begin());
  totals_.step_seconds_counts[bucket] += 1;
  totals_.stall_seconds += Sane(report.stall_seconds());
  totals_.demand_loads += report.demand_loads();
  totals_.prefetch_loads += report.prefetch_loads();
  totals_.demand_loaded_bytes += report.demand_loaded_bytes();
  totals_.prefetch_loaded_bytes += report.prefetch_loaded_bytes();
  totals_.unloads += report.unloads();
  totals_.unloaded_bytes += report.unloaded_bytes();
  totals_.prefetch_hits += report.prefetch_hits();
  totals_.departures += report.departures();

  size_t unknown = 0;
  for (const v1::FacetResidency& item : report.residency()) {
    ModuleRegistry::Facet* facet = session->registry.Find(item.facet());
    if (facet == nullptr || !v1::Residency_IsValid(item.residency())) {
      ++unknown;
    } else {
      facet->residency = item.residency();
    }
  }
  if (unknown > 0) {
    Problem(session, "trainer_problem",
            "step " + std::to_string(report.step()) + " reported " + std::to_string(unknown) +
                " facets that are not registered; they are ignored");
  }
  if (!report.problem().empty()) Problem(session, "trainer_problem", report.problem().substr(0, 2000));

  FoldStatistics(session, report);
  FoldGuards(session, report);
  if (session->mode == v1::MODE_SAMPLED) FoldSampler(session, report);
  FinishShrink(session);

  FoldStep(session, report.trace_digest());
  for (const v1::ModeTrace& mode_trace : report.mode_traces()) FoldModeTrace(session, mode_trace);
  if (report.has_trace()) {
    FoldTrace(session, report.trace());
  } else if (session->has_trace && session->steps_since_plan >= kStepsBeforeReplan && LinkMoved(*session)) {
    WantPlan(session);
    WantInfluence(session);
  } else if (session->has_trace && session->plan_failures > 0 && !session->plan_in_flight &&
             session->steps_since_plan >= kStepsBeforeRetry << std::min(session->plan_failures, kMostRetryDoublings)) {
    // What was in the way may be gone: a budget that was too small for a moment, a trainer that had no room.
    WantPlan(session);
  }
}

void Core::FoldStatistics(Session* session, const v1::StepReport& report) {
  size_t refused = 0;
  std::string first;
  std::string first_module;
  if (session->tracker) {
    const std::string sentence = session->tracker->BeginStep(report.task(), report.task_weight());
    if (!sentence.empty()) Problem(session, "trainer_problem", "the step counts for no task: " + sentence);
  }
  for (const v1::ModuleStatistics& item : report.statistics()) {
    std::string sentence;
    if (!session->tracker || item.module() >= session->registry.modules().size()) {
      sentence = "module " + std::to_string(item.module()) + " is not registered";
    } else {
      sentence = session->tracker->Observe(item.module(), {item.sum(), item.sum_squares(), item.count()});
    }
    if (sentence.empty()) continue;
    if (refused++ == 0) {
      first = sentence;
      if (item.module() < session->registry.modules().size()) {
        first_module = session->registry.modules()[item.module()].name();
      }
    }
  }
  if (refused == 0) return;
  // One event a step, whatever the number: a model full of NaN has thousands.
  if (refused > 1) first += " (and " + std::to_string(refused - 1) + " more in this step)";
  Emit("statistics_refused", session->name, first, 0, first_module);
  session->last_problem = first;
}

void Core::FoldSampler(Session* session, const v1::StepReport& report) {
  std::fill(session->active.begin(), session->active.end(), false);
  for (const uint32_t module : report.active_modules()) {
    if (module < session->active.size()) session->active[module] = true;
  }
  if (!session->sampler || report.sampler_digest() == 0) return;
  const auto give_up = [&](const std::string& why) {
    session->sampler.reset();
    Emit("sampler_unmirrored", session->name, why + "; its draws are not checked by the daemon");
  };
  const uint64_t before = session->sampler->round();
  if (session->reports > 1 && report.step() != session->sampler_step + 1) {
    return give_up("reports of steps between " + std::to_string(session->sampler_step) + " and " +
                   std::to_string(report.step()) + " are missing");
  }
  session->sampler_step = report.step();
  for (const v1::ModuleStatistics& item : report.statistics()) {
    if (report.sampling_waits()) break;
    if (item.module() >= session->sampler_index.size() || session->sampler_index[item.module()] < 0) continue;
    // A module that is not active, or a value that is not finite: the trainer's sampler refuses it in the same way.
    session->sampler->Observe(static_cast<uint32_t>(session->sampler_index[item.module()]),
                              {item.sum(), item.sum_squares(), item.count()});
  }
  // The trainer's digest is taken after its own EndStep of this step.
  if (!report.sampling_waits()) {
    // A task that is refused has been told of already; the trainer's sampler refuses it as well.
    uint32_t task = 0;
    session->sampler->EnterTask(report.task(), report.task_weight(), &task);
    session->sampler->EndStep(report.counted_steps(), task);
  }
  if (session->sampler->Digest() == report.sampler_digest()) return;
  if (session->reports == 1 && report.round() != before && report.round() != session->sampler->round()) {
    return give_up("the trainer resumed in round " + std::to_string(report.round()));
  }
  session->sampler.reset();  // once apart they stay apart: one event, not one a step
  Problem(session, "sampler_mismatch",
          "at step " + std::to_string(report.step()) +
              " the trainer's sampler is not in the state that its reports lead to; ranks that draw from different states "
              "train different modules. Stop the job, and compare the ranks' options, seeds and statistics");
}

void Core::FoldTrace(Session* session, const v1::Trace& trace) {
  CheckedTrace checked = CheckTrace(session->registry, trace);
  if (!checked.refusal.empty()) {
    Problem(session, "plan_failed", "the trace was refused: " + checked.refusal);
    return;
  }
  session->has_trace = true;
  session->trace = std::move(checked.by_index);
  session->trace_digest = checked.digest;
  session->plan_failures = 0;
  KeepPhase(session);
  session->smallest_bytes = SmallestOf(*session, session->budget_bytes);
  session->influence.clear();
  arbitrate_ = true;
  WantPlan(session, /*all=*/false);
  WantInfluence(session);
}

void Core::FoldModeTrace(Session* session, const v1::ModeTrace& mode_trace) {
  const auto mode = static_cast<trace::TraceMode>(mode_trace.mode());
  CheckedTrace checked = CheckTrace(session->registry, mode_trace.trace());
  if (checked.refusal.empty() && mode != trace::TraceMode::kEval && mode != trace::TraceMode::kAccumulate) {
    checked.refusal = "a part of a step is of evaluation or accumulation, and this one is of mode " +
                      std::to_string(mode_trace.mode());
  }
  if (!checked.refusal.empty()) {
    Problem(session, "trainer_problem", "the trace of a mode was refused: " + checked.refusal);
    return;
  }
  const auto known = std::find_if(session->mode_traces.begin(), session->mode_traces.end(),
                                  [&](const trace::Section& section) { return section.mode == mode; });
  if (known == session->mode_traces.end()) {
    session->mode_traces.push_back({mode, std::move(checked.by_index)});
  } else {
    known->trace = std::move(checked.by_index);
  }
}

policy::LinkRates Core::EffectiveLink(const Session& session) const {
  policy::LinkRates link = options_.link;
  if (!session.last.has_measured_link()) return link;
  const v1::LinkRates& measured = session.last.measured_link();
  link.load = Positive(measured.load_bytes_per_second(), link.load);
  link.unload = Positive(measured.unload_bytes_per_second(), link.unload);
  link.duplex_load = Positive(measured.duplex_load_bytes_per_second(), link.duplex_load);
  link.duplex_unload = Positive(measured.duplex_unload_bytes_per_second(), link.duplex_unload);
  // Rates measured apart may contradict each other; a direction is never faster beside the other than alone.
  link.duplex_load = std::min(link.duplex_load, link.load);
  link.duplex_unload = std::min(link.duplex_unload, link.unload);
  return link;
}

bool Core::LinkMoved(const Session& session) const {
  const policy::LinkRates now = EffectiveLink(session);
  return Moved(now.load, session.plan_link.load) || Moved(now.unload, session.plan_link.unload) ||
         Moved(now.duplex_load, session.plan_link.duplex_load) ||
         Moved(now.duplex_unload, session.plan_link.duplex_unload);
}

policy::PlanInput Core::MakeInput(const Session& session, uint64_t budget_bytes) const {
  policy::PlanInput input;
  input.facet_bytes = session.registry.FacetBytes();
  input.trace = session.trace;
  input.budget_bytes = budget_bytes;
  input.reserve_bytes = policy::SessionReserve(budget_bytes, policy_.reserve_bytes);
  input.link = EffectiveLink(session);
  input.most_cycle_periods = kMostCyclePeriods;
  return input;
}

void Core::WantPlan(Session* session, bool all) {
  for (auto& phase : session->phases.items()) phase.value.outdated |= all;
  if (session->plan_in_flight) {
    session->plan_wanted = true;
    return;
  }
  StartPlan(session, session->trace_digest, MakeInput(*session, session->budget_bytes));
}

void Core::StartPlan(Session* session, uint64_t digest, policy::PlanInput input) {
  if (Session::Phase* phase = session->phases.Find(digest)) phase->outdated = false;
  // A cycle that goes on from step to step would be broken off by every step of another phase.
  if (Alternates(*session)) input.most_cycle_periods = 1;
  session->plan_in_flight = true;
  session->plan_wanted = false;
  session->steps_since_plan = 0;
  session->plan_trace_digest = digest;
  ComputePlan effect;
  effect.lease = session->lease;
  effect.serial = ++session->plan_serial;
  effect.input = std::move(input);
  session->plan_link = effect.input.link;
  effect.input.pinned = PinnedFacets(*session, effect.input);
  Do(std::move(effect));
}

void Core::On(const PlanMade& event) {
  const auto found = sessions_.find(event.lease);
  if (found == sessions_.end() || found->second.plan_serial != event.serial) return;
  Session* session = &found->second;
  session->plan_in_flight = false;
  if (!session->attached()) return;
  if (session->plan_wanted && session->has_trace) {
    // Made for what no longer holds: the trainer would refuse it, or exceed a smaller budget with it.
    if (Session::Phase* phase = session->phases.Find(session->plan_trace_digest)) phase->outdated = true;
    WantPlan(session, /*all=*/false);
    return;
  }
  if (!event.plan.ok()) {
    PhaseFailed(session, session->plan_trace_digest);
    if (session->plan_trace_digest == session->trace_digest) ++session->plan_failures;
    Problem(session, "plan_failed", event.plan.error);
    return;
  }
  if (!session->has_trace) return;
  session->bound = event.bound.ok() ? event.bound.value : policy::Bound{};
  if (!event.bound.ok()) Problem(session, "trainer_problem", "no bound could be computed: " + event.bound.error);
  v1::TrainResponse response;
  v1::Plan* plan = response.mutable_plan();
  plan->set_version(++session->sent_version);
  plan->set_trace_digest(session->plan_trace_digest);
  for (const policy::Action& action : event.plan.value.actions) {
    if (action.facet >= session->registry.facets().size()) continue;
    v1::PlanAction* out = plan->add_actions();
    out->set_position(action.position);
    out->set_kind(action.kind == policy::Action::kLoad ? v1::ACTION_KIND_LOAD : v1::ACTION_KIND_UNLOAD);
    out->set_facet(session->registry.facets()[action.facet].id);
  }
  plan->set_periods(event.plan.value.periods);
  plan->set_predicted_step_seconds(event.plan.value.step_seconds);
  plan->set_bound_step_seconds(session->bound.step_seconds);
  plan->set_bound_load_bytes(session->bound.load_bytes);
  plan->set_bound_unload_bytes(session->bound.unload_bytes);
  if (session->stream == 0) return;  // a new stream asks again
  Emit("plan_sent", session->name,
       "plan " + std::to_string(plan->version()) + " with " + std::to_string(plan->actions_size()) + " actions",
       event.plan.value.loaded_bytes + event.plan.value.unloaded_bytes);
  Do(SendTrain{session->stream, std::move(response)});
  NotePlanSent(session);
}

void Core::WantInfluence(Session* session) {
  if (!session->elastic) return;
  ComputeInfluence effect;
  effect.lease = session->lease;
  effect.serial = ++session->influence_serial;
  effect.input = MakeInput(*session, session->budget_bytes);
  Do(std::move(effect));
}

void Core::On(const InfluenceMade& event) {
  const auto found = sessions_.find(event.lease);
  // Of an older trace than the one that is known now: another is on its way.
  if (found == sessions_.end() || found->second.influence_serial != event.serial || !event.influence.ok()) return;
  found->second.influence = event.influence.value;
  arbitrate_ = true;
}

void Core::FinishShrink(Session* session) {
  if (session->leased_bytes <= session->budget_bytes) return;
  // The pool gets the difference only when the trainer has lived a whole step under this change: a report that was on its
  // way before the trainer heard of it proves nothing, however small its budget was then.
  const v1::StepReport& last = session->last;
  if (last.budget_serial() < session->budget_serial || last.device_peak_bytes() > session->budget_bytes || last.device_bytes() > session->budget_bytes ||
      last.pool_backed_bytes() > session->budget_bytes) {
    return;
  }
  const uint64_t given_back = session->leased_bytes - session->budget_bytes;
  const std::string problem = device_.Return(given_back);
  if (!problem.empty()) {
    Do(LogLine{Level::kError, problem});
    return;
  }
  session->leased_bytes = session->budget_bytes;
  freed_ = true;
  Emit("memory_reclaimed", session->name, "budget lowered", given_back);
  JournalSessions();
}

void Core::Problem(Session* session, const char* kind, const std::string& sentence) {
  session->last_problem = sentence;
  Emit(kind, session->name, sentence);
}

}  // namespace misa::server
