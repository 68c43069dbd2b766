// A causal transformer over bytes: pre-norm blocks, each matrix a module of its own.
#pragma once

#include <torch/nn/cloneable.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

namespace misa::train {

struct ModelOptions {
  int64_t sequence = 128;
  int64_t width = 256;
  int64_t layers = 4;
  int64_t heads = 4;
};

constexpr int64_t kVocabulary = 256;

class AttentionImpl : public torch::nn::Module {
 public:
  AttentionImpl(int64_t width, int64_t heads);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  const int64_t heads_;
  torch::nn::Linear query_, key_, value_, output_;
};
TORCH_MODULE(Attention);

class FeedForwardImpl : public torch::nn::Module {
 public:
  explicit FeedForwardImpl(int64_t width);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::nn::Linear up_, down_;
};
TORCH_MODULE(FeedForward);

class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(const ModelOptions& options);
  torch::Tensor forward(const torch::Tensor& x);

 private:
  torch::nn::LayerNorm attention_norm_, ffn_norm_;
  Attention attention_;
  FeedForward ffn_;
};
TORCH_MODULE(Block);

class LanguageModelImpl : public torch::nn::Module {
 public:
  explicit LanguageModelImpl(const ModelOptions& options);
  // tokens [batch, sequence] to logits [batch, sequence, kVocabulary].
  torch::Tensor forward(const torch::Tensor& tokens);

 private:
  torch::nn::Embedding token_embedding_, position_embedding_;
  torch::nn::ModuleList blocks_;
  torch::nn::LayerNorm norm_;
  torch::nn::Linear head_;
};
TORCH_MODULE(LanguageModel);

}  // namespace misa::train
