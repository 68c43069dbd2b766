#include "runtime/guard/dependencies.h"

#include <algorithm>
#include <set>
#include <unordered_map>
#include <utility>

namespace misa::guard {
namespace {

constexpr size_t kMostPairs = 1'000'000;

std::string Quoted(const std::string& name) { return "\"" + name + "\""; }

}  // namespace

std::string Resolve(const std::vector<std::string>& modules, const std::vector<Dependency>& dependencies,
                    ResolvedDependencies* resolved) {
  const std::string kept = "; no dependency was changed.";
  if (dependencies.size() > kMostDependencies) {
    return "There are " + std::to_string(dependencies.size()) + " dependencies between modules, and the most is " +
           std::to_string(kMostDependencies) + kept;
  }
  std::unordered_map<std::string, uint32_t> by_name;
  for (uint32_t i = 0; i < modules.size(); ++i) by_name.emplace(modules[i], i);
  std::vector<std::vector<uint32_t>> direct(modules.size());
  std::vector<std::pair<uint32_t, uint32_t>> apart;
  for (const Dependency& dependency : dependencies) {
    for (const std::string* name : {&dependency.module, &dependency.other}) {
      if (!by_name.contains(*name)) {
        return "A dependency names the module " + Quoted(*name) + ", and there is none of this name" + kept;
      }
    }
    const uint32_t module = by_name.at(dependency.module);
    const uint32_t other = by_name.at(dependency.other);
    if (dependency.kind != Dependency::kNeeds && dependency.kind != Dependency::kApart) {
      return "A dependency of the module " + Quoted(dependency.module) + " is of an unknown kind" + kept;
    }
    if (module == other) {
      return "The module " + Quoted(dependency.module) + " is declared to " +
             (dependency.kind == Dependency::kNeeds ? "need itself" : "be apart from itself") + kept;
    }
    if (dependency.kind == Dependency::kNeeds) {
      direct[module].push_back(other);
    } else {
      apart.emplace_back(module, other);
    }
  }
  ResolvedDependencies result;
  result.needs.resize(modules.size());
  result.apart.resize(modules.size());
  // Who is in whose unit, the other way round: the unit of a module has itself in it.
  std::vector<std::vector<uint32_t>> units_with(modules.size());
  size_t pairs = 0;
  for (uint32_t module = 0; module < modules.size(); ++module) {
    std::set<uint32_t> unit = {module};
    std::vector<uint32_t> open = {module};
    while (!open.empty()) {
      const uint32_t at = open.back();
      open.pop_back();
      for (const uint32_t other : direct[at]) {
        if (unit.insert(other).second) open.push_back(other);
      }
    }
    pairs += unit.size() - 1;
    if (pairs > kMostPairs) return "The dependencies tie too many modules together" + kept;
    for (const uint32_t member : unit) units_with[member].push_back(module);
    unit.erase(module);
    result.needs[module].assign(unit.begin(), unit.end());
  }
  std::vector<std::set<uint32_t>> exclusions(modules.size());
  for (const auto& [one, other] : apart) {
    for (const uint32_t a : units_with[one]) {
      for (const uint32_t b : units_with[other]) {
        if (a == b) {
          std::string with = a == one     ? "needs " + Quoted(modules[other]) + " and must be apart from it"
                             : a == other ? "needs " + Quoted(modules[one]) + " and must be apart from it"
                                          : "needs both " + Quoted(modules[one]) + " and " + Quoted(modules[other]) +
                                                ", which must be apart";
          return "The dependencies contradict each other: the module " + Quoted(modules[a]) + " " + std::move(with) +
                 ", so it could never be trained" + kept;
        }
        exclusions[a].insert(b);
        exclusions[b].insert(a);
        if (++pairs > kMostPairs) return "The dependencies keep too many modules apart" + kept;
      }
    }
  }
  for (size_t i = 0; i < modules.size(); ++i) result.apart[i].assign(exclusions[i].begin(), exclusions[i].end());
  *resolved = std::move(result);
  return "";
}

}  // namespace misa::guard
