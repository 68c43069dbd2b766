// The daemon's decisions: (state, event, now) -> (state, effects). No I/O, no clock, no randomness, no threads: the same
// events at the same times give the same effects, so that a simulation can drive it and a seed replays a failure.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/memory/pool.h"
#include "server/core/effect.h"
#include "server/core/event.h"
#include "server/core/figures.h"
#include "server/core/session.h"
#include "server/errors.h"

namespace misa::server {

struct CoreOptions {
  std::string version;
  std::string device_kind = "cpu";
  std::string device_name;
  std::string device_uuid;
  uint64_t device_capacity_bytes = 0;
  uint64_t chunk_bytes = 64 << 10;
  // The tier below: "disk" or "host".
  std::string below = "disk";
  uint64_t disk_capacity_bytes = 0;
  uint32_t disk_block_bytes = 4096;
  policy::LinkRates link;
  // Trainers keep to `link` and this latency themselves; nothing about it is measured.
  bool link_modelled = false;
  double link_latency_seconds = 0;
  PolicyOptions policy;
  uint32_t max_sessions = 64;
  uint32_t module_series_limit = 90;
  // Ends with its last session, or when none came in time.
  bool private_daemon = false;
  double private_wait_seconds = 30;
};

class Core {
 public:
  // `orphans` are trainers of an earlier daemon that still live.
  Core(CoreOptions options, const std::vector<JournalEntry>& orphans, Now now, Effects* effects);

  void Handle(const Event& event, Now now, Effects* effects);

  // "" or a sentence: the invariants of the accounting, for tests and the scheduler's own check.
  std::string CheckInvariants() const;
  // For a simulation's checks.
  const std::map<LeaseId, Session>& sessions() const { return sessions_; }
  const Pool& device() const { return device_; }

 private:
  // Lease plane.
  void On(const LeaseOpened& event);
  void On(const LeaseClosed& event);
  void On(const ChunksCreated& event);
  void On(const DiskReserved& event);
  void On(const Released& event);
  void On(const OrphanEnded& event);
  // Control plane.
  void On(const AttachCall& event);
  void On(const RegisterCall& event);
  void On(const DetachCall& event);
  void On(const TrainOpened& event);
  void On(const TrainMessage& event);
  void On(const TrainClosed& event);
  void On(const PlanMade& event);
  void On(const InfluenceMade& event);
  void On(const JournalWritten& event);
  // Admin and observation.
  void On(const AdminCall& event);
  void On(const MetricsCall& event);
  void On(const DrainRequested& event);
  void On(const PolicyReloaded& event);
  void On(const Tick& event);

  void Admin(CallId call, const v1::GetNodeRequest& request);
  void Admin(CallId call, const v1::ListSessionsRequest& request);
  void Admin(CallId call, const v1::ListModulesRequest& request);
  void Admin(CallId call, const v1::CaptureSnapshotRequest& request);
  void Admin(CallId call, const v1::GetTraceRequest& request);
  void Admin(CallId call, const v1::SetBudgetRequest& request);
  void Admin(CallId call, const v1::SetPolicyRequest& request);
  void Admin(CallId call, const v1::DrainRequest& request);

  // The session of a token; nullptr after having replied with what is wrong.
  Session* Authenticate(CallId call, const std::string& token, bool must_be_attached);
  Error CheckAttach(const Session& session, const v1::AttachRequest& request) const;
  // An Attach that waits for memory: that of a session that ends, or what the others give back at their next steps.
  struct Waiting {
    AttachCall attach;
    double since = 0;
    uint64_t target_bytes = 0;  // of an elastic budget, by the arbiter
  };
  // True where the call was answered or is under way; false where it waits.
  bool TryAttach(Session* session, const Waiting& waiting);
  void BeginAttach(Session* session, const AttachCall& call, uint64_t budget_bytes);
  void FinishRegister(Session* session);
  void KeepTrace(Session* session, const std::vector<ModuleRegistry::Facet>& before);
  // Starts the end of a session, or notes the cause while its chunks are being made.
  void End(Session* session, const std::string& cause);
  void StartRelease(Session* session);
  void Forget(Session* session);
  void Erase(Session* session);
  void BeginDrain(const std::string& reason);
  void ApplyPolicy(const PolicyOptions& policy);
  uint32_t FreeSlot() const;
  // With `answer`, the serial that JournalWritten will come with.
  uint64_t JournalSessions(bool answer = false);

