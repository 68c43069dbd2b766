// What the core wants done. Adapters carry effects out in order; an effect with an answer comes back as an event.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "misa/v1/admin.pb.h"
#include "misa/v1/control.pb.h"
#include "server/core/event.h"
#include "server/core/figures.h"
#include "server/errors.h"
#include "server/journal.h"
#include "server/log.h"

namespace misa::server {

struct SendWelcome {
  LeaseId lease = 0;
  std::string token;
};
struct RefuseLease {
  LeaseId lease = 0;
  std::string sentence;
};
// Closes the lease's socket: its session is gone.
struct CloseLease {
  LeaseId lease = 0;
};

// Makes the session's memfd and sends it. Answer: ChunksCreated.
struct CreateChunks {
  LeaseId lease = 0;
  std::string session;
  uint64_t bytes = 0;
  uint64_t chunk_bytes = 0;
};
// Creates or grows the session's file to `bytes`; the first time, sends it. Answer: DiskReserved.
struct ReserveDisk {
  LeaseId lease = 0;
  uint64_t bytes = 0;
};
// Scrubs and closes all the lease holds. Answer: Released.
struct Release {
  LeaseId lease = 0;
};

using Response =
    std::variant<std::monostate, v1::AttachResponse, v1::RegisterModulesResponse, v1::DetachResponse,
                 v1::GetNodeResponse, v1::ListSessionsResponse, v1::ListModulesResponse, v1::CaptureSnapshotResponse,
                 v1::GetTraceResponse, v1::SetBudgetResponse, v1::SetPolicyResponse, v1::DrainResponse, Figures>;
struct Reply {
  CallId call = 0;
  Error error;
  Response response;
};

struct SendTrain {
  StreamId stream = 0;
  v1::TrainResponse response;
};
// The stream's last message was folded in: it may send the next one.
struct ReadTrain {
  StreamId stream = 0;
};
struct FinishTrain {
  StreamId stream = 0;
  Error error;
};

// Runs the policy on a thread of its own. Answer: PlanMade.
struct ComputePlan {
  LeaseId lease = 0;
  uint64_t serial = 0;
  policy::PlanInput input;
};

// Predicts the session's stall at several budgets, on the same thread. Answer: InfluenceMade.
struct ComputeInfluence {
  LeaseId lease = 0;
  uint64_t serial = 0;
  policy::PlanInput input;
};

// Shows a session's next steps to the predictor that learns, on a thread of its own. Answer: PredictionMade.
struct ComputePrediction {
  LeaseId lease = 0;
  uint64_t observed = 0;  // steps up to here, these included
  std::vector<uint64_t> digests;
};
// It is not asked about this session again.
struct ForgetPrediction {
  LeaseId lease = 0;
};

// Written before any memory that a later effect creates. Answer, where `serial` is not 0: JournalWritten.
struct WriteJournal {
  std::vector<JournalEntry> entries;
  uint64_t serial = 0;
};
struct EmitEvent {
  v1::Event event;
};
struct LogLine {
  Level level = Level::kInfo;
  std::string sentence;
};
struct SetServing {
  bool serving = true;
};
// A private daemon's work is done.
struct Quit {
  std::string cause;
};

using Effect = std::variant<SendWelcome, RefuseLease, CloseLease, CreateChunks, ReserveDisk, Release, Reply, SendTrain,
                            ReadTrain, FinishTrain, ComputePlan, ComputeInfluence, ComputePrediction, ForgetPrediction, WriteJournal, EmitEvent, LogLine,
                            SetServing, Quit>;
using Effects = std::vector<Effect>;

}  // namespace misa::server
