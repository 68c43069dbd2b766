"""One rank of a distributed job: `python -m tests.python.distributed_trainer JSON`. Trains plain and managed, one after the
other, and says each time what came out."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from typing import Any

import misa
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.python.models import Transformer, batch

STEPS = 6


def loss_through(model: torch.nn.Module, step: int) -> torch.Tensor:
    inputs, targets = batch(model.module, step)
    return torch.nn.functional.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def train(case: dict[str, Any], manage: Any) -> tuple[str, list[Any]]:
    torch.manual_seed(7)
    sampled = case["mode"] == "sampled"
    # Half of a sampled round's matrices get no gradient.
    model = DistributedDataParallel(Transformer(), gradient_as_bucket_view=case["views"], find_unused_parameters=sampled)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    seen = []
    with manage(model, optimizer) as run:
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = loss_through(model, 100 * dist.get_rank() + step)  # every rank has rows of its own
            loss.backward()
            if sampled:
                run.step_loss(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            seen.append(loss.item())
        digest = misa.state_sha256(model.module, optimizer)
        active = (run._sampling if isinstance(run, misa.Run) else run).active_modules if sampled else []
        seen.append(list(active))
    return digest, seen


def main(settings: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    rank = settings["rank"]
    dist.init_process_group("gloo", init_method=f"file://{settings['rendezvous']}", rank=rank, world_size=2)
    options = {"delta": 0.4, "inner_steps": 2, "seed": settings.get("seeds", [3, 3])[rank]}
    common = options
    for case in settings["cases"]:
        options = {**common, **case.get("options", {})}
        gc.collect()
        misa.memory.reset_peak()
        before = misa.memory.live_bytes()
        if case["mode"] == "sampled":
            plain = train(case, lambda m, o: misa.SampledReference(m.module, o, **options))
        else:
            plain = train(case, lambda *_: contextlib.nullcontext())
        peak = misa.memory.peak_bytes() - before
        gc.collect()
        budget = misa.memory.live_bytes() + int(case["share"] * peak)
        runs = []

        def manage(model: Any, optimizer: Any) -> Any:
            runs.append(misa.manage(model, optimizer, budget=budget, daemon="required", runtime_dir=settings["runtime_dir"],
                                    mode=case["mode"], step=case["step"], sampled=misa.Sampled(**options)))
            return runs[-1]

        managed = train(case, manage)
        runs[-1].release()
        report = runs[-1].report()
        print("case", json.dumps({
            "plain": plain, "managed": managed, "peak": report["device_peak_bytes"], "budget": budget,
            "loads": report["demand_loads"] + report["prefetch_loads"]}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
