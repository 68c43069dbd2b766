// One line to stderr: a level and a sentence. systemd adds time and unit.
#pragma once

#include <cstdint>
#include <string_view>

namespace misa::server {

enum class Level : uint8_t { kInfo, kWarning, kError };

// One write for each line, so that lines of different threads do not mix. Line feeds inside become spaces.
void Log(Level level, std::string_view sentence);

}  // namespace misa::server
