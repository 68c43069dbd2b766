// What a simulated trainer is: its modules, the trace of its step, and what it reports.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "misa/v1/control.pb.h"
#include "runtime/policy/trace.h"
#include "runtime/sim/random.h"

namespace misa::server {

// Modules of weights, gradients and optimizer state, and a step over them: forward, backward, optimizer.
class TrainerModel {
 public:
  TrainerModel(sim::Random* random, uint64_t chunk_bytes);

  v1::RegisterModulesRequest Modules() const;
  // More modules, or another size of one: what was known of the trace is void.
  void Change();
  // Another order or branch over the same modules.
  void ChangeTrace();

  const v1::Trace& trace() const { return trace_; }
  uint64_t digest() const { return trace_.digest(); }
  double compute_seconds() const { return compute_seconds_; }
  // Bytes that the largest position needs at once, and bytes with which nothing has to move.
  uint64_t smallest_bytes() const { return smallest_bytes_; }
  uint64_t all_bytes() const { return all_bytes_; }
  uint64_t disk_bytes() const { return disk_bytes_; }
  uint32_t module_count() const { return static_cast<uint32_t>(modules_.size()); }
  uint32_t facet_count() const { return next_facet_; }

 private:
  struct Module {
    uint32_t weights = 0, gradients = 0, optimizer = 0;  // facet ids
    uint64_t chunks = 1;
    bool trained = true;
  };
  void AddModule();
  void MakeTrace();

  sim::Random* random_;
  uint64_t chunk_bytes_;
  std::vector<Module> modules_;
  uint32_t next_facet_ = 0;
  bool optimizer_pass_ = false;
  uint64_t other_bytes_ = 0;
  double position_seconds_ = 0;
  v1::Trace trace_;
  double compute_seconds_ = 0;
  uint64_t smallest_bytes_ = 0;
  uint64_t all_bytes_ = 0;
  uint64_t disk_bytes_ = 0;
};

}  // namespace misa::server
