// What must hold in a simulated node, told from what the adapters and trainers know, not from the core's own count.
#include <algorithm>
#include <utility>

#include "server/sim/world.h"

namespace misa::server {
namespace {

constexpr double kReclaimSeconds = 1;  // a dead trainer's memory is free again
constexpr double kAnswerSeconds = 10;  // the longest that a call waits
constexpr size_t kMostUnread = 8;

std::string Bytes(uint64_t bytes) { return std::to_string(bytes) + " bytes"; }

// The core knows that the session's steps have this trace, now or from time to time.
bool Knows(const Session& session, uint64_t digest) {
  if (!session.has_trace || session.trace_digest == digest) return session.has_trace;
  const Session::Phase* phase = session.phases.Find(digest);
  return phase != nullptr && phase->returned && !phase->trace.entries.empty();
}

}  // namespace

void World::Violate(const std::string& sentence) {
  if (!result_.violation.empty()) return;
  result_.violation = sentence;
  if (logs()) Log("VIOLATION: " + sentence);
}

void World::Log(const std::string& line) {
  char time[32];
  std::snprintf(time, sizeof time, "%10.6f ", now());
  result_.log.push_back(time + line);
}

void World::Audit() {
  if (!up() || !result_.violation.empty()) return;
  if (const std::string problem = core_->CheckInvariants(); !problem.empty()) return Violate(problem);
  const uint64_t capacity = core_options_.device_capacity_bytes;
  uint64_t budgets = 0;
  uint64_t held = 0;  // by living trainers, and by what is left of dead ones
  for (const auto& [lease, session] : core_->sessions()) {
    const Trainer* trainer = ByLease(lease);
    const bool lives = trainer != nullptr && alive(*trainer) && trainer->phase != Trainer::Phase::kLeaving;
    if (session.attached()) budgets += session.budget_bytes;
    if (session.attached() && session.budget_bytes > session.leased_bytes) {
      return Violate("session " + session.name + " has a budget of " + Bytes(session.budget_bytes) +
                     " and a lease of " + Bytes(session.leased_bytes));
    }
    if (lives && trainer->in_force_bytes > session.leased_bytes) {
      return Violate("the trainer of session " + session.name + " may hold " + Bytes(trainer->in_force_bytes) +
                     ", and the pool counts " + Bytes(session.leased_bytes) + " for it");
    }
    if (!lives) held += session.leased_bytes;
    Decided& decided = decided_[lease];
    if (decided.serial != session.budget_serial || decided.bytes != session.budget_bytes) changed_at_ = now();
    if (session.attached() && decided.serial != session.budget_serial) {
      const bool known =
          lives && !trainer->registering && Knows(session, trainer->model.digest());
      if (known && session.budget_bytes < decided.bytes && session.budget_bytes < trainer->model.smallest_bytes()) {
        return Violate("session " + session.name + " was asked to shrink to " + Bytes(session.budget_bytes) +
                       ", and one operator needs " + Bytes(trainer->model.smallest_bytes()));
      }
    }
    decided = {session.budget_serial, session.budget_bytes};
  }
  if (budgets > capacity)
    return Violate("the budgets sum to " + Bytes(budgets) + ", more than the pool's " + Bytes(capacity));
  for (const Trainer& trainer : trainers_) {
    if (alive(trainer)) held += trainer.in_force_bytes;
  }
  if (held > capacity) return Violate("trainers hold " + Bytes(held) + ", more than the pool's " + Bytes(capacity));
  for (auto ended = ended_.begin(); ended != ended_.end();) {
    const auto session = core_->sessions().find(ended->first);
    if (session == core_->sessions().end() || session->second.leased_bytes == 0) {
      ended = ended_.erase(ended);
      continue;
    }
    if (now() - ended->second > kReclaimSeconds) {
      return Violate("the memory of lease " + std::to_string(ended->first) + " is not free " +
                     std::to_string(now() - ended->second) + " s after its trainer ended");
    }
    ++ended;
  }
  for (const auto& [id, call] : calls_) {
    if (now() - call.at > kAnswerSeconds) {
      return Violate("call " + std::to_string(id) + " (" + call.what + ") has waited " +
                     std::to_string(now() - call.at) + " s for an answer");
    }
  }
}

void World::AuditMessage(const SendTrain& effect) {
  const auto found = streams_.find(effect.stream);
  if (found == streams_.end())
    return Violate("a message was sent to stream " + std::to_string(effect.stream) + ", which never was");
  const Trainer& trainer = trainers_[found->second.trainer];
  if (trainer.stream != effect.stream || !connected(trainer)) return;
  const auto session = core_->sessions().find(trainer.lease);
  if (session == core_->sessions().end()) return Violate("a message was sent to a session that is gone");
  if (effect.response.has_plan()) {
    const v1::Plan& plan = effect.response.plan();
    for (const v1::PlanAction& action : plan.actions()) {
      if (action.facet() >= trainer.model.facet_count()) {
        return Violate("plan " + std::to_string(plan.version()) + " of session " + session->second.name +
                       " names facet " + std::to_string(action.facet()) + ", which the trainer does not have");
      }
    }
  }
}

// A daemon that starts has to know of all memory that is still held.
void World::AuditStart(const std::vector<JournalEntry>& orphans) {
  for (const Trainer& trainer : trainers_) {
    if (!alive(trainer) || trainer.in_force_bytes == 0) continue;
    uint64_t known = 0;
    for (const JournalEntry& orphan : orphans) {
      if (orphan.pid == trainer.pid) known = orphan.bytes;
    }
    const uint64_t may_hold = std::max(trainer.in_force_bytes, trainer.told ? trainer.told->budget_bytes() : 0);
    if (known < may_hold) {
      return Violate("after a restart process " + std::to_string(trainer.pid) + " may hold " + Bytes(may_hold) +
                     ", and the journal knows of " + Bytes(known));
    }
  }
}

// Bytes that are free, or that other elastic sessions hold beyond their least.
uint64_t World::Givable(const Session& session) const {
  uint64_t bytes = core_->device().free_bytes();
  for (const auto& [lease, other] : core_->sessions()) {
    if (&other == &session || !other.elastic || !other.attached()) continue;
    const uint64_t least = std::max({other.least_bytes, other.asked_bytes, core_options_.chunk_bytes,
                                     other.smallest_bytes + other.smallest_bytes / 16});
    bytes += other.budget_bytes - std::min(other.budget_bytes, least);
  }
  return bytes;
}

// Nothing has failed or changed for many steps: everybody has what it is due.
void World::AuditSettled() {
  if (!up() || !result_.violation.empty()) return;
  const uint64_t free = core_->device().free_bytes();
  for (const auto& [id, call] : calls_) {
    return Violate("call " + std::to_string(id) + " (" + call.what + ") was made at " + std::to_string(call.at) +
                   " s and is not answered now that everything is settled");
  }
  for (const Trainer& trainer : trainers_) {
    if (trainer.phase != Trainer::Phase::kTraining || !connected(trainer)) continue;
    const auto found = core_->sessions().find(trainer.lease);
    if (found == core_->sessions().end()) return Violate("a living trainer has no session");
    const Session& session = found->second;
    if (!trainer.stream_open) return Violate("the trainer of session " + session.name + " has no stream");
    if (streams_.at(trainer.stream).outbox.size() > kMostUnread) {
      return Violate("the daemon does not read the stream of session " + session.name);
    }
    if (session.budget_bytes != trainer.in_force_bytes) {
      return Violate("session " + session.name + " has a budget of " + Bytes(session.budget_bytes) +
                     ", and its trainer knows of " + Bytes(trainer.in_force_bytes));
    }
    if (session.leased_bytes != session.budget_bytes) {
      return Violate("session " + session.name + " has given nothing back: it leases " + Bytes(session.leased_bytes) +
                     " under a budget of " + Bytes(session.budget_bytes));
    }
    const uint64_t needed = std::min(std::max(trainer.model.smallest_bytes(), session.asked_bytes), session.most_bytes);
    const bool known = Knows(session, trainer.model.digest());
    if (session.elastic && known && session.budget_bytes < needed &&
        Givable(session) >= needed + core_options_.chunk_bytes - session.budget_bytes) {
      return Violate("session " + session.name + " starves: it has " + Bytes(session.budget_bytes) +
                     ", its step needs " + Bytes(needed) + ", and others could give " + Bytes(Givable(session)));
    }
    if (session.elastic && session.budget_bytes < session.target_bytes &&
        free >= session.target_bytes - session.budget_bytes + core_options_.device_capacity_bytes / 10) {
      return Violate("session " + session.name + " was to have " + Bytes(session.target_bytes) + " and has " +
                     Bytes(session.budget_bytes) + ", with " + Bytes(free) + " free");
    }
    const bool possible = session.budget_bytes >= trainer.model.smallest_bytes() + core_options_.chunk_bytes * 2;
    // Tried again later and later.
    const Session::Phase* phase = session.phases.Find(trainer.model.digest());
    if (session.plan_failures > 1 || (phase != nullptr && phase->failures > 1)) continue;
    const Trainer::Trace* trace = trainer.traces.Find(trainer.model.digest());
    if (possible && !trainer.refuses_plans && (trace == nullptr || !trace->planned)) {
      return Violate("session " + session.name + " has no plan for the trace that its steps have");
    }
  }
}

// Everybody has ended: every byte is free, every call answered, nothing is left behind.
void World::AuditEnd() {
  if (!up()) return Violate("the daemon did not start again");
  for (const auto& [id, call] : calls_) {
    return Violate("call " + std::to_string(id) + " (" + call.what + ") was never answered");
  }
  if (!core_->sessions().empty()) return Violate("sessions are left after all trainers have ended");
  if (!holdings_.empty()) return Violate("memory is left after all sessions have ended");
  if (!journal_.empty()) return Violate("the journal names sessions after all have ended");
  Effects effects;
  core_->Handle(AdminCall{next_call_++, v1::GetNodeRequest()}, CoreNow(), &effects);
  for (const Effect& effect : effects) {
    const auto* reply = std::get_if<Reply>(&effect);
    if (reply == nullptr) continue;
    const auto& node = std::get<v1::GetNodeResponse>(reply->response);
    if (node.free_bytes() != node.capacity_bytes()) {
      Violate(Bytes(node.capacity_bytes() - node.free_bytes()) +
              " of the pool are not free after all trainers have ended");
    }
    if (node.disk_reserved_bytes() != 0) {
      Violate(Bytes(node.disk_reserved_bytes()) + " of the disk are reserved after all trainers have ended");
    }
  }
}

}  // namespace misa::server
