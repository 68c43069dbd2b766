#include "server/core/session.h"

#include <unordered_set>

#include "runtime/memory/byte_size.h"

namespace misa::server {
namespace {

Error Invalid(std::string sentence) { return {Code::kInvalid, std::move(sentence) + "; nothing was registered"}; }

Error CheckModule(const v1::Module& module, uint64_t chunk_bytes) {
  if (module.name().empty()) return Invalid("a module has no name");
  if (module.name().size() > kMaxNameBytes || module.kind().size() > kMaxNameBytes) {
    return Invalid("the name or kind of the module " + module.name().substr(0, 64) + "… is longer than " +
                   std::to_string(kMaxNameBytes) + " bytes");
  }
  for (const v1::Facet& facet : module.facets()) {
    const std::string which = "facet " + std::to_string(facet.id()) + " of the module " + module.name();
    if (facet.kind() < v1::FACET_KIND_WEIGHTS || facet.kind() > v1::FACET_KIND_OPTIMIZER) {
      return Invalid(which + " has no kind: weights, gradients and optimizer are known");
    }
    if (facet.device_bytes() == 0 || facet.device_bytes() > kMaxFacetBytes ||
        facet.device_bytes() % chunk_bytes != 0) {
      return Invalid(which + " has " + std::to_string(facet.device_bytes()) +
                     " bytes; it takes a multiple of the lease's chunk of " + std::to_string(chunk_bytes) +
                     " bytes, from one chunk up to " + FormatByteSize(kMaxFacetBytes));
    }
  }
  return {};
}

}  // namespace

Error ModuleRegistry::Upsert(const google::protobuf::RepeatedPtrField<v1::Module>& modules, uint64_t chunk_bytes,
                             bool* layout_changed) {
  *layout_changed = false;
  // On copies, so that a refusal changes nothing.
  std::vector<v1::Module> merged = modules_;
  std::unordered_map<std::string, uint32_t> by_name = by_name_;
  std::unordered_set<std::string> given;
  for (const v1::Module& module : modules) {
    Error error = CheckModule(module, chunk_bytes);
    if (!error.ok()) return error;
    if (!given.insert(module.name()).second) return Invalid("the module " + module.name() + " is given twice");
    const auto [at, added] = by_name.emplace(module.name(), static_cast<uint32_t>(merged.size()));
    if (added) {
      merged.push_back(module);
    } else {
      merged[at->second] = module;
    }
  }
  if (merged.size() > kMaxModules) {
    return Invalid("the session would have " + std::to_string(merged.size()) + " modules, and the most is " +
                   std::to_string(kMaxModules) + "; group small layers into one module");
  }

  std::vector<Facet> facets;
  std::unordered_map<uint32_t, uint32_t> by_id;
  // Facets that were known keep their dense index where the module list only grew.
  for (uint32_t module = 0; module < merged.size(); ++module) {
    for (const v1::Facet& facet : merged[module].facets()) {
      const auto [at, added] = by_id.emplace(facet.id(), static_cast<uint32_t>(facets.size()));
      if (!added) {
        return Invalid("facet id " + std::to_string(facet.id()) + " is used by the modules " +
                       merged[facets[at->second].module].name() + " and " + merged[module].name() +
                       "; ids are unique in a session");
      }
      Facet entry{facet.id(), module, facet.kind(), facet.device_bytes(), v1::RESIDENCY_UNSPECIFIED};
      const auto known = by_id_.find(facet.id());
      if (known != by_id_.end()) entry.residency = facets_[known->second].residency;
      facets.push_back(entry);
    }
  }
  for (const Facet& before : facets_) {
    const auto now = by_id.find(before.id);
    if (now == by_id.end() || facets[now->second].bytes != before.bytes || now->second != by_id_.at(before.id)) {
      *layout_changed = true;
    }
  }
  modules_ = std::move(merged);
  by_name_ = std::move(by_name);
  facets_ = std::move(facets);
  by_id_ = std::move(by_id);
  return {};
}

ModuleRegistry::Facet* ModuleRegistry::Find(uint32_t id) {
  const auto found = by_id_.find(id);
  return found == by_id_.end() ? nullptr : &facets_[found->second];
}

std::optional<uint32_t> ModuleRegistry::Index(uint32_t id) const {
  const auto found = by_id_.find(id);
  if (found == by_id_.end()) return std::nullopt;
  return found->second;
}

std::vector<uint64_t> ModuleRegistry::FacetBytes() const {
  std::vector<uint64_t> bytes;
  bytes.reserve(facets_.size());
  for (const Facet& facet : facets_) bytes.push_back(facet.bytes);
  return bytes;
}

std::vector<policy::SamplerModule> ModuleRegistry::Samplable() const {
  std::vector<policy::SamplerModule> samplable;
  for (const v1::Module& module : modules_) {
    if (module.samplable()) samplable.push_back({module.name(), module.parameter_count()});
  }
  return samplable;
}

std::vector<guard::Dependency> DependenciesOf(const v1::SamplingOptions& sampling) {
  std::vector<guard::Dependency> dependencies;
  for (const v1::ModuleDependency& item : sampling.dependencies()) {
    dependencies.push_back({item.module(), static_cast<guard::Dependency::Kind>(item.kind()), item.other()});
  }
  return dependencies;
}

}  // namespace misa::server
