#include "client/train/model.h"

#include <ATen/ATen.h>
#include <torch/nn/init.h>

namespace misa::train {

namespace nn = torch::nn;

AttentionImpl::AttentionImpl(int64_t width, int64_t heads)
    : heads_(heads),
      query_(register_module("query", nn::Linear(width, width))),
      key_(register_module("key", nn::Linear(width, width))),
      value_(register_module("value", nn::Linear(width, width))),
      output_(register_module("output", nn::Linear(width, width))) {}

torch::Tensor AttentionImpl::forward(const torch::Tensor& x) {
  const auto split = [&](const torch::Tensor& t) {
    return t.view({x.size(0), x.size(1), heads_, x.size(2) / heads_}).transpose(1, 2);
  };
  const torch::Tensor mixed =
      at::scaled_dot_product_attention(split(query_(x)), split(key_(x)), split(value_(x)), /*attn_mask=*/{},
                                       /*dropout_p=*/0.0, /*is_causal=*/true);
  return output_(mixed.transpose(1, 2).reshape_as(x));
}

FeedForwardImpl::FeedForwardImpl(int64_t width)
    : up_(register_module("up", nn::Linear(width, 4 * width))),
      down_(register_module("down", nn::Linear(4 * width, width))) {}

torch::Tensor FeedForwardImpl::forward(const torch::Tensor& x) { return down_(at::gelu(up_(x))); }

BlockImpl::BlockImpl(const ModelOptions& options)
    : attention_norm_(register_module("attention_norm", nn::LayerNorm(nn::LayerNormOptions({options.width})))),
      ffn_norm_(register_module("ffn_norm", nn::LayerNorm(nn::LayerNormOptions({options.width})))),
      attention_(register_module("attention", Attention(options.width, options.heads))),
      ffn_(register_module("ffn", FeedForward(options.width))) {}

torch::Tensor BlockImpl::forward(const torch::Tensor& x) {
  const torch::Tensor attended = x + attention_(attention_norm_(x));
  return attended + ffn_(ffn_norm_(attended));
}

LanguageModelImpl::LanguageModelImpl(const ModelOptions& options)
    : token_embedding_(register_module("token_embedding", nn::Embedding(kVocabulary, options.width))),
      position_embedding_(register_module("position_embedding", nn::Embedding(options.sequence, options.width))),
      blocks_(register_module("blocks", nn::ModuleList())),
      norm_(register_module("norm", nn::LayerNorm(nn::LayerNormOptions({options.width})))),
      head_(register_module("head", nn::Linear(nn::LinearOptions(options.width, kVocabulary).bias(false)))) {
  for (int64_t i = 0; i < options.layers; ++i) blocks_->push_back(Block(options));
  // Small embeddings and head: the first loss is then close to that of a uniform guess.
  nn::init::normal_(token_embedding_->weight, 0.0, 0.02);
  nn::init::normal_(position_embedding_->weight, 0.0, 0.02);
  nn::init::normal_(head_->weight, 0.0, 0.02);
}

torch::Tensor LanguageModelImpl::forward(const torch::Tensor& tokens) {
  const torch::Tensor positions = at::arange(tokens.size(1), tokens.options());
  torch::Tensor x = token_embedding_(tokens) + position_embedding_(positions);
  for (const std::shared_ptr<nn::Module>& block : *blocks_) x = block->as<Block>()->forward(x);
  return head_(norm_(x));
}

}  // namespace misa::train
