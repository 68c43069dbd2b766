// The daemon's surroundings: workers, sockets, streams, the operator, restarts.
#include "server/sim/world.h"

#include <algorithm>
#include <utility>

#include "runtime/policy/residency.h"
#include "runtime/policy/schedule.h"
#include "runtime/policy/session_plan.h"
#include "runtime/policy/step_model.h"
#include "server/sim/describe.h"

namespace misa::server {
namespace {

constexpr uint64_t kChunkBytes = 1 << 20;
constexpr size_t kMostHappenings = 200'000;  // a run that does not end is a fault
constexpr double kSettleSeconds = 1;
constexpr double kRestSeconds = 1;

// The planner's first way only: planning is most of a run's cost, and few runs are about plans.
policy::Result<policy::Plan> QuickPlan(const policy::PlanInput& input) {
  policy::Result<policy::Plan> result;
  const policy::Result<policy::StepModel> model = policy::BuildStepModel(input);
  result.error = model.error;
  if (!model.ok()) return result;
  const std::vector<uint8_t> kept = policy::ChooseFarthest(model.value, policy::WidenUses(model.value, 1), 0.1);
  policy::Result<policy::Schedule> schedule = policy::MakeSchedule(model.value, kept, {});
  result.error = schedule.error;
  result.value = std::move(schedule.value.plan);
  return result;
}

}  // namespace

// Any influence is possible, as far as the arbiter can know.
policy::Result<std::vector<policy::StallPoint>> World::GuessInfluence(const policy::PlanInput& input) {
  policy::Result<std::vector<policy::StallPoint>> result;
  uint64_t budget = policy::SmallestBudget(input) + input.reserve_bytes;
  double stall = random_.Between(0.0, 2.0);
  for (int point = 0; point < 3; ++point) {
    result.value.push_back({budget, stall, stall + 1});
    budget += random_.Between(uint64_t{1}, 10 * kChunkBytes);
    stall *= random_.Chance(0.2) ? 1 : random_.Between(0.0, 1.0);
  }
  return result;
}

World::World(const NodeOptions& options) : options_(options), random_(options.seed) {
  thorough_ = random_.Chance(0.1);
  core_options_.version = "simulated";
  core_options_.device_name = "simulated";
  core_options_.chunk_bytes = kChunkBytes;
  const uint64_t crowd = (options_.trainers + 5) / 6;  // in sixes
  core_options_.device_capacity_bytes = crowd * random_.Between(uint64_t{20}, uint64_t{80}) * kChunkBytes;
  core_options_.disk_capacity_bytes = crowd * random_.Between(uint64_t{60}, uint64_t{400}) * kChunkBytes;
  core_options_.link = {random_.Between(2e8, 4e9), random_.Between(2e8, 4e9), 0, 0};
  core_options_.link.duplex_load = core_options_.link.load * random_.Between(0.5, 1.0);
  core_options_.link.duplex_unload = core_options_.link.unload * random_.Between(0.5, 1.0);
  core_options_.policy.reserve_bytes = random_.Below(3) * kChunkBytes;
  core_options_.policy.keep_hot = random_.Chance(0.3);
  core_options_.policy.guards.stability = {4, 0.1, 1};
  core_options_.max_sessions =
      static_cast<uint32_t>(random_.Between(uint64_t{2}, std::max<uint64_t>(6, options_.trainers)));
  // A third of the nodes have no faults: what must hold then is more.
  if (!random_.Chance(0.33)) {
    fault_rate_ = random_.Between(0.0, 0.15);
    garble_rate_ = random_.Chance(0.5) ? random_.Between(0.0, 0.1) : 0;
    restart_chance_ = random_.Chance(0.3) ? 1 : 0;
  }
}

NodeResult World::Run() {
  StartDaemon();
  ScheduleArrivals();
  ScheduleOperator();
  ScheduleTicks();
  if (random_.Chance(restart_chance_)) {
    const uint64_t restarts = random_.Between(uint64_t{1}, uint64_t{2});
    for (uint64_t i = 0; i < restarts; ++i) {
      Later(random_.Between(0.0, options_.seconds), [this] {
        if (up()) KillDaemon();
      });
    }
  }
  Later(options_.seconds, [this] { Settle(); });
  for (size_t count = 0; !queue_.empty() && result_.violation.empty(); ++count) {
    if (count == kMostHappenings) {
      Violate("the run does not come to its end");
      break;
    }
    queue_.Take()();
  }
  if (result_.violation.empty()) AuditEnd();
  result_.virtual_seconds = now();
  return std::move(result_);
}

Now World::CoreNow() const { return {100 + now(), 1'700'000'000'000'000 + static_cast<int64_t>(now() * 1e6)}; }

// --- The daemon
// -------------------------------------------------------------------------------------------------------

void World::StartDaemon() {
  ++epoch_;
  reserving_ = reclaiming_ = planning_ = {now()};
  next_lease_ = 1;
  std::vector<JournalEntry> orphans;
  watched_orphans_.clear();
  for (const JournalEntry& entry : journal_) {
    for (const Trainer& trainer : trainers_) {
      if (alive(trainer) && trainer.pid == entry.pid && trainer.start_time == entry.start_time) {
        orphans.push_back(entry);
        watched_orphans_[entry.session] = trainer.number;
      }
    }
  }
  if (logs()) Log("a daemon starts with " + std::to_string(orphans.size()) + " orphans");
  AuditStart(orphans);
  Effects effects;
  core_.emplace(core_options_, orphans, CoreNow(), &effects);
  for (const Effect& effect : effects) Perform(effect);
  Audit();
}

void World::KillDaemon() {
  if (logs()) Log("the daemon is killed");
  ++result_.restarts;
  core_.reset();
  ++epoch_;
  holdings_.clear();
  ended_.clear();
  decided_.clear();
  std::unordered_map<CallId, Call> calls = std::exchange(calls_, {});
  for (auto& [id, call] : calls) {
    Reply reply{id, {Code::kUnavailable, "the daemon has ended"}, {}};
    Later(Latency(), [done = std::move(call.done), reply] { done(reply); });
  }
  for (auto& [id, stream] : streams_) {
    if (!std::exchange(stream.open, false)) continue;
    Later(Latency(), [this, id = id, number = stream.trainer] { OnStreamEnd(number, id); });
  }
  for (Trainer& trainer : trainers_) {
    if (!alive(trainer) || trainer.phase == Trainer::Phase::kTraining || trainer.phase == Trainer::Phase::kAlone)
      continue;
    // Its lease socket ends in the middle of something: it cannot go on.
    Later(Latency(), [this, number = trainer.number] { Kill(number, "process ended"); });
  }
  Later(random_.Between(0.01, 0.2), [this] { StartDaemon(); });
}

void World::Handle(Event event) {
  if (options_.tamper_event && !options_.tamper_event(&event, result_.events)) return;
  ++result_.events;
  if (logs()) Log("-> " + Describe(event));
  const auto* message = std::get_if<TrainMessage>(&event);
  if (message != nullptr && message->request.has_report() && message->request.report().has_trace()) changed_at_ = now();
  Effects effects;
  core_->Handle(event, CoreNow(), &effects);
  for (Effect& effect : effects) {
    if (options_.tamper_effect && !options_.tamper_effect(&effect, effects_seen_)) continue;
    ++effects_seen_;
    if (logs()) Log("   <- " + Describe(effect));
    Perform(effect);
    if (!result_.violation.empty()) return;
  }
  Audit();
}

void World::Deliver(double delay, Event event) {
  Later(delay, [this, epoch = epoch_, event = std::move(event)]() mutable {
    if (epoch == epoch_ && up()) Handle(std::move(event));
  });
}

bool World::Offer(double delay, Event event) {
  if (!settling_ && random_.Chance(fault_rate_ * 0.05)) return false;  // the queue is full
  Deliver(delay, std::move(event));
  return true;
}

void World::Post(Worker* worker, double seconds, std::function<void()> job) {
  worker->free_at = std::max(worker->free_at, now()) + seconds;
  queue_.Add(worker->free_at, [this, epoch = epoch_, job = std::move(job)] {
    if (epoch == epoch_ && up()) job();
  });
}

void World::Perform(const Effect& effect) {
  const auto fails = [&] { return !settling_ && random_.Chance(fault_rate_); };
  if (const auto* welcome = std::get_if<SendWelcome>(&effect)) {
    Later(Latency(), [this, epoch = epoch_, lease = welcome->lease] {
      if (epoch == epoch_) OnWelcome(lease);
    });
  } else if (const auto* refuse = std::get_if<RefuseLease>(&effect)) {
    if (Trainer* trainer = ByLease(refuse->lease)) {
      Later(Latency(), [this, number = trainer->number] { Kill(number, "socket closed"); });
    }
  } else if (const auto* close = std::get_if<CloseLease>(&effect)) {
    if (Trainer* trainer = ByLease(close->lease); trainer != nullptr && alive(*trainer)) {
      Later(Latency(), [this, number = trainer->number] { Kill(number, "socket closed"); });
    }
  } else if (const auto* chunks = std::get_if<CreateChunks>(&effect)) {
    Error error;
    if (fails()) error = {Code::kInternal, "no memfd could be made"};
    Post(&reserving_, random_.Exponential(0.002), [this, lease = chunks->lease, error] {
      if (error.ok()) holdings_[lease] = false;
      Handle(ChunksCreated{lease, error});
    });
  } else if (const auto* reserve = std::get_if<ReserveDisk>(&effect)) {
    Error error;
    if (fails()) error = {Code::kExhausted, "the disk is full"};
    // Reserving blocks can take long on a busy disk.
    const double seconds = fails() ? random_.Between(0.1, 0.5) : random_.Exponential(0.005);
    Post(&reserving_, seconds, [this, lease = reserve->lease, error]() mutable {
      const auto found = holdings_.find(lease);
      if (found == holdings_.end()) {
        error = {Code::kInternal, "the lease holds nothing that disk could be added to"};
      } else if (error.ok()) {
        found->second = true;
      }
      Handle(DiskReserved{lease, error});
    });
  } else if (const auto* release = std::get_if<Release>(&effect)) {
    const std::string problem = fails() ? "a chunk could not be scrubbed and was closed" : "";
    Post(&reclaiming_, random_.Exponential(0.01), [this, lease = release->lease, problem] {
      holdings_.erase(lease);
      Handle(Released{lease, problem});
    });
  } else if (const auto* plan = std::get_if<ComputePlan>(&effect)) {
    PlanMade made{plan->lease, plan->serial, {}, {}};
    if (fails()) {
      made.plan.error = "the planner found no plan";
    } else {
      policy::SessionPlan found =
          thorough_ ? policy::MakeSessionPlan(plan->input)
                    : policy::SessionPlan{QuickPlan(plan->input), policy::LowerBound(plan->input)};
      made.plan = std::move(found.plan);
      if (made.plan.ok()) made.bound = std::move(found.bound);
    }
    const double seconds = fails() ? random_.Between(0.05, 0.3) : random_.Exponential(0.002);
    Post(&planning_, seconds, [this, made = std::move(made)] { Handle(made); });
  } else if (const auto* reply = std::get_if<Reply>(&effect)) {
    const auto found = calls_.find(reply->call);
    if (found == calls_.end()) {
      Violate("call " + std::to_string(reply->call) + " was answered twice, or was never made");
      return;
    }
    Later(Latency(), [done = std::move(found->second.done), reply = *reply] { done(reply); });
    calls_.erase(found);
  } else if (const auto* send = std::get_if<SendTrain>(&effect)) {
    AuditMessage(*send);
    const auto found = streams_.find(send->stream);
    if (found == streams_.end() || !found->second.open) return;
    Stream& stream = found->second;
    // As the real stream does it: a newer message of a kind replaces one that still waits.
    if (send->response.has_budget()) {
      stream.budget = send->response;
    } else if (send->response.has_plan()) {
      stream.plan = send->response;
      ++result_.plans;
    } else {
      stream.drain = send->response;
    }
    PumpDown(send->stream);
  } else if (const auto* read = std::get_if<ReadTrain>(&effect)) {
    const auto found = streams_.find(read->stream);
    if (found == streams_.end()) return;
    found->second.credit = true;
    PumpUp(read->stream);
  } else if (const auto* finish = std::get_if<FinishTrain>(&effect)) {
    const auto found = streams_.find(finish->stream);
    if (found == streams_.end() || !std::exchange(found->second.open, false)) return;
    Later(Latency(), [this, id = finish->stream, number = found->second.trainer] { OnStreamEnd(number, id); });
    if (!std::exchange(found->second.closed_told, true)) Deliver(Latency(), TrainClosed{finish->stream});
  } else if (const auto* write = std::get_if<WriteJournal>(&effect)) {
    Post(&reserving_, random_.Exponential(0.001), [this, write = *write] {
      journal_ = write.entries;
      if (write.serial != 0) Handle(JournalWritten{write.serial});
    });
  } else if (const auto* influence = std::get_if<ComputeInfluence>(&effect)) {
    InfluenceMade made{influence->lease, influence->serial, {}};
    if (fails()) {
      made.influence.error = "the planner found no plan";
    } else {
      made.influence = thorough_ ? policy::MeasureInfluence(influence->input, 3) : GuessInfluence(influence->input);
    }
    Post(&planning_, random_.Exponential(0.004), [this, made = std::move(made)] { Handle(made); });
  } else if (const auto* line = std::get_if<LogLine>(&effect)) {
    if (line->level == Level::kError) Violate("the core logged an error: " + line->sentence);
  }
}

bool World::Start(const std::string& what, double delay, const std::function<Event(CallId)>& make,
                  std::function<void(const Reply&)> done) {
  if (!up()) return false;
  const CallId call = next_call_++;
  if (!Offer(delay, make(call))) return false;
  calls_.emplace(call, Call{what, now(), std::move(done)});
  return true;
}

void World::PumpDown(StreamId id) {
  Stream& stream = streams_.at(id);
  if (stream.writing || !stream.open) return;
  for (std::optional<v1::TrainResponse>* slot : {&stream.budget, &stream.plan, &stream.drain}) {
    if (!slot->has_value()) continue;
    stream.writing = true;
    Later(Latency(), [this, id, response = std::move(**slot)] {
      Stream& stream = streams_.at(id);
      stream.writing = false;
      OnResponse(stream.trainer, id, response);
      PumpDown(id);
    });
    slot->reset();
    return;
  }
}

void World::PumpUp(StreamId id) {
  Stream& stream = streams_.at(id);
  if (!stream.credit || !stream.open || stream.outbox.empty()) return;
  stream.credit = false;
  TrainMessage message{id, std::move(stream.outbox.front())};
  stream.outbox.pop_front();
  // Once read it arrives, whatever becomes of the stream meanwhile.
  Deliver(Latency(), std::move(message));
}

// --- The operator, and the course of the run
// --------------------------------------------------------------------------

void World::ScheduleArrivals() {
  const uint64_t count = random_.Between(uint64_t{2}, uint64_t{options_.trainers});
  // Some start together, as a job's ranks do.
  const bool together = random_.Chance(0.3);
  for (uint64_t i = 0; i < count; ++i) {
    Later(together ? random_.Between(0.0, 0.02) : random_.Between(0.0, options_.seconds * 0.8), [this] { Arrive(); });
  }
}

void World::ScheduleOperator() {
  const uint64_t count = random_.Below(12);
  for (uint64_t i = 0; i < count; ++i) {
    Later(random_.Between(0.0, options_.seconds), [this] { Operate(); });
  }
}

void World::ScheduleTicks() {
  Later(0.1, [this] {
    if (ending_ && std::none_of(trainers_.begin(), trainers_.end(), [this](const Trainer& t) { return alive(t); }))
      return;
    if (up()) Offer(0, Tick{});
    ScheduleTicks();
  });
}

void World::Operate() {
  if (settling_ || !up()) return;
  const auto ignore = [](const Reply&) {};
  const auto call = [&](const std::string& what, auto request) {
    Start(
        what, Latency(),
        [&](CallId id) {
          return AdminCall{id, request};
        },
        ignore);
  };
  switch (random_.Below(10)) {
    case 0:
    case 1:
    case 2:
    case 3: {
      v1::SetBudgetRequest request;
      request.set_session("s" + std::to_string(random_.Between(1, result_.sessions + 1)));
      request.set_budget_bytes(random_.Below(40) * kChunkBytes / 2);
      request.set_automatic(random_.Chance(0.2));
      return call("SetBudget", request);
    }
    case 4: {
      v1::SetPolicyRequest request;
      request.set_alpha(random_.Between(-0.1, 1.1));
      return call("SetPolicy", request);
    }
    case 5:
      return call("ListSessions", v1::ListSessionsRequest());
    case 6:
      return call("ListModules", v1::ListModulesRequest());
    case 7:
      return call("CaptureSnapshot", v1::CaptureSnapshotRequest());
    case 8: {
      Start(
          "metrics", Latency(), [](CallId id) { return MetricsCall{id}; }, ignore);
      return;
    }
    case 9: {
      if (random_.Chance(0.7)) {
        PolicyReloaded event{core_options_.policy, "reloaded"};
        event.policy.reserve_bytes = random_.Below(3) * kChunkBytes;
        return Deliver(Latency(), event);
      }
      draining_ = true;
      if (random_.Chance(0.5)) return Deliver(Latency(), DrainRequested{"maintenance"});
      return call("Drain", v1::DrainRequest());
    }
  }
}

void World::Settle() {
  if (logs()) Log("from here on nothing comes and nothing fails");
  settling_ = true;
  Later(kSettleSeconds, [this] { AwaitRest(20); });
}

void World::AwaitRest(int tries) {
  if (now() - changed_at_ < kRestSeconds) {
    if (tries == 0) return Violate("the node does not come to rest: budgets or plans go on changing");
    return Later(kRestSeconds, [this, tries] { AwaitRest(tries - 1); });
  }
  AuditSettled();
  EndAll();
}

void World::EndAll() {
  if (logs()) Log("everybody ends");
  ending_ = true;
  for (Trainer& trainer : trainers_) {
    if (!alive(trainer)) continue;
    const uint32_t number = trainer.number;
    Later(random_.Between(0.0, 0.5), [this, number] {
      if (trainers_[number].phase == Trainer::Phase::kTraining && random_.Chance(0.5)) {
        Detach(number);
      } else {
        Kill(number, "process ended");
      }
    });
  }
}

}  // namespace misa::server
