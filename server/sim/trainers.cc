// The life of a simulated trainer: as the real session and executor behave towards the daemon, and worse.
#include <algorithm>
#include <limits>
#include <utility>

#include "runtime/memory/lease_protocol.h"
#include "server/sim/world.h"

namespace misa::server {
namespace {

constexpr size_t kMostReports = 64;  // as the real session keeps
constexpr double kRetrySeconds = 0.05;

}  // namespace

World::Trainer* World::ByLease(LeaseId lease) {
  for (Trainer& trainer : trainers_) {
    if (trainer.epoch == epoch_ && trainer.lease == lease) return &trainer;
  }
  return nullptr;
}

void World::Arrive() {
  const auto number = static_cast<uint32_t>(trainers_.size());
  Trainer& trainer = trainers_.emplace_back(number, &random_, core_options_.chunk_bytes);
  trainer.pid = next_pid_++;
  trainer.start_time = random_.Below(1'000'000);
  trainer.last_step = random_.Between(uint64_t{3}, uint64_t{60});
  trainer.refuses_plans = random_.Chance(fault_rate_);
  trainer.slowness = random_.Between(0.8, 1.2);
  trainer.mode = random_.Chance(0.8) ? v1::MODE_EXACT : v1::MODE_SAMPLED;
  const uint64_t most = std::max(trainer.model.smallest_bytes() + 1, trainer.model.all_bytes());
  trainer.wanted_bytes = random_.Between(trainer.model.smallest_bytes(), most);
  if (random_.Chance(0.05)) trainer.wanted_bytes = random_.Below(2 * core_options_.device_capacity_bytes);
  trainer.elastic = random_.Chance(0.5);
  trainer.weight = random_.Chance(0.5) ? 1 : random_.Between(0.2, 5.0);
  if (trainer.elastic && random_.Chance(0.5)) {
    trainer.wanted_bytes = random_.Below(trainer.model.smallest_bytes() + 1);
    trainer.most_bytes = trainer.wanted_bytes + random_.Between(trainer.model.smallest_bytes(), 2 * most);
  }
  Hello(number);
  if (!random_.Chance(fault_rate_)) return;
  Later(random_.Between(0.0, options_.seconds), [this, number] {
    if (!settling_) Kill(number, random_.Chance(0.5) ? "process ended" : "socket closed");
  });
}

void World::Hello(uint32_t number) {
  Trainer& trainer = trainers_[number];
  if (!alive(trainer)) return;
  if (!up()) {
    if (++trainer.attempts > 6) return Kill(number, "process ended");
    return Later(kRetrySeconds, [this, number] { Hello(number); });
  }
  trainer.epoch = epoch_;
  trainer.lease = next_lease_++;
  trainer.token = "token" + std::to_string(next_token_++);
  const double latency = Latency();
  trainer.hello_at = now() + latency;
  if (!Offer(latency, LeaseOpened{trainer.lease, trainer.token, trainer.pid, 0, trainer.start_time, "simulated"})) {
    trainer.lease = 0;
    Kill(number, "process ended");
  }
}

void World::OnWelcome(LeaseId lease) {
  Trainer* trainer = ByLease(lease);
  if (trainer == nullptr || trainer->phase != Trainer::Phase::kConnecting) return;
  trainer->phase = Trainer::Phase::kAttaching;
  const uint32_t number = trainer->number;
  if (random_.Chance(garble_rate_)) CallRegister(number);
  if (random_.Chance(garble_rate_)) CallAttach(number);
  CallAttach(number);
}

void World::CallAttach(uint32_t number) {
  Trainer& trainer = trainers_[number];
  if (trainer.phase != Trainer::Phase::kAttaching || !connected(trainer)) return;
  v1::AttachRequest request;
  request.set_protocol_version(random_.Chance(garble_rate_) ? 99 : kProtocolVersion);
  request.set_job("job" + std::to_string(number % 2));
  request.set_rank(number);
  request.set_weight(random_.Chance(garble_rate_) ? -1 : trainer.weight);
  if (trainer.elastic) {
    request.mutable_elastic()->set_least_bytes(trainer.wanted_bytes);
    request.mutable_elastic()->set_most_bytes(trainer.most_bytes);
  } else {
    request.set_budget_bytes(trainer.wanted_bytes);
  }
  request.set_mode(trainer.mode);
  if (trainer.mode == v1::MODE_SAMPLED) {
    request.mutable_sampling()->set_delta(random_.Chance(garble_rate_) ? 0 : 0.9);
    request.mutable_sampling()->set_eta(1);
    request.mutable_sampling()->set_alpha(0.2);
    request.mutable_sampling()->set_inner_steps(2);
  }
  const bool called = Start(
      "Attach", Latency(),
      [&](CallId call) {
        return AttachCall{call, trainer.token, request};
      },
      [this, number, epoch = epoch_](const Reply& reply) {
        if (epoch == epoch_) OnAttached(number, reply);
      });
  if (!called) Kill(number, "process ended");
}

void World::OnAttached(uint32_t number, const Reply& reply) {
  Trainer& trainer = trainers_[number];
  if (trainer.phase != Trainer::Phase::kAttaching) return;
  if (!reply.error.ok()) {
    if (reply.error.code == Code::kExhausted && ++trainer.attempts < 4 && !settling_) {
      trainer.wanted_bytes = std::max(trainer.wanted_bytes / 2, core_options_.chunk_bytes);
      return Later(random_.Exponential(kRetrySeconds), [this, number] { CallAttach(number); });
    }
    return Kill(number, "socket closed");
  }
  const auto& response = std::get<v1::AttachResponse>(reply.response);
  ++result_.sessions;
  trainer.session = response.session();
  trainer.in_force_bytes = response.budget_bytes();
  trainer.phase = Trainer::Phase::kRegistering;
  CallRegister(number);
}

void World::CallRegister(uint32_t number) {
  Trainer& trainer = trainers_[number];
  if (!connected(trainer)) return;
  const bool called = Start(
      "RegisterModules", Latency(),
      [&](CallId call) {
        return RegisterCall{call, trainer.token, trainer.model.Modules()};
      },
      [this, number, epoch = epoch_](const Reply& reply) {
        Trainer& trainer = trainers_[number];
        if (epoch != epoch_ || trainer.phase != Trainer::Phase::kRegistering) return;
        if (!reply.error.ok()) return Kill(number, "process ended");
        OpenStream(number);
        if (trainer.phase != Trainer::Phase::kRegistering) return;
        trainer.phase = Trainer::Phase::kTraining;
        BeginStep(number);
      });
  if (!called && trainer.phase == Trainer::Phase::kRegistering) Kill(number, "process ended");
}

// --- The stream
// -------------------------------------------------------------------------------------------------------

void World::OpenStream(uint32_t number) {
  Trainer& trainer = trainers_[number];
  if (!alive(trainer) || !connected(trainer)) return;
  const StreamId id = next_stream_++;
  trainer.stream = id;
  trainer.stream_open = true;
  trainer.trace_sent = 0;  // what was on its way on an earlier stream may be lost
  streams_[id].trainer = number;
  if (Offer(Latency(), TrainOpened{id, random_.Chance(garble_rate_) ? "nobody" : trainer.token})) return;
  streams_[id].open = false;
  Later(Latency(), [this, number, id] { OnStreamEnd(number, id); });
}

void World::OnStreamEnd(uint32_t number, StreamId stream) {
  Trainer& trainer = trainers_[number];
  if (trainer.stream != stream || !alive(trainer) || trainer.phase == Trainer::Phase::kLeaving) return;
  trainer.stream_open = false;
  if (connected(trainer)) {
    return Later(random_.Exponential(kRetrySeconds), [this, number, stream] {
      if (trainers_[number].stream == stream) OpenStream(number);
    });
  }
  if (trainer.phase == Trainer::Phase::kTraining) trainer.phase = Trainer::Phase::kAlone;
}

void World::BreakStream(uint32_t number) {
  Trainer& trainer = trainers_[number];
  const StreamId id = trainer.stream;
  const auto found = streams_.find(id);
  if (found == streams_.end() || !std::exchange(found->second.open, false)) return;
  trainer.stream_open = false;
  if (!std::exchange(found->second.closed_told, true)) Deliver(random_.Exponential(0.01), TrainClosed{id});
  if (random_.Chance(garble_rate_)) Deliver(random_.Exponential(0.01), TrainClosed{id});
  // The new one may come before the daemon has noticed the old one's end.
  Later(random_.Exponential(0.01), [this, number] { OpenStream(number); });
}

void World::Say(Trainer* trainer, v1::TrainRequest request) {
  const auto found = streams_.find(trainer->stream);
  if (!trainer->stream_open || found == streams_.end() || !found->second.open) return;
  if (found->second.outbox.size() >= kMostReports) found->second.outbox.pop_front();
  found->second.outbox.push_back(std::move(request));
  PumpUp(trainer->stream);
}

void World::OnResponse(uint32_t number, StreamId stream, const v1::TrainResponse& response) {
  Trainer& trainer = trainers_[number];
  if (trainer.stream != stream || trainer.phase != Trainer::Phase::kTraining) return;
  if (response.has_budget()) {
    trainer.told = response.budget();
  } else if (response.has_plan()) {
    const v1::Plan& plan = response.plan();
    v1::TrainRequest request;
    v1::PlanAcknowledgement* acknowledgement = request.mutable_acknowledgement();
    acknowledgement->set_version(plan.version());
    const bool fits = plan.trace_digest() == trainer.model.digest() || plan.trace_digest() == trainer.previous_digest;
    const bool accepted = fits && !(trainer.refuses_plans && random_.Chance(0.5));
    acknowledgement->set_accepted(accepted);
    trainer.refused_last = !accepted;
    if (accepted) {
      trainer.plan_digest = plan.trace_digest();
      trainer.plan_version = plan.version();
    } else {
      acknowledgement->set_reason(fits ? "there is no room for it" : "it is for another trace");
    }
    if (random_.Chance(garble_rate_)) acknowledgement->set_version(random_.Below(100));
    Say(&trainer, request);
    if (random_.Chance(garble_rate_)) Say(&trainer, request);
  }
}

// --- Steps
// ------------------------------------------------------------------------------------------------------------

void World::BeginStep(uint32_t number) {
  Trainer& trainer = trainers_[number];
  const double seconds = trainer.model.compute_seconds() * trainer.slowness * random_.Between(0.9, 1.1);
  Later(seconds, [this, number] { EndStep(number); });
}

void World::EndStep(uint32_t number) {
  Trainer& trainer = trainers_[number];
  if (trainer.phase != Trainer::Phase::kTraining && trainer.phase != Trainer::Phase::kAlone) return;
  ++trainer.step;
  ++result_.steps;
  if (trainer.stream_open) {
    v1::TrainRequest request;
    *request.mutable_report() = Report(&trainer);
    Say(&trainer, std::move(request));
  }
  // The boundary. What has to leave may take another step.
  if (trainer.told && (settling_ || trainer.told->budget_bytes() > trainer.in_force_bytes || !random_.Chance(0.2))) {
    trainer.in_force_bytes = trainer.told->budget_bytes();
    trainer.budget_serial = trainer.told->serial();
    trainer.told.reset();
  }
  if (!settling_) {
    if (trainer.step >= trainer.last_step) {
      if (trainer.phase == Trainer::Phase::kTraining && random_.Chance(0.6)) return Detach(number);
      return Kill(number, random_.Chance(0.5) ? "process ended" : "socket closed");
    }
    if (random_.Chance(fault_rate_ * 0.1)) BreakStream(number);
    if (trainer.elastic && random_.Chance(0.02)) {
      v1::TrainRequest request;
      request.mutable_budget_request()->set_bytes(random_.Below(2 * trainer.model.all_bytes()));
      Say(&trainer, std::move(request));
    }
    if (random_.Chance(0.02)) {
      trainer.previous_digest = trainer.model.digest();
      trainer.model.ChangeTrace();
    } else if (connected(trainer) && random_.Chance(0.02)) {
      // The call blocks the trainer, as the real one does.
      const TrainerModel before = trainer.model;
      trainer.model.Change();
      trainer.registering = true;
      const bool called = Start(
          "RegisterModules", Latency(),
          [&](CallId call) {
            return RegisterCall{call, trainer.token, trainer.model.Modules()};
          },
          [this, number, before](const Reply& reply) {
            Trainer& trainer = trainers_[number];
            trainer.registering = false;
            if (!reply.error.ok()) trainer.model = before;  // what it had goes on
            BeginStep(number);
          });
      if (called) return;
      trainer.registering = false;
      trainer.model = before;
    }
  }
  BeginStep(number);
}

v1::StepReport World::Report(Trainer* trainer) {
  v1::StepReport report;
  const TrainerModel& model = trainer->model;
  report.set_step(trainer->step);
  report.set_step_seconds(model.compute_seconds());
  report.set_stall_seconds(random_.Exponential(0.001));
  const uint64_t budget = trainer->in_force_bytes;
  const uint64_t peak = random_.Between(std::min(model.smallest_bytes(), budget), budget);
  report.set_device_peak_bytes(peak);
  report.set_budget_serial(trainer->budget_serial);
  report.set_device_bytes(random_.Below(peak + 1));
  report.set_pool_backed_bytes(random_.Below(report.device_bytes() + 1));
  report.set_plan_version(trainer->plan_version);
  if (model.digest() != trainer->trace_sent) {
    *report.mutable_trace() = model.trace();
    trainer->trace_sent = model.digest();
  }
  for (uint32_t i = 0; i < model.module_count(); ++i) {
    v1::ModuleStatistics* statistics = report.add_statistics();
    statistics->set_module(i);
    statistics->set_sum(random_.Between(-1.0, 1.0));
    statistics->set_sum_squares(random_.Between(1.0, 2.0));
    statistics->set_count(10);
    v1::FacetResidency* residency = report.add_residency();
    residency->set_facet(3 * i);
    residency->set_residency(random_.Chance(0.5) ? v1::RESIDENCY_DEVICE : v1::RESIDENCY_DISK);
  }
  if (random_.Chance(0.8)) {
    report.set_loss(random_.Chance(garble_rate_) ? std::numeric_limits<double>::infinity() : random_.Between(2.9, 3.1));
  }
  report.set_rows(random_.Below(3));
  if (!settling_ && random_.Chance(0.05)) trainer->link_share = random_.Between(0.3, 2.0);
  if (trainer->step > 2) {
    v1::LinkRates* measured = report.mutable_measured_link();
    measured->set_load_bytes_per_second(core_options_.link.load * trainer->link_share);
    measured->set_unload_bytes_per_second(core_options_.link.unload * trainer->link_share);
  }
  if (!settling_ && random_.Chance(garble_rate_)) Confuse(trainer, &report);
  return report;
}

void World::Confuse(Trainer* trainer, v1::StepReport* report) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  switch (random_.Below(6)) {
    case 0:
      report->mutable_statistics(0)->set_sum_squares(kNan);
      break;
    case 1:
      report->add_statistics()->set_module(1'000'000);
      break;
    case 2:
      report->add_residency()->set_facet(1'000'000);
      break;
    case 3:
      report->set_step_seconds(kNan);
      break;
    case 4:
      report->mutable_measured_link()->set_load_bytes_per_second(-1);
      break;
    case 5: {
      *report->mutable_trace() = trainer->model.trace();
      v1::TraceEntry* entry = report->mutable_trace()->mutable_entries(0);
      switch (random_.Below(4)) {
        case 0:
          entry->set_facets(0, 1'000'000);
          break;
        case 1:
          entry->set_access(0, 77);
          break;
        case 2:
          entry->add_access(1);
          break;
        case 3:
          report->mutable_trace()->set_digest(7);
          break;
      }
      trainer->trace_sent = 0;
      break;
    }
  }
}