  // Sharing the device: core_arbiter.cc.
  // In force from the trainer's next boundary on; what it grows by is leased first. A sentence, and nothing changed, where
  // the pool has no room for that.
  std::string ChangeBudget(Session* session, uint64_t budget_bytes, const std::string& cause);
  void Announce(Session* session);
  // What an elastic session can be brought down to.
  uint64_t Floor(const Session& session) const;
  uint64_t LeastOf(const v1::AttachRequest& request) const;
  uint64_t MostOf(const v1::AttachRequest& request) const;
  // Free bytes, and those that will be as sessions end and elastic ones shrink.
  uint64_t Attainable() const;
  void Arbitrate();
  void ServeWaiting();
  void Grow(bool only_starved);
  // After each event: what it set free is given out, and budgets follow who is there.
  void Balance();

  void FoldReport(Session* session, const v1::StepReport& report);
  void FoldStatistics(Session* session, const v1::StepReport& report);
  void FoldSampler(Session* session, const v1::StepReport& report);
  void FoldTrace(Session* session, const v1::Trace& trace);
  void FoldModeTrace(Session* session, const v1::ModeTrace& mode_trace);
  void FinishShrink(Session* session);
  // Guards: core_guards.cc.
  void BeginGuards(Session* session) const;
  void FoldGuards(Session* session, const v1::StepReport& report);
  void FoldLoss(Session* session, const v1::StepReport& report);
  void JudgeModules(Session* session, bool planned_anyway);
  bool ImportanceInForce(const Session& session) const;
  policy::ImportanceTracker::Options TrackerOptions(const Session& session) const;
  // The options, and the windows of single modules.
  void SetTracker(Session* session) const;
  size_t KeptModules(const Session& session, const policy::PlanInput& input) const;
  std::vector<uint32_t> PinnedFacets(const Session& session, const policy::PlanInput& input) const;
  v1::GuardStatus DescribeGuards(const Session& session) const;
  void WantPlan(Session* session);
  void WantInfluence(Session* session);
  bool LinkMoved(const Session& session) const;
  policy::LinkRates EffectiveLink(const Session& session) const;
  policy::PlanInput MakeInput(const Session& session, uint64_t budget_bytes) const;
  void Problem(Session* session, const char* kind, const std::string& sentence);

  v1::GetNodeResponse Node() const;
  v1::Session Describe(const Session& session) const;
  std::vector<v1::ModuleStatus> DescribeModules(const Session& session) const;
  Figures Measure() const;

  void Emit(const std::string& kind, const std::string& session, const std::string& cause, uint64_t bytes = 0,
            const std::string& module = "");
  void Fail(CallId call, Error error);
  void Answer(CallId call, Response response);
  template <typename E>
  void Do(E effect) {
    effects_->emplace_back(std::move(effect));
  }

  const CoreOptions options_;
  PolicyOptions policy_;
  Pool device_;
  Pool disk_;  // of the tier below, whichever it is
  bool draining_ = false;
  bool quit_ = false;
  bool ever_attached_ = false;
  double started_at_ = 0;
  uint64_t next_session_ = 1;
  std::map<LeaseId, Session> sessions_;
  std::unordered_map<std::string, LeaseId> by_token_;
  std::unordered_map<StreamId, LeaseId> by_stream_;
  std::map<std::string, JournalEntry> orphans_;
  // First come, first served; at most one for each session.
  std::deque<Waiting> waiting_;
  bool freed_ = false;      // memory came free, or somebody waits for some
  bool arbitrate_ = false;  // who shares the device, or what they need, has changed
  uint64_t journal_serial_ = 0;
  Totals totals_;

  // Of the event being handled.
  Now now_;
  Effects* effects_ = nullptr;
};

}  // namespace misa::server
