#include "runtime/device/cpu/chunk_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstring>
#include <utility>

namespace misa::device {

std::string ChunkMemory::Create(const std::string& session, uint64_t bytes) {
  // MFD_EXEC and MFD_NOEXEC_SEAL are not asked for: older kernels refuse unknown flags.
  UniqueFd fd(memfd_create(("misa-" + session).c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) {
    return std::string("the session's memory could not be created (memfd_create: ") + strerror(errno) +
           "); nothing was leased";
  }
  if (ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0) {
    return "the session's memory could not be sized to " + std::to_string(bytes) + " bytes (" + strerror(errno) +
           "); nothing was leased";
  }
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
    return std::string("the session's memory could not be sealed (") + strerror(errno) + "); nothing was leased";
  }
  fd_ = std::move(fd);
  bytes_ = bytes;
  return "";
}

std::string ChunkMemory::Scrub() {
  if (!fd_.valid() || bytes_ == 0) return "";
  while (fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, static_cast<off_t>(bytes_)) != 0) {
    if (errno == EINTR) continue;
    return std::string("the session's memory could not be scrubbed (") + strerror(errno) +
           "); its pages go when the last process that maps them ends";
  }
  return "";
}

uint64_t ChunkMemory::BackedBytes() const {
  struct stat status;
  if (!fd_.valid() || fstat(fd_.get(), &status) != 0) return 0;
  return static_cast<uint64_t>(status.st_blocks) * 512;
}

}  // namespace misa::device
