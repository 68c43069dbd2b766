#include "runtime/capacity/workload.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "runtime/modules/grouping.h"
#include "runtime/policy/sampler.h"

namespace misa::capacity {
namespace {

using policy::kCreate;
using policy::kDiscard;
using policy::kRead;
using policy::kWrite;

constexpr uint64_t kMostTokens = uint64_t{1} << 32;
constexpr uint64_t kDefaultSequence = 2048;
// Each makes positions of its own in every block.
constexpr uint64_t kMostMicroBatches = 256;
// int8 with a 32-bit scale for each 64 elements.
constexpr double kQuantizedBytes = 1 + 4.0 / 64;
// Reading one byte and writing two of an element that is made bf16 again.
constexpr double kDequantizedTraffic = 3;
// Of each element of the logits: themselves, their fp32 copy and its gradient; in fp32 the softmax and its gradient.
constexpr double kLogitsBytes = 2 + 4 + 4;
constexpr double kFullLogitsBytes = 4 + 4 + 4;
// More than any device has, and far from the end of a signed word.
constexpr double kMostOther = 1e18;
constexpr uint32_t kNoFacet = UINT32_MAX;

const OptimizerKind* FindOptimizer(const std::string& name) {
  const auto found = std::find_if(Optimizers().begin(), Optimizers().end(),
                                  [&](const OptimizerKind& kind) { return name == kind.name; });
  return found == Optimizers().end() ? nullptr : &*found;
}

const PrecisionKind* FindPrecision(const std::string& name) {
  const auto found = std::find_if(Precisions().begin(), Precisions().end(),
                                  [&](const PrecisionKind& kind) { return name == kind.name; });
  return found == Precisions().end() ? nullptr : &*found;
}

template <typename Kinds>
std::string Names(const Kinds& kinds) {
  std::string names;
  for (const auto& kind : kinds) {
    names += (names.empty() ? "" : ", ") + std::string(kind.name);
  }
  return names;
}

std::string FindKinds(const std::string& optimizer, const std::string& precision, const OptimizerKind** optimizer_kind,
                      const PrecisionKind** precision_kind) {
  *optimizer_kind = FindOptimizer(optimizer);
  if (*optimizer_kind == nullptr) {
    return "There is no optimizer \"" + optimizer + "\"; known are " + Names(Optimizers()) + ".";
  }
  *precision_kind = FindPrecision(precision);
  if (*precision_kind == nullptr) {
    return "There is no precision \"" + precision + "\"; known are " + Names(Precisions()) + ".";
  }
  return "";
}

double StateBytesOf(const ModelParameter& parameter, const OptimizerKind& optimizer, const PrecisionKind& precision) {
  const auto elements = static_cast<double>(parameter.elements());
  double kept = optimizer.states * elements;
  if (optimizer.factored && parameter.dimensions >= 2) {
    kept = optimizer.states * static_cast<double>(parameter.rows + parameter.columns);
  }
  const double bytes = optimizer.eight_bit ? kept * (1 + 4.0 / 2048) : kept * precision.state_bytes;
  return bytes + elements * precision.master_bytes;
}

// The planner's link has rates alone: what a copy of the mean size loses to the latency goes off them.
void AddLatency(double seconds, const std::vector<uint64_t>& facet_bytes, policy::LinkRates* link) {
  if (seconds <= 0 || facet_bytes.empty()) {
    return;
  }
  double mean = 0;
  for (const uint64_t bytes : facet_bytes) {
    mean += static_cast<double>(bytes) / static_cast<double>(facet_bytes.size());
  }
  for (double* rate : {&link->load, &link->unload, &link->duplex_load, &link->duplex_unload}) {
    *rate = mean / (mean / *rate + seconds);
  }
}

// Writes the trace of a step position by position.
class StepWriter {
 public:
  StepWriter(const Model& model, const DeviceProfile& device, const Training& training, const OptimizerKind& optimizer,
             const PrecisionKind& precision, uint64_t sequence)
      : model_(model),
        device_(device),
        training_(training),
        optimizer_(optimizer),
        precision_(precision),
        sequence_(static_cast<double>(sequence)),
        tokens_(static_cast<double>(training.batch) * sequence_),
        parts_(training.micro_batch == 0 ? 1 : (training.batch + training.micro_batch - 1) / training.micro_batch),
        part_tokens_(tokens_ / static_cast<double>(parts_)) {}

