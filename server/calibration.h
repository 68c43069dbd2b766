// Measures the link between the cpu device and the disk below it, once, at start.
#pragma once

#include <string>

#include "runtime/device/lower_tier.h"
#include "runtime/policy/planner.h"

namespace misa::server {

// Where nothing was measured: a plain SATA SSD, so that a plan errs on the careful side.
policy::LinkRates DefaultLink();

// Direct reads alone, writes alone, and both at once, in blocks of 4 MiB on a nameless file of `file_bytes`, for at most
// `seconds` in all. "" or a sentence; `*link` is set only then.
std::string Calibrate(device::LowerTier* disk, uint64_t file_bytes, double seconds, policy::LinkRates* link);

}  // namespace misa::server
