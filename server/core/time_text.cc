#include "server/core/time_text.h"

#include <chrono>
#include <cstdio>

namespace misa::server {

std::string FormatTime(int64_t wall_us) {
  using namespace std::chrono;
  const microseconds since_epoch(wall_us);
  const auto day = floor<days>(since_epoch);
  const year_month_day date{sys_days(day)};
  const hh_mm_ss time(since_epoch - day);
  char text[64];
  std::snprintf(text, sizeof text, "%04d-%02u-%02uT%02d:%02d:%02d.%06dZ", static_cast<int>(date.year()),
                static_cast<unsigned>(date.month()), static_cast<unsigned>(date.day()), static_cast<int>(time.hours().count()),
                static_cast<int>(time.minutes().count()), static_cast<int>(time.seconds().count()),
                static_cast<int>(time.subseconds().count()));
  return text;
}

}  // namespace misa::server
