// Wall time as text, from a number: no clock and no time zone in it.
#pragma once

#include <cstdint>
#include <string>

namespace misa::server {

// RFC 3339, UTC, microseconds.
std::string FormatTime(int64_t wall_us);

}  // namespace misa::server
