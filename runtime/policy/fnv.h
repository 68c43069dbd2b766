// FNV-1a, 64 bits (Fowler, Noll, Vo; constants of the IETF draft draft-eastlake-fnv). Not for adversaries.
#pragma once

#include <cstddef>
#include <cstdint>

namespace misa::policy {

class Fnv {
 public:
  void AddByte(uint8_t byte) {
    value_ ^= byte;
    value_ *= 0x100000001b3ull;
  }
  // Little end first, whatever the machine's order is.
  void Add64(uint64_t word) {
    for (int shift = 0; shift < 64; shift += 8) {
      AddByte(static_cast<uint8_t>(word >> shift));
    }
  }
  uint64_t value() const { return value_; }

 private:
  uint64_t value_ = 0xcbf29ce484222325ull;
};

}  // namespace misa::policy
