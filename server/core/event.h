// What happens to the core: the only way anything enters it.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "misa/v1/admin.pb.h"
#include "misa/v1/control.pb.h"
#include "runtime/policy/arbiter.h"
#include "runtime/policy/importance.h"
#include "runtime/policy/planner.h"
#include "runtime/policy/session_plan.h"
#include "server/core/guard_options.h"
#include "server/errors.h"

namespace misa::server {

using LeaseId = uint64_t;
using CallId = uint64_t;
using StreamId = uint64_t;

// Thresholds of the policy that may change while the daemon runs.
struct PolicyOptions {
  double alpha = 0.25;
  double hot = 0.75;
  double cold = 0.35;
  uint64_t reserve_bytes = policy::kDefaultReserveBytes;
  uint32_t window = 50;
  policy::Signal signal = policy::Signal::kVariance;
  // Hot modules and the guards' pins keep their place on the device; else plans decide by bytes and time alone.
  bool keep_hot = false;
  GuardOptions guards;

  bool operator==(const PolicyOptions&) const = default;
};

// A trainer's hello on the lease socket was accepted; `token` is fresh.
struct LeaseOpened {
  LeaseId lease = 0;
  std::string token;
  int32_t pid = 0;
  uint32_t uid = 0;
  uint64_t start_time = 0;
  std::string client_version;
};
struct LeaseClosed {
  LeaseId lease = 0;
  std::string cause;  // "socket closed" or "process ended"
};

struct AttachCall {
  CallId call = 0;
  std::string token;
  v1::AttachRequest request;
};
// The answer to CreateChunks: the memfd exists and is on its way to the trainer.
struct ChunksCreated {
  LeaseId lease = 0;
  Error error;
};
struct RegisterCall {
  CallId call = 0;
  std::string token;
  v1::RegisterModulesRequest request;
};
// The answer to ReserveDisk.
struct DiskReserved {
  LeaseId lease = 0;
  Error error;
};
struct DetachCall {
  CallId call = 0;
  std::string token;
};
// The answer to Release: chunks scrubbed and closed, disk file closed.
struct Released {
  LeaseId lease = 0;
  std::string problem;  // "" or what could not be scrubbed
};

struct TrainOpened {
  StreamId stream = 0;
  std::string token;
};
struct TrainMessage {
  StreamId stream = 0;
  v1::TrainRequest request;
};
struct TrainClosed {
  StreamId stream = 0;
};
// The answer to ComputePlan.
struct PlanMade {
  LeaseId lease = 0;
  uint64_t serial = 0;
  policy::Result<policy::Plan> plan;
  policy::Result<policy::Bound> bound;
};

// The answer to ComputeInfluence.
struct InfluenceMade {
  LeaseId lease = 0;
  uint64_t serial = 0;
  policy::Result<std::vector<policy::StallPoint>> influence;
};
// The answer to a WriteJournal with a serial: it is on the disk, or could not be written.
struct JournalWritten {
  uint64_t serial = 0;
};

struct OrphanEnded {
  std::string session;
};

struct AdminCall {
  CallId call = 0;
  std::variant<v1::GetNodeRequest, v1::ListSessionsRequest, v1::ListModulesRequest, v1::CaptureSnapshotRequest,
               v1::GetTraceRequest, v1::SetBudgetRequest, v1::SetPolicyRequest, v1::DrainRequest>
      request;
};
// A scrape wants the core's figures.
struct MetricsCall {
  CallId call = 0;
};

struct DrainRequested {
  std::string reason;
};
struct PolicyReloaded {
  PolicyOptions policy;
  std::string note;
};
// The answer to ComputePrediction.
struct PredictionMade {
  LeaseId lease = 0;
  uint64_t observed = 0;
  std::optional<uint64_t> digest;  // that the step after those observed is to have
  std::string problem;             // not empty: there is no such predictor, now or ever again
};
struct Tick {};

using Event = std::variant<LeaseOpened, LeaseClosed, AttachCall, ChunksCreated, RegisterCall, DiskReserved, DetachCall,
                           Released, TrainOpened, TrainMessage, TrainClosed, PlanMade, InfluenceMade, JournalWritten,
                           OrphanEnded, AdminCall, MetricsCall, DrainRequested, PolicyReloaded, PredictionMade, Tick>;

// Read by the scheduler, once for each event.
struct Now {
  double monotonic_seconds = 0;
  int64_t wall_us = 0;  // since the epoch, UTC
};

}  // namespace misa::server