// --- The end
// ----------------------------------------------------------------------------------------------------------

void World::Detach(uint32_t number) {
  Trainer& trainer = trainers_[number];
  if (!connected(trainer)) return Kill(number, "process ended");
  trainer.phase = Trainer::Phase::kLeaving;
  trainer.in_force_bytes = 0;
  const bool called = Start(
      "Detach", Latency(),
      [&](CallId call) {
        return DetachCall{call, trainer.token};
      },
      [this, number](const Reply&) { Kill(number, "socket closed"); });
  if (!called) return Kill(number, "process ended");
  ended_.emplace(trainer.lease, now());
  if (random_.Chance(garble_rate_)) {
    Start(
        "Detach", Latency(),
        [&](CallId call) {
          return DetachCall{call, trainer.token};
        },
        [](const Reply&) {});
  }
  // It does not wait for ever, and may die meanwhile.
  Later(random_.Chance(0.1) ? Latency() : 2.0, [this, number] { Kill(number, "process ended"); });
}

void World::Kill(uint32_t number, const std::string& cause) {
  Trainer& trainer = trainers_[number];
  if (!alive(trainer)) return;
  if (logs()) Log("trainer " + std::to_string(number) + " (lease " + std::to_string(trainer.lease) + "): " + cause);
  trainer.phase = Trainer::Phase::kGone;
  trainer.in_force_bytes = 0;
  for (const auto& [session, orphan] : watched_orphans_) {
    if (orphan != number) continue;
    Deliver(Latency(), OrphanEnded{session});
    if (random_.Chance(garble_rate_)) Deliver(Latency(), OrphanEnded{session});
  }
  if (!connected(trainer)) return;
  ended_.emplace(trainer.lease, now());
  // The ends of its socket, its process and its stream are seen in any order.
  Deliver(std::max(trainer.hello_at - now(), Latency()), LeaseClosed{trainer.lease, cause});
  if (random_.Chance(garble_rate_)) Deliver(Latency(), LeaseClosed{trainer.lease, cause});
  const auto found = streams_.find(trainer.stream);
  if (found == streams_.end()) return;
  found->second.open = false;
  if (!std::exchange(found->second.closed_told, true)) Deliver(Latency(), TrainClosed{trainer.stream});
}

}  // namespace misa::server
