#include "client/torch/manage.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <functional>
#include <memory>
#include <stdexcept>

namespace misa {
namespace {

namespace nn = torch::nn;
namespace optim = torch::optim;
using ::testing::HasSubstr;

std::string SentenceOf(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

TEST(Budget, TakesNumbersAndText) {
  EXPECT_EQ(Budget("24MiB").bytes(), 24u << 20);
  EXPECT_EQ(Budget(std::string("1kB")).bytes(), 1000u);
  EXPECT_EQ(Budget(4096).bytes(), 4096u);
  EXPECT_THAT(SentenceOf([] { Budget budget("24 apples"); }), HasSubstr("apples"));
  EXPECT_THAT(SentenceOf([] { Budget budget(0); }), HasSubstr("above 0"));
  EXPECT_THAT(SentenceOf([] { Budget budget(-1); }), HasSubstr("above 0"));
}

// ------------------------------------------------------------------------------------------------------------- digests

class SmallImpl : public nn::Module {
 public:
  SmallImpl() : layer(register_module("layer", nn::Linear(3, 2))) {
    register_buffer("scale", at::full({1}, 0.5, at::kDouble));
    const at::NoGradGuard no_grad;
    layer->weight.copy_(at::arange(6, at::kFloat).view({2, 3}));
    layer->bias.copy_(at::arange(2, at::kFloat));
  }
  nn::Linear layer;
};

// The expected digests are what misa.state_sha256 of the Python package gives for the same names and numbers.
TEST(Budget, CanBeTheDaemonsChoice) {
  EXPECT_TRUE(Budget("auto").elastic());
  EXPECT_EQ(Budget("auto").bytes(), 0u);
  const Budget range = Budget::Between("2MiB", "3MiB");
  EXPECT_TRUE(range.elastic());
  EXPECT_EQ(range.least_bytes(), 2u << 20);
  EXPECT_EQ(range.bytes(), 3u << 20);
  EXPECT_FALSE(Budget("3MiB").elastic());
  EXPECT_THAT(SentenceOf([] { Budget::Between("3MiB", "2MiB"); }), HasSubstr("no range"));
  EXPECT_THAT(SentenceOf([] { Budget::Between("auto", "2MiB"); }), HasSubstr("no range"));
}

TEST(StateSha256, IsThatOfThePythonPackage) {
  SmallImpl module;
  optim::AdamW optimizer(module.parameters());
  EXPECT_EQ(StateSha256(module, optimizer), "4b934cd8d52faf94a0e79e7409378f8f596ab4caf39d794f434035ec0c69919c");
  for (const at::Tensor& parameter : module.parameters()) {
    auto state = std::make_unique<optim::AdamWParamState>();
    state->step(3);
    state->exp_avg(at::full_like(parameter, 0.25));
    state->exp_avg_sq(at::full_like(parameter, 2.0));
    optimizer.state()[parameter.unsafeGetTensorImpl()] = std::move(state);
  }
  EXPECT_EQ(StateSha256(module, optimizer), "563befb39073b6fbbd3e3d561744291ef761ba5c8de2bcd6d1acc402bb1fb4ea");
}

// ------------------------------------------------------------------------------------------------------------ refusals

TEST(Manage, RefusesWithASentence) {
  SmallImpl module;
  optim::AdamW adamw(module.parameters());
  EXPECT_THAT(SentenceOf([&] { (void)Manage(module, adamw, {}); }), HasSubstr("needs a budget"));
  ManageOptions options;
  options.budget = "64MiB";
  optim::LBFGS lbfgs(module.parameters());
  EXPECT_THAT(SentenceOf([&] { (void)Manage(module, lbfgs, options); }), HasSubstr("cannot be managed"));
  optim::AdamW foreign(std::vector<at::Tensor>{at::ones({5, 7}).requires_grad_()});
  EXPECT_THAT(SentenceOf([&] { (void)Manage(module, foreign, options); }), HasSubstr("[5, 7]"));
  options.mode = Mode::kSampled;
  EXPECT_THAT(SentenceOf([&] { (void)Manage(module, adamw, options); }), HasSubstr("no matrices inside numbered blocks"));
}

// ------------------------------------------------------------------------------------------------------------ training

constexpr int64_t kWidth = 192;
constexpr int kLayers = 8;
constexpr int kSteps = 6;

class StackImpl : public nn::Module {
 public:
  StackImpl() : blocks(register_module("blocks", nn::ModuleList())) {
    at::manual_seed(7);
    for (int i = 0; i < kLayers; ++i) blocks->push_back(nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(at::Tensor x) {
    for (const std::shared_ptr<nn::Module>& block : *blocks) x = at::tanh(block->as<nn::Linear>()->forward(x));
    return x;
  }
  nn::ModuleList blocks;
};

using MakeOptimizer = std::function<std::unique_ptr<optim::Optimizer>(std::vector<at::Tensor>)>;

// The digest after some steps in which the learning rate changes; plain without options.
std::string Trained(const MakeOptimizer& make, const ManageOptions* options, RunReport* report = nullptr) {
  InstallMeter();
  StackImpl module;
  const std::unique_ptr<optim::Optimizer> optimizer = make(module.parameters());
  std::optional<Managed> run;
  if (options != nullptr) run.emplace(Manage(module, *optimizer, *options));
  at::manual_seed(11);
  for (int step = 0; step < kSteps; ++step) {
    for (auto& group : optimizer->param_groups()) group.options().set_lr(0.01 / (1 + step));
    optimizer->zero_grad();
    const at::Tensor x = at::randn({4, kWidth});
    const at::Tensor loss = (module.forward(x) - x).square().mean();
    loss.backward();
    if (run) {
      run->ReportLoss(loss.item<double>(), 4);
      run->Step();
    } else {
      optimizer->step();
    }
  }
  if (run) run->Flush();
  const std::string digest = StateSha256(module, *optimizer);
  if (run) {
    run->Close(AtEnd::kGiveBack);
    if (report != nullptr) *report = run->Report();
    // Its own memory again, and the same bits in it.
    EXPECT_EQ(StateSha256(module, *optimizer), digest);
  }
  return digest;
}

ManageOptions Tight() {
  ManageOptions options;
  // The weights alone are 1.1 MiB, all state with two moments 4.5 MiB.
  options.budget = "1500KiB";
  options.chunk_bytes = 64 << 10;
  options.daemon = DaemonChoice::kPrivate;
  options.daemon_binary = MISA_DAEMON_BINARY;
  return options;
}

struct Case {
  const char* name;
  MakeOptimizer make;
  StepTime step;
};

class EveryOptimizer : public ::testing::TestWithParam<Case> {};

TEST_P(EveryOptimizer, TrainsToTheSameBitsAsPlain) {
  ManageOptions options = Tight();
  options.step = GetParam().step;
  options.pins = {"blocks.0"};
  RunReport report;
  EXPECT_EQ(Trained(GetParam().make, &options, &report), Trained(GetParam().make, nullptr));
  EXPECT_LE(report.device_peak_bytes, options.budget.bytes());
  EXPECT_EQ(report.steps, static_cast<uint64_t>(kSteps));
  EXPECT_GT(report.unloads, 0u);
  EXPECT_THAT(report.batch_hint, HasSubstr("rows"));
  EXPECT_THAT(report.notices, ::testing::IsEmpty());
}

template <typename Optimizer, typename Options>
MakeOptimizer With(Options options) {
  return [options](std::vector<at::Tensor> parameters) {
    return std::make_unique<Optimizer>(std::move(parameters), options);
  };
}

INSTANTIATE_TEST_SUITE_P(
    , EveryOptimizer,
    ::testing::Values(
        Case{"AdamWDeferred", With<optim::AdamW>(optim::AdamWOptions()), StepTime::kDeferred},
        Case{"AdamWInBackward", With<optim::AdamW>(optim::AdamWOptions()), StepTime::kInBackward},
        Case{"AdamWEager", With<optim::AdamW>(optim::AdamWOptions()), StepTime::kEager},
        Case{"AdamAmsgrad", With<optim::Adam>(optim::AdamOptions().amsgrad(true)), StepTime::kDeferred},
        Case{"SgdMomentum", With<optim::SGD>(optim::SGDOptions(0.01).momentum(0.9)), StepTime::kDeferred},
        Case{"RmspropCentered", With<optim::RMSprop>(optim::RMSpropOptions().momentum(0.5).centered(true)),
             StepTime::kDeferred},
        Case{"Adagrad", With<optim::Adagrad>(optim::AdagradOptions()), StepTime::kDeferred}),
    [](const auto& info) { return info.param.name; });

// The last step of a round uses the options of its own Step(), though a deferred one runs after the rate has changed.
TEST(Sampled, DeferredAndEagerGiveTheSameBits) {
  const MakeOptimizer adamw = With<optim::AdamW>(optim::AdamWOptions());
  ManageOptions options = Tight();
  options.mode = Mode::kSampled;
  options.sampling.delta = 0.4;
  options.sampling.inner_steps = 2;
  options.sampling.seed = 5;
  const std::string deferred = Trained(adamw, &options);
  options.step = StepTime::kEager;
  EXPECT_EQ(Trained(adamw, &options), deferred);
  EXPECT_NE(Trained(adamw, nullptr), deferred);
}

}  // namespace
}  // namespace misa
