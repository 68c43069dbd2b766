"""One run of the demo in a process of its own: `python -m demo.run_one SETTINGS.json`.

Progress goes to standard output as JSON lines, the result to the file that the settings name. The training loop is the
same for every run and knows nothing of misa; only the line around it differs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Iterator

# Importing misa puts the meter around every allocation that follows.
import misa
import numpy as np
import torch

from demo.model import LanguageModel, ModelConfig

# Steps left out of the median: the first ones allocate, and the managed ones record their trace.
_WARM_UP_STEPS = 3
_TIMELINE_POINTS = 4000
_BASELINE_STEPS = 4


@dataclass(frozen=True)
class Settings:
    name: str
    result: str
    tokens: str
    steps: int
    threads: int
    seed: int
    batch: int
    learning_rate: float
    budget_bytes: int | None
    model: dict[str, Any]
    sampling: dict[str, Any] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(dataclasses.asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Settings:
        return Settings(**json.loads(path.read_text(encoding="utf-8")))


def say(**message: Any) -> None:
    print(json.dumps(message), flush=True)


def make_model(settings: Settings) -> tuple[LanguageModel, torch.optim.Optimizer]:
    torch.manual_seed(settings.seed)
    model = LanguageModel(ModelConfig(**settings.model))
    return model, torch.optim.AdamW(model.parameters(), lr=settings.learning_rate)


def batches(settings: Settings) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The same batches for every run: windows of the text at random places."""
    tokens = np.load(settings.tokens, mmap_mode="r")
    length = settings.model["context"]
    places = np.random.default_rng(settings.seed).integers(len(tokens) - length - 1, size=(settings.steps, settings.batch))
    for row in places:
        windows = np.stack([tokens[place : place + length + 1] for place in row]).astype(np.int64)
        windows = torch.from_numpy(windows)
        yield windows[:, :-1], windows[:, 1:]


def train(settings: Settings, model: LanguageModel, optimizer: torch.optim.Optimizer) -> tuple[list[float], list[float]]:
    """The training loop. Returns every step's loss and seconds."""
    losses: list[float] = []
    seconds: list[float] = []
    for inputs, targets in batches(settings):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = model.loss(inputs, targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - start)
        say(step=len(losses), loss=losses[-1], seconds=seconds[-1])
    return losses, seconds


def thin(timeline: list[list[float]]) -> list[list[float]]:
    """At most _TIMELINE_POINTS samples; of each group the highest, so that no peak is lost."""
    group = -(-len(timeline) // _TIMELINE_POINTS)
    if group <= 1:
        return timeline
    return [max(timeline[i : i + group], key=lambda sample: sample[1]) for i in range(0, len(timeline), group)]


def unmanaged_figures(model: LanguageModel, optimizer: torch.optim.Optimizer, timeline: Any) -> dict[str, Any]:
    """What run.report() gives for a managed run, for one that keeps everything in memory."""
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {
        "budget_bytes": None,
        "stall_seconds_median": 0.0,
        "h2d_bytes_per_step": 0,
        "d2h_bytes_per_step": 0,
        "bound_h2d_bytes_per_step": 0,
        "bound_d2h_bytes_per_step": 0,
        "device_peak_bytes": misa.memory.peak_bytes(),
        "device_stddev_bytes": timeline.stddev_bytes,
        "demand_loads": 0,
        "prefetch_loads": 0,
        "weights_bytes": sum(p.nbytes for p in model.parameters()),
        "gradients_bytes": sum(g.nbytes for g in gradients),
        "optimizer_bytes": sum(t.nbytes for t in state),
        "timeline": timeline.samples,
    }


def write_result(settings: Settings, mode: str, model: LanguageModel, optimizer: torch.optim.Optimizer,
                 losses: list[float], seconds: list[float], figures: dict[str, Any]) -> None:
    step_seconds = statistics.median(seconds[_WARM_UP_STEPS:] or seconds)
    tokens_per_step = settings.batch * settings.model["context"]
    result = {
        **figures,
        "name": settings.name,
        "mode": mode,
        "steps": settings.steps,
        # Measured by the loop itself in every run, so that one ruler measures all of them.
        "step_seconds_median": step_seconds,
        "tokens_per_second": tokens_per_step / step_seconds,
        "training_seconds": sum(seconds),
        "losses": losses,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "parameter_count": sum(p.numel() for p in model.parameters()),
        "timeline": thin(figures["timeline"]),
        "state_sha256": misa.state_sha256(model, optimizer),
    }
    result.setdefault("bound_step_seconds", step_seconds)
    Path(settings.result).write_text(json.dumps(result), encoding="utf-8")


def run_unmanaged(settings: Settings) -> None:
    misa.memory.reset_peak()
    with misa.memory.Timeline() as timeline:
        model, optimizer = make_model(settings)
        if settings.name == "sampled_reference":
            mode, line = "sampled", misa.SampledReference(model, optimizer, **settings.sampling)
        else:
            mode, line = "plain", contextlib.nullcontext()
        with line:
            losses, seconds = train(settings, model, optimizer)
            figures = unmanaged_figures(model, optimizer, timeline)
            write_result(settings, mode, model, optimizer, losses, seconds, figures)


def manage(settings: Settings, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """The one line that a managed run adds."""
    options: dict[str, Any] = {}
    if settings.name == "sampled":
        options["sampled"] = misa.Sampled(**settings.sampling)
    mode = "sampled" if settings.name == "sampled" else "exact"
    return misa.manage(
        model, optimizer, budget=settings.budget_bytes, mode=mode, daemon="private", job=f"demo-{settings.name}", **options
    )


def run_managed(settings: Settings) -> None:
    model, optimizer = make_model(settings)
    with manage(settings, model, optimizer) as run:
        losses, seconds = train(settings, model, optimizer)
        figures = run.report()
        # Written before the block ends: what the model does afterwards is not part of the run.
        write_result(settings, figures["mode"], model, optimizer, losses, seconds, figures)
        if settings.name == "baseline":
            say(ready=True)
            sys.stdin.readline()


def run_baseline(settings: Settings) -> None:
    """The same program around a model of one small block: what trainer and daemon use without the real model."""
    width = settings.model["width"]
    rows = settings.batch * settings.model["context"]
    # The math library keeps buffers from its first multiplication of this size on.
    torch.randn(rows, width) @ torch.randn(width, 4 * width)
    small = {**settings.model, "width": 64, "depth": 1, "heads": 1}
    run_managed(dataclasses.replace(settings, steps=_BASELINE_STEPS, model=small))


def main(arguments: list[str]) -> None:
    settings = Settings.read(Path(arguments[0]))
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory would find no errors here and cost time in every run.
    torch.utils.deterministic.fill_uninitialized_memory = False
    if settings.name == "baseline":
        run_baseline(settings)
    elif settings.name in ("exact", "sampled"):
        run_managed(settings)
    else:
        run_unmanaged(settings)


if __name__ == "__main__":
    main(sys.argv[1:])
