// The touch observer: sees every operator before it runs, and with it every managed storage it is about to use.
#pragma once

#include <cstddef>
#include <string>

#include "client/torch/managed_storage.h"
#include "runtime/policy/trace.h"

namespace misa::torch_client {

// What the observer found for one operator. Facets are named once, access flags joined.
struct Touched {
  Facet* facet = nullptr;
  uint8_t access = 0;
};

// Who answers touches: makes everything present and pinned, or returns a sentence (nothing is pinned then).
class TouchHandler {
 public:
  virtual ~TouchHandler() = default;
  virtual std::string Touch(const Touched* touched, size_t count) = 0;
  virtual void EndTouch(const Touched* touched, size_t count) = 0;
  // Autograd is about to note a view of the facet, which a later change of what it shows would spoil.
  virtual void BeforeView(Facet* facet) = 0;
};

// From now on every operator of the process reports to `handler`; one at a time. Null ends it: returns when no operator
// is inside the handler any more.
void SetTouchHandler(TouchHandler* handler);

}  // namespace misa::torch_client
