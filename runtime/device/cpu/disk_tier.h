// The tier below the cpu device: one nameless file for each session, reserved on the disk before it is promised.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/device/cpu/unique_fd.h"

namespace misa::device {

struct DiskOutcome {
  enum Kind : uint8_t { kDone, kFull, kFailed };
  Kind kind = kDone;
  std::string sentence;  // "" for kDone
  bool ok() const { return kind == kDone; }
};

// A session's file; its storage is given back when the last descriptor of it closes.
class DiskFile {
 public:
  virtual ~DiskFile() = default;
  // Grows the reservation to `bytes` in all; a smaller value changes nothing. All or nothing.
  virtual DiskOutcome Reserve(uint64_t bytes) = 0;
  virtual int fd() const = 0;
  virtual uint64_t bytes() const = 0;
};

class DiskTier {
 public:
  virtual ~DiskTier() = default;
  virtual DiskOutcome Create(std::unique_ptr<DiskFile>* file) = 0;
  // Unit of direct transfers.
  virtual uint32_t block_bytes() const = 0;
  // What the file system has free now; 0 where it cannot say.
  virtual uint64_t FreeBytes() const = 0;
};

// Files in a folder, opened O_DIRECT; without a name, so that no crash leaves one behind.
class DirectDiskTier : public DiskTier {
 public:
  explicit DirectDiskTier(std::string directory) : directory_(std::move(directory)) {}

  // Creates the folder where it is missing, proves that it can hold such files, and finds the block size.
  std::string Open();

  DiskOutcome Create(std::unique_ptr<DiskFile>* file) override;
  uint32_t block_bytes() const override { return block_bytes_; }
  uint64_t FreeBytes() const override;
  const std::string& directory() const { return directory_; }

 private:
  const std::string directory_;
  uint32_t block_bytes_ = 4096;
};

}  // namespace misa::device