  std::string Write(Workload* out) {
    out_ = out;
    out_->tokens = static_cast<uint64_t>(tokens_);
    if (std::string error = MakeGroups(); !error.empty()) {
      return error;
    }
    MakeFacets();
    MeasureActivations();
    Forward();
    const size_t turn = entries().size();
    Backward();
    if (training_.update == Update::kEager) {
      for (Group& group : groups_) {
        UpdatePosition(&group, held_);
      }
    }
    for (size_t i = 0; i < entries().size(); ++i) {
      out_->compute_seconds += entries()[i].compute_seconds;
      if (i + 1 == turn) {
        out_->forward_seconds = out_->compute_seconds;
      }
    }
    return "";
  }

 private:
  struct Group {
    modules::ModuleGroup info;
    double elements = 0;
    double largest = 0;  // elements of its largest parameter
    double state_bytes = 0;
    bool trained = false;
    bool quantized = false;
    bool pending = true;        // an update is left to do at the next touch
    bool has_gradient = false;  // in this backward
    const Operation* first_operation = nullptr;
    uint32_t weights = kNoFacet;
    uint32_t gradients = kNoFacet;
    uint32_t optimizer = kNoFacet;
  };

  std::vector<policy::TraceEntry>& entries() { return out_->input.trace.entries; }

  std::string MakeGroups() {
    std::vector<modules::ParameterShape> shapes;
    for (const ModelParameter& parameter : model_.parameters) {
      const auto bytes = static_cast<uint64_t>(static_cast<double>(parameter.elements()) * precision_.weight_bytes);
      shapes.push_back({parameter.name, parameter.dimensions, parameter.elements(), bytes});
    }
    group_of_.resize(model_.parameters.size());
    for (modules::ModuleGroup& info : modules::GroupParameters(shapes)) {
      Group group;
      for (const size_t parameter : info.parameters) {
        group_of_[parameter] = groups_.size();
        const auto elements = static_cast<double>(model_.parameters[parameter].elements());
        group.elements += elements;
        group.largest = std::max(group.largest, elements);
        group.state_bytes += StateBytesOf(model_.parameters[parameter], optimizer_, precision_);
      }
      group.info = std::move(info);
      groups_.push_back(std::move(group));
    }
    if (training_.mode == Mode::kExact) {
      for (Group& group : groups_) {
        group.trained = true;
      }
      return "";
    }
    // The draw itself: the share that a round really trains is what whole modules leave of delta.
    std::vector<policy::SamplerModule> choices;
    std::vector<size_t> group_of_choice;
    for (size_t g = 0; g < groups_.size(); ++g) {
      if (groups_[g].info.samplable) {
        choices.push_back({groups_[g].info.name, static_cast<uint64_t>(groups_[g].elements)});
        group_of_choice.push_back(g);
      }
    }
    policy::SamplerOptions options;
    options.delta = training_.delta;
    options.seed = training_.seed;
    if (std::string error = policy::CheckSampler(options, choices); !error.empty()) {
      return error;
    }
    const policy::ModuleSampler sampler(options, choices);
    for (const uint32_t choice : sampler.active()) {
      groups_[group_of_choice[choice]].trained = true;
    }
    for (Group& group : groups_) {
      group.quantized = training_.mode == Mode::kQuantized && group.info.samplable && !group.trained;
    }
    return "";
  }

  uint32_t AddFacet(const Group& group, trace::FacetKind kind, double bytes) {
    if (bytes <= 0) {
      return kNoFacet;
    }
    const double chunks = std::ceil(bytes / static_cast<double>(device_.chunk_bytes));
    const uint64_t rounded = static_cast<uint64_t>(chunks) * device_.chunk_bytes;
    out_->input.facet_bytes.push_back(rounded);
    out_->facets.push_back({group.info.name, kind, rounded});
    return static_cast<uint32_t>(out_->facets.size() - 1);
  }

