// What the core knows of one session: one lease, one trainer process.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "misa/v1/control.pb.h"
#include "runtime/policy/arbiter.h"
#include "runtime/policy/importance.h"
#include "runtime/policy/planner.h"
#include "runtime/policy/sampler.h"
#include "runtime/trace/trace_file.h"
#include "server/core/event.h"
#include "server/core/session_guards.h"
#include "server/errors.h"

namespace misa::server {

inline constexpr size_t kMaxModules = 20000;
inline constexpr size_t kMaxNameBytes = 512;
inline constexpr size_t kMaxTraceEntries = 1'000'000;
inline constexpr uint64_t kMaxFacetBytes = 1ull << 50;

// The modules of one session. A facet's id is the trainer's; its index is dense, for the policy.
class ModuleRegistry {
 public:
  struct Facet {
    uint32_t id = 0;
    uint32_t module = 0;
    v1::FacetKind kind = v1::FACET_KIND_UNSPECIFIED;
    uint64_t bytes = 0;
    v1::Residency residency = v1::RESIDENCY_UNSPECIFIED;
  };

  // Adds the modules, or replaces those of the same name in place. A sentence, and nothing changed, where one is
  // impossible. `*layout_changed` tells whether a facet that was known has another shape now, or is gone.
  Error Upsert(const google::protobuf::RepeatedPtrField<v1::Module>& modules, uint64_t chunk_bytes, bool* layout_changed);

  const std::vector<v1::Module>& modules() const { return modules_; }
  const std::vector<Facet>& facets() const { return facets_; }
  Facet* Find(uint32_t id);
  // The dense index of a facet's id.
  std::optional<uint32_t> Index(uint32_t id) const;
  // Device bytes by dense index.
  std::vector<uint64_t> FacetBytes() const;
  // The modules that sampling may choose, in the order of registration.
  std::vector<policy::SamplerModule> Samplable() const;

 private:
  std::vector<v1::Module> modules_;
  std::unordered_map<std::string, uint32_t> by_name_;
  std::vector<Facet> facets_;
  std::unordered_map<uint32_t, uint32_t> by_id_;
};

std::vector<guard::Dependency> DependenciesOf(const v1::SamplingOptions& sampling);

struct Session {
  enum class State : uint8_t {
    kConnected,  // has a lease and no memory
    kAttaching,  // its chunks are being made
    kAttached,
    kReleasing,  // ended; its memory is being scrubbed
    kReleased,   // and is free; its disk is still being reserved, or it would be gone
  };

  // Who.
  LeaseId lease = 0;
  std::string name;
  std::string token;
  int32_t pid = 0;
  uint32_t uid = 0;
  uint64_t start_time = 0;
  std::string client_version;
  std::string job;
  uint32_t rank = 0;
  std::string command;
  v1::Mode mode = v1::MODE_UNSPECIFIED;
  v1::SamplingOptions sampling;
  uint32_t slot = 0;
  double attached_at = 0;

  // Where it is in its life. At most one operation (chunks or disk) is under way; it goes only after that.
  State state = State::kConnected;
  bool operation = false;
  CallId operation_call = 0;
  std::string end_cause;  // not empty: it ends
  std::vector<CallId> detach_calls;

  // What it holds.
  uint64_t budget_bytes = 0;  // in force, or announced
  uint64_t leased_bytes = 0;  // counted in the pool; above the budget until the trainer has shrunk
  uint64_t chunks_bytes = 0;  // size of its memfd
  uint64_t disk_bytes = 0;    // reserved
  uint64_t disk_coming_bytes = 0;  // being reserved, beside them
  bool has_disk_file = false;
  uint64_t budget_serial = 0;    // of the last change since it attached; 0: none
  uint64_t announce_serial = 0;  // not 0: a larger budget is announced once this journal is written

  // How it shares the device.
  double weight = 1;
  bool elastic = false;  // the arbiter chooses its budget
  uint64_t least_bytes = 0;  // as asked for
  uint64_t most_bytes = 0;
  uint64_t smallest_bytes = 0;  // that its step needs at once; 0: not known
  uint64_t asked_bytes = 0;     // that a step turned out to need
  uint64_t target_bytes = 0;    // what its budget is to become, as memory comes free
  std::vector<policy::StallPoint> influence;
  uint64_t influence_serial = 0;

  // What it told us.
  ModuleRegistry registry;
  v1::RegisterModulesRequest registering;  // waits for the disk
  StreamId stream = 0;
  v1::StepReport last;  // without trace, statistics and residency
  uint64_t reports = 0;
  std::string last_problem;
  std::vector<bool> active;  // by module

  SessionGuards guards;
  std::optional<policy::ImportanceTracker> tracker;
  // A mirror of the trainer's sampler, to see the two apart. Gone once they are, or where it cannot follow.
  std::optional<policy::ModuleSampler> sampler;
  uint64_t sampler_step = 0;  // the step it has followed last
  std::vector<int32_t> sampler_index;  // by module; -1 where it may not be chosen

  // Planning.
  bool has_trace = false;
  policy::Trace trace;  // by dense facet index
  uint64_t trace_digest = 0;
  std::vector<trace::Section> mode_traces;  // of evaluation and accumulation, by dense facet index
  bool plan_in_flight = false;
  bool plan_wanted = false;  // something changed while one was being made
  uint64_t plan_serial = 0;
  uint64_t plan_trace_digest = 0;
  uint64_t sent_version = 0;
  uint64_t accepted_version = 0;
  policy::LinkRates plan_link;
  uint64_t steps_since_plan = 0;
  uint32_t plan_failures = 0;  // since the last one that was accepted
  policy::Bound bound;

  bool attached() const { return state == State::kAttached && end_cause.empty(); }
};

}  // namespace misa::server
