// The tier below the cpu device: one nameless file for each session, reserved on the disk before it is promised.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "runtime/device/lower_tier.h"

namespace misa::device {

// Files in a folder, opened O_DIRECT; without a name, so that no crash leaves one behind.
class DirectDiskTier : public LowerTier {
 public:
  explicit DirectDiskTier(std::string directory) : directory_(std::move(directory)) {}

  // Creates the folder where it is missing, proves that it can hold such files, and finds the block size.
  std::string Open();

  const char* name() const override { return "disk"; }
  TierOutcome Create(std::unique_ptr<TierFile>* file) override;
  uint32_t block_bytes() const override { return block_bytes_; }
  uint64_t FreeBytes() const override;
  const std::string& directory() const { return directory_; }

 private:
  const std::string directory_;
  uint32_t block_bytes_ = 4096;
};

}  // namespace misa::device