  void MakeFacets() {
    for (const Operation& operation : model_.operations) {
      for (Group* group : GroupsOf(operation)) {
        if (group->first_operation == nullptr) {
          group->first_operation = &operation;
        }
      }
    }
    for (Group& group : groups_) {
      const double weights = group.elements * (group.quantized ? kQuantizedBytes : precision_.weight_bytes);
      group.weights = AddFacet(group, trace::FacetKind::kWeights, weights);
      out_->state.weights += weights;
      if (!group.trained) {
        continue;
      }
      const double gradients = group.elements * precision_.gradient_bytes;
      if (training_.update != Update::kInBackward) {
        group.gradients = AddFacet(group, trace::FacetKind::kGradients, gradients);
        out_->state.gradients += gradients;
      }
      group.optimizer = AddFacet(group, trace::FacetKind::kOptimizer, group.state_bytes);
      out_->state.optimizer += group.state_bytes;
      out_->trained_parameters += static_cast<uint64_t>(group.elements);
    }
  }

  void MeasureActivations() {
    const ModelShape& shape = model_.shape;
    const auto hidden = static_cast<double>(shape.hidden);
    const auto intermediate = static_cast<double>(shape.intermediate);
    block_bytes_ =
        BlockActivationBytes(shape, training_, precision_.activation_bytes) / static_cast<double>(parts_);
    boundary_bytes_ = tokens_ * hidden * precision_.activation_bytes;
    working_bytes_ = part_tokens_ * (2 * hidden + intermediate * (shape.gated ? 3 : 2)) * precision_.activation_bytes;
    logits_bytes_ =
        part_tokens_ * static_cast<double>(shape.vocabulary) * (precision_.full ? kFullLogitsBytes : kLogitsBytes);
  }

  double MatrixSeconds(double flops) const {
    const double rate = device_.flops_per_second * device_.utilization * (precision_.full ? device_.fp32_share : 1);
    return flops / rate;
  }
  double MemorySeconds(double bytes) const {
    return device_.memory_bytes_per_second > 0 ? bytes / device_.memory_bytes_per_second : 0;
  }
  double AttentionFlops(const Operation& operation) const {
    if (!operation.attention) {
      return 0;
    }
    // Of one micro-batch. Scores and mixing, 2*s*s*width each; a fused kernel skips the half above the diagonal.
    const auto width = static_cast<double>(model_.shape.heads * model_.shape.head_width);
    return (training_.fused_attention ? 2 : 4) * part_tokens_ * sequence_ * width;
  }

  // Groups of an operation, each once.
  std::vector<Group*> GroupsOf(const Operation& operation) {
    std::vector<Group*> found;
    for (const uint32_t parameter : operation.parameters) {
      Group* group = &groups_[group_of_[parameter]];
      if (std::find(found.begin(), found.end(), group) == found.end()) {
        found.push_back(group);
      }
    }
    return found;
  }

  void Position(std::vector<policy::Use> uses, double seconds, double other) {
    policy::TraceEntry entry;
    entry.uses = std::move(uses);
    entry.compute_seconds = seconds;
    entry.other_bytes = static_cast<uint64_t>(std::min(std::round(other), kMostOther));
    entries().push_back(std::move(entry));
  }

  // Weights of an operation on the device; `extra` beside what is held.
  void Touch(const std::vector<Group*>& groups, double seconds, double extra) {
    std::vector<policy::Use> uses;
    for (const Group* group : groups) {
      uses.push_back({group->weights, kRead});
      if (group->quantized) {
        seconds += MemorySeconds(group->elements * kDequantizedTraffic);
        extra += group->elements * precision_.weight_bytes;
      }
    }
    Position(std::move(uses), seconds, held_ + extra);
  }

