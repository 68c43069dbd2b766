// Byte sizes as people write them: "24GiB", "512MiB", "64KiB", "1.5GB", "1000000".
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace misa {

// KiB, MiB, GiB, TiB count in 1024; kB (or KB), MB, GB, TB in 1000; B or no unit in bytes. A fraction is allowed where
// it gives whole bytes after rounding down. Returns "" or a sentence; `*bytes` is set only then.
std::string ParseByteSize(std::string_view text, uint64_t* bytes);

// The largest binary unit that is exact ("24GiB"), else two decimals ("1.46GiB"); ParseByteSize reads it back.
std::string FormatByteSize(uint64_t bytes);

}  // namespace misa
