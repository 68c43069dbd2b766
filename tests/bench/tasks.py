"""Several tasks in one trainer beside one trainer a task: memory, speed, and whether the result is plain's.

    python -m tests.bench.tasks [--tasks 3] [--share 0.4] [--rounds 6]

A task is a head of its own on one trunk; in a round every task trains a step. One trainer a task has a trunk each, and their
peaks count together, as they do where all of them train at the same time. Writes out/bench/tasks.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from tests.bench.report import ROOT, write_report

# What the design that misa's name comes from reports for tasks that take turns on one device.
PUBLISHED_REDUCTION = 0.58
SAMPLED = {"delta": 0.25, "inner_steps": 6, "seed": 0}


def run(settings: dict[str, Any]) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "tests.bench.tasks_worker", json.dumps(settings)], cwd=ROOT, text=True,
                          capture_output=True, timeout=900)
    if done.returncode != 0:
        raise SystemExit(f"a case ended with status {done.returncode}: {done.stderr[-800:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.4, help="misa's budget, of the plain peak of the same trainer")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--rows", type=int, default=8)
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT / "build/python"), os.environ.get("PYTHONPATH")) if p)
    os.environ.setdefault("MISA_DAEMON", str(ROOT / "build/bin/misad"))
    weights = {f"task{number}": float(options.tasks - number) for number in range(options.tasks)}
    common = {"rounds": options.rounds, "rows": options.rows, "budget": 0, "sampled": {},
              "model": {"vocabulary": 2048, "width": options.width, "depth": options.depth, "heads": options.width // 64,
                        "context": 64, "checkpointing": True}}

    def each(**changes: Any) -> list[dict[str, Any]]:
        """One trainer a task."""
        return [run({**common, **changes, "tasks": {name: weight}}) for name, weight in weights.items()]

    def together(**changes: Any) -> list[dict[str, Any]]:
        return [run({**common, **changes, "tasks": weights})]

    cases: dict[str, list[dict[str, Any]]] = {"a trainer a task, plain": each(), "one trainer, plain": together(),
                                              "one trainer, sampled reference": together(sampled=SAMPLED)}
    budget_each = int(options.share * max(r["device_peak_bytes"] for r in cases["a trainer a task, plain"]))
    budget = int(options.share * cases["one trainer, plain"][0]["device_peak_bytes"])
    cases["a trainer a task, exact"] = each(budget=budget_each)
    cases["one trainer, exact"] = together(budget=budget)
    cases["one trainer, sampled"] = together(budget=budget, sampled=SAMPLED)

    beside = {"a trainer a task, exact": "a trainer a task, plain", "one trainer, exact": "one trainer, plain",
              "one trainer, sampled": "one trainer, sampled reference"}
    separate = sum(r["device_peak_bytes"] for r in cases["a trainer a task, plain"])
    rows = []
    print(f"{'case':32} {'trainers':>8} {'peak':>10} {'against a trainer a task':>25} {'round':>8}  bits")
    for case, results in cases.items():
        peak = sum(r["device_peak_bytes"] for r in results)
        seconds = sum(statistics.median(r["round_seconds"][1:]) for r in results)
        row = {
            "case": case,
            "peer": "one plain trainer a task, all at the same time",
            "trainers": len(results),
            "device_peak_bytes": peak,
            "reduction_against_separate": 1 - peak / separate,
            "published_reduction": PUBLISHED_REDUCTION,
            "parameter_count": sum(r["parameter_count"] for r in results),
            "round_seconds_median": seconds,
            "demand_loads_per_step": statistics.fmean(r["demand_loads_per_step"] for r in results),
            "prefetch_loads_per_step": statistics.fmean(r["prefetch_loads_per_step"] for r in results),
            "tasks": results[0]["tasks"],
        }
        if case in beside:
            row["identical"] = [r["state_sha256"] for r in results] == [r["state_sha256"] for r in cases[beside[case]]]
        rows.append(row)
        bits = {True: "plain's", False: "DIFFERENT", None: ""}[row.get("identical")]
        print(f"{case:32} {len(results):8} {peak / 1e6:8.1f}MB {-row['reduction_against_separate']:25.1%} {seconds:7.2f}s  {bits}")
    path = write_report("tasks", rows, settings={**vars(options), "weights": weights, **common})
    print(f"published, in another setting: {-PUBLISHED_REDUCTION:.0%}\n{path.relative_to(ROOT)}")
    return 0 if all(row.get("identical", True) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
