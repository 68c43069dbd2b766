// A link whose time is modelled and whose bytes are real: for emulated devices, whose host tier is memory.
#pragma once

#include <memory>
#include <string>

#include "runtime/device/link.h"
#include "runtime/device/link_model.h"

namespace misa {

// Copies between the device's memory and the file `fd` (the session's memory in the host tier) on a stream thread. A copy
// completes when all its bytes have arrived and the model says that it has ended, whichever is later. Takes the fd over.
// Null and a sentence in *error where the model is impossible.
std::unique_ptr<Link> MakeModelledLink(int fd, const LinkModelOptions& options, std::string* error);

}  // namespace misa
