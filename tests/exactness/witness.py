"""Rows with the kernel as a witness: trainer and daemon in one memory cgroup, whose limit is the budget above what the same
program needs around a model of next to nothing. Each run is a process of its own.

    python -m tests.exactness.witness JSON    one run, for the rows below
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from demo.cgroup import CgroupUnavailable, MemoryCgroup

ROOT = Path(__file__).resolve().parents[2]
SHARE = 1 / 3
RUN_SECONDS = 400

# family, options that make it wide, optimizer, loop
ROWS = [
    ("gpt2", {"n_embd": 512, "n_head": 8, "n_layer": 8}, "adamw fused", "clipping by norm"),
    ("mixtral", {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 6}, "adamw", "accumulation"),
    ("vit", {"hidden_size": 384, "intermediate_size": 1536, "num_hidden_layers": 10}, "nadam", "recomputation, by hooks"),
    ("llama", {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8}, "adamw", "saved and loaded back, misa.save"),
    ("opt", {"hidden_size": 384, "ffn_dim": 1536, "num_hidden_layers": 8, "word_embed_proj_dim": 384}, "adamw foreach",
     "saved and loaded back, torch.save"),
]


def rows() -> list[dict[str, Any]]:
    """The lines of the report, or one line each that says why there is no witness."""
    return [_row(*row) for row in ROWS]


def _row(family: str, wide: dict[str, int], optimizer: str, loop: str) -> dict[str, Any]:
    begin = time.monotonic()
    line: dict[str, Any] = {
        "model": f"{family}, wide", "kind": "cgroup", "optimizer": optimizer,
        "features": [loop, "step=deferred", "cgroup"], "identical": False, "refused": None, "budget_ratio": SHARE,
        "device_peak_bytes": None,
    }
    settings = {"family": family, "optimizer": optimizer, "loop": loop, "wide": wide}
    try:
        plain = _run({**settings}, None)
        budget = int(SHARE * plain["peak_bytes"])
        base = _run({**settings, "wide": {}, "budget": 64 << 20}, None)
        limit = None if base["cgroup_peak_bytes"] is None else base["cgroup_peak_bytes"] + budget
        managed = _run({**settings, "budget": budget}, limit)
    except RuntimeError as error:
        return line | {"error": str(error), "seconds": time.monotonic() - begin}
    differences = [what for what, same in (
        ("the state at the end", managed["sha256"] == plain["sha256"]),
        ("what the loop saw on its way", managed["seen"] == plain["seen"]),
        ("the peak is above the budget", managed["peak_bytes"] <= budget),
    ) if not same]
    return line | {
        "identical": not differences, "differences": differences, "budget_bytes": budget,
        "plain_peak_bytes": plain["peak_bytes"], "device_peak_bytes": managed["peak_bytes"],
        "cgroup_peak_bytes": managed["cgroup_peak_bytes"], "cgroup_limit_bytes": limit,
        "cgroup_plain_peak_bytes": plain["cgroup_peak_bytes"], "cgroup_note": managed["cgroup_note"],
        "seconds": time.monotonic() - begin,
    }


def _run(settings: dict[str, Any], limit: int | None) -> dict[str, Any]:
    note = ""
    group: Any = contextlib.nullcontext()
    try:
        group = MemoryCgroup(f"exactness-{time.monotonic_ns()}", limit)
    except CgroupUnavailable as reason:
        note = str(reason)
    with group as cgroup:
        done = subprocess.run([sys.executable, "-m", "tests.exactness.witness", json.dumps(settings)], cwd=ROOT, text=True,
                              capture_output=True, timeout=RUN_SECONDS, preexec_fn=cgroup.join if cgroup else None)
        kills = cgroup.oom_kills() if cgroup else 0
        peak = cgroup.peak_bytes() if cgroup else None
    if done.returncode != 0:
        cause = f"the kernel ended it at its limit of {limit} bytes" if kills else done.stderr[-2000:]
        raise RuntimeError(f"the run ended with status {done.returncode}: {cause}")
    return {**json.loads(done.stdout.splitlines()[-1]), "cgroup_peak_bytes": peak, "cgroup_note": note or cgroup.description}


def _child(settings: dict[str, Any]) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import misa
    import torch

    from tests.exactness.families import FAMILIES
    from tests.exactness.loops import LOOPS, Case
    from tests.exactness.optimizers import OPTIMIZERS
    from tests.python.beside import digest

    torch.set_num_threads(1)
    family = FAMILIES[settings["family"]]
    make, (auto, kind, options) = family.make.func, family.make.args
    family = dataclasses.replace(family, make=lambda: make(auto, kind, {**options, **settings["wide"]}))
    kept: dict[str, Any] = {}

    @contextlib.contextmanager
    def manage(model: Any, optimizer: Any) -> Any:
        run = None
        if "budget" in settings:
            run = misa.manage(model, optimizer, budget=settings["budget"], daemon="private")
        yield run
        # Read a tensor at a time, so within the budget as well.
        kept.update(sha256=digest(model, optimizer), peak_bytes=misa.memory.peak_bytes())

    misa.memory.reset_peak()
    _, _, seen = LOOPS[settings["loop"]].run(Case(family, OPTIMIZERS[settings["optimizer"]]), manage)
    print(json.dumps({**kept, "seen": seen}))


if __name__ == "__main__":
    _child(json.loads(sys.argv[1]))
