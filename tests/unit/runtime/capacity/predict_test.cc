#include "runtime/capacity/predict.h"

#include <gmock/gmock.h>

#include <limits>

namespace misa::capacity {
namespace {

using ::testing::HasSubstr;

Model Known(const std::string& name) { return BuildModel(*FindModel(name)).value; }

double Total(const std::string& model, const std::string& precision) {
  const policy::Result<StateBytes> state = StateOf(Known(model), "adamw", precision);
  EXPECT_EQ(state.error, "");
  return state.value.total();
}

// A model of a few blocks, so that plans are quick.
Model Small() {
  ModelShape shape;
  shape.name = "small";
  shape.vocabulary = 4096;
  shape.hidden = 512;
  shape.intermediate = 2048;
  shape.layers = 6;
  shape.heads = shape.key_value_heads = 8;
  shape.head_width = 64;
  shape.context = 1024;
  return BuildModel(shape).value;
}

DeviceProfile SmallDevice() {
  DeviceProfile device;
  device.name = "small";
  device.capacity_bytes = uint64_t{4} << 30;
  device.flops_per_second = 1e11;
  device.h2d_bytes_per_second = 4e8;
  device.d2h_bytes_per_second = 4e8;
  device.total_bytes_per_second = 6e8;
  device.memory_bytes_per_second = 1e10;
  device.chunk_bytes = 64 << 10;
  return device;
}

Training Fp32() {
  Training training;
  training.precision = "fp32";
  training.batch = 2;
  training.sequence = 256;
  training.checkpointing = true;
  return training;
}

Prediction Ask(const Model& model, const DeviceProfile& device, const Training& training, uint64_t budget = 0) {
  const policy::Result<Prediction> prediction = Predict({model, device, training, budget});
  EXPECT_EQ(prediction.error, "");
  return prediction.value;
}

TEST(MemoryArithmetic, IsWithinOnePercentOfWhatIsPublished) {
  const auto near = [](double value, double published) { EXPECT_NEAR(value / published, 1, 0.01) << published; };
  near(Total("llama-7b", "bf16-mixed"), 107.8e9);
  near(Total("llama-13b", "bf16-mixed"), 208.3e9);
  near(Total("llama-70b", "bf16-mixed"), 1103.6e9);
  near(Total("llama3-8b", "bf16-mixed-fp32-gradients"), 144.5e9);
  near(StateOf(Known("llama3-8b"), "adamw", "bf16-mixed").value.weights, 16.1e9);
  // Shares of all parameters, each with all its state.
  near(0.01 * Total("llama3-8b", "bf16-mixed-fp32-gradients"), 1.45e9);
  near(0.03 * Total("llama3-8b", "bf16-mixed-fp32-gradients"), 4.34e9);
  near(static_cast<double>(Known("llama3-8b").block_parameter_count), 218e6);
}

TEST(MemoryArithmetic, KnowsOptimizers) {
  const Model model = Known("llama-7b");
  const auto parameters = static_cast<double>(model.parameter_count);
  const auto bytes = [&](const char* optimizer, const char* precision) {
    return StateOf(model, optimizer, precision).value.total() / parameters;
  };
  EXPECT_NEAR(bytes("adamw", "fp32"), 16, 1e-9);
  EXPECT_NEAR(bytes("sgd", "bf16"), 4, 1e-9);
  EXPECT_NEAR(bytes("sgd-momentum", "bf16"), 6, 1e-9);
  EXPECT_NEAR(bytes("adamw-8bit", "bf16"), 6.004, 1e-3);
  EXPECT_NEAR(bytes("adafactor", "fp32"), 8.003, 2e-3);
  EXPECT_THAT(StateOf(model, "adamW", "fp32").error, HasSubstr("no optimizer \"adamW\"; known are adamw, adam,"));
  EXPECT_THAT(StateOf(model, "adamw", "int3").error, HasSubstr("no precision \"int3\"; known are bf16-mixed,"));
}

TEST(Workload, ComputeIsTheArithmeticOfTheModel) {
  const Model model = Small();
  DeviceProfile device = SmallDevice();
  device.memory_bytes_per_second = 0;
  Training training = Fp32();
  training.checkpointing = false;
  const policy::Result<Workload> workload = MakeWorkload(model, device, training);
  ASSERT_EQ(workload.error, "");
  const ModelShape& shape = model.shape;
  // Matrices: 2 operations a parameter and token forward, 4 backward. Attention: half of 4*s*s*h, and twice that.
  const double matrices = static_cast<double>(6 * (4 * 512 * 512 + 3 * 512 * 2048) + 512 * 4096);
  const double tokens = 512;
  const double attention = static_cast<double>(shape.layers) * 2 * 2 * 256 * 256 * 512;
  const double expected = (6 * matrices * tokens + 3 * attention) / 1e11;
  EXPECT_NEAR(workload.value.compute_seconds, expected, 1e-9 * expected);
  EXPECT_NEAR(workload.value.forward_seconds, expected / 3, 1e-9 * expected);
  training.checkpointing = true;
  const double head = 2 * 512.0 * 4096 * tokens / 1e11;  // is not in a block, and not computed again
  EXPECT_NEAR(MakeWorkload(model, device, training).value.compute_seconds, expected * 4 / 3 - head, 1e-9 * expected);
}

TEST(Workload, ActivationsAreThoseOfTheFormula) {
  ModelShape shape = Small().shape;
  Training training = Fp32();
  training.checkpointing = false;
  training.fused_attention = false;
  // s*b*h*(34 + 5*a*s/h)
  EXPECT_DOUBLE_EQ(BlockActivationBytes(shape, training, 2), 256.0 * 2 * 512 * (34 + 5.0 * 8 * 256 / 512));
  training.fused_attention = true;
  EXPECT_DOUBLE_EQ(BlockActivationBytes(shape, training, 4), 2 * 256.0 * 2 * 512 * 34);
  // Six blocks of it at the turn, or one and the inputs of six.
  const auto most = [&] {
    const policy::Result<Workload> workload = MakeWorkload(Small(), SmallDevice(), training);
    uint64_t other = 0;
    for (const policy::TraceEntry& entry : workload.value.input.trace.entries) other = std::max(other, entry.other_bytes);
    return static_cast<double>(other);
  };
  const double whole = most();
  const double logits = 512 * 4096 * 12;
  const double head_gradient = 512 * 4096 * 4;
  EXPECT_NEAR(whole, 6 * BlockActivationBytes(shape, training, 4) + logits + head_gradient, 0.02 * whole);
  training.checkpointing = true;
  EXPECT_LT(most(), 0.5 * whole);  // one block, the inputs of six, and the logits
}

TEST(Workload, EveryStepIsWhole) {
  for (const Update update : {Update::kDeferred, Update::kInBackward, Update::kEager}) {
    for (const Mode mode : {Mode::kExact, Mode::kSampled, Mode::kQuantized}) {
      Training training = Fp32();
      training.update = update;
      training.mode = mode;
      training.delta = 0.3;
      for (const Model& model : {Small(), Known("gpt2")}) {
        const policy::Result<Workload> made = MakeWorkload(model, SmallDevice(), training);
        ASSERT_EQ(made.error, "");
        const Workload& workload = made.value;
        std::vector<int> updates(workload.facets.size(), 0);
        std::vector<int> gradients(workload.facets.size(), 0);
        for (const policy::TraceEntry& entry : workload.input.trace.entries) {
          for (const policy::Use& use : entry.uses) {
            const trace::FacetKind kind = workload.facets[use.facet].kind;
            if (kind == trace::FacetKind::kWeights) updates[use.facet] += (use.access & policy::kWrite) != 0;
            if (kind == trace::FacetKind::kGradients) {
              gradients[use.facet] += (use.access & policy::kCreate) != 0;
              gradients[use.facet] -= (use.access & policy::kDiscard) != 0;
            }
          }
        }
        size_t trained = 0;
        for (size_t f = 0; f < workload.facets.size(); ++f) {
          EXPECT_LE(updates[f], 1);
          EXPECT_EQ(gradients[f], 0) << workload.facets[f].name;  // made once, used up once
          trained += static_cast<size_t>(updates[f]);
        }
        size_t states = 0;
        for (const trace::FacetInfo& facet : workload.facets) states += facet.kind == trace::FacetKind::kOptimizer;
        EXPECT_EQ(trained, states);
        EXPECT_EQ(mode == Mode::kExact, workload.trained_parameters == model.parameter_count);
      }
    }
  }
}

TEST(Predict, APlanKeepsWithinItsBudgetAndBound) {
  const Model model = Small();
  const DeviceProfile device = SmallDevice();
  double before = std::numeric_limits<double>::infinity();
  const Prediction whole = Ask(model, device, Fp32());
  EXPECT_EQ(whole.limited_by, "compute");
  EXPECT_EQ(whole.loaded_bytes, 0u);
  EXPECT_NEAR(whole.step_seconds, whole.compute_seconds, 1e-9);
  EXPECT_NEAR(static_cast<double>(whole.parts.weights_bytes + whole.parts.gradients_bytes + whole.parts.optimizer_bytes),
              whole.state.total(), 0.05 * whole.state.total());  // not every gradient is there then
  EXPECT_NEAR(static_cast<double>(whole.peak_bytes), static_cast<double>(whole.plain_bytes + whole.parts.reserve_bytes), 1);
  for (const double share : {0.35, 0.5, 0.7, 1.1}) {
    const auto budget = static_cast<uint64_t>(share * static_cast<double>(whole.plain_bytes));
    const Prediction p = Ask(model, device, Fp32(), budget);
    ASSERT_TRUE(p.fits) << share;
    EXPECT_LE(p.peak_bytes, budget);
    EXPECT_GT(p.peak_bytes, p.smallest_budget_bytes / 2);
    EXPECT_EQ(p.parts.total(), p.peak_bytes);
    EXPECT_GE(p.step_seconds, p.bound_step_seconds * (1 - 1e-9));
    EXPECT_GE(p.loaded_bytes, p.bound_load_bytes);
    EXPECT_LE(p.step_seconds, before * 1.01);
    EXPECT_NEAR(p.tokens_per_second, 512 / p.step_seconds, 1e-6 * p.tokens_per_second);
    before = p.step_seconds;
  }
}

TEST(Predict, SampledMovesLessThanExact) {
  Training training = Fp32();
  const Prediction exact = Ask(Small(), SmallDevice(), training, 120 << 20);
  training.mode = Mode::kSampled;
  training.delta = 0.1;
  const Prediction sampled = Ask(Small(), SmallDevice(), training, 120 << 20);
  ASSERT_TRUE(exact.fits && sampled.fits);
  EXPECT_LT(sampled.loaded_bytes + sampled.unloaded_bytes, exact.loaded_bytes + exact.unloaded_bytes);
  EXPECT_LT(sampled.step_seconds, exact.step_seconds);
  EXPECT_LT(sampled.host_bytes, exact.host_bytes);
  EXPECT_LE(sampled.trained_parameters, Small().parameter_count / 10);
}

TEST(Predict, MicroBatchesComputeTheSameWithFewerActivations) {
  for (const bool checkpointing : {true, false}) {
    Training training = Fp32();
    training.checkpointing = checkpointing;
    training.batch = 6;
    const Workload whole = MakeWorkload(Small(), SmallDevice(), training).value;
    training.micro_batch = 2;
    const Workload parts = MakeWorkload(Small(), SmallDevice(), training).value;
    // Each micro-batch adds its gradients to those there are.
    EXPECT_GT(parts.compute_seconds, whole.compute_seconds);
    EXPECT_LT(parts.compute_seconds, 1.05 * whole.compute_seconds);
    EXPECT_EQ(parts.input.facet_bytes, whole.input.facet_bytes);
    const auto most = [](const Workload& workload) {
      uint64_t bytes = 0;
      for (const policy::TraceEntry& entry : workload.input.trace.entries) bytes = std::max(bytes, entry.other_bytes);
      return bytes;
    };
    EXPECT_LT(most(parts), most(whole));
    // Every block's weights are used once a micro-batch before the next block's.
    std::vector<size_t> creates(parts.facets.size(), 0);
    std::vector<size_t> adds(parts.facets.size(), 0);
    for (const policy::TraceEntry& entry : parts.input.trace.entries) {
      for (const policy::Use& use : entry.uses) {
        if (parts.facets[use.facet].kind != trace::FacetKind::kGradients) continue;
        creates[use.facet] += (use.access & policy::kCreate) != 0;
        adds[use.facet] += (use.access & (policy::kWrite | policy::kCreate)) == policy::kWrite;
      }
    }
    for (size_t f = 0; f < parts.facets.size(); ++f) {
      if (parts.facets[f].kind != trace::FacetKind::kGradients) continue;
      EXPECT_EQ(creates[f], 1u) << parts.facets[f].name;
      const bool in_block = parts.facets[f].name.find("layers.") != std::string::npos;
      EXPECT_GE(adds[f], in_block ? 2u : 0u) << parts.facets[f].name;
    }
  }
  Training training = Fp32();
  training.micro_batch = training.batch = 4;
  EXPECT_EQ(policy::Digest(MakeWorkload(Small(), SmallDevice(), training).value.input.trace),
            policy::Digest(MakeWorkload(Small(), SmallDevice(), Fp32()).value.input.trace));
  training.batch = 100000;
  training.micro_batch = 1;
  EXPECT_THAT(MakeWorkload(Small(), SmallDevice(), training).error, HasSubstr("at most 256 of them"));
}

TEST(Predict, ALatencyCountsForEachCopy) {
  DeviceProfile device = SmallDevice();
  device.latency_seconds = 0.01;
  const Workload workload = MakeWorkload(Small(), device, Fp32()).value;
  double bytes = 0;
  for (const uint64_t facet : workload.input.facet_bytes) bytes += static_cast<double>(facet);
  const auto count = static_cast<double>(workload.input.facet_bytes.size());
  EXPECT_NEAR(bytes / workload.input.link.load, bytes / 4e8 + 0.01 * count, 1e-9);
  EXPECT_LT(workload.input.link.duplex_unload, 3e8);
}

TEST(Predict, SuggestionsAreWhatTheySay) {
  Training training = Fp32();
  training.checkpointing = false;
  training.batch = 8;
  const Prediction p = Ask(Small(), SmallDevice(), training, 300 << 20);
  ASSERT_FALSE(p.fits);
  EXPECT_EQ(p.limited_by, "memory");
  EXPECT_EQ(p.step_seconds, 0);
  EXPECT_THAT(p.reason, HasSubstr("the budget is 300MiB"));
  EXPECT_EQ(p.peak_bytes, p.parts.total());
  std::vector<std::string> changes;
  for (const Suggestion& suggestion : p.suggestions) {
    changes.push_back(suggestion.change);
    EXPECT_GT(suggestion.tokens_per_second, 0) << suggestion.change;
    if (suggestion.change.find("budget") == std::string::npos) {
      EXPECT_LE(suggestion.smallest_budget_bytes, uint64_t{300} << 20) << suggestion.change;
    }
  }
  EXPECT_THAT(changes, ::testing::Contains("checkpointing"));
  // The largest batch that fits, and not one more.
  const auto batch = std::find_if(changes.begin(), changes.end(), [](const std::string& c) { return c.rfind("batch ", 0) == 0; });
  ASSERT_NE(batch, changes.end());
  training.batch = std::stoull(batch->substr(6));
  EXPECT_TRUE(Ask(Small(), SmallDevice(), training, 300 << 20).fits);
  ++training.batch;
  EXPECT_FALSE(Ask(Small(), SmallDevice(), training, 300 << 20).fits);
}

TEST(Predict, TooLittleHostMemoryDoesNotFit) {
  DeviceProfile device = SmallDevice();
  device.host_bytes = 200 << 20;
  const Prediction p = Ask(Small(), device, Fp32());
  EXPECT_FALSE(p.fits);
  EXPECT_EQ(p.limited_by, "host memory");
  std::vector<std::string> changes;
  for (const Suggestion& suggestion : p.suggestions) {
    changes.push_back(suggestion.change);
    if (suggestion.change.rfind("host memory", 0) == 0) continue;
    EXPECT_LE(suggestion.host_bytes, device.host_bytes);
  }
  EXPECT_THAT(changes, ::testing::ElementsAre("host memory 449.31MiB", "mode sampled"));
}

TEST(Predict, RefusesWhatCannotBe) {
  const auto error = [](auto change) {
    Question question{Small(), SmallDevice(), Fp32(), 0};
    change(&question);
    return Predict(question).error;
  };
  EXPECT_THAT(error([](Question* q) { q->training.batch = 0; }), HasSubstr("A batch of 0"));
  EXPECT_THAT(error([](Question* q) { q->training.batch = uint64_t{1} << 62; }), HasSubstr("cannot be planned"));
  EXPECT_THAT(error([](Question* q) { q->training.sequence = 4096; }), HasSubstr("longer than the 1024"));
  EXPECT_THAT(error([](Question* q) { q->budget_bytes = uint64_t{1} << 40; }), HasSubstr("is more than small has"));
  EXPECT_THAT(error([](Question* q) { q->device.flops_per_second = std::numeric_limits<double>::quiet_NaN(); }),
              HasSubstr("flops_per_second"));
  EXPECT_THAT(error([](Question* q) { q->training.optimizer = "magic"; }), HasSubstr("known are adamw"));
  const auto delta = [&](double value) {
    return error([&](Question* q) {
      q->training.mode = Mode::kSampled;
      q->training.delta = value;
    });
  };
  EXPECT_THAT(delta(1e-9), HasSubstr("smallest"));
  EXPECT_NE(delta(std::numeric_limits<double>::quiet_NaN()), "");
  EXPECT_NE(delta(0), "");
  EXPECT_NE(delta(1.5), "");
}

TEST(Predict, SevenBillionParametersOnTwentyFourGigabytes) {
  Training training;
  training.checkpointing = true;
  for (const Mode mode : {Mode::kExact, Mode::kSampled}) {
    training.mode = mode;
    const Prediction p = Ask(Known("llama-7b"), *FindDevice("rtx-3090"), training);
    EXPECT_TRUE(p.fits);
    EXPECT_LT(p.peak_bytes, uint64_t{24} << 30);
    EXPECT_GE(p.step_seconds, p.bound_step_seconds * (1 - 1e-9));
  }
}

}  // namespace
}  // namespace misa::capacity
