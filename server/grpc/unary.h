// A unary call as a call to the core.
#pragma once

#include <grpcpp/grpcpp.h>

#include <string>
#include <utility>
#include <variant>

#include "runtime/memory/lease_protocol.h"
#include "server/errors.h"
#include "server/grpc/call_table.h"

namespace misa::server {

inline std::string TokenOf(const grpc::CallbackServerContext& context) {
  const auto found = context.client_metadata().find(kTokenMetadata);
  if (found == context.client_metadata().end()) return "";
  return std::string(found->second.data(), found->second.size());
}

// `make` gives the event of a call's id. `response` stays valid until the reactor is finished, which happens here.
template <typename R, typename Make>
grpc::ServerUnaryReactor* Unary(grpc::CallbackServerContext* context, CallTable* calls, R* response, Make make) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  calls->Start(
      [reactor, response](const Error& error, Response&& answer) {
        if (!error.ok()) {
          reactor->Finish(ToStatus(error));
          return;
        }
        if (R* value = std::get_if<R>(&answer)) *response = std::move(*value);
        reactor->Finish(grpc::Status::OK);
      },
      [&make](CallId call) { return Event(make(call)); });
  return reactor;
}

}  // namespace misa::server
