// The tier below a device, as its owner sees it: one file for each session, reserved before it is promised.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace misa::device {

struct TierOutcome {
  enum Kind : uint8_t { kDone, kFull, kFailed };
  Kind kind = kDone;
  std::string sentence;  // "" for kDone
  bool ok() const { return kind == kDone; }
};

// A session's file; its storage is given back when the last descriptor of it closes.
class TierFile {
 public:
  virtual ~TierFile() = default;
  // Grows the reservation to `bytes` in all; a smaller value changes nothing. All or nothing.
  virtual TierOutcome Reserve(uint64_t bytes) = 0;
  // Gives the storage back at once, whoever still holds a descriptor. "" or what could not be given back.
  virtual std::string Scrub() { return ""; }
  virtual int fd() const = 0;
  virtual uint64_t bytes() const = 0;
};

class LowerTier {
 public:
  virtual ~LowerTier() = default;
  // "disk" or "host": in metrics, sentences and lease packets.
  virtual const char* name() const = 0;
  virtual TierOutcome Create(std::unique_ptr<TierFile>* file) = 0;
  // Unit of transfers.
  virtual uint32_t block_bytes() const = 0;
  // What there is room for now; 0 where it cannot say.
  virtual uint64_t FreeBytes() const = 0;
};

}  // namespace misa::device
