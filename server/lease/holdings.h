// What each lease holds: its memfd and its file in the tier below. Device work, done on workers, never on the scheduler's thread.
#pragma once

#include <absl/base/thread_annotations.h>
#include <absl/synchronization/mutex.h>

#include <functional>
#include <map>
#include <memory>
#include <string>

#include "runtime/device/cpu/chunk_memory.h"
#include "runtime/device/lower_tier.h"
#include "server/core/effect.h"
#include "server/errors.h"

namespace misa::server {

class Holdings {
 public:
  // Sends a packet with a descriptor to a lease's peer; "" or a sentence.
  using Send = std::function<std::string(LeaseId lease, const std::string& json, int fd)>;

  Holdings(device::LowerTier* below, Send send) : below_(below), send_(std::move(send)) {}

  // Makes the memfd and sends it, or neither.
  Error Create(const CreateChunks& effect) ABSL_LOCKS_EXCLUDED(mutex_);
  // Reserves; sends the file the first time.
  Error Reserve(const ReserveDisk& effect) ABSL_LOCKS_EXCLUDED(mutex_);
  // Scrubs and closes. "" or what could not be scrubbed.
  std::string Release(LeaseId lease) ABSL_LOCKS_EXCLUDED(mutex_);

 private:
  struct Holding {
    device::ChunkMemory chunks;
    std::unique_ptr<device::TierFile> file;
  };

  device::LowerTier* const below_;
  const Send send_;
  absl::Mutex mutex_;
  // Shared, so that a long scrub does not hold the lock: the core never has two operations on one lease.
  std::map<LeaseId, std::shared_ptr<Holding>> holdings_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace misa::server
