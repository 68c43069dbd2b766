#include "server/core/core.h"

#include <algorithm>
#include <set>
#include <utility>

#include "runtime/memory/byte_size.h"
#include "runtime/memory/lease_protocol.h"
#include "server/core/time_text.h"

namespace misa::server {
namespace {

constexpr double kMostWeight = 1000;
// An Attach waits so long for its share of an elastic budget, and so long for anything at all: a client gives up after 30 s.
constexpr double kPatienceSeconds = 3;
constexpr double kMostWaitSeconds = 15;

std::string Amount(uint64_t bytes) { return FormatByteSize(bytes) + " (" + std::to_string(bytes) + " bytes)"; }

// A trace's facets at their new places; false where one is gone.
bool MoveFacets(const ModuleRegistry& registry, const std::vector<ModuleRegistry::Facet>& before, policy::Trace* trace) {
  bool all = true;
  for (policy::TraceEntry& entry : trace->entries) {
    for (policy::Use& use : entry.uses) {
      const std::optional<uint32_t> index = registry.Index(before[use.facet].id);
      all = all && index.has_value();
      use.facet = index.value_or(0);
    }
  }
  return all;
}

policy::SamplerOptions SamplingOf(const Session& session) {
  const v1::SamplingOptions& in = session.sampling;
  policy::SamplerOptions out{in.delta(), in.eta(), in.alpha(), in.inner_steps(), in.seed()};
  out.dependencies = DependenciesOf(in);
  return out;
}

}  // namespace

Core::Core(CoreOptions options, const std::vector<JournalEntry>& orphans, Now now, Effects* effects)
    : options_(std::move(options)),
      policy_(options_.policy),
      device_("device", options_.device_capacity_bytes),
      disk_(options_.below, options_.disk_capacity_bytes),
      started_at_(now.monotonic_seconds),
      now_(now),
      effects_(effects) {
  Emit("daemon_started", "", "version " + options_.version, options_.device_capacity_bytes);
  for (JournalEntry orphan : orphans) {
    orphan.bytes = device_.AddOrphan(orphan.bytes);
    orphan.disk_bytes = disk_.AddOrphan(orphan.disk_bytes);
    Emit("orphan_found", orphan.session, "process " + std::to_string(orphan.pid) + " of an earlier daemon still holds it",
         orphan.bytes);
    orphans_[orphan.session] = orphan;
  }
  JournalSessions();
}

void Core::Handle(const Event& event, Now now, Effects* effects) {
  now_ = now;
  effects_ = effects;
  std::visit([this](const auto& e) { On(e); }, event);
  Balance();
}

std::string Core::CheckInvariants() const {
  std::string problem = device_.Check();
  if (problem.empty()) problem = disk_.Check();
  if (!problem.empty()) return problem;
  uint64_t leased = 0, reclaiming = 0, disk_leased = 0, disk_reclaiming = 0, orphaned = 0;
  for (const auto& [lease, session] : sessions_) {
    const bool releasing = session.state == Session::State::kReleasing;
    (releasing ? reclaiming : leased) += session.leased_bytes;
    (releasing ? disk_reclaiming : disk_leased) += session.disk_bytes;
    disk_leased += session.disk_coming_bytes;
    if (session.attached() && session.budget_bytes > session.leased_bytes) {
      return "session " + session.name + " has a budget of " + std::to_string(session.budget_bytes) +
             " bytes and leases only " + std::to_string(session.leased_bytes);
    }
  }
  for (const auto& [name, orphan] : orphans_) orphaned += orphan.bytes;
  if (leased != device_.leased_bytes() || reclaiming != device_.reclaiming_bytes() ||
      orphaned != device_.orphaned_bytes()) {
    return "the sessions' bytes are not the device pool's: leased " + std::to_string(leased) + " against " +
           std::to_string(device_.leased_bytes()) + ", reclaiming " + std::to_string(reclaiming) + " against " +
           std::to_string(device_.reclaiming_bytes());
  }
  if (disk_leased != disk_.leased_bytes() || disk_reclaiming != disk_.reclaiming_bytes()) {
    return "the sessions' bytes are not the disk pool's: leased " + std::to_string(disk_leased) + " against " +
           std::to_string(disk_.leased_bytes()) + ", reclaiming " + std::to_string(disk_reclaiming) + " against " +
           std::to_string(disk_.reclaiming_bytes());
  }
  return "";
}

// --- Leases -----------------------------------------------------------------------------------------------------------

void Core::On(const LeaseOpened& event) {
  // A connection without memory is cheap, but not free: twice the sessions is the most.
  if (sessions_.size() >= 2 * static_cast<size_t>(options_.max_sessions) + 16) {
    Do(RefuseLease{event.lease, "misad has too many connections (" + std::to_string(sessions_.size()) +
                                    "); end some trainers, or raise limits.sessions in its configuration"});
    return;
  }
  Session session;
  session.lease = event.lease;
  session.token = event.token;
  session.pid = event.pid;
  session.uid = event.uid;
  session.start_time = event.start_time;
  session.client_version = event.client_version;
  by_token_[event.token] = event.lease;
  sessions_.emplace(event.lease, std::move(session));
  Do(SendWelcome{event.lease, event.token});
}

void Core::On(const LeaseClosed& event) {
  const auto found = sessions_.find(event.lease);
  if (found == sessions_.end()) return;
  End(&found->second, event.cause);
}

Session* Core::Authenticate(CallId call, const std::string& token, bool must_be_attached) {
  const auto by_token = by_token_.find(token);
  if (token.empty() || by_token == by_token_.end()) {
    Fail(call, {Code::kUnauthenticated,
                "the call carries no token that a lease holds; connect to " + std::string(kLeaseSocketName) +
                    " first, keep that socket open, and send its token as metadata " + kTokenMetadata});
    return nullptr;
  }
  Session* session = &sessions_.at(by_token->second);
  if (!session->end_cause.empty()) {
    Fail(call, {Code::kPrecondition, "the session has ended (" + session->end_cause + "); attach again"});
    return nullptr;
  }
  if (must_be_attached && session->state != Session::State::kAttached) {
    Fail(call, {Code::kPrecondition, "the session is not attached yet; call Attach first"});
    return nullptr;
  }
  return session;
}

Error Core::CheckAttach(const Session& session, const v1::AttachRequest& request) const {
  if (request.protocol_version() != kProtocolVersion) {
    return {Code::kPrecondition, "the trainer speaks protocol " + std::to_string(request.protocol_version()) +
                                     " and this misad (version " + options_.version + ") speaks " +
                                     std::to_string(kProtocolVersion) + "; install the same version of both"};
  }
  if (draining_) {
    return {Code::kPrecondition, "misad is draining and takes no new sessions; attach again when it has restarted"};
  }
  if (session.state != Session::State::kConnected) {
    return {Code::kPrecondition, "this lease has a session already; open a new lease socket for another one"};
  }
  if (request.mode() != v1::MODE_EXACT && request.mode() != v1::MODE_SAMPLED) {
    return {Code::kInvalid, "the mode is not set; exact and sampled are known"};
  }
  if (request.job().size() > kMaxNameBytes || request.client_version().size() > kMaxNameBytes) {
    return {Code::kInvalid, "the job's name or the client's version is longer than " + std::to_string(kMaxNameBytes) +
                                " bytes"};
  }
  const uint64_t least = LeastOf(request);
  if (!(request.weight() >= 0 && request.weight() <= kMostWeight)) {
    return {Code::kInvalid, "the weight lies above 0 and up to " + std::to_string(static_cast<int>(kMostWeight)) +
                                " (0 stands for 1)"};
  }
  if (request.has_elastic() && request.elastic().most_bytes() != 0 && least > request.elastic().most_bytes()) {
    return {Code::kInvalid, "a budget between " + Amount(least) + " and " + Amount(request.elastic().most_bytes()) +
                                " is no range; the smallest budget is one chunk of " + FormatByteSize(options_.chunk_bytes)};
  }
  if (!request.has_elastic() && request.budget_bytes() < options_.chunk_bytes) {
    return {Code::kInvalid, "a budget of " + std::to_string(request.budget_bytes()) +
                                " bytes holds nothing; the smallest is one chunk of " +
                                FormatByteSize(options_.chunk_bytes)};
  }
  if (request.mode() == v1::MODE_SAMPLED) {
    const v1::SamplingOptions& s = request.sampling();
    // Negated, so that a value that is not a number is refused too.
    if (!(s.delta() > 0 && s.delta() <= 1) || !(s.eta() >= 0 && s.eta() <= 1e6) || !(s.alpha() > 0 && s.alpha() <= 1) ||
        s.inner_steps() < 1 || static_cast<size_t>(s.dependencies_size()) > guard::kMostDependencies) {
      return {Code::kInvalid,
              "the sampling options are out of range: delta and alpha lie in (0, 1], eta in [0, 1000000], and "
              "inner_steps is at least 1, with at most " + std::to_string(guard::kMostDependencies) + " dependencies"};
    }
  }
  if (least > device_.capacity_bytes()) {
    return {Code::kExhausted, "a budget of " + Amount(least) + " was asked for and the device pool is " +
                                  Amount(device_.capacity_bytes()) +
                                  " in all; ask for less, or raise device.capacity in misad's configuration"};
  }
  size_t attached = 0;
  for (const auto& [lease, other] : sessions_) attached += other.state != Session::State::kConnected;
  if (attached >= options_.max_sessions) {
    return {Code::kExhausted, "misad has its " + std::to_string(options_.max_sessions) +
                                  " sessions; end one, or raise limits.sessions in its configuration"};
  }
  return {};
}

void Core::On(const AttachCall& event) {
  Session* session = Authenticate(event.call, event.token, false);
  if (session == nullptr) return;
  for (const Waiting& waiting : waiting_) {
    if (waiting.attach.token != event.token) continue;
    Fail(event.call, {Code::kPrecondition, "this lease's Attach already waits for memory"});
    return;
  }
  Error error = CheckAttach(*session, event.request);
  if (!error.ok()) {
    Fail(event.call, std::move(error));
    return;
  }
  // Behind those who wait already; Balance serves it at once where it can.
  waiting_.push_back({event, now_.monotonic_seconds, 0});
  freed_ = true;
  arbitrate_ = true;
}

bool Core::TryAttach(Session* session, const Waiting& waiting) {
  const AttachCall& call = waiting.attach;
  const v1::AttachRequest& request = call.request;
  Error error = CheckAttach(*session, request);
  if (!error.ok()) {
    Fail(call.call, std::move(error));
    return true;
  }
  const double waited = now_.monotonic_seconds - waiting.since;
  const uint64_t least = LeastOf(request);
  uint64_t budget = least;
  if (request.has_elastic()) {
    // Its share, where the others give it in time; else what there is.
    budget = std::max(least, waiting.target_bytes);
    if (waited >= kPatienceSeconds) budget = std::max(least, std::min(budget, device_.free_bytes()));
  }
  if (device_.Lease(budget).empty()) {
    BeginAttach(session, call, budget);
    return true;
  }
  if (least <= Attainable() && waited < kMostWaitSeconds) return false;
  std::string sentence = std::string("a budget of ") + (request.has_elastic() ? "at least " : "") + Amount(least) +
                         " was asked for, and " + Amount(device_.free_bytes()) + " of the device pool's " +
                         Amount(device_.capacity_bytes()) + " are free";
  if (device_.orphaned_bytes() > 0) {
    sentence += " (" + FormatByteSize(device_.orphaned_bytes()) + " are held by trainers of an earlier misad)";
  }
  if (waited >= kMostWaitSeconds) {
    sentence += "; other sessions were asked to give memory back and did not within " +
                std::to_string(static_cast<int>(kMostWaitSeconds)) + " s";
  }
  sentence += "; ask for less, wait for a session to end, or raise device.capacity in misad's configuration";
  Fail(call.call, {Code::kExhausted, std::move(sentence)});
  return true;
}

// The budget is leased.
void Core::BeginAttach(Session* session, const AttachCall& call, uint64_t budget_bytes) {
  const v1::AttachRequest& request = call.request;
  do {
    session->name = "s" + std::to_string(next_session_++);
  } while (orphans_.contains(session->name));
  session->slot = FreeSlot();
  session->state = Session::State::kAttaching;
  session->job = request.job();
  session->rank = request.rank();
  session->command = request.command().substr(0, 4096);
  BeginGuards(session);
  session->mode = request.mode();
  if (request.mode() == v1::MODE_SAMPLED) session->sampling = request.sampling();
  session->weight = request.weight() > 0 ? request.weight() : 1;
  session->elastic = request.has_elastic();
  session->least_bytes = LeastOf(request);
  session->most_bytes = MostOf(request);
  session->budget_bytes = budget_bytes;
  session->target_bytes = budget_bytes;
  session->leased_bytes = budget_bytes;
  // Room to grow costs nothing until pages are in it.
  session->chunks_bytes = session->most_bytes / options_.chunk_bytes * options_.chunk_bytes;
  session->operation = true;
  session->operation_call = call.call;
  // Before the memory is handed out: a daemon killed right after must leave word of it.
  JournalSessions();
  Do(CreateChunks{session->lease, session->name, session->chunks_bytes, options_.chunk_bytes});
}

void Core::On(const ChunksCreated& event) {
  const auto found = sessions_.find(event.lease);
  if (found == sessions_.end()) return;
  Session* session = &found->second;
  const CallId call = std::exchange(session->operation_call, 0);
  session->operation = false;
  session->state = Session::State::kAttached;
  arbitrate_ = true;
  if (!event.error.ok() && session->end_cause.empty()) {
    Fail(call, event.error);
    End(session, "its memory could not be leased");
    return;
  }
  if (!session->end_cause.empty()) {
    Fail(call, {Code::kUnavailable, "the session ended (" + session->end_cause + ") while it was being attached"});
    StartRelease(session);
    return;
  }
  ever_attached_ = true;
  session->attached_at = now_.monotonic_seconds;
  v1::AttachResponse response;
  response.set_session(session->name);
  response.set_budget_bytes(session->budget_bytes);
  response.set_chunks_bytes(session->chunks_bytes);
  response.set_chunk_bytes(options_.chunk_bytes);
  response.set_disk_block_bytes(options_.disk_block_bytes);
  response.set_device_kind(options_.device_kind);
  response.set_device_name(options_.device_name);
  response.set_device_uuid(options_.device_uuid);
  response.set_device_capacity_bytes(options_.device_capacity_bytes);
  response.mutable_link()->set_load_bytes_per_second(options_.link.load);
  response.mutable_link()->set_unload_bytes_per_second(options_.link.unload);
  response.mutable_link()->set_duplex_load_bytes_per_second(options_.link.duplex_load);
  response.mutable_link()->set_duplex_unload_bytes_per_second(options_.link.duplex_unload);
  response.set_below(options_.below);
  response.set_link_modelled(options_.link_modelled);
  response.set_link_latency_seconds(options_.link_latency_seconds);
  if (session->mode == v1::MODE_SAMPLED) *response.mutable_sampling() = session->sampling;
  Answer(call, std::move(response));
  Emit("session_attached", session->name,
       "job " + session->job + " rank " + std::to_string(session->rank) + " process " + std::to_string(session->pid),
       session->budget_bytes);
}

// --- Modules and disk -------------------------------------------------------------------------------------------------

void Core::On(const RegisterCall& event) {
  Session* session = Authenticate(event.call, event.token, true);
  if (session == nullptr) return;
  if (session->operation) {
    Fail(event.call, {Code::kPrecondition, "an earlier RegisterModules of this session is still under way; wait for it"});
    return;
  }
  // Checked on a copy first: disk is not reserved for modules that are refused.
  ModuleRegistry checked = session->registry;
  bool layout_changed = false;
  Error error = checked.Upsert(event.request.modules(), options_.chunk_bytes, &layout_changed);
  // A trainer whose model is still being made reserves disk first and names its modules later.
  if (error.ok() && session->mode == v1::MODE_SAMPLED && !checked.modules().empty()) {
    const policy::SamplerOptions sampling = SamplingOf(*session);
    std::string sentence = policy::CheckSampler(sampling, checked.Samplable());
    const std::string& state = event.request.sampler_state();
    if (sentence.empty() && !state.empty()) {
      sentence = policy::ModuleSampler(sampling, checked.Samplable()).Restore({state.begin(), state.end()});
    }
    if (!sentence.empty()) error = {Code::kInvalid, sentence};
  }
  if (!error.ok()) {
    Fail(event.call, std::move(error));
    return;
  }
  const uint64_t wanted = event.request.disk_bytes();
  session->registering = event.request;
  session->operation_call = event.call;
  // The first answer comes with the file, also where nothing is to be put into it yet.
  if (wanted <= session->disk_bytes && session->has_disk_file) {
    FinishRegister(session);
    return;
  }
  const std::string refusal = disk_.Lease(wanted - session->disk_bytes);
  if (!refusal.empty()) {
    session->operation_call = 0;
    session->registering.Clear();
    Fail(event.call, {Code::kExhausted,
                      Amount(wanted) + " of " + options_.below + " were asked for, the session has " +
                          Amount(session->disk_bytes) + ", and " + Amount(disk_.free_bytes()) + " of the " + options_.below +
                          " tier's " + Amount(disk_.capacity_bytes()) +
                          " are free; nothing was reserved. End another session, or raise " + options_.below +
                          ".capacity in misad's configuration"});
    return;
  }
  session->disk_coming_bytes = wanted - session->disk_bytes;
  session->operation = true;
  JournalSessions();
  Do(ReserveDisk{session->lease, wanted});
}

void Core::On(const DiskReserved& event) {
  const auto found = sessions_.find(event.lease);
  if (found == sessions_.end()) return;
  Session* session = &found->second;
  session->operation = false;
  const uint64_t came = std::exchange(session->disk_coming_bytes, 0);
  const bool ended = !session->end_cause.empty();
  if (event.error.ok() && !ended) {
    session->disk_bytes += came;
    session->has_disk_file = true;
  } else {
    // An ended session's file went with its other memory.
    const std::string problem = disk_.Return(came);
    if (!problem.empty()) Do(LogLine{Level::kError, problem});
    JournalSessions();
  }
  if (ended) {
    Fail(std::exchange(session->operation_call, 0),
         {Code::kUnavailable, "the session ended (" + session->end_cause + ") while its disk was being reserved"});
    if (session->state == Session::State::kReleased) Forget(session);
    return;
  }
  if (!event.error.ok()) {
    session->registering.Clear();
    Fail(std::exchange(session->operation_call, 0), event.error);
    return;
  }
  FinishRegister(session);
}

void Core::FinishRegister(Session* session) {
  const CallId call = std::exchange(session->operation_call, 0);
  bool layout_changed = false;
  const std::vector<ModuleRegistry::Facet> before = session->registry.facets();
  const Error error = session->registry.Upsert(session->registering.modules(), options_.chunk_bytes, &layout_changed);
  const std::string sampler_state = session->registering.sampler_state();
  session->registering.Clear();
  if (!error.ok()) {
    Fail(call, error);
    return;
  }
  const size_t count = session->registry.modules().size();
  if (!session->tracker) {
    session->tracker.emplace(count, TrackerOptions(*session));
  } else {
    session->tracker->Resize(count);
  }
  SetTracker(session);
  session->active.resize(count, session->mode == v1::MODE_EXACT);
  if (layout_changed) {
    std::erase_if(session->mode_traces, [&](trace::Section& section) {
      return !MoveFacets(session->registry, before, &section.trace);
    });
  }
  if (layout_changed && session->has_trace) KeepTrace(session, before);
  if (session->mode == v1::MODE_SAMPLED && count > 0) {
    if (session->reports == 0 || !sampler_state.empty()) {
      session->sampler.emplace(SamplingOf(*session), session->registry.Samplable());
      if (!sampler_state.empty()) session->sampler->Restore({sampler_state.begin(), sampler_state.end()});
    } else if (layout_changed || session->sampler_index.size() != count) {
      // Steps were drawn from the earlier modules; what the trainer's sampler makes of the new ones is not known here.
      session->sampler.reset();
    }
    session->sampler_index.assign(count, -1);
    int32_t next = 0;
    for (size_t module = 0; module < count; ++module) {
      if (session->registry.modules()[module].samplable()) session->sampler_index[module] = next++;
    }
  }
  v1::RegisterModulesResponse response;
  response.set_disk_bytes(session->disk_bytes);
  Answer(call, std::move(response));
  Emit("modules_registered", session->name, std::to_string(count) + " modules", session->disk_bytes);
}

// Facets have other sizes or places now. The trace knows nothing of sizes, and a trainer whose steps stay as they were does
// not send it again: it stays, with the new places. Where it uses a facet that is gone, a new one will come.
void Core::KeepTrace(Session* session, const std::vector<ModuleRegistry::Facet>& before) {
  session->has_trace = MoveFacets(session->registry, before, &session->trace);
  ++session->influence_serial;  // what is being computed is of before
  session->influence.clear();
  session->smallest_bytes = 0;
  if (!session->has_trace) {
    session->trace = {};
    return;
  }
  session->smallest_bytes = policy::SmallestBudget(MakeInput(*session, session->budget_bytes));
  arbitrate_ = true;
  WantPlan(session);
  WantInfluence(session);
}

// --- The end of a session ---------------------------------------------------------------------------------------------

void Core::On(const DetachCall& event) {
  Session* session = Authenticate(event.call, event.token, false);
  if (session == nullptr) return;
  // Answered once the memory is free again, so that whoever attaches next finds it.
  session->detach_calls.push_back(event.call);
  End(session, "detached");
}

void Core::End(Session* session, const std::string& cause) {
  if (!session->end_cause.empty()) return;
  session->end_cause = cause;
  arbitrate_ = true;
  for (auto waiting = waiting_.begin(); waiting != waiting_.end();) {
    if (waiting->attach.token == session->token) {
      Fail(waiting->attach.call, {Code::kUnavailable, "the session ended (" + cause + ") while it waited for memory"});
      waiting = waiting_.erase(waiting);
    } else {
      ++waiting;
    }
  }
  if (session->stream != 0) {
    Do(FinishTrain{session->stream, {Code::kUnavailable, "the session ended: " + cause}});
    by_stream_.erase(session->stream);
    session->stream = 0;
  }
  if (session->state == Session::State::kAttaching) return;  // the answer starts the release
  if (session->state == Session::State::kConnected) {
    Do(CloseLease{session->lease});
    Erase(session);
    return;
  }
  StartRelease(session);
}

void Core::StartRelease(Session* session) {
  session->state = Session::State::kReleasing;
  std::string problem = device_.BeginReclaim(session->leased_bytes);
  if (problem.empty()) problem = disk_.BeginReclaim(session->disk_bytes);
  if (!problem.empty()) Do(LogLine{Level::kError, problem});
  Emit("session_ended", session->name, session->end_cause, session->leased_bytes);
  Do(Release{session->lease});
}

void Core::On(const Released& event) {
  const auto found = sessions_.find(event.lease);
  if (found == sessions_.end()) return;
  Session* session = &found->second;
  if (session->state != Session::State::kReleasing) return;
  if (!event.problem.empty()) Do(LogLine{Level::kWarning, event.problem});
  std::string problem = device_.EndReclaim(session->leased_bytes);
  if (problem.empty()) problem = disk_.EndReclaim(session->disk_bytes);
  if (!problem.empty()) Do(LogLine{Level::kError, problem});
  Emit("memory_reclaimed", session->name, session->end_cause, session->leased_bytes);
  session->leased_bytes = 0;
  session->disk_bytes = 0;
  session->state = Session::State::kReleased;
  freed_ = true;
  arbitrate_ = true;
  if (session->operation) {
    JournalSessions();
  } else {
    Forget(session);
  }
}

// Nothing of an ended session is left.
void Core::Forget(Session* session) {
  Do(CloseLease{session->lease});
  Erase(session);
  JournalSessions();
  if (options_.private_daemon && ever_attached_ && !quit_ && waiting_.empty()) {
    const bool any = std::any_of(sessions_.begin(), sessions_.end(),
                                 [](const auto& item) { return item.second.state != Session::State::kConnected; });
    if (!any) {
      quit_ = true;
      Do(Quit{"the last session of this private daemon has ended"});
    }
  }
}

void Core::Erase(Session* session) {
  for (const CallId call : session->detach_calls) Answer(call, v1::DetachResponse());
  by_token_.erase(session->token);
  sessions_.erase(session->lease);
}

void Core::On(const OrphanEnded& event) {
  const auto found = orphans_.find(event.session);
  if (found == orphans_.end()) return;
  std::string problem = device_.EndOrphan(found->second.bytes);
  if (problem.empty()) problem = disk_.EndOrphan(found->second.disk_bytes);
  if (!problem.empty()) Do(LogLine{Level::kError, problem});
  Emit("orphan_ended", event.session, "process ended", found->second.bytes);
  orphans_.erase(found);
  freed_ = true;
  arbitrate_ = true;
  JournalSessions();
}

uint32_t Core::FreeSlot() const {
  std::set<uint32_t> taken;
  for (const auto& [lease, session] : sessions_) {
    if (session.state != Session::State::kConnected) taken.insert(session.slot);
  }
  uint32_t slot = 0;
  while (taken.contains(slot)) ++slot;
  return slot;
}

uint64_t Core::JournalSessions(bool answer) {
  WriteJournal effect;
  if (answer) effect.serial = ++journal_serial_;
  for (const auto& [lease, session] : sessions_) {
    if (session.state == Session::State::kConnected) continue;
    effect.entries.push_back({session.name, session.job, session.pid, session.start_time, session.leased_bytes,
                              session.disk_bytes + session.disk_coming_bytes});
  }
  for (const auto& [name, orphan] : orphans_) effect.entries.push_back(orphan);
  const uint64_t serial = effect.serial;
  Do(std::move(effect));
  return serial;
}

// --- The daemon itself ------------------------------------------------------------------------------------------------

void Core::On(const DrainRequested& event) { BeginDrain(event.reason); }

void Core::BeginDrain(const std::string& reason) {
  if (!draining_) Emit("drain", "", reason);
  draining_ = true;
  Do(SetServing{false});
  v1::TrainResponse notice;
  notice.mutable_drain()->set_reason(reason);
  for (const auto& [lease, session] : sessions_) {
    if (session.stream != 0) Do(SendTrain{session.stream, notice});
  }
  while (!waiting_.empty()) {
    Fail(waiting_.front().attach.call, {Code::kPrecondition, "misad is draining and takes no new sessions (" + reason + ")"});
    waiting_.pop_front();
  }
}

void Core::On(const PolicyReloaded& event) {
  ApplyPolicy(event.policy);
  Emit("config_reloaded", "", event.note);
}

void Core::ApplyPolicy(const PolicyOptions& policy) {
  const bool replan = policy.reserve_bytes != policy_.reserve_bytes;
  policy_ = policy;
  for (auto& [lease, session] : sessions_) {
    if (session.tracker) SetTracker(&session);
    if (replan && session.attached() && session.has_trace) WantPlan(&session);
  }
}

void Core::On(const Tick&) {
  freed_ = true;  // who waits may have waited long enough
  if (options_.private_daemon && !ever_attached_ && !quit_ &&
      now_.monotonic_seconds - started_at_ >= options_.private_wait_seconds) {
    quit_ = true;
    Do(Quit{"no session attached to this private daemon in time"});
  }
}

void Core::Emit(const std::string& kind, const std::string& session, const std::string& cause, uint64_t bytes,
                const std::string& module) {
  ++totals_.events[kind];
  v1::Event event;
  event.set_time(FormatTime(now_.wall_us));
  event.set_kind(kind);
  event.set_session(session);
  event.set_module(module);
  event.set_bytes(bytes);
  event.set_cause(cause);
  Do(EmitEvent{std::move(event)});
}

void Core::Fail(CallId call, Error error) { Do(Reply{call, std::move(error), {}}); }

void Core::Answer(CallId call, Response response) { Do(Reply{call, {}, std::move(response)}); }

}  // namespace misa::server
