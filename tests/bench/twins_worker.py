"""One twin and mode of the twins benchmark in a process of its own: `python -m tests.bench.twins_worker SETTINGS.json`.

Trains the same model on the same tokens once plain and then at each budget, managed and on demand, and says a JSON line
after each run.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator

import misa
import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from demo.model import LanguageModel, ModelConfig


@dataclass(frozen=True)
class Settings:
    twin: str
    mode: str
    compute_flops: float
    tokens: str
    tokens_per_step: int
    micro_batch: int  # sequences that go through a group of blocks at once
    group: int        # blocks whose activations are computed again together
    model: dict[str, Any]
    shares: list[float]  # of plain's peak
    steps: int
    demand_steps: int
    warm_up: int
    threads: int
    sampling: dict[str, Any]
    disk: str | None = None

    @staticmethod
    def read(path: Path) -> Settings:
        return Settings(**json.loads(path.read_text(encoding="utf-8")))


class MicroBatched(LanguageModel):
    """The demo's model run group by group: every micro-batch goes through a few blocks before the next ones begin, so that
    one load of their weights serves all of them. Activations inside a group, and the head's, are computed again in the
    backward pass. A plain model: it knows nothing of misa."""

    def loss_of_batch(self, inputs: torch.Tensor, targets: torch.Tensor, rows: int, group: int) -> torch.Tensor:
        positions = torch.arange(inputs.shape[1])
        parts = [self.token_embedding(t) + self.position_embedding(positions) for t in inputs.split(rows)]
        for first in range(0, len(self.blocks), group):
            blocks = nn.Sequential(*self.blocks[first : first + group])
            parts = [self._again(blocks, x) for x in parts]
        losses = [self._again(self._tail, x, t) for x, t in zip(parts, targets.split(rows))]
        return torch.stack(losses).sum() / targets.numel()

    @staticmethod
    def _again(function: Any, *arguments: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    def _tail(self, x: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1), reduction="sum")


def make(settings: Settings) -> tuple[MicroBatched, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = MicroBatched(ModelConfig(**settings.model))
    return model, torch.optim.AdamW(model.parameters(), lr=3e-4)


def batches(settings: Settings, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    tokens = np.load(settings.tokens, mmap_mode="r")
    length = settings.model["context"]
    rows = settings.tokens_per_step // length
    draw = np.random.default_rng(0)
    for _ in range(steps):
        places = draw.integers(len(tokens) - length - 1, size=rows)
        windows = torch.from_numpy(np.stack([tokens[p : p + length + 1] for p in places]).astype(np.int64))
        yield windows[:, :-1], windows[:, 1:]


def train(settings: Settings, model: MicroBatched, optimizer: torch.optim.Optimizer, steps: int) -> tuple[list[float], list[float], float]:
    """Seconds and losses of each step, and when (on the clock of perf_counter) the counted ones began."""
    seconds: list[float] = []
    losses: list[float] = []
    counted = time.perf_counter()
    for number, (inputs, targets) in enumerate(batches(settings, steps)):
        begin = time.perf_counter()
        if number == min(settings.warm_up, steps - 1):
            counted = begin
        optimizer.zero_grad()
        loss = model.loss_of_batch(inputs, targets, settings.micro_batch, settings.group)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return seconds, losses, counted


def deviation(samples: list[list[float]], since: float) -> float:
    """Standard deviation of the bytes on the device in the counted steps."""
    values = [bytes_ for at, bytes_ in samples if at >= since]
    return statistics.pstdev(values) if len(values) > 1 else 0.0


def clean() -> None:
    gc.collect()
    misa.memory.reset_peak()


def run_plain(settings: Settings, steps: int) -> dict[str, Any]:
    """Without misa's memory: the bits and the speed that the managed runs are compared with."""
    clean()
    before = misa.memory.live_bytes()
    with misa.memory.Timeline() as timeline:
        start = time.perf_counter()
        model, optimizer = make(settings)
        line: Any = None
        if settings.mode == "sampled":
            line = misa.SampledReference(model, optimizer, **settings.sampling)
            line.__enter__()
        seconds, losses, counted = train(settings, model, optimizer, steps)
        if line is not None:
            line.__exit__(None, None, None)
        peak = misa.memory.peak_bytes()
        stddev = deviation(timeline.samples, counted - start)
    state = [t for values in optimizer.state.values() for t in values.values() if isinstance(t, torch.Tensor)]
    weights = sum(p.nbytes for p in model.parameters())
    return {
        "run": "plain",
        "step_seconds": seconds,
        "losses": losses,
        "device_peak_bytes": peak - before,
        "device_stddev_bytes": stddev,
        "parameter_count": sum(p.numel() for p in model.parameters()),
        "weights_bytes": weights,
        "optimizer_bytes": sum(t.nbytes for t in state),
        "state_sha256": misa.state_sha256(model, optimizer),
    }


def run_managed(settings: Settings, share: float, budget: int, demand_only: bool) -> dict[str, Any]:
    clean()
    steps = settings.demand_steps if demand_only else settings.steps
    model, optimizer = make(settings)
    options: dict[str, Any] = {"sampled": misa.Sampled(**settings.sampling)} if settings.mode == "sampled" else {}
    result: dict[str, Any] = {"run": "demand" if demand_only else "managed", "share": share, "budget_bytes": budget}
    try:
        run = misa.manage(model, optimizer, budget=budget, mode=settings.mode, daemon="private", job=f"twins-{settings.twin}",
                          device=misa.Emulated(twin=settings.twin, compute_flops=settings.compute_flops),
                          demand_only=demand_only, **options)
        start = time.perf_counter()
        with run:
            seconds, losses, counted = train(settings, model, optimizer, steps)
            report = run.report()
            peak = misa.memory.peak_bytes()
            result.update(
                step_seconds=seconds,
                losses=losses,
                device_peak_bytes=peak,
                device_stddev_bytes=deviation(report["timeline"], counted - start),
                largest_module_bytes=4 * max(m["parameter_count"] for m in run.modules()),
                report={k: v for k, v in report.items() if k != "timeline"},
                state_sha256=None if demand_only else misa.state_sha256(model, optimizer),
            )
        run.release()
    except RuntimeError as error:
        result["refused"] = str(error).splitlines()[0]
        run_now = misa.current_run()
        if run_now is not None:
            run_now.release()
    del model, optimizer
    if "refused" in result:
        # What an interrupted backward left in autograd's queue goes with the next one.
        torch.ones(1, requires_grad=True).sum().backward()
    return result


def main(arguments: list[str]) -> None:
    settings = Settings.read(Path(arguments[0]))
    torch.set_num_threads(settings.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False

    def say(result: dict[str, Any]) -> None:
        print(json.dumps(result), flush=True)

    # What the math library allocates for itself belongs to no run.
    run_plain(dataclasses.replace(settings, model={**settings.model, "depth": 1}), 1)
    plain = run_plain(settings, settings.steps)
    say(plain)
    for share in settings.shares:
        clean()
        budget = int(share * plain["device_peak_bytes"]) + misa.memory.live_bytes()
        say(run_managed(settings, share, budget, demand_only=False))
        if settings.demand_steps > 0:
            say(run_managed(settings, share, budget, demand_only=True))
    # Once more, so that a drift of the machine shows and meets both sides.
    again = run_plain(settings, 4)
    say({**again, "run": "plain-again"})


if __name__ == "__main__":
    main(sys.argv[1:])
