// The door for raw pointers: an access to managed memory that is not there (or not writable) waits until it is.
//
// A facet's addresses never change, so whoever took a pointer (a NumPy array over a parameter, a compiled kernel, a C
// extension) may use it at any time. The processor faults where the bytes are away; the handler has them brought back
// and the access is done again, as if nothing had been. Faults anywhere else go to the handler that was there before.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace misa {

struct Facet;

// Who serves such accesses. Called on the thread that faulted, which may be inside any code but ours: it must wait for
// nothing that this thread could hold, and for nothing without a deadline.
class FaultServer {
 public:
  virtual ~FaultServer() = default;
  // Makes an access to the facet possible and returns "", or a sentence; the process ends with it then, because an
  // access cannot be refused.
  virtual std::string Serve(Facet& facet) = 0;
};

// From now on faults in added ranges go to `server`. Null ends it: returns when nobody is inside it any more.
void SetFaultServer(FaultServer* server);
// A range of addresses that may fault, until it is removed by what Add returned. Any thread.
size_t AddFaultRange(const char* begin, uint64_t bytes, Facet* facet);
void RemoveFaultRange(size_t range);
// Puts the handler back in front where another one was installed after it. Cheap; called at step boundaries.
void KeepFaultDoor();

}  // namespace misa
