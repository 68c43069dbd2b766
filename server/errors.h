// Domain errors, and the one place that maps them to gRPC's codes.
#pragma once

#include <grpcpp/support/status.h>

#include <cstdint>
#include <string>

namespace misa::server {

enum class Code : uint8_t {
  kOk,
  kInvalid,          // the request can never work as it is
  kNotFound,         // no such session, module, token
  kExhausted,        // no room now: pool, disk, queue, sessions
  kPrecondition,     // not in this state: draining, wrong protocol version, already attached
  kUnauthenticated,  // no token, or one that no lease holds
  kUnavailable,      // the daemon is going away
  kInternal,         // our own mistake, or the machine's
};

struct Error {
  Code code = Code::kOk;
  std::string sentence;
  bool ok() const { return code == Code::kOk; }
};

grpc::Status ToStatus(const Error& error);

}  // namespace misa::server
