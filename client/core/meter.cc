#include "client/core/meter.h"

namespace misa {

DeviceMeter& DeviceMeter::Get() {
  // Never destroyed: tensors may be freed by static destructors that run later.
  static DeviceMeter* meter = new DeviceMeter;
  return *meter;
}

}  // namespace misa
