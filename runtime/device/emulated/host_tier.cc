#include "runtime/device/emulated/host_tier.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <utility>

#include "runtime/device/cpu/unique_fd.h"
#include "runtime/memory/byte_size.h"

namespace misa::device {
namespace {

class HostFile : public TierFile {
 public:
  HostFile(UniqueFd fd, HostTier::Available available) : fd_(std::move(fd)), available_(std::move(available)) {}

  TierOutcome Reserve(uint64_t bytes) override {
    if (bytes <= bytes_) return {};
    const std::string asked = FormatByteSize(bytes) + " (" + std::to_string(bytes) + " bytes)";
    // The kernel would end other processes rather than refuse: what is not there must not even be asked for.
    if (const uint64_t available = available_(); bytes - bytes_ > available) {
      return {TierOutcome::kFull, "the host tier cannot hold the " + asked + " asked for: " + FormatByteSize(available) +
                                      " (" + std::to_string(available) +
                                      " bytes) of memory can be had now; nothing was reserved. Make memory free, or set "
                                      "host.capacity to what there is"};
    }
    int result;
    do {
      // Pages are there before they are promised: memory that runs out must not be met in the middle of a copy.
      result = fallocate(fd_.get(), 0, static_cast<off_t>(bytes_), static_cast<off_t>(bytes - bytes_));
    } while (result != 0 && errno == EINTR);
    if (result == 0) {
      bytes_ = bytes;
      return {};
    }
    const int error = errno;
    // The kernel gives back what a refused call took; the size may have grown.
    std::string left;
    if (Punch(bytes_, bytes - bytes_) != 0) left = " (and the part already taken could not be given back)";
    if (error == ENOSPC || error == ENOMEM || error == EFBIG) {
      return {TierOutcome::kFull, "the host tier cannot hold the " + asked +
                                      " asked for: the system has no memory for them" + left +
                                      "; nothing was reserved. Make memory free, or set host.capacity to what there is"};
    }
    return {TierOutcome::kFailed,
            "reserving " + asked + " of the host tier failed (" + strerror(error) + ")" + left + "; nothing was reserved"};
  }

  std::string Scrub() override {
    if (bytes_ == 0 || Punch(0, bytes_) == 0) return "";
    return std::string("the session's memory in the host tier could not be scrubbed (") + strerror(errno) +
           "); its pages go when the last process that holds it ends";
  }

  int fd() const override { return fd_.get(); }
  uint64_t bytes() const override { return bytes_; }

 private:
  int Punch(uint64_t from, uint64_t bytes) {
    int result;
    do {
      result = fallocate(fd_.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(from),
                         static_cast<off_t>(bytes));
    } while (result != 0 && errno == EINTR);
    return result;
  }

  UniqueFd fd_;
  const HostTier::Available available_;
  uint64_t bytes_ = 0;
};

}  // namespace

TierOutcome HostTier::Create(std::unique_ptr<TierFile>* file) {
  UniqueFd fd(memfd_create("misa-host", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid()) {
    return {TierOutcome::kFailed, std::string("memory of the host tier could not be created (memfd_create: ") +
                                      strerror(errno) + "); nothing was reserved"};
  }
  // It may grow with the session and never shrinks under a copy.
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK) != 0) {
    return {TierOutcome::kFailed, std::string("memory of the host tier could not be sealed (") + strerror(errno) +
                                      "); nothing was reserved"};
  }
  *file = std::make_unique<HostFile>(std::move(fd), available_);
  return {};
}

}  // namespace misa::device