  void UpdatePosition(Group* group, double other) {
    if (!group->trained) {
      return;
    }
    std::vector<policy::Use> uses = {{group->weights, kRead | kWrite}};
    if (group->gradients != kNoFacet) {
      uses.push_back({group->gradients, kRead | kDiscard});
    }
    if (group->optimizer != kNoFacet) {
      uses.push_back({group->optimizer, kRead | kWrite});
    }
    // With a master copy the weight is only written.
    const double weight_traffic = group->elements * precision_.weight_bytes * (precision_.master_bytes > 0 ? 1 : 2);
    const double seconds =
        MemorySeconds(group->elements * precision_.gradient_bytes + 2 * group->state_bytes + weight_traffic);
    const double temporaries = optimizer_.temporaries * group->largest * std::max(4.0, precision_.state_bytes);
    out_->update_seconds += seconds;
    Position(std::move(uses), seconds, other + temporaries);
  }

  // The end of the operations of one block, or of the single one outside of any.
  size_t EndOfBlock(size_t begin) const {
    const std::vector<Operation>& operations = model_.operations;
    size_t end = begin + 1;
    while (operations[begin].block != kNoBlock && end < operations.size() &&
           operations[end].block == operations[begin].block) {
      ++end;
    }
    return end;
  }
  // Tokens that go through at once. Outside of blocks nothing else comes between two micro-batches.
  double TokensAtOnce(const Operation& operation) const { return operation.block == kNoBlock ? tokens_ : part_tokens_; }

  void Forward() {
    held_ = boundary_bytes_;  // what the embedding makes
    for (size_t begin = 0; begin < model_.operations.size();) {
      const size_t end = EndOfBlock(begin);
      const size_t parts = model_.operations[begin].block == kNoBlock ? 1 : parts_;
      for (size_t part = 0; part < parts; ++part) {
        for (size_t i = begin; i < end; ++i) {
          const double share = static_cast<double>(i - begin + 1) / static_cast<double>(end - begin);
          ForwardOf(model_.operations[i], static_cast<double>(part) + share);
        }
      }
      begin = end;
    }
  }

  // `parts_done` of its block, this operation included.
  void ForwardOf(const Operation& operation, double parts_done) {
    const std::vector<Group*> groups = GroupsOf(operation);
    if (training_.update == Update::kDeferred) {
      for (Group* group : groups) {
        if (std::exchange(group->pending, false)) {
          UpdatePosition(group, held_);
        }
      }
    }
    double extra = 0;
    if (operation.block != kNoBlock) {
      const double before = boundary_bytes_ + operation.block * KeptBytes();
      if (training_.checkpointing) {
        held_ = before + KeptBytes();
        extra = working_bytes_;
      } else {
        held_ = before + block_bytes_ * parts_done;
      }
    } else if (&operation == &model_.operations.back()) {
      extra = logits_bytes_;
    }
    Touch(groups, MatrixSeconds(operation.flops_per_token * TokensAtOnce(operation) + AttentionFlops(operation)), extra);
  }

  // What a block leaves behind after forward.
  double KeptBytes() const {
    return training_.checkpointing ? boundary_bytes_ : block_bytes_ * static_cast<double>(parts_);
  }

  void Backward() {
    const std::vector<Operation>& operations = model_.operations;
    size_t end = operations.size();
    while (end > 0) {
      const uint32_t block = operations[end - 1].block;
      size_t begin = end - 1;
      while (block != kNoBlock && begin > 0 && operations[begin - 1].block == block) {
        --begin;
      }
      const double below = boundary_bytes_ + (block == kNoBlock ? (begin == 0 ? 0.0 : static_cast<double>(model_.shape.layers))
                                                                : static_cast<double>(block)) *
                                                 KeptBytes();
      if (block == kNoBlock) {
        held_ = below;
        BackwardOf(operations[begin], begin == 0, begin + 1 == operations.size() ? logits_bytes_ : 0, /*last=*/true);
        end = begin;
        continue;
      }
      for (size_t part = 0; part < parts_; ++part) {
        // Without checkpointing those of the micro-batches to come are there as well.
        const double others = training_.checkpointing ? boundary_bytes_
                                                      : block_bytes_ * static_cast<double>(parts_ - 1 - part);
        BackwardOfBlock(begin, end, below + others, part + 1 == parts_);
      }
      end = begin;
    }
    held_ = 0;
  }

