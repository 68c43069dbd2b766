#include "server/sim/trainer_model.h"

#include <algorithm>
#include <utility>

namespace misa::server {

TrainerModel::TrainerModel(sim::Random* random, uint64_t chunk_bytes) : random_(random), chunk_bytes_(chunk_bytes) {
  const uint64_t count = random_->Between(uint64_t{2}, uint64_t{4});
  for (uint64_t i = 0; i < count; ++i) AddModule();
  optimizer_pass_ = random_->Chance(0.3);
  other_bytes_ = random_->Below(3) * chunk_bytes_ / 2;
  position_seconds_ = random_->Between(0.002, 0.008);
  MakeTrace();
}

void TrainerModel::AddModule() {
  Module module;
  module.weights = next_facet_++;
  module.gradients = next_facet_++;
  module.optimizer = next_facet_++;
  module.chunks = random_->Between(uint64_t{1}, uint64_t{3});
  module.trained = !random_->Chance(0.3);
  modules_.push_back(module);
}

v1::RegisterModulesRequest TrainerModel::Modules() const {
  v1::RegisterModulesRequest request;
  request.set_disk_bytes(disk_bytes_);
  for (size_t i = 0; i < modules_.size(); ++i) {
    v1::Module* module = request.add_modules();
    module->set_name("blocks." + std::to_string(i));
    module->set_kind("block");
    module->set_parameter_count(modules_[i].chunks * 1000);
    module->set_samplable(true);
    const std::pair<uint32_t, v1::FacetKind> facets[] = {{modules_[i].weights, v1::FACET_KIND_WEIGHTS},
                                                         {modules_[i].gradients, v1::FACET_KIND_GRADIENTS},
                                                         {modules_[i].optimizer, v1::FACET_KIND_OPTIMIZER}};
    for (const auto& [id, kind] : facets) {
      v1::Facet* facet = module->add_facets();
      facet->set_id(id);
      facet->set_kind(kind);
      facet->set_device_bytes(modules_[i].chunks * chunk_bytes_);
    }
  }
  return request;
}

void TrainerModel::Change() {
  if (random_->Chance(0.5)) {
    AddModule();
  } else {
    modules_[random_->Below(modules_.size())].chunks = random_->Between(uint64_t{1}, uint64_t{3});
  }
  MakeTrace();
}

void TrainerModel::ChangeTrace() {
  optimizer_pass_ = !optimizer_pass_;
  Module& module = modules_[random_->Below(modules_.size())];
  module.trained = !module.trained;
  MakeTrace();
}

void TrainerModel::MakeTrace() {
  policy::Trace trace;
  std::vector<uint64_t> bytes(next_facet_, 0);
  all_bytes_ = other_bytes_;
  disk_bytes_ = 0;
  for (const Module& module : modules_) {
    for (const uint32_t facet : {module.weights, module.gradients, module.optimizer}) {
      bytes[facet] = module.chunks * chunk_bytes_;
      disk_bytes_ += bytes[facet];
    }
    all_bytes_ += module.chunks * chunk_bytes_ * (module.trained ? 3 : 1);
  }
  const auto add = [&](std::vector<policy::Use> uses) {
    trace.entries.push_back({std::move(uses), position_seconds_, other_bytes_});
  };
  for (const Module& module : modules_) add({{module.weights, policy::kRead}});
  for (auto module = modules_.rbegin(); module != modules_.rend(); ++module) {
    std::vector<policy::Use> uses = {{module->weights, policy::kRead}};
    if (module->trained) uses.push_back({module->gradients, policy::kCreate | policy::kWrite});
    add(std::move(uses));
    const uint8_t step = policy::kRead | policy::kWrite;
    const uint8_t last = policy::kRead | policy::kDiscard;
    if (module->trained && !optimizer_pass_) {
      add({{module->weights, step}, {module->gradients, last}, {module->optimizer, step}});
    }
  }
  if (optimizer_pass_) {
    for (const Module& module : modules_) {
      if (!module.trained) continue;
      const uint8_t step = policy::kRead | policy::kWrite;
      add({{module.weights, step}, {module.gradients, policy::kRead | policy::kDiscard}, {module.optimizer, step}});
    }
  }
  compute_seconds_ = position_seconds_ * static_cast<double>(trace.entries.size());
  smallest_bytes_ = 0;
  trace_.Clear();
  for (const policy::TraceEntry& entry : trace.entries) {
    uint64_t needed = entry.other_bytes;
    v1::TraceEntry* out = trace_.add_entries();
    for (const policy::Use& use : entry.uses) {
      out->add_facets(use.facet);
      out->add_access(use.access);
      needed += bytes[use.facet];
    }
    out->set_compute_seconds(entry.compute_seconds);
    out->set_other_bytes(entry.other_bytes);
    smallest_bytes_ = std::max(smallest_bytes_, needed);
  }
  trace_.set_digest(policy::Digest(trace));
}

}  // namespace misa::server
