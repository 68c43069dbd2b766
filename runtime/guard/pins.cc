#include "runtime/guard/pins.h"

#include <algorithm>
#include <cctype>

namespace misa::guard {

bool IsExpert(const std::string& name) {
  for (size_t begin = 0; begin <= name.size();) {
    const size_t end = std::min(name.find('.', begin), name.size());
    std::string part = name.substr(begin, end - begin);
    std::transform(part.begin(), part.end(), part.begin(), [](unsigned char c) { return std::tolower(c); });
    // "expert_3" and "experts7" as well, but not "expertise".
    const std::string rest = part.rfind("expert", 0) == 0 ? part.substr(6) : "-";
    const size_t from = !rest.empty() && rest[0] == 's' ? 1 : 0;
    if (rest.find_first_not_of("_0123456789", from) == std::string::npos) return true;
    // A layer's shared expert sees every token; it is an expert all the same.
    if (part == "shared_expert" || part == "shared_experts") return true;
    begin = end + 1;
  }
  return false;
}

std::string PinKind(const std::string& name, const std::string& kind) {
  if (IsExpert(name)) return "expert";
  return kind == "small" ? "norm" : kind;
}

const std::vector<std::string>& DefaultPins() {
  static const std::vector<std::string> pins = {"expert", "embedding", "norm"};
  return pins;
}

bool IsPinned(const std::string& name, const std::string& kind, const std::vector<std::string>& pins) {
  const std::string pin_kind = PinKind(name, kind);
  return std::any_of(pins.begin(), pins.end(),
                     [&](const std::string& pin) { return pin == name || pin == kind || pin == pin_kind; });
}

}  // namespace misa::guard
