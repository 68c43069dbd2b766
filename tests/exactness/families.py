"""Small models of the families people train, made from their configurations: no weights, no network.

A family makes a model and a loss of a step. Sizes are such that a module is some kilobytes and a step some milliseconds.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from tests.python.models import Recurrent

VOCABULARY = 256
TOKENS = 12


@dataclasses.dataclass(frozen=True)
class Family:
    name: str
    kind: str  # text, mixture, state-space, encoder-decoder, vision, speech, recurrent
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator, int], dict[str, torch.Tensor]]
    # The loss of a batch; Hugging Face models give it themselves.
    loss: Callable[[nn.Module, dict[str, torch.Tensor]], torch.Tensor] = lambda model, batch: model(**batch).loss
    generates: bool = False
    needs: tuple[str, ...] = ("transformers",)


def seed_everything(seed: int) -> None:
    torch.manual_seed(seed)
    np.random.seed(seed)  # speech models draw their masks there


def loss_of(family: Family, model: nn.Module, step: int, rows: int = 2) -> torch.Tensor:
    """The loss of a step's batch; the batch depends on nothing but the step."""
    return family.loss(model, batch_of(family, step, rows))


def batch_of(family: Family, step: int, rows: int = 2) -> dict[str, torch.Tensor]:
    return family.batch(torch.Generator().manual_seed(1000 + step), rows)


# --------------------------------------------------------------------------------------------------------- batches


def _tokens(draw: torch.Generator, rows: int) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (rows, TOKENS), generator=draw)


def _causal(draw: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    tokens = _tokens(draw, rows)
    return {"input_ids": tokens, "labels": tokens}


def _masked(draw: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    tokens = _tokens(draw, rows)
    hidden = torch.rand(tokens.shape, generator=draw) < 0.3
    hidden[:, 0] = True
    return {
        "input_ids": tokens.masked_fill(hidden, 3),
        "labels": tokens.masked_fill(~hidden, -100),
        "attention_mask": torch.ones_like(tokens),
    }


def _pairs(draw: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    return {"input_ids": _tokens(draw, rows), "labels": _tokens(draw, rows)[:, :8].contiguous()}


def _images(size: int, draw: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(rows, 3, size, size, generator=draw),
        "labels": torch.randint(10, (rows,), generator=draw),
    }


def _captions(draw: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(rows, 3, 32, 32, generator=draw),
        "input_ids": _tokens(draw, rows),
        "attention_mask": torch.ones(rows, TOKENS, dtype=torch.long),
    }


def _spectrograms(draw: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(rows, 16, 40, generator=draw), "labels": _tokens(draw, rows)[:, :8].contiguous()}


def _waves(draw: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    return {"input_values": torch.randn(rows, 4000, generator=draw), "labels": _tokens(draw, rows)[:, :4] % 30 + 1}


# -------------------------------------------------------------------------------------------------- Hugging Face


def _hugging_face(auto: str, kind: str, options: dict[str, Any]) -> nn.Module:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **options)
    return getattr(transformers, auto).from_config(config)


_DECODER = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}
_ENCODER = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0,
}
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SEQUENCE = {**_IDS, "vocab_size": VOCABULARY, "d_model": 64, "encoder_layers": 2, "decoder_layers": 2,
             "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
             "decoder_start_token_id": 1}
_VISION = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
           "image_size": 32, "patch_size": 8}


def _without(options: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key not in names}


