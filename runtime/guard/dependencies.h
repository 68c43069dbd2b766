// Modules that belong together, or must not be together: what one is kept or drawn with.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace misa::guard {

struct Dependency {
  enum Kind : uint8_t {
    kNeeds = 1,  // `module` only together with `other`
    kApart = 2,  // never both
  };
  std::string module;
  Kind kind = kNeeds;
  std::string other;

  bool operator==(const Dependency&) const = default;
};

inline constexpr size_t kMostDependencies = 4096;

// By module; ascending, without itself.
struct ResolvedDependencies {
  std::vector<std::vector<uint32_t>> needs;  // and what that needs, and so on: two that need each other are one unit
  std::vector<std::vector<uint32_t>> apart;  // nor with anything that needs one it is apart from; mutual
};

// A sentence, and *resolved as it was, for a name that is not among `modules`, a module that is declared against
// itself, a module that would need two that are apart, or more than kMostDependencies.
std::string Resolve(const std::vector<std::string>& modules, const std::vector<Dependency>& dependencies,
                    ResolvedDependencies* resolved);

}  // namespace misa::guard
