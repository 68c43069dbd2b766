// Mathematics whose results are the same bits on every machine: IEEE additions and multiplications only.
#pragma once

namespace misa::policy {

// exp(x) to within a few units in the last place for x <= 0, which is all a softmax needs; 1 above. The C library's exp
// differs in the last bit between systems, and with it the draw on two ranks could.
double PortableExp(double x);

}  // namespace misa::policy