  // One micro-batch through one block; `last`: no other comes after it.
  void BackwardOfBlock(size_t begin, size_t end, double below, bool last) {
    const std::vector<Operation>& operations = model_.operations;
    const auto count = static_cast<double>(end - begin);
    if (training_.checkpointing) {
      for (size_t i = begin; i < end; ++i) {
        held_ = below + block_bytes_ * static_cast<double>(i - begin + 1) / count;
        Touch(GroupsOf(operations[i]),
              MatrixSeconds(operations[i].flops_per_token * part_tokens_ + AttentionFlops(operations[i])), 0);
      }
    }
    for (size_t i = end; i-- > begin;) {
      held_ = below + block_bytes_ * static_cast<double>(i - begin + 1) / count;
      BackwardOf(operations[i], false, working_bytes_, last);
    }
  }

  // `first`: the embedding, through which nothing has to go further down.
  void BackwardOf(const Operation& operation, bool first, double working, bool last) {
    const std::vector<Group*> groups = GroupsOf(operation);
    double trained_elements = 0;
    for (const Group* group : groups) {
      trained_elements += group->trained ? group->largest : 0;
    }
    const bool matrix_trained = groups.front()->trained;
    const double matrix = operation.flops_per_token * TokensAtOnce(operation);
    const double seconds =
        MatrixSeconds(matrix + (matrix_trained ? matrix : 0) + 2 * AttentionFlops(operation));
    // Autograd's own gradient, before it is taken over.
    const double fresh = trained_elements * precision_.gradient_bytes;
    if (!first) {
      Touch(groups, seconds, working + fresh);
    } else if (trained_elements > 0) {
      Position({}, seconds, held_ + fresh);
    }
    for (Group* group : groups) {
      if (!group->trained) {
        continue;
      }
      if (training_.update == Update::kInBackward) {
        // The first operation of forward is the last of backward, and completes the group's gradients.
        if (last && group->first_operation == &operation) {
          UpdatePosition(group, held_ + working + fresh);
        }
        continue;
      }
      const uint8_t access = std::exchange(group->has_gradient, true) ? kRead | kWrite : kCreate | kWrite;
      Position({{group->gradients, access}}, MemorySeconds(2 * group->largest * precision_.gradient_bytes),
               held_ + working + fresh);
    }
  }

