// The bytes of one tier by what they are used for. Every byte is in exactly one state, always:
// free + leased + reclaiming + orphaned = capacity.
#pragma once

#include <cstdint>
#include <string>

namespace misa {

class Pool {
 public:
  // `name` names the tier in sentences: "device", "disk".
  Pool(std::string name, uint64_t capacity_bytes);

  // Each moves bytes from one state to another, or returns a sentence and changes nothing.
  std::string Lease(uint64_t bytes);         // free -> leased
  std::string Return(uint64_t bytes);        // leased -> free: given back by a session that goes on
  std::string BeginReclaim(uint64_t bytes);  // leased -> reclaiming: its session ended, not scrubbed yet
  std::string EndReclaim(uint64_t bytes);    // reclaiming -> free: scrubbed and unmapped
  std::string EndOrphan(uint64_t bytes);     // orphaned -> free: its process ended

  // free -> orphaned, as many as are free (a smaller capacity than the earlier daemon's may leave fewer). Returns how many.
  uint64_t AddOrphan(uint64_t bytes);

  uint64_t capacity_bytes() const { return capacity_; }
  uint64_t free_bytes() const { return free_; }
  uint64_t leased_bytes() const { return leased_; }
  uint64_t reclaiming_bytes() const { return reclaiming_; }
  uint64_t orphaned_bytes() const { return orphaned_; }

  // "" or a sentence that says how the states fail to add up.
  std::string Check() const;

 private:
  std::string Move(uint64_t* from, uint64_t* to, uint64_t bytes, const char* from_name, const char* to_name);

  const std::string name_;
  const uint64_t capacity_;
  uint64_t free_;
  uint64_t leased_ = 0;
  uint64_t reclaiming_ = 0;
  uint64_t orphaned_ = 0;
};

}  // namespace misa
