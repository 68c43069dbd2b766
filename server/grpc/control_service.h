// misa.v1.ControlService: every call becomes an event, and the core's effect finishes it.
#pragma once

#include <grpcpp/grpcpp.h>

#include "misa/v1/control.grpc.pb.h"
#include "server/grpc/call_table.h"
#include "server/grpc/train_stream.h"

namespace misa::server {

class ControlService final : public v1::ControlService::CallbackService {
 public:
  ControlService(CallTable* calls, TrainStreams* streams) : calls_(calls), streams_(streams) {}

  grpc::ServerUnaryReactor* Attach(grpc::CallbackServerContext* context, const v1::AttachRequest* request,
                                   v1::AttachResponse* response) override;
  grpc::ServerUnaryReactor* RegisterModules(grpc::CallbackServerContext* context, const v1::RegisterModulesRequest* request,
                                            v1::RegisterModulesResponse* response) override;
  grpc::ServerBidiReactor<v1::TrainRequest, v1::TrainResponse>* Train(grpc::CallbackServerContext* context) override;
  grpc::ServerUnaryReactor* Detach(grpc::CallbackServerContext* context, const v1::DetachRequest* request,
                                   v1::DetachResponse* response) override;

 private:
  CallTable* const calls_;
  TrainStreams* const streams_;
};

}  // namespace misa::server
