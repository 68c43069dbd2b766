#include "server/errors.h"

namespace misa::server {

grpc::Status ToStatus(const Error& error) {
  grpc::StatusCode code = grpc::StatusCode::INTERNAL;
  switch (error.code) {
    case Code::kOk: return grpc::Status::OK;
    case Code::kInvalid: code = grpc::StatusCode::INVALID_ARGUMENT; break;
    case Code::kNotFound: code = grpc::StatusCode::NOT_FOUND; break;
    case Code::kExhausted: code = grpc::StatusCode::RESOURCE_EXHAUSTED; break;
    case Code::kPrecondition: code = grpc::StatusCode::FAILED_PRECONDITION; break;
    case Code::kUnauthenticated: code = grpc::StatusCode::UNAUTHENTICATED; break;
    case Code::kUnavailable: code = grpc::StatusCode::UNAVAILABLE; break;
    case Code::kInternal: code = grpc::StatusCode::INTERNAL; break;
  }
  return grpc::Status(code, error.sentence);
}

}  // namespace misa::server
