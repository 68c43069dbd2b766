#include "server/grpc/control_service.h"

#include "server/grpc/unary.h"

namespace misa::server {

grpc::ServerUnaryReactor* ControlService::Attach(grpc::CallbackServerContext* context, const v1::AttachRequest* request,
                                                 v1::AttachResponse* response) {
  return Unary(context, calls_, response, [&](CallId call) { return AttachCall{call, TokenOf(*context), *request}; });
}

grpc::ServerUnaryReactor* ControlService::RegisterModules(grpc::CallbackServerContext* context,
                                                          const v1::RegisterModulesRequest* request,
                                                          v1::RegisterModulesResponse* response) {
  return Unary(context, calls_, response, [&](CallId call) { return RegisterCall{call, TokenOf(*context), *request}; });
}

grpc::ServerBidiReactor<v1::TrainRequest, v1::TrainResponse>* ControlService::Train(grpc::CallbackServerContext* context) {
  return streams_->Open(TokenOf(*context));
}

grpc::ServerUnaryReactor* ControlService::Detach(grpc::CallbackServerContext* context, const v1::DetachRequest*,
                                                 v1::DetachResponse* response) {
  return Unary(context, calls_, response, [&](CallId call) { return DetachCall{call, TokenOf(*context)}; });
}

}  // namespace misa::server
