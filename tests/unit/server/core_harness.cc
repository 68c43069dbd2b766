#include "tests/unit/server/core_harness.h"

#include <gmock/gmock.h>

#include <deque>
#include <utility>

namespace misa::server {

CoreOptions CoreHarness::Defaults() {
  CoreOptions options;
  options.version = "test";
  options.device_capacity_bytes = 100 * kMiB;
  options.disk_capacity_bytes = 1000 * kMiB;
  options.link = {1e9, 8e8, 6e8, 5e8};
  options.policy.reserve_bytes = 0;
  options.max_sessions = 4;
  return options;
}

CoreHarness::CoreHarness(CoreOptions options, const std::vector<JournalEntry>& orphans) {
  now = {1000, 1'700'000'000'000'000};
  Effects effects;
  core_.emplace(std::move(options), orphans, now, &effects);
  Do(std::move(effects));
}

void CoreHarness::Handle(const Event& event) {
  Effects effects;
  now.monotonic_seconds += 0.001;
  core_->Handle(event, now, &effects);
  ASSERT_EQ(core_->CheckInvariants(), "");
  Do(std::move(effects));
}

void CoreHarness::Do(Effects effects) {
  std::vector<Event> follow;
  for (const Effect& effect : effects) Perform(effect, &follow);
  for (const Event& event : follow) Handle(event);
}

void CoreHarness::Perform(const Effect& effect, std::vector<Event>* follow) {
  const auto answer = [&](Event event) { (hold ? held : *follow).push_back(std::move(event)); };
  if (const auto* chunks = std::get_if<CreateChunks>(&effect)) {
    if (chunks_error.ok()) {
      EXPECT_TRUE(holding.insert(chunks->lease).second);
    }
    answer(ChunksCreated{chunks->lease, chunks_error});
  } else if (const auto* disk = std::get_if<ReserveDisk>(&effect)) {
    answer(DiskReserved{disk->lease, disk_error});
  } else if (const auto* release = std::get_if<Release>(&effect)) {
    holding.erase(release->lease);
    answer(Released{release->lease, ""});
  } else if (const auto* plan = std::get_if<ComputePlan>(&effect)) {
    PlanMade made{plan->lease, plan->serial, policy::MakePlan(plan->input), {}};
    if (made.plan.ok()) made.bound = policy::LowerBound(plan->input);
    answer(made);
  } else if (const auto* reply = std::get_if<Reply>(&effect)) {
    for (const Reply& earlier : replies) EXPECT_NE(earlier.call, reply->call) << "a call was answered twice";
    replies.push_back(*reply);
  } else if (const auto* emit = std::get_if<EmitEvent>(&effect)) {
    events.push_back(emit->event);
  } else if (const auto* send = std::get_if<SendTrain>(&effect)) {
    sent.push_back(*send);
  } else if (const auto* finish = std::get_if<FinishTrain>(&effect)) {
    finished.push_back(*finish);
  } else if (const auto* write = std::get_if<WriteJournal>(&effect)) {
    journal = write->entries;
    if (write->serial != 0) answer(JournalWritten{write->serial});
  } else if (const auto* influence = std::get_if<ComputeInfluence>(&effect)) {
    answer(InfluenceMade{influence->lease, influence->serial, policy::MeasureInfluence(influence->input)});
  } else if (const auto* prediction = std::get_if<ComputePrediction>(&effect)) {
    predictions.push_back(*prediction);
  } else if (const auto* forget = std::get_if<ForgetPrediction>(&effect)) {
    forgotten.push_back(forget->lease);
  } else if (const auto* refuse = std::get_if<RefuseLease>(&effect)) {
    refused.push_back(refuse->sentence);
  } else if (const auto* quit = std::get_if<Quit>(&effect)) {
    quits.push_back(quit->cause);
  } else if (const auto* line = std::get_if<LogLine>(&effect)) {
    if (line->level == Level::kError) errors.push_back(line->sentence);
  }
}

void CoreHarness::Answer(Error error) {
  std::vector<Event> events_now = std::move(held);
  held.clear();
  for (Event& event : events_now) {
    if (auto* chunks = std::get_if<ChunksCreated>(&event)) chunks->error = error;
    if (auto* disk = std::get_if<DiskReserved>(&event)) disk->error = error;
    Handle(event);
  }
}

LeaseId CoreHarness::Attach(uint64_t budget_bytes, v1::Mode mode) {
  const LeaseId id = ++lease;
  Handle(LeaseOpened{id, Token(id), 100 + static_cast<int32_t>(id), 0, 7, "test"});
  AttachCall call{NewCall(), Token(id), {}};
  call.request.set_protocol_version(1);
  call.request.set_job("job");
  call.request.set_budget_bytes(budget_bytes);
  call.request.set_mode(mode);
  if (mode == v1::MODE_SAMPLED) {
    call.request.mutable_sampling()->set_delta(0.5);
    call.request.mutable_sampling()->set_eta(1);
    call.request.mutable_sampling()->set_alpha(0.1);
    call.request.mutable_sampling()->set_inner_steps(2);
    call.request.mutable_sampling()->set_seed(3);
  }
  Handle(call);
  return id;
}

LeaseId CoreHarness::AttachElastic(uint64_t least_bytes, uint64_t most_bytes, double weight) {
  const LeaseId id = ++lease;
  Handle(LeaseOpened{id, Token(id), 100 + static_cast<int32_t>(id), 0, 7, "test"});
  AttachCall call{NewCall(), Token(id), {}};
  call.request.set_protocol_version(1);
  call.request.set_mode(v1::MODE_EXACT);
  call.request.mutable_elastic()->set_least_bytes(least_bytes);
  call.request.mutable_elastic()->set_most_bytes(most_bytes);
  call.request.set_weight(weight);
  Handle(call);
  return id;
}

void CoreHarness::Register(LeaseId id, const v1::RegisterModulesRequest& request) {
  Handle(RegisterCall{NewCall(), Token(id), request});
}

v1::GetNodeResponse CoreHarness::Node() {
  Handle(AdminCall{NewCall(), v1::GetNodeRequest()});
  return last<v1::GetNodeResponse>();
}

int CoreHarness::CountEvents(const std::string& kind) const {
  int count = 0;
  for (const v1::Event& event : events) count += event.kind() == kind;
  return count;
}

v1::RegisterModulesRequest MakeModules(int count, uint64_t facet_bytes, uint64_t disk_bytes) {
  v1::RegisterModulesRequest request;
  request.set_disk_bytes(disk_bytes);
  for (int i = 0; i < count; ++i) {
    v1::Module* module = request.add_modules();
    module->set_name("m" + std::to_string(i));
    module->set_parameter_count(100);
    module->set_samplable(true);
    v1::Facet* facet = module->add_facets();
    facet->set_id(static_cast<uint32_t>(10 + i));
    facet->set_kind(v1::FACET_KIND_WEIGHTS);
    facet->set_device_bytes(facet_bytes);
  }
  return request;
}

v1::Trace MakeTrace(int count) {
  v1::Trace trace;
  for (int i = 0; i < 2 * count; ++i) {
    const int module = i < count ? i : 2 * count - 1 - i;
    v1::TraceEntry* entry = trace.add_entries();
    entry->add_facets(static_cast<uint32_t>(10 + module));
    entry->add_access(i < count ? v1::ACCESS_READ : v1::ACCESS_READ | v1::ACCESS_WRITE);
    entry->set_compute_seconds(0.01);
  }
  return trace;
}

}  // namespace misa::server
