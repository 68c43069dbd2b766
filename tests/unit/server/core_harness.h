// Drives the core without threads, clocks or sockets: effects are carried out by a fake, in order.
#pragma once

#include <map>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "server/core/core.h"

namespace misa::server {

inline constexpr uint64_t kMiB = 1 << 20;

struct CoreHarness {
  explicit CoreHarness(CoreOptions options = Defaults(), const std::vector<JournalEntry>& orphans = {});
  static CoreOptions Defaults();

  // Handles the event and carries out what follows, unless `hold` is set: operations then wait in `held`.
  void Handle(const Event& event);
  // Answers the held operations in order.
  void Answer(Error error = {});

  // Opens a lease and attaches; the lease's number, also where Attach was refused.
  LeaseId Attach(uint64_t budget_bytes, v1::Mode mode = v1::MODE_EXACT);
  // As Attach, with a budget that the arbiter chooses; 0: no limit on that side.
  LeaseId AttachElastic(uint64_t least_bytes = 0, uint64_t most_bytes = 0, double weight = 0);
  void Register(LeaseId lease, const v1::RegisterModulesRequest& request);
  CallId next_call() const { return call_; }

  const Reply& last_reply() const { return replies.back(); }
  template <typename R>
  R last() const {
    return std::get<R>(replies.back().response);
  }
  v1::GetNodeResponse Node();
  int CountEvents(const std::string& kind) const;

  Now now;
  bool hold = false;
  Error chunks_error;
  Error disk_error;
  std::vector<Event> held;
  std::vector<Reply> replies;
  std::vector<v1::Event> events;
  std::vector<SendTrain> sent;
  std::vector<FinishTrain> finished;
  std::vector<JournalEntry> journal;
  std::set<LeaseId> holding;  // leases with memory
  std::vector<ComputePrediction> predictions;  // asked for; the test answers
  std::vector<LeaseId> forgotten;
  std::vector<std::string> refused;
  std::vector<std::string> quits;
  std::vector<std::string> errors;  // logged
  LeaseId lease = 0;

 private:
  void Do(Effects effects);
  void Perform(const Effect& effect, std::vector<Event>* follow);

  CallId call_ = 0;
  std::optional<Core> core_;

 public:
  CallId NewCall() { return ++call_; }
  static std::string Token(LeaseId lease) { return "token" + std::to_string(lease); }
};

// `count` modules of one chunk-sized weights facet each; ids 10, 11, …
v1::RegisterModulesRequest MakeModules(int count, uint64_t facet_bytes = kMiB, uint64_t disk_bytes = 0);
// Forward and backward over them.
v1::Trace MakeTrace(int count);

}  // namespace misa::server
