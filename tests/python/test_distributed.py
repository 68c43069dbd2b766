"""DistributedDataParallel on two ranks over Gloo: the bits of the same job without misa."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import misa
import pytest
import torch
from torch import nn

from tests.python.processes import ROOT


def job(folder: Any, misad: Any, cases: list[dict[str, Any]], **settings: Any) -> list[tuple[int, str, str]]:
    """Both ranks to their ends: (status, what was said, what went wrong) of each."""
    processes = []
    for rank in range(2):
        text = json.dumps({"rank": rank, "rendezvous": str(folder / "rendezvous"), "cases": cases,
                           "runtime_dir": str(misad.runtime_dir), **settings})
        processes.append(subprocess.Popen([sys.executable, "-m", "tests.python.distributed_trainer", text], cwd=ROOT,
                                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)))
    results = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=120)
            results.append((process.returncode, out, errors))
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    return results


CASES = [
    {"mode": "exact", "step": "deferred", "views": False, "share": 0.75},
    {"mode": "exact", "step": "deferred", "views": True, "share": 0.75},
    {"mode": "exact", "step": "eager", "views": False, "share": 0.75},
    {"mode": "sampled", "step": "deferred", "views": False, "share": 0.9},
    # Ranks have losses of their own, and have to begin sampling in the same step.
    {"mode": "sampled", "step": "deferred", "views": False, "share": 0.9,
     "options": {"wait_for_stable_loss": True, "stable_window": 4, "stable_tolerance": 0.5, "stable_hold": 1,
                 "count_micro_batches": True}},
]


def test_two_ranks_train_to_the_bits_of_the_plain_job(folder, shared_misad):
    said = []
    for status, out, errors in job(folder, shared_misad, CASES):
        assert status == 0, errors
        said.append([json.loads(line.removeprefix("case ")) for line in out.splitlines() if line.startswith("case ")])
    for number, case in enumerate(CASES):
        first, second = said[0][number], said[1][number]
        for rank in (first, second):
            assert rank["managed"] == rank["plain"], case
            assert rank["peak"] <= rank["budget"] and rank["loads"] > 4, case
        # Ranks have seen different rows, hold the same model, and have drawn the same modules.
        assert first["managed"][0] == second["managed"][0]
        assert first["managed"][1][:-1] != second["managed"][1][:-1]
        assert first["managed"][1][-1] == second["managed"][1][-1]


def test_ranks_that_draw_different_sets_stop(folder, shared_misad):
    case = {"mode": "sampled", "step": "deferred", "views": False, "share": 0.9}
    results = job(folder, shared_misad, [case], seeds=[3, 4])
    assert all(status != 0 for status, *_ in results)
    assert any("have drawn different modules" in errors for _, _, errors in results)


def test_steps_in_backward_are_refused_in_a_distributed_job(shared_misad, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="before they are averaged.*Nothing was changed"):
        misa.manage(model, torch.optim.SGD(model.parameters()), budget="1MiB", step="in_backward")


def test_fsdp_is_refused(folder):
    """In a process of its own: FSDP wants a process group."""
    program = f"""
import misa, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://{folder}/rendezvous", rank=0, world_size=1)
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
fully_shard(model, mesh=mesh)
try:
    misa.manage(model, torch.optim.SGD(model.parameters()), budget="1MiB")
except ValueError as error:
    print("refused:", error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert "refused:" in done.stdout and "sharded by FSDP" in done.stdout, done.stderr
