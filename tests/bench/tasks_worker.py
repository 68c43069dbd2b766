"""One case of the comparison in tasks.py, as a process of its own: `python -m tests.bench.tasks_worker JSON`."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

import misa
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from demo.model import LanguageModel, ModelConfig

CLASSES = 64


class Shared(nn.Module):
    """One trunk, and a head for each task."""

    def __init__(self, config: ModelConfig, tasks: list[str]) -> None:
        super().__init__()
        self.trunk = LanguageModel(config)
        self.heads = nn.ModuleDict({task: nn.Linear(config.width, CLASSES) for task in tasks})

    def forward(self, tokens: torch.Tensor, task: str) -> torch.Tensor:
        trunk = self.trunk
        x = trunk.token_embedding(tokens) + trunk.position_embedding(torch.arange(tokens.shape[1]))
        for block in trunk.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return self.heads[task](trunk.norm(x).mean(1))


def batch(settings: dict[str, Any], task: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1000 * step + sum(map(ord, task)))
    tokens = torch.randint(settings["model"]["vocabulary"], (settings["rows"], settings["model"]["context"]), generator=draw)
    return tokens, torch.randint(CLASSES, (settings["rows"],), generator=draw)


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    weights: dict[str, float] = settings["tasks"]
    # What the math library allocates for itself belongs to no case.
    torch.randn(256, 256) @ torch.randn(256, 1024)
    misa.memory.reset_peak()
    before = misa.memory.live_bytes()
    torch.manual_seed(0)
    model = Shared(ModelConfig(**settings["model"]), list(weights))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    sampled = settings["sampled"]
    line: Any = contextlib.nullcontext()
    if settings["budget"]:
        options = {"mode": "sampled", "sampled": misa.Sampled(**sampled)} if sampled else {}
        line = misa.manage(model, optimizer, budget=settings["budget"] + before, daemon="private", tasks=weights, **options)
    elif sampled:
        line = misa.SampledReference(model, optimizer, tasks=weights, **sampled)
    seconds: list[float] = []
    with line as run:
        for step in range(settings["rounds"]):
            begin = time.perf_counter()
            for task in weights:
                with misa.task(task):
                    inputs, targets = batch(settings, task, step)
                    optimizer.zero_grad()
                    functional.cross_entropy(model(inputs, task), targets).backward()
                    optimizer.step()
            seconds.append(time.perf_counter() - begin)
        peak = misa.memory.peak_bytes()
        report = run.report() if settings["budget"] else None
        result = {
            "round_seconds": seconds,
            "device_peak_bytes": peak - before,
            "parameter_count": sum(p.numel() for p in model.parameters()),
            "tasks": report["tasks"] if report else [],
            "demand_loads_per_step": report["demand_loads"] / report["steps"] if report else 0,
            "prefetch_loads_per_step": report["prefetch_loads"] / report["steps"] if report else 0,
            "state_sha256": misa.state_sha256(model, optimizer),
        }
    print(json.dumps(result))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
