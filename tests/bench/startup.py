"""How long `misa.manage` takes beyond copying, for a model of a billion parameters.

    python -m tests.bench.startup [--rounds 3]

Each round is a process of its own. `copy_seconds` is the least that any owner of memory has to do: every parameter copied into
fresh memory, tensor by tensor, the old memory freed. `beyond_copying_seconds` is what `manage` takes on top of that.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.bench.report import ROOT, write_report

# name, blocks, matrices a block, width of their rows and columns, type, daemon
CASES = [
    ("146 tensors, bfloat16", 24, 6, (2048, 3392), "bfloat16", "node"),
    ("146 tensors, float32", 24, 6, (2048, 3392), "float32", "node"),
    ("4,802 tensors, bfloat16", 100, 48, (448, 464), "bfloat16", "node"),
    ("146 tensors, bfloat16, private daemon", 24, 6, (2048, 3392), "bfloat16", "private"),
]
GOAL_SECONDS = 1.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the blocks, for a quick look")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        print(json.dumps(measure(**json.loads(options.worker))), flush=True)
        return 0
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT / "build/python"), os.environ.get("PYTHONPATH")) if p)
    os.environ.setdefault("MISA_DAEMON", str(ROOT / "build/bin/misad"))
    rows = []
    for name, blocks, matrices, shape, dtype, daemon in CASES:
        settings = {"blocks": max(1, round(blocks * options.scale)), "matrices": matrices, "shape": shape, "dtype": dtype,
                    "daemon": daemon}
        results = []
        for _ in range(options.rounds):
            done = subprocess.run([sys.executable, "-m", "tests.bench.startup", "--worker", json.dumps(settings)], cwd=ROOT,
                                  text=True, stdout=subprocess.PIPE, timeout=300, check=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
        seconds = {key: statistics.median(r[key] for r in results) for key in results[0] if key.endswith("_seconds")}
        rows.append({"case": name, "peer": "torch, every parameter copied once", "goal_seconds": GOAL_SECONDS,
                     "parameter_count": results[0]["parameter_count"], "tensor_count": results[0]["tensor_count"],
                     "bytes": results[0]["bytes"], **seconds})
        print(f"  {name}: manage {seconds['manage_seconds']:.2f} s, copying {seconds['copy_seconds']:.2f} s, beyond it "
              f"{seconds['beyond_copying_seconds']:.2f} s", flush=True)
    print(f"Written to {write_report('startup', rows).relative_to(ROOT)}.")
    return 0


def make_model(blocks: int, matrices: int, shape: list[int], dtype: str) -> Any:
    import torch
    from torch import nn

    kind = getattr(torch, dtype)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for number in range(matrices):
                setattr(self, f"part{number}", nn.Parameter(torch.full(tuple(shape), 0.5, dtype=kind)))

    model = nn.Module()
    model.blocks = nn.ModuleList(Block() for _ in range(blocks))
    model.scale = nn.Parameter(torch.ones(shape[0], dtype=kind))
    model.shift = nn.Parameter(torch.zeros(shape[0], dtype=kind))
    return model


def measure(blocks: int, matrices: int, shape: list[int], dtype: str, daemon: str) -> dict[str, Any]:
    import misa
    import torch

    from tests.python.processes import Misad

    torch.set_num_threads(1)
    gib = 1 << 30

    model = make_model(blocks, matrices, shape, dtype)
    begin = time.perf_counter()
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    copy_seconds = time.perf_counter() - begin
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given: dict[str, Any] = {"budget": 6 * gib, "daemon": "private"}

    def managed() -> dict[str, Any]:
        begin = time.perf_counter()
        run = misa.manage(model, optimizer, **given)
        seconds = time.perf_counter() - begin
        run.close(keep_managed=True)
        return {"manage_seconds": seconds, "copy_seconds": copy_seconds, "beyond_copying_seconds": seconds - copy_seconds,
                "parameter_count": sum(p.numel() for p in model.parameters()),
                "tensor_count": len(list(model.parameters())),
                "bytes": sum(p.numel() * p.element_size() for p in model.parameters())}

    if daemon == "private":
        return managed()
    with tempfile.TemporaryDirectory(prefix="misa-b-", dir=os.environ.get("MISA_DISK_DIR", "/var/tmp")) as folder:
        with Misad(Path(folder), capacity=8 * gib, disk_capacity=24 * gib, chunk=65536) as misad:
            given |= {"daemon": "required", "runtime_dir": str(misad.runtime_dir)}
            return managed()


if __name__ == "__main__":
    sys.exit(main())
