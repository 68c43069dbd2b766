"""Steps that take turns: each follows the plan of its own trace, and the result is that of plain training."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.python.beside import assert_identical

WIDTH = 256


class TwoTasks(nn.Module):
    """One trunk and a head for each task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.heads = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(2))

    def forward(self, x: torch.Tensor, task: int) -> torch.Tensor:
        for layer in [*self.trunk, *self.heads[task]]:
            x = torch.tanh(layer(x))
        return x


def loop_of(tasks: list[int]):
    def loop(manage: Any):
        torch.manual_seed(7)
        model = TwoTasks()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        departures = []
        with manage(model, optimizer) as run:
            for step, task in enumerate(tasks):
                draw = torch.Generator().manual_seed(1000 + step)
                inputs = torch.randn(32, WIDTH, generator=draw)
                optimizer.zero_grad()
                loss = F.mse_loss(model(inputs, task), inputs.roll(task + 1, dims=1))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                if run is not None:
                    departures.append(run.report()["departures"])
        loop.departures = departures
        return model, optimizer, losses

    return loop


def test_tasks_that_alternate_depart_from_no_plan(misad):
    loop = loop_of([0, 1] * 12)
    result = assert_identical(loop, misad, "tight", share=0.5)
    assert result.report["plan_version"] > 0, misad.events()
    # Once the turns are known no step is taken for another one: what comes is what was expected.
    assert loop.departures[-1] == loop.departures[11], loop.departures
    kinds = [json.loads(line)["kind"] for line in misad.events().splitlines()]
    assert "plan_refused" not in kinds


@pytest.mark.parametrize("seed", [1, 2])
def test_tasks_in_no_order_end_in_the_bits_of_plain(misad, seed):
    draw = torch.Generator().manual_seed(seed)
    tasks = torch.randint(2, (16,), generator=draw).tolist()
    assert_identical(loop_of(tasks), misad, "tight", share=0.5)
