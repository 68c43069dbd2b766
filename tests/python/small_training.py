"""A small managed training, piece by piece, for tests that do something between its steps."""

from __future__ import annotations

from typing import Any

import misa
import torch
from torch import nn

from tests.python.models import Mlp, loss_of
from tests.python.processes import Misad


def mlp(**options: Any) -> tuple[Mlp, torch.optim.AdamW]:
    torch.manual_seed(7)
    model = Mlp(**options)
    return model, torch.optim.AdamW(model.parameters(), lr=3e-3)


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def manage(misad: Misad, model: Any, optimizer: Any, **options: Any) -> misa.Run:
    return misa.manage(model, optimizer, **{"runtime_dir": str(misad.runtime_dir), "daemon": "required",
                                            "budget": "64MiB", **options})
