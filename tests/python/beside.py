"""Runs one training loop plain and managed and compares every bit.

A loop is a function `loop(manage)`: it makes model and optimizer (one, or a list) from a seed, trains inside `with manage(model, optimizer):`
and gives model, optimizer and a list of whatever it looked at on its way (losses, generated tokens, …). The same code runs
plain, where `manage` does nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from typing import Any, Callable, Iterator

import misa
import torch

from tests.python.processes import Misad

Loop = Callable[[Callable[..., Any]], tuple[Any, Any, list[Any]]]

# What a run looks like from outside: under memory pressure, and with everything sent away at every touch.
PRESSURES = ("tight", "stress")


@dataclasses.dataclass
class Plain:
    sha256: str
    seen: list[Any]
    bytes: int  # the peak, less what lived before


@dataclasses.dataclass
class Managed:
    sha256: str
    seen: list[Any]
    peak_bytes: int
    budget_bytes: int
    report: dict[str, Any]


def digest(models: Any, optimizers: Any) -> str:
    models = models if isinstance(models, (list, tuple)) else [models]
    optimizers = optimizers if isinstance(optimizers, (list, tuple)) else [optimizers]
    return " ".join(misa.state_sha256(model, optimizer) for model in models for optimizer in optimizers)


def plain(loop: Loop) -> Plain:
    gc.collect()
    misa.memory.reset_peak()
    before = misa.memory.live_bytes()
    model, optimizers, seen = loop(lambda *_, **__: contextlib.nullcontext())
    peak = misa.memory.peak_bytes()
    return Plain(digest(model, optimizers), seen, peak - before)


def managed(loop: Loop, misad: Misad, budget: int, **options: Any) -> Managed:
    """Runs the loop managed. The digest is taken inside, and again after the memory was given back. A loop may manage more than
    once, one after the other: the report is the last run's, the peak that of all."""
    gc.collect()
    kept: dict[str, Any] = {"peak": 0}

    @contextlib.contextmanager
    def manage(model: Any, optimizer: Any) -> Iterator[misa.Run]:
        run = misa.manage(model, optimizer, budget=budget, runtime_dir=str(misad.runtime_dir), daemon="required",
                          **options)
        kept["run"] = run
        try:
            yield run
            kept["sha256"] = digest(model, optimizer)
            kept["peak"] = max(kept["peak"], misa.memory.peak_bytes())
        finally:
            run.release()

    model, optimizers, seen = loop(manage)
    assert digest(model, optimizers) == kept["sha256"], "giving the memory back changed it"
    return Managed(kept["sha256"], seen, kept["peak"], budget, kept["run"].report())


_plain_runs: dict[Any, Plain] = {}


def plain_once(loop: Loop, key: Any = None) -> Plain:
    """The plain run, made only once for a loop."""
    key = key or loop
    if key not in _plain_runs:
        _plain_runs[key] = plain(loop)
    return _plain_runs[key]


def assert_identical(loop: Loop, misad: Misad, pressure: str, *, key: Any = None, share: float = 0.5, **options: Any) -> Managed:
    """The loop managed ends in the very bits of the loop plain, within its budget; `share` is the budget's part of the plain
    peak."""
    expected = plain_once(loop, key)
    gc.collect()
    if pressure == "stress":
        budget, options = misa.memory.live_bytes() + 2 * expected.bytes + (1 << 20), {**options, "stress": True}
    else:
        budget = misa.memory.live_bytes() + int(share * expected.bytes)
    result = managed(loop, misad, budget, **options)
    assert result.seen == expected.seen
    assert result.sha256 == expected.sha256
    assert result.peak_bytes <= budget
    # Bytes did travel: otherwise the comparison says nothing.
    assert result.report["demand_loads"] + result.report["prefetch_loads"] > 4
    assert result.report["unloads"] > 3
    assert result.report["notices"] == []
    return result
