"""The optimizers of the comparison, torch's own and two from outside."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch.optim import Optimizer


def _lion(parameters: Any) -> Optimizer:
    from lion_pytorch import Lion

    return Lion(parameters, lr=1e-3, weight_decay=0.1)


def _transformers_adafactor(parameters: Any) -> Optimizer:
    from transformers.optimization import Adafactor

    return Adafactor(parameters, lr=1e-3, relative_step=False, scale_parameter=True, warmup_init=False)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, foreach=False),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, foreach=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1, fused=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, weight_decay=0.01),
    "lion (lion-pytorch)": _lion,
    "adafactor (transformers)": _transformers_adafactor,
}

# What a trainer is told before its first step that it cannot have.
REFUSED: dict[str, Callable[[Any], Optimizer]] = {
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3),
}
