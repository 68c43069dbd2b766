// Telling processes apart, and learning of their end.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <string>

#include "runtime/device/cpu/unique_fd.h"

namespace misa::server {

// A descriptor that becomes readable when the process ends; invalid where there is no such process.
UniqueFd OpenPidfd(pid_t pid);
// That of a connected socket's peer, by the kernel's own record where it has one.
UniqueFd OpenPeerPidfd(int socket, pid_t pid);
// Field 22 of /proc/PID/stat; 0 where it cannot be read.
uint64_t ProcessStartTime(pid_t pid);
// True when the pidfd's process has ended.
bool HasEnded(int pidfd);
// This boot's id; "" where the kernel does not tell.
std::string BootId();
// Open descriptors of this process.
uint64_t CountOpenFds();

}  // namespace misa::server
