// The device chunks of one session on the cpu device: one memfd, new for each session and never leased again.
#pragma once

#include <cstdint>
#include <string>

#include "runtime/device/cpu/unique_fd.h"

namespace misa::device {

class ChunkMemory {
 public:
  // A memfd of `bytes`, sealed against shrinking and growing so that a mapping of it can never meet a missing page.
  // Holds no pages yet: they come when the trainer touches them, and count in the trainer's cgroup. Returns "" or a
  // sentence.
  std::string Create(const std::string& session, uint64_t bytes);

  // Detaches every page from the file. What a dead trainer's direct I/O still writes lands in pages that nobody can
  // reach any more. Returns "" or a sentence.
  std::string Scrub();

  // Bytes that hold pages now.
  uint64_t BackedBytes() const;

  int fd() const { return fd_.get(); }
  uint64_t bytes() const { return bytes_; }

 private:
  UniqueFd fd_;
  uint64_t bytes_ = 0;
};

}  // namespace misa::device
