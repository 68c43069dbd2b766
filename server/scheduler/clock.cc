#include "server/scheduler/clock.h"

#include <chrono>

namespace misa::server {

Now SystemClock::now() const {
  using namespace std::chrono;
  return {duration<double>(steady_clock::now().time_since_epoch()).count(),
          duration_cast<microseconds>(system_clock::now().time_since_epoch()).count()};
}

}  // namespace misa::server
