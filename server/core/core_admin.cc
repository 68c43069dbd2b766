// What operators and scrapers ask.
#include <google/protobuf/util/json_util.h>


#include <algorithm>
#include <cstdio>
#include <utility>

#include "runtime/memory/byte_size.h"
#include "server/core/core.h"

namespace misa::server {

void Core::On(const AdminCall& event) {
  std::visit([&](const auto& request) { Admin(event.call, request); }, event.request);
}

void Core::On(const MetricsCall& event) { Answer(event.call, Measure()); }

v1::GetNodeResponse Core::Node() const {
  v1::GetNodeResponse node;
  node.set_version(options_.version);
  node.set_device_kind(options_.device_kind);
  node.set_below(options_.below);
  node.set_device_name(options_.device_name);
  node.set_device_uuid(options_.device_uuid);
  node.set_capacity_bytes(device_.capacity_bytes());
  node.set_free_bytes(device_.free_bytes());
  node.set_leased_bytes(device_.leased_bytes());
  node.set_reclaiming_bytes(device_.reclaiming_bytes());
  node.set_orphaned_bytes(device_.orphaned_bytes());
  node.set_disk_capacity_bytes(disk_.capacity_bytes());
  node.set_disk_reserved_bytes(disk_.capacity_bytes() - disk_.free_bytes());
  node.mutable_link()->set_load_bytes_per_second(options_.link.load);
  node.mutable_link()->set_unload_bytes_per_second(options_.link.unload);
  node.mutable_link()->set_duplex_load_bytes_per_second(options_.link.duplex_load);
  node.mutable_link()->set_duplex_unload_bytes_per_second(options_.link.duplex_unload);
  uint32_t attached = 0;
  for (const auto& [lease, session] : sessions_) attached += session.attached();
  node.set_sessions(attached);
  node.set_draining(draining_);
  node.set_uptime_seconds(now_.monotonic_seconds - started_at_);
  for (const auto& [name, entry] : orphans_) {
    v1::Orphan* orphan = node.add_orphans();
    orphan->set_session(name);
    orphan->set_pid(entry.pid);
    orphan->set_bytes(entry.bytes);
  }
  return node;
}

v1::Session Core::Describe(const Session& session) const {
  v1::Session out;
  out.set_session(session.name);
  out.set_job(session.job);
  out.set_rank(session.rank);
  out.set_pid(session.pid);
  out.set_uid(session.uid);
  out.set_mode(session.mode);
  out.set_budget_bytes(session.budget_bytes);
  out.set_device_bytes(session.last.device_bytes());
  out.set_device_peak_bytes(session.last.device_peak_bytes());
  out.set_disk_bytes(session.disk_bytes);
  out.set_step(session.last.step());
  out.set_step_seconds(session.last.step_seconds());
  out.set_stall_seconds(session.last.stall_seconds());
  out.set_bound_step_seconds(session.bound.step_seconds);
  out.set_plan_version(session.accepted_version);
  out.set_module_count(static_cast<uint32_t>(session.registry.modules().size()));
  out.set_loaded_bytes_per_step(session.last.loaded_bytes());
  out.set_unloaded_bytes_per_step(session.last.unloaded_bytes());
  out.set_attached_seconds(now_.monotonic_seconds - session.attached_at);
  out.set_command(session.command);
  out.set_last_problem(session.last_problem);
  out.set_weight(session.weight);
  out.set_leased_bytes(session.leased_bytes);
  out.set_elastic(session.elastic);
  out.set_least_budget_bytes(Floor(session));
  out.set_most_budget_bytes(session.most_bytes);
  out.set_target_budget_bytes(session.target_bytes);
  for (const policy::StallPoint& point : session.influence) {
    v1::StallPoint* item = out.add_influence();
    item->set_budget_bytes(point.budget_bytes);
    item->set_stall_seconds(point.stall_seconds);
    item->set_step_seconds(point.step_seconds);
  }
  if (session.tracker && session.tracker->tasks().size() > 1) {
    const std::vector<double> shares = session.tracker->shares();
    for (size_t i = 0; i < shares.size(); ++i) {
      const policy::Task& task = session.tracker->tasks()[i];
      if (i == 0 && task.steps == 0) continue;
      v1::Task* item = out.add_tasks();
      item->set_name(task.name);
      item->set_weight(task.weight);
      item->set_share(shares[i]);
      item->set_steps(task.steps);
    }
  }
  *out.mutable_guards() = DescribeGuards(session);
  return out;
}

std::vector<v1::ModuleStatus> Core::DescribeModules(const Session& session) const {
  std::vector<v1::ModuleStatus> out;
  const std::vector<v1::Module>& modules = session.registry.modules();
  out.resize(modules.size());
  std::vector<double> ranks;
  if (session.tracker) ranks = session.tracker->Ranks();
  for (size_t i = 0; i < modules.size(); ++i) {
    out[i].set_session(session.name);
    out[i].set_name(modules[i].name());
    out[i].set_kind(modules[i].kind());
    out[i].set_parameter_count(modules[i].parameter_count());
    if (i < ranks.size()) {
      out[i].set_importance(session.tracker->importance(i));
      out[i].set_importance_rank(ranks[i]);
    }
    out[i].set_active(i < session.active.size() && session.active[i]);
  }
  for (const ModuleRegistry::Facet& facet : session.registry.facets()) {
    v1::ModuleStatus& status = out[facet.module];
    if (facet.kind == v1::FACET_KIND_WEIGHTS) status.set_weights(facet.residency);
    if (facet.kind == v1::FACET_KIND_GRADIENTS) status.set_gradients(facet.residency);
    if (facet.kind == v1::FACET_KIND_OPTIMIZER) status.set_optimizer(facet.residency);
    if (facet.residency == v1::RESIDENCY_DEVICE || facet.residency == v1::RESIDENCY_LOADING ||
        facet.residency == v1::RESIDENCY_UNLOADING) {
      status.set_device_bytes(status.device_bytes() + facet.bytes);
    }
  }
  return out;
}

void Core::Admin(CallId call, const v1::GetNodeRequest&) { Answer(call, Node()); }

void Core::Admin(CallId call, const v1::ListSessionsRequest&) {
  v1::ListSessionsResponse response;
  for (const auto& [lease, session] : sessions_) {
    if (session.attached()) *response.add_sessions() = Describe(session);
  }
  Answer(call, std::move(response));
}

void Core::Admin(CallId call, const v1::ListModulesRequest& request) {
  v1::ListModulesResponse response;
  bool found = request.session().empty();
  for (const auto& [lease, session] : sessions_) {
    if (!session.attached() || (!request.session().empty() && request.session() != session.name)) continue;
    found = true;
    for (v1::ModuleStatus& status : DescribeModules(session)) *response.add_modules() = std::move(status);
  }
  if (!found) {
    Fail(call, {Code::kNotFound, "there is no session \"" + request.session() + "\"; misactl sessions lists those there are"});
    return;
  }
  Answer(call, std::move(response));
}

void Core::Admin(CallId call, const v1::CaptureSnapshotRequest&) {
  // Every message in protobuf's own JSON, put together by hand: names and kinds stay those of the contract.
  google::protobuf::util::JsonPrintOptions options;
  options.preserve_proto_field_names = true;
  options.always_print_primitive_fields = true;
  const auto print = [&](const google::protobuf::Message& message) {
    std::string text;
    return google::protobuf::util::MessageToJsonString(message, &text, options).ok() ? text : std::string("null");
  };
  v1::ListSessionsResponse sessions;
  v1::ListModulesResponse modules;
  for (const auto& [lease, session] : sessions_) {
    if (!session.attached()) continue;
    *sessions.add_sessions() = Describe(session);
    for (v1::ModuleStatus& status : DescribeModules(session)) *modules.add_modules() = std::move(status);
  }
  char policy[256];
  std::snprintf(policy, sizeof policy, "{\"alpha\":%.17g,\"hot\":%.17g,\"cold\":%.17g,\"reserve_bytes\":%llu}", policy_.alpha,
                policy_.hot, policy_.cold, static_cast<unsigned long long>(policy_.reserve_bytes));
  v1::CaptureSnapshotResponse response;
  response.set_json("{\"schema\":\"misa.snapshot/1\",\"node\":" + print(Node()) + ",\"sessions\":" + print(sessions) +
                    ",\"modules\":" + print(modules) + ",\"policy\":" + policy + "}");
  Answer(call, std::move(response));
}

void Core::Admin(CallId call, const v1::GetTraceRequest& request) {
  const Session* session = nullptr;
  for (const auto& [lease, candidate] : sessions_) {
    if (candidate.attached() && candidate.name == request.session()) session = &candidate;
  }
  if (session == nullptr) {
    Fail(call, {Code::kNotFound, "there is no session \"" + request.session() + "\"; misactl sessions lists those there are"});
    return;
  }
  if (!session->has_trace) {
    Fail(call, {Code::kPrecondition, "session " + session->name + " has no trace yet: its first step has not ended, or its "
                                     "last trace was refused (misactl sessions says why)"});
    return;
  }
  const policy::PlanInput input = MakeInput(*session, session->budget_bytes);
  trace::TraceFile file;
  file.label = "session " + session->name + (session->job.empty() ? "" : ", job " + session->job);
  file.budget_bytes = input.budget_bytes;
  file.reserve_bytes = input.reserve_bytes;
  file.link = input.link;
  for (const ModuleRegistry::Facet& facet : session->registry.facets()) {
    file.facets.push_back(
        {session->registry.modules()[facet.module].name(), static_cast<trace::FacetKind>(facet.kind), facet.bytes});
  }
  file.sections.push_back({trace::TraceMode::kTrain, session->trace});
  file.sections.insert(file.sections.end(), session->mode_traces.begin(), session->mode_traces.end());
  policy::Result<std::string> encoded = trace::Encode(file);
  if (!encoded.ok()) {
    Fail(call, {Code::kPrecondition, encoded.error});
    return;
  }
  v1::GetTraceResponse response;
  response.set_file(std::move(encoded.value));
  Answer(call, std::move(response));
}

void Core::Admin(CallId call, const v1::SetBudgetRequest& request) {
  Session* session = nullptr;
  for (auto& [lease, candidate] : sessions_) {
    if (candidate.attached() && candidate.name == request.session()) session = &candidate;
  }
  if (session == nullptr) {
    Fail(call, {Code::kNotFound, "there is no session \"" + request.session() + "\"; misactl sessions lists those there are"});
    return;
  }
  if (request.automatic()) {
    session->elastic = true;
    session->most_bytes = std::max(session->chunks_bytes, session->budget_bytes);
    session->least_bytes = std::min(session->least_bytes, session->most_bytes);
    arbitrate_ = true;
    Emit("budget_changed", session->name, "the arbiter's from here on", session->budget_bytes);
    Answer(call, v1::SetBudgetResponse());
    return;
  }
  const uint64_t budget = request.budget_bytes();
  if (budget < options_.chunk_bytes) {
    Fail(call, {Code::kInvalid, "a budget of " + std::to_string(budget) + " bytes holds nothing; the smallest is one chunk of " +
                                    FormatByteSize(options_.chunk_bytes)});
    return;
  }
  if (budget / options_.chunk_bytes * options_.chunk_bytes > session->chunks_bytes) {
    Fail(call, {Code::kPrecondition,
                "the session's memory is sealed at the " + FormatByteSize(session->chunks_bytes) +
                    " it was attached with, and its budget cannot go above it; start the trainer again with a larger "
                    "budget. Its budget stays " + FormatByteSize(session->budget_bytes)});
    return;
  }
  if (session->has_trace) {
    const uint64_t smallest = policy::SmallestBudget(MakeInput(*session, budget));
    if (budget < smallest) {
      Fail(call, {Code::kPrecondition, "the session's step needs " + FormatByteSize(smallest) + " (" +
                                           std::to_string(smallest) + " bytes) at once; a budget of " +
                                           FormatByteSize(budget) + " cannot hold it, and it stays " +
                                           FormatByteSize(session->budget_bytes)});
      return;
    }
  }
  const std::string refusal = ChangeBudget(session, budget, "by an operator");
  if (!refusal.empty()) {
    Fail(call, {Code::kExhausted, refusal + "; the session's budget stays " + FormatByteSize(session->budget_bytes)});
    return;
  }
  // What an operator has set, the arbiter does not change.
  session->elastic = false;
  session->target_bytes = budget;
  arbitrate_ = true;
  Answer(call, v1::SetBudgetResponse());
}

void Core::Admin(CallId call, const v1::SetPolicyRequest& request) {
  PolicyOptions policy = policy_;
  if (request.has_alpha()) policy.alpha = request.alpha();
  if (request.has_hot()) policy.hot = request.hot();
  if (request.has_cold()) policy.cold = request.cold();
  if (request.has_window()) policy.window = request.window();
  if (!(policy.alpha > 0 && policy.alpha <= 1) || !(policy.cold >= 0 && policy.cold < policy.hot && policy.hot <= 1)) {
    Fail(call, {Code::kInvalid, "alpha lies in (0, 1] and 0 <= cold < hot <= 1; the policy stays as it was"});
    return;
  }
  if (const std::string sentence = policy::ImportanceTracker(0, {}).SetOptions(
          {policy.alpha, policy.signal, policy.hot, policy.cold, policy.window});
      !sentence.empty()) {
    Fail(call, {Code::kInvalid, sentence + " The policy stays as it was"});
    return;
  }
  ApplyPolicy(policy);
  char text[128];
  std::snprintf(text, sizeof text, "alpha %g, hot %g, cold %g, window %u", policy.alpha, policy.hot, policy.cold, policy.window);
  Emit("policy_changed", "", text);
  Answer(call, v1::SetPolicyResponse());
}

void Core::Admin(CallId call, const v1::DrainRequest& request) {
  BeginDrain(request.reason().empty() ? "asked for by an operator" : request.reason().substr(0, 512));
  Answer(call, v1::DrainResponse());
}

Figures Core::Measure() const {
  const auto pool = [](const Pool& p) {
    return PoolFigures{p.free_bytes(), p.leased_bytes(), p.reclaiming_bytes(), p.orphaned_bytes()};
  };
  Figures figures;
  figures.device = pool(device_);
  figures.below = options_.below;
  figures.disk = pool(disk_);
  figures.orphans = static_cast<uint32_t>(orphans_.size());
  figures.totals = totals_;
  for (const auto& [lease, session] : sessions_) {
    if (!session.attached()) continue;
    ++figures.sessions;
    for (const ModuleRegistry::Facet& facet : session.registry.facets()) {
      figures.facets[facet.kind - 1][facet.residency] += 1;
      figures.facet_bytes[facet.residency] += facet.bytes;
    }
    figures.session_figures.push_back({session.slot, session.bound.step_seconds, session.accepted_version,
                                       session.budget_bytes, session.leased_bytes, session.weight,
                                       session.tracker ? session.tracker->tasks().size() - 1 : 0});
    if (!session.tracker) continue;
    for (size_t i = 0; i < session.registry.modules().size(); ++i) {
      figures.modules.push_back({session.slot, session.registry.modules()[i].name(), session.tracker->importance(i)});
    }
  }
  const size_t limit = std::min<size_t>(figures.modules.size(), options_.module_series_limit);
  std::partial_sort(figures.modules.begin(), figures.modules.begin() + static_cast<ptrdiff_t>(limit), figures.modules.end(),
                    [](const ModuleFigure& a, const ModuleFigure& b) { return a.importance > b.importance; });
  figures.modules.resize(limit);
  return figures;
}

}  // namespace misa::server