# (kind, AutoModel class, batches, generates, {name: options})
_FAMILIES: list[tuple[str, str, Any, bool, dict[str, dict[str, Any]]]] = [
    ("text", "AutoModelForCausalLM", _causal, True, {
        "gpt2": {**_IDS, "vocab_size": VOCABULARY, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 64},
        "llama": _DECODER,
        "mistral": {**_DECODER, "sliding_window": 8},
        "qwen2": _DECODER,
        "qwen3": {**_DECODER, "head_dim": 16},
        "gemma2": {**_DECODER, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
        "phi": {**_without(_DECODER, "num_key_value_heads"), "partial_rotary_factor": 0.5},
        "opt": {**_IDS, "vocab_size": VOCABULARY, "hidden_size": 64, "ffn_dim": 128, "num_hidden_layers": 3,
                "num_attention_heads": 4, "word_embed_proj_dim": 64, "max_position_embeddings": 64},
        "gpt_neox": _without(_DECODER, "num_key_value_heads"),
        "falcon": {**_IDS, "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4},
        "bloom": {**_IDS, "vocab_size": VOCABULARY, "hidden_size": 64, "n_layer": 3, "n_head": 4},
    }),
    ("mixture", "AutoModelForCausalLM", _causal, True, {
        "mixtral": {**_DECODER, "num_local_experts": 4, "num_experts_per_tok": 2},
        "qwen3_moe": {**_DECODER, "head_dim": 16, "moe_intermediate_size": 64, "num_experts": 4,
                      "num_experts_per_tok": 2, "decoder_sparse_step": 1},
        "gpt_oss": {**_DECODER, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
    }),
    ("state-space", "AutoModelForCausalLM", _causal, True, {
        "mamba": {**_IDS, "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 8},
        "mamba2": {**_IDS, "vocab_size": VOCABULARY, "hidden_size": 64, "num_hidden_layers": 3, "state_size": 16,
                   "num_heads": 8, "head_dim": 16, "n_groups": 1, "chunk_size": 8},
    }),
    ("text", "AutoModelForMaskedLM", _masked, False, {
        "bert": _ENCODER,
        "roberta": {**_ENCODER, "bos_token_id": 1, "eos_token_id": 2},
        "albert": {**_ENCODER, "embedding_size": 32},
        "deberta-v2": {**_ENCODER, "relative_attention": True, "position_buckets": 8, "pos_att_type": ["p2c", "c2p"]},
        "electra": {**_ENCODER, "embedding_size": 64},
        "distilbert": {"vocab_size": VOCABULARY, "dim": 64, "hidden_dim": 128, "n_layers": 3, "n_heads": 4,
                       "max_position_embeddings": 64, "pad_token_id": 0},
    }),
    ("encoder-decoder", "AutoModelForSeq2SeqLM", _pairs, True, {
        "t5": {**_IDS, "vocab_size": VOCABULARY, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
               "decoder_start_token_id": 0},
        "bart": {**_SEQUENCE, "max_position_embeddings": 64},
        "marian": {**_SEQUENCE, "max_position_embeddings": 64},
    }),
    ("vision", "AutoModelForImageClassification", functools.partial(_images, 32), False, {
        "vit": {**_VISION, "num_labels": 10},
        "convnext": {"hidden_sizes": [32, 48, 64, 96], "depths": [1, 1, 2, 1], "num_labels": 10},
        "swin": {"image_size": 32, "patch_size": 4, "embed_dim": 32, "depths": [1, 2], "num_heads": [2, 4],
                 "window_size": 4, "num_labels": 10},
    }),
    ("speech", "AutoModelForSpeechSeq2Seq", _spectrograms, False, {
        "whisper": {**_SEQUENCE, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32,
                    "suppress_tokens": None, "begin_suppress_tokens": None},
    }),
    ("speech", "AutoModelForCTC", _waves, False, {
        "wav2vec2": {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
                     "num_attention_heads": 4, "conv_dim": [32, 32, 32], "conv_kernel": [10, 8, 4],
                     "conv_stride": [5, 4, 4], "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
                     "pad_token_id": 0, "mask_time_prob": 0.1, "mask_time_length": 4},
        "hubert": {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
                   "num_attention_heads": 4, "conv_dim": [32, 32, 32], "conv_kernel": [10, 8, 4],
                   "conv_stride": [5, 4, 4], "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
                   "pad_token_id": 0, "mask_time_prob": 0.1, "mask_time_length": 4},
    }),
]


def _clip() -> nn.Module:
    import transformers

    text = {**_ENCODER, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=32)
    return transformers.CLIPModel(config)


# ------------------------------------------------------------------------------------------- torchvision and torch


def _resnet() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)


def _mobilenet() -> nn.Module:
    from torchvision.models import mobilenet_v3_small

    return mobilenet_v3_small(num_classes=10)


def _vision_transformer() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=64, mlp_dim=128,
                             num_classes=10, dropout=0.1)


def _classes(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["pixel_values"]).float(), batch["labels"])


def _sequences(draw: torch.Generator, rows: int) -> dict[str, torch.Tensor]:
    return {"tokens": torch.randint(400, (rows, 6), generator=draw), "labels": torch.randint(16, (rows,), generator=draw)}


def _sequence_classes(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return F.cross_entropy(model(batch["tokens"]).float(), batch["labels"])


def _all() -> dict[str, Family]:
    families = [
        Family(name, kind, functools.partial(_hugging_face, auto, name, options), batch, generates=generates)
        for kind, auto, batch, generates, members in _FAMILIES
        for name, options in members.items()
    ]
    families.append(Family("clip", "vision", _clip, _captions,
                           loss=lambda model, batch: model(**batch, return_loss=True).loss))
    torchvision = ("torchvision",)
    for name, make, size in (("torchvision resnet", _resnet, 32), ("torchvision mobilenet_v3", _mobilenet, 32),
                             ("torchvision vit", _vision_transformer, 32)):
        families.append(Family(name, "vision", make, functools.partial(_images, size), loss=_classes, needs=torchvision))
    families.append(Family("lstm", "recurrent", Recurrent, _sequences, loss=_sequence_classes, needs=()))
    return {family.name: family for family in families}


FAMILIES = _all()
