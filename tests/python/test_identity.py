"""Managed training ends in the very bits of plain training: models, optimizers, step modes."""

from __future__ import annotations

import functools
from typing import Any, Callable

import pytest
import torch

from tests.python.beside import PRESSURES, assert_identical
from tests.python.models import MODELS, loss_of

STEP_MODES = ("deferred", "in_backward", "eager")
STEPS = 3


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=3e-3, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "adamw-amsgrad": lambda p: torch.optim.AdamW(p, lr=3e-3, amsgrad=True),
    "adam-l2": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.1),
    "adam-fused": lambda p: torch.optim.Adam(p, lr=3e-3, weight_decay=0.1, fused=True),
    "adam-tensor-lr": lambda p: torch.optim.Adam(p, lr=torch.tensor(3e-3)),
    "sgd-momentum": lambda p: torch.optim.SGD(p, lr=3e-2, momentum=0.9, nesterov=True),
    "sgd-foreach": lambda p: torch.optim.SGD(p, lr=3e-2, momentum=0.9, foreach=True),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=3e-2, momentum=0.9, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=3e-3, weight_decay=0.1),
    "nadam-foreach": lambda p: torch.optim.NAdam(p, lr=3e-3, foreach=True),
    "radam": lambda p: torch.optim.RAdam(p, lr=3e-3),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "adamax": lambda p: torch.optim.Adamax(p, lr=3e-3),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
}


@functools.cache
def loop_of(model_name: str, optimizer_name: str) -> Callable[..., Any]:
    def loop(manage: Callable[..., Any]) -> tuple[torch.nn.Module, Any, list[float]]:
        torch.manual_seed(7)
        model = MODELS[model_name]()
        optimizer = OPTIMIZERS[optimizer_name](model.parameters())
        losses = []
        with manage(model, optimizer):
            # RAdam is another optimizer from its sixth step on.
            for step in range(7 if optimizer_name == "radam" else STEPS):
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
        return model, optimizer, losses

    return loop


@pytest.mark.parametrize("pressure", PRESSURES)
@pytest.mark.parametrize("step", STEP_MODES)
@pytest.mark.parametrize("model", MODELS)
def test_models(shared_misad, model, step, pressure):
    # One operator needs all of a small model's LSTM or table at once.
    share = {"convolution": 0.8, "lstm": 0.7, "embedding": 0.7}.get(model, 0.5)
    assert_identical(loop_of(model, "adamw"), shared_misad, pressure, step=step, share=share)


# Every optimizer is taken apart in the same way: all ways of stepping under both pressures for some of them.
THOROUGH = ("adamw", "adamw-foreach", "adamw-fused", "adam-l2", "sgd-momentum", "nadam", "adafactor")


@pytest.mark.parametrize(("optimizer", "step", "pressure"), [
    (optimizer, step, pressure)
    for optimizer in OPTIMIZERS for step in STEP_MODES for pressure in PRESSURES
    if optimizer in THOROUGH or step == "deferred" or pressure == "stress"
])
def test_optimizers(shared_misad, optimizer, step, pressure):
    assert_identical(loop_of("mlp", optimizer), shared_misad, pressure, step=step, share=0.6)
