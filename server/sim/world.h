// The inside of a simulated node: see node.h.
#pragma once

#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "runtime/predict/recent.h"
#include "runtime/sim/event_queue.h"
#include "runtime/sim/random.h"
#include "server/core/core.h"
#include "server/sim/node.h"
#include "server/sim/trainer_model.h"

namespace misa::server {

class World {
 public:
  explicit World(const NodeOptions& options);
  NodeResult Run();

 private:
  // A trainer's process. What it says and does is in trainers.cc.
  struct Trainer {
    enum class Phase : uint8_t {
      kConnecting,   // its hello is on the way
      kAttaching,    // has a token
      kRegistering,  // has memory
      kTraining,
      kAlone,    // trains on without a daemon
      kLeaving,  // has let go of its memory
      kGone,     // the process has ended
    };
    Trainer(uint32_t number, sim::Random* random, uint64_t chunk_bytes) : number(number), model(random, chunk_bytes) {}

    uint32_t number;
    int32_t pid = 0;
    uint64_t start_time = 0;
    Phase phase = Phase::kConnecting;
    TrainerModel model;
    v1::Mode mode = v1::MODE_EXACT;
    uint64_t wanted_bytes = 0;
    bool elastic = false;
    uint64_t most_bytes = 0;  // of an elastic budget; 0: no limit
    double weight = 1;
    double hello_at = 0;  // when the daemon hears of it
    uint32_t attempts = 0;
    bool refuses_plans = false;
    double slowness = 1;

    // The daemon it speaks to.
    uint64_t epoch = 0;
    LeaseId lease = 0;
    std::string token;
    std::string session;
    StreamId stream = 0;
    bool stream_open = false;

    // What it may hold now, by what it has been told: the truth that the pool's count has to cover.
    uint64_t in_force_bytes = 0;
    uint64_t budget_serial = 0;
    std::optional<v1::BudgetChange> told;  // in force from the next boundary on
    uint64_t step = 0;
    uint64_t last_step = 0;
    struct Trace {
      bool sent = false;
      bool planned = false;
    };
    predict::Recent<Trace> traces;  // that its last steps had, by digest
    uint64_t plan_version = 0;
    bool refused_last = false;
    bool registering = false;  // other modules, which the daemon does not know yet
    double link_share = 1;     // of the daemon's rates
  };

  struct Stream {
    uint32_t trainer = 0;
    bool open = true;     // not finished by the daemon, not cancelled
    bool credit = false;  // the daemon reads
    bool writing = false;
    bool closed_told = false;
    std::deque<v1::TrainRequest> outbox;
    std::optional<v1::TrainResponse> budget, plan, drain;
  };

  struct Call {
    std::string what;
    double at = 0;
    std::function<void(const Reply&)> done;
  };

  // A worker thread of the daemon: jobs in order, one at a time.
  struct Worker {
    double free_at = 0;
  };

  // --- The daemon: world.cc ---
  void StartDaemon();
  void KillDaemon();
  bool up() const { return core_.has_value(); }
  void Handle(Event event);
  // An event on its way into the daemon that lives now; lost where that dies first.
  void Deliver(double delay, Event event);
  // As Deliver, but the queue may be full: false then.
  bool Offer(double delay, Event event);
  void Perform(const Effect& effect);
  void Post(Worker* worker, double seconds, std::function<void()> job);
  policy::Result<std::vector<policy::StallPoint>> GuessInfluence(const policy::PlanInput& input);
  void PumpDown(StreamId id);
  void PumpUp(StreamId id);
  // Answered with `done`, at the latest when the daemon dies. False: refused at the door.
  bool Start(const std::string& what, double delay, const std::function<Event(CallId)>& make,
             std::function<void(const Reply&)> done);
  void Later(double delay, std::function<void()> what) { queue_.Add(queue_.now() + delay, std::move(what)); }
  double now() const { return queue_.now(); }
  Now CoreNow() const;

  // --- Faults and the operator: world.cc ---
  void ScheduleArrivals();
  void ScheduleOperator();
  void ScheduleTicks();
  void Operate();
  void Settle();
  void EndAll();

  // --- Trainers: trainers.cc ---
  void Arrive();
  void Hello(uint32_t number);
  void OnWelcome(LeaseId lease);
  void CallAttach(uint32_t number);
  void OnAttached(uint32_t number, const Reply& reply);
  void CallRegister(uint32_t number);
  void OpenStream(uint32_t number);
  void OnResponse(uint32_t number, StreamId stream, const v1::TrainResponse& response);
  void OnStreamEnd(uint32_t number, StreamId stream);
  void BreakStream(uint32_t number);
  void BeginStep(uint32_t number);
  void EndStep(uint32_t number);
  v1::StepReport Report(Trainer* trainer);
  void Confuse(Trainer* trainer, v1::StepReport* report);
  void Say(Trainer* trainer, v1::TrainRequest request);
  void Detach(uint32_t number);
  // The process ends.
  void Kill(uint32_t number, const std::string& cause);
  bool alive(const Trainer& trainer) const { return trainer.phase != Trainer::Phase::kGone; }
  // Speaks to the daemon that lives now.
  bool connected(const Trainer& trainer) const { return up() && trainer.epoch == epoch_ && trainer.lease != 0; }
  Trainer* ByLease(LeaseId lease);
  double Latency() { return random_.Exponential(0.0005); }

  // --- Checks: audit.cc ---
  void Audit();
  void AuditMessage(const SendTrain& effect);
  void AuditStart(const std::vector<JournalEntry>& orphans);
  uint64_t Givable(const Session& session) const;
  void AuditSettled();
  // Once nothing has changed for a while; a node that does not come to rest is a fault.
  void AwaitRest(int tries);
  void AuditEnd();
  void Violate(const std::string& sentence);
  void Log(const std::string& line);
  bool logs() const { return options_.log; }

  const NodeOptions options_;
  sim::Random random_;
  sim::EventQueue<std::function<void()>> queue_;
  NodeResult result_;
  uint64_t effects_seen_ = 0;

  // The node.
  CoreOptions core_options_;
  double start_wall_ = 0;
  std::optional<Core> core_;
  uint64_t epoch_ = 0;
  Worker reserving_, reclaiming_, planning_;
  std::vector<JournalEntry> journal_;  // as on the disk
  std::unordered_map<CallId, Call> calls_;
  CallId next_call_ = 1;
  StreamId next_stream_ = 1;
  LeaseId next_lease_ = 1;
  uint64_t next_token_ = 1;
  std::map<StreamId, Stream> streams_;
  std::map<LeaseId, bool> holdings_;  // leases whose memory exists; true: a file too
  std::map<std::string, uint32_t> watched_orphans_;
  int32_t next_pid_ = 1000;

  std::deque<Trainer> trainers_;
  bool thorough_ = false;  // plans and influences as the daemon makes them
  bool settling_ = false;
  bool ending_ = false;
  bool draining_ = false;
  double fault_rate_ = 0;   // chance of a failure of each operation
  double garble_rate_ = 0;  // chance that a trainer says something senseless
  double restart_chance_ = 0;

  // By lease: the budget that was last seen decided.
  struct Decided {
    uint64_t serial = 0;
    uint64_t bytes = 0;
  };
  std::map<LeaseId, Decided> decided_;
  double changed_at_ = 0;  // a budget, a trace, who is there
  // Leases of the daemon that lives now whose trainer has ended or let go, and when.
  std::map<LeaseId, double> ended_;
};

}  // namespace misa::server
