"""One row: the loop plain, the same loop managed, and whether every bit is the same."""

from __future__ import annotations

import gc
import re
import time
import warnings
from typing import Any

import misa
import torch

from tests.exactness.design import Row
from tests.exactness.families import FAMILIES
from tests.exactness.loops import LOOPS, Case
from tests.exactness.optimizers import OPTIMIZERS, REFUSED
from tests.python import beside
from tests.python.processes import Misad

MAX_ATTEMPTS = 25
# Of plain's peak: where the search for the smallest budget begins, and what is plenty.
FIRST_SHARE = {"tight": 0.25, "comfortable": 0.65, "ample": 3.0}


def forget_the_past() -> None:
    """After an error: what it left in autograd's queue goes with the next backward."""
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()


def run_row(row: Row, misad: Misad) -> dict[str, Any]:
    """The row's line of the report. `identical` is true, false, or null where the row was refused before its first step."""
    begin = time.monotonic()
    case = Case(FAMILIES[row.family], OPTIMIZERS.get(row.optimizer) or REFUSED[row.optimizer])
    loop = LOOPS[row.loop].run
    line: dict[str, Any] = {
        "model": row.family, "kind": case.family.kind, "optimizer": row.optimizer,
        "features": [row.loop, f"step={row.step}", row.pressure],
        "identical": False, "budget_ratio": None, "device_peak_bytes": None, "refused": None,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = beside.plain(lambda manage: loop(case, manage))
        line["plain_peak_bytes"] = expected.bytes
        gc.collect()
        base = misa.memory.live_bytes()
        options: dict[str, Any] = {"step": row.step}
        if row.pressure == "stress":
            budget, options["stress"] = base + 2 * expected.bytes + (1 << 20), True
        else:
            budget = base + int(FIRST_SHARE[row.pressure] * expected.bytes)
        for attempt in range(1, MAX_ATTEMPTS + 1):
            line |= {"attempts": attempt, "budget_bytes": budget, "budget_ratio": (budget - base) / expected.bytes}
            try:
                result = beside.managed(lambda manage: loop(case, manage), misad, budget, **options)
            except ValueError as refusal:
                if "Nothing was changed" not in str(refusal):
                    raise
                return line | {"identical": None, "refused": str(refusal), "seconds": time.monotonic() - begin}
            except RuntimeError as error:
                # A tight budget is found by following the sentence that names the smallest one that works.
                found = re.search(r"smallest budget that works here is (?:above )?(\d+) bytes", str(error))
                if found is None or int(found.group(1)) <= budget:
                    raise
                # One operator after the other says what it needs: a little more each time, or the search takes long.
                budget = int(found.group(1)) + attempt * expected.bytes // 400
                del error
            else:
                break
            forget_the_past()
        else:
            return line | {"error": f"no budget was enough in {MAX_ATTEMPTS} attempts", "seconds": time.monotonic() - begin}
    differences = []
    if result.seen != expected.seen:
        differences.append("what the loop saw on its way")
    if result.sha256 != expected.sha256:
        differences.append("the state at the end")
    if result.peak_bytes > budget:
        differences.append(f"the peak of {result.peak_bytes} bytes is above the budget")
    return line | {
        "identical": not differences, "differences": differences, "device_peak_bytes": result.peak_bytes,
        "state_sha256": result.sha256, "loads": result.report["demand_loads"] + result.report["prefetch_loads"],
        "unloads": result.report["unloads"], "notices": result.report["notices"], "seconds": time.monotonic() - begin,
    }
