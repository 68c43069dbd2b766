// Where the daemon's time comes from; tests pass their own.
#pragma once

#include "server/core/event.h"

namespace misa::server {

class Clock {
 public:
  virtual ~Clock() = default;
  virtual Now now() const = 0;
};

class SystemClock : public Clock {
 public:
  Now now() const override;
};

}  // namespace misa::server
