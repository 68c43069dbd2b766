// Word to systemd: ready, stopping, alive. One datagram each, to $NOTIFY_SOCKET; nothing without it.
#pragma once

#include <string>

namespace misa::server {

// For example "READY=1". False where there is nobody to tell, or it failed.
bool Notify(const std::string& state);

// Seconds between two signs of life, half of what systemd wants; 0 without a watchdog.
double WatchdogSeconds();

}  // namespace misa::server
