#include "server/sim/describe.h"

namespace misa::server {
namespace {

template <typename... Fs>
struct Overloaded : Fs... {
  using Fs::operator()...;
};
template <typename... Fs>
Overloaded(Fs...) -> Overloaded<Fs...>;

std::string Outcome(const Error& error) { return error.ok() ? "done" : "failed: " + error.sentence; }
std::string Lease(LeaseId lease) { return " lease " + std::to_string(lease); }
std::string Call(CallId call) { return " call " + std::to_string(call); }
std::string Stream(StreamId stream) { return " stream " + std::to_string(stream); }
std::string Short(const google::protobuf::Message& message) {
  std::string text = message.ShortDebugString();
  if (text.size() > 200) text = text.substr(0, 200) + "…";
  return " {" + text + "}";
}

}  // namespace

std::string Describe(const Event& event) {
  return std::visit(
      Overloaded{
          [](const LeaseOpened& e) { return "LeaseOpened" + Lease(e.lease) + " pid " + std::to_string(e.pid); },
          [](const LeaseClosed& e) { return "LeaseClosed" + Lease(e.lease) + ": " + e.cause; },
          [](const AttachCall& e) { return "Attach" + Call(e.call) + " " + e.token + Short(e.request); },
          [](const ChunksCreated& e) { return "ChunksCreated" + Lease(e.lease) + " " + Outcome(e.error); },
          [](const RegisterCall& e) {
            return "RegisterModules" + Call(e.call) + " " + e.token + ": " + std::to_string(e.request.modules_size()) +
                   " modules, disk " + std::to_string(e.request.disk_bytes());
          },
          [](const DiskReserved& e) { return "DiskReserved" + Lease(e.lease) + " " + Outcome(e.error); },
          [](const DetachCall& e) { return "Detach" + Call(e.call) + " " + e.token; },
          [](const Released& e) { return "Released" + Lease(e.lease) + " " + e.problem; },
          [](const TrainOpened& e) { return "TrainOpened" + Stream(e.stream) + " " + e.token; },
          [](const TrainMessage& e) {
            v1::TrainRequest request = e.request;
            if (request.has_report()) {
              request.mutable_report()->clear_residency();
              request.mutable_report()->clear_statistics();
              request.mutable_report()->mutable_trace()->clear_entries();
            }
            return "TrainMessage" + Stream(e.stream) + Short(request);
          },
          [](const TrainClosed& e) { return "TrainClosed" + Stream(e.stream); },
          [](const PlanMade& e) {
            return "PlanMade" + Lease(e.lease) + " serial " + std::to_string(e.serial) + " " + e.plan.error;
          },
          [](const InfluenceMade& e) {
            return "InfluenceMade" + Lease(e.lease) + " serial " + std::to_string(e.serial) + " " + e.influence.error;
          },
          [](const JournalWritten& e) { return "JournalWritten " + std::to_string(e.serial); },
          [](const OrphanEnded& e) { return "OrphanEnded " + e.session; },
          [](const AdminCall& e) {
            return std::visit([](const auto& r) { return r.GetTypeName() + Short(r); }, e.request) + Call(e.call);
          },
          [](const MetricsCall& e) { return "Metrics" + Call(e.call); },
          [](const DrainRequested& e) { return "DrainRequested: " + e.reason; },
          [](const PolicyReloaded& e) { return "PolicyReloaded reserve " + std::to_string(e.policy.reserve_bytes); },
          [](const PredictionMade& e) {
            return "PredictionMade" + Lease(e.lease) + " after " + std::to_string(e.observed) + " " + e.problem;
          },
          [](const Tick&) { return std::string("Tick"); },
      },
      event);
}

std::string Describe(const Effect& effect) {
  return std::visit(
      Overloaded{
          [](const SendWelcome& e) { return "SendWelcome" + Lease(e.lease); },
          [](const RefuseLease& e) { return "RefuseLease" + Lease(e.lease) + ": " + e.sentence; },
          [](const CloseLease& e) { return "CloseLease" + Lease(e.lease); },
          [](const CreateChunks& e) { return "CreateChunks" + Lease(e.lease) + " " + std::to_string(e.bytes); },
          [](const ReserveDisk& e) { return "ReserveDisk" + Lease(e.lease) + " " + std::to_string(e.bytes); },
          [](const Release& e) { return "Release" + Lease(e.lease); },
          [](const Reply& e) { return "Reply" + Call(e.call) + " " + Outcome(e.error); },
          [](const SendTrain& e) {
            v1::TrainResponse response = e.response;
            if (response.has_plan()) response.mutable_plan()->clear_actions();
            return "SendTrain" + Stream(e.stream) + Short(response);
          },
          [](const ReadTrain& e) { return "ReadTrain" + Stream(e.stream); },
          [](const FinishTrain& e) { return "FinishTrain" + Stream(e.stream) + " " + Outcome(e.error); },
          [](const ComputePlan& e) {
            return "ComputePlan" + Lease(e.lease) + " serial " + std::to_string(e.serial) + " budget " +
                   std::to_string(e.input.budget_bytes);
          },
          [](const ComputeInfluence& e) {
            return "ComputeInfluence" + Lease(e.lease) + " serial " + std::to_string(e.serial);
          },
          [](const ComputePrediction& e) {
            return "ComputePrediction" + Lease(e.lease) + " after " + std::to_string(e.observed);
          },
          [](const ForgetPrediction& e) { return "ForgetPrediction" + Lease(e.lease); },
          [](const WriteJournal& e) {
            return "WriteJournal of " + std::to_string(e.entries.size()) + " serial " + std::to_string(e.serial);
          },
          [](const EmitEvent& e) { return "event" + Short(e.event); },
          [](const LogLine& e) { return "log: " + e.sentence; },
          [](const SetServing& e) { return std::string(e.serving ? "serving" : "not serving"); },
          [](const Quit& e) { return "Quit: " + e.cause; },
      },
      effect);
}

}  // namespace misa::server