  const Model& model_;
  const DeviceProfile& device_;
  const Training& training_;
  const OptimizerKind& optimizer_;
  const PrecisionKind& precision_;
  const double sequence_;
  const double tokens_;
  const size_t parts_;        // micro-batches
  const double part_tokens_;  // of one
  Workload* out_ = nullptr;
  std::vector<Group> groups_;
  std::vector<size_t> group_of_;  // by parameter
  double block_bytes_ = 0;
  double boundary_bytes_ = 0;
  double working_bytes_ = 0;
  double logits_bytes_ = 0;
  double held_ = 0;  // activations kept at the present position
};

}  // namespace

const char* ModeName(Mode mode) {
  switch (mode) {
    case Mode::kExact: return "exact";
    case Mode::kSampled: return "sampled";
    case Mode::kQuantized: return "quantized";
  }
  return "";
}

const char* UpdateName(Update update) {
  switch (update) {
    case Update::kDeferred: return "deferred";
    case Update::kInBackward: return "in_backward";
    case Update::kEager: return "eager";
  }
  return "";
}

const std::vector<OptimizerKind>& Optimizers() {
  static const std::vector<OptimizerKind> kinds = {
      {"adamw", 2, false, false, 1},    {"adam", 2, false, false, 1},    {"nadam", 2, false, false, 1},
      {"adamw-8bit", 2, false, true, 2}, {"rmsprop", 1, false, false, 1}, {"adagrad", 1, false, false, 1},
      {"lion", 1, false, false, 1},     {"sgd", 0, false, false, 0},     {"sgd-momentum", 1, false, false, 0},
      {"adafactor", 1, true, false, 1},
  };
  return kinds;
}

const std::vector<PrecisionKind>& Precisions() {
  static const std::vector<PrecisionKind> kinds = {
      {"bf16-mixed", 2, 2, 4, 4, 2, false},
      {"bf16-mixed-fp32-gradients", 2, 4, 4, 4, 2, false},
      {"fp16-mixed", 2, 2, 4, 4, 2, false},
      {"bf16", 2, 2, 0, 2, 2, false},
      {"fp32", 4, 4, 0, 4, 4, true},
  };
  return kinds;
}

double BlockActivationBytes(const ModelShape& shape, const Training& training, double activation_bytes) {
  const auto batch = static_cast<double>(training.batch);
  const auto sequence = static_cast<double>(training.sequence);
  const auto hidden = static_cast<double>(shape.hidden);
  const double scores = training.fused_attention ? 0 : 5 * static_cast<double>(shape.heads) * sequence / hidden;
  return sequence * batch * hidden * (34 + scores) * activation_bytes / 2;
}

policy::Result<StateBytes> StateOf(const Model& model, const std::string& optimizer, const std::string& precision) {
  policy::Result<StateBytes> result;
  const OptimizerKind* optimizer_kind = nullptr;
  const PrecisionKind* precision_kind = nullptr;
  result.error = FindKinds(optimizer, precision, &optimizer_kind, &precision_kind);
  if (!result.ok()) {
    return result;
  }
  for (const ModelParameter& parameter : model.parameters) {
    const auto elements = static_cast<double>(parameter.elements());
    result.value.weights += elements * precision_kind->weight_bytes;
    result.value.gradients += elements * precision_kind->gradient_bytes;
    result.value.optimizer += StateBytesOf(parameter, *optimizer_kind, *precision_kind);
  }
  return result;
}

policy::Result<Workload> MakeWorkload(const Model& model, const DeviceProfile& device, const Training& training) {
  policy::Result<Workload> result;
  const OptimizerKind* optimizer = nullptr;
  const PrecisionKind* precision = nullptr;
  result.error = FindKinds(training.optimizer, training.precision, &optimizer, &precision);
  if (result.ok()) {
    result.error = CheckDevice(device);
  }
  Training filled = training;
  if (filled.sequence == 0) {
    filled.sequence = model.shape.context == 0 ? kDefaultSequence : std::min(kDefaultSequence, model.shape.context);
  }
  const uint64_t context = model.shape.context;
  if (result.ok() && context > 0 && filled.sequence > context) {
    result.error = "A sequence of " + std::to_string(filled.sequence) + " tokens is longer than the " +
                   std::to_string(context) + " that " + model.shape.name + " was made for.";
  }
  if (result.ok() && (filled.batch == 0 || filled.batch > kMostTokens / filled.sequence)) {
    result.error = "A batch of " + std::to_string(filled.batch) + " sequences of " + std::to_string(filled.sequence) +
                   " tokens cannot be planned; a step has between 1 and 2^32 tokens.";
  }
  if (result.ok() && filled.micro_batch > 0 && filled.batch > kMostMicroBatches * filled.micro_batch) {
    result.error = "A batch of " + std::to_string(filled.batch) + " in micro-batches of " +
                   std::to_string(filled.micro_batch) + " cannot be planned; a step has at most " +
                   std::to_string(kMostMicroBatches) + " of them.";
  }
  if (!result.ok()) {
    return result;
  }
  StepWriter writer(model, device, filled, *optimizer, *precision, filled.sequence);
  result.error = writer.Write(&result.value);
  if (!result.ok()) {
    result.value = {};
    return result;
  }
  result.value.input.link = LinkOf(device);
  AddLatency(device.latency_seconds, result.value.input.facet_bytes, &result.value.input.link);
  return result;
}

}  // namespace misa::capacity
