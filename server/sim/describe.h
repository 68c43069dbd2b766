// Events and effects as a line of text, for the log of a simulated run.
#pragma once

#include <string>

#include "server/core/effect.h"
#include "server/core/event.h"

namespace misa::server {

std::string Describe(const Event& event);
std::string Describe(const Effect& effect);

}  // namespace misa::server
