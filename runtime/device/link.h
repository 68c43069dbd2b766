// Copies between the device and the tier below it, asynchronous, in blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "runtime/policy/planner.h"

namespace misa {

struct Transfer {
  enum class Direction : uint8_t { kLoad, kUnload };
  Direction direction = Direction::kLoad;
  char* address = nullptr;   // aligned to the disk's block
  uint64_t disk_offset = 0;  // aligned to the disk's block
  uint64_t bytes = 0;        // multiple of the disk's block
  uint64_t tag = 0;          // given back on completion
};

struct Completion {
  uint64_t tag = 0;
  Transfer::Direction direction = Transfer::Direction::kLoad;
  uint64_t bytes = 0;
  double seconds = 0;   // from submission to completion
  std::string error;    // empty: every byte has arrived
};

// Used by one thread, but for Wake.
class Link {
 public:
  virtual ~Link() = default;
  // Queues a transfer; its blocks start at once.
  virtual void Submit(const Transfer& transfer) = 0;
  // Waits for completions, a Wake, or the time-out (seconds), whichever is first; appends to *completions.
  virtual void Wait(double timeout_seconds, std::vector<Completion>* completions) = 0;
  // Ends a Wait in progress or the next one. Any thread.
  virtual void Wake() = 0;
  virtual size_t in_flight() const = 0;
  // Its rates, where they are known rather than measured: all zero where they are not.
  virtual policy::LinkRates known_rates() const { return {}; }
  // By how much completions came later than the link's model says, in all; 0 where there is no model.
  virtual double late_seconds() const { return 0; }
};

// Direct I/O through io_uring on the session's file. Takes the fd over. Null and a sentence in *error where the kernel
// does not offer io_uring.
std::unique_ptr<Link> MakeUringLink(int fd, std::string* error);

}  // namespace misa
