// The tier below an emulated device: memory of the daemon, one memfd for each session, reserved page by page before it
// is promised. Charged to the daemon, whatever the trainer does with it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "runtime/device/lower_tier.h"

namespace misa::device {

class HostTier : public LowerTier {
 public:
  // Bytes of memory that can be had at this moment.
  using Available = std::function<uint64_t()>;
  explicit HostTier(Available available) : available_(std::move(available)) {}

  const char* name() const override { return "host"; }
  TierOutcome Create(std::unique_ptr<TierFile>* file) override;
  uint32_t block_bytes() const override { return 4096; }
  uint64_t FreeBytes() const override { return available_(); }

 private:
  const Available available_;
};

}  // namespace misa::device
