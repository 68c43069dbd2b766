#include "runtime/device/cpu/disk_tier.h"

#include <fcntl.h>
#include <linux/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "runtime/device/cpu/unique_fd.h"
#include "runtime/memory/byte_size.h"

namespace misa::device {
namespace {

constexpr uint32_t kDefaultBlockBytes = 4096;

uint64_t FreeBytesOf(const std::string& directory) {
  struct statvfs status;
  if (statvfs(directory.c_str(), &status) != 0) return 0;
  return static_cast<uint64_t>(status.f_bavail) * status.f_frsize;
}

// Offsets and addresses must both be aligned, so the larger of the two holds; never below 512.
uint32_t FindBlockBytes(int fd) {
#ifdef STATX_DIOALIGN
  // By number: the C library's own struct statx may be older than the kernel's field.
  struct statx status;
  std::memset(&status, 0, sizeof status);
  if (syscall(SYS_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN) != 0) {
    const uint32_t align = std::max({status.stx_dio_offset_align, status.stx_dio_mem_align, 512u});
    if (status.stx_dio_offset_align != 0 && std::has_single_bit(align) && align <= (1u << 20)) return align;
  }
#endif
  return kDefaultBlockBytes;
}

class DirectDiskFile : public TierFile {
 public:
  DirectDiskFile(UniqueFd fd, std::string directory) : fd_(std::move(fd)), directory_(std::move(directory)) {}

  TierOutcome Reserve(uint64_t bytes) override {
    if (bytes <= bytes_) return {};
    int result;
    do {
      result = fallocate(fd_.get(), 0, static_cast<off_t>(bytes_), static_cast<off_t>(bytes - bytes_));
    } while (result != 0 && errno == EINTR);
    if (result == 0) {
      bytes_ = bytes;
      return {};
    }
    const int error = errno;
    const uint64_t free_bytes = FreeBytesOf(directory_);
    // A refused fallocate may keep a part of what it took: cut it off, so that nothing has changed.
    std::string left;
    if (ftruncate(fd_.get(), static_cast<off_t>(bytes_)) != 0) left = " (and the part already taken could not be given back)";
    const std::string asked = FormatByteSize(bytes) + " (" + std::to_string(bytes) + " bytes)";
    if (error == ENOSPC || error == EDQUOT || error == EFBIG) {
      return {TierOutcome::kFull, "the disk at " + directory_ + " cannot hold the " + asked + " asked for: " +
                                      FormatByteSize(free_bytes) + " (" + std::to_string(free_bytes) +
                                      " bytes) are free" + left +
                                      "; nothing was reserved. Free some space there, or set disk.directory to a larger disk"};
    }
    std::string sentence = "reserving " + asked + " at " + directory_ + " failed (" + strerror(error) + ")" + left +
                           "; nothing was reserved.";
    if (error == EOPNOTSUPP) {
      sentence += " This file system cannot reserve space: set disk.directory to a folder on ext4 or XFS";
    }
    return {TierOutcome::kFailed, std::move(sentence)};
  }

  int fd() const override { return fd_.get(); }
  uint64_t bytes() const override { return bytes_; }

 private:
  UniqueFd fd_;
  const std::string directory_;
  uint64_t bytes_ = 0;
};

}  // namespace

std::string DirectDiskTier::Open() {
  std::error_code error;
  std::filesystem::create_directories(directory_, error);
  if (error) {
    return "the disk tier's folder " + directory_ + " could not be created (" + error.message() +
           "); create it, or set disk.directory to a folder that misad may write to";
  }
  std::unique_ptr<TierFile> probe;
  TierOutcome outcome = Create(&probe);
  if (!outcome.ok()) return outcome.sentence;
  block_bytes_ = FindBlockBytes(probe->fd());
  return "";
}

TierOutcome DirectDiskTier::Create(std::unique_ptr<TierFile>* file) {
  UniqueFd fd(open(directory_.c_str(), O_TMPFILE | O_DIRECT | O_RDWR | O_CLOEXEC, 0600));
  if (!fd.valid()) {
    const int error = errno;
    std::string sentence =
        "a file for direct transfers could not be opened in " + directory_ + " (" + strerror(error) + ").";
    if (error == EINVAL || error == EOPNOTSUPP) {
      sentence += " This file system has no O_TMPFILE or no O_DIRECT: set disk.directory to a folder on ext4, XFS or btrfs";
    } else {
      sentence += " Set disk.directory to a folder that misad may write to";
    }
    return {error == ENOSPC ? TierOutcome::kFull : TierOutcome::kFailed, std::move(sentence)};
  }
  *file = std::make_unique<DirectDiskFile>(std::move(fd), directory_);
  return {};
}

uint64_t DirectDiskTier::FreeBytes() const { return FreeBytesOf(directory_); }

}  // namespace misa::device
