"""How often each predictor names the module that a step touches next, and whether the bidder keeps up with the best of them.

    python -m tests.bench.predictors [--seeds 3] [--symbols 6000]

Four kinds of trace, each from several seeds: dense steps, layer drop, tasks that take turns, routing to experts
(tests/unit/runtime/predict/streams.h). Every symbol counts, the first ones too; silence counts as wrong.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.bench.report import ROOT, write_report

KINDS = ["dense", "layer-drop", "tasks", "moe"]
PREDICTORS = ["last", "period", "ppm", "lstm", "bidder"]
GOAL_SHARE = 0.98  # of the best predictor's accuracy


def program(*parts: str) -> Path:
    path = ROOT.joinpath("build", *parts)
    if not path.exists():
        sys.exit(f"{path.relative_to(ROOT)} is missing; `make build` makes it.")
    return path


def measure(kind: str, seed: int, symbols: int, plugin: Path) -> dict[str, Any]:
    command = [str(program("tests", "predictors")), kind, str(seed), str(symbols), str(plugin)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip())
    return json.loads(done.stdout)


def summary(kind: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": kind, "symbols": runs[0]["symbols"], "seeds": [run["seed"] for run in runs]}
    for name in PREDICTORS:
        row[f"{name}_accuracy"] = statistics.fmean(run[f"{name}_accuracy"] for run in runs)
        if name != "bidder":
            row[f"{name}_seconds_per_symbol"] = statistics.median(run[f"{name}_seconds_per_symbol"] for run in runs)
        if f"{name}_memory_bytes" in runs[0]:
            row[f"{name}_memory_bytes"] = runs[0][f"{name}_memory_bytes"]
    best = max(PREDICTORS[:-1], key=lambda name: row[f"{name}_accuracy"])
    row["best_predictor"] = best
    row["bidder_over_best"] = row["bidder_accuracy"] / row[f"{best}_accuracy"]
    row["goal_bidder_over_best"] = GOAL_SHARE
    row["peer"] = "last, period, ppm and lstm on the same symbols"
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--symbols", type=int, default=6000)
    options = parser.parse_args()
    plugin = program("bin", "libmisa_lstm_predictor.so")
    rows = []
    print(f"Accuracy, mean of {options.seeds} seeds, {options.symbols} symbols each (µs a symbol)")
    print(f"{'trace':12}" + "".join(f"{name:>16}" for name in PREDICTORS) + f"{'bidder / best':>16}")
    for kind in KINDS:
        row = summary(kind, [measure(kind, seed, options.symbols, plugin) for seed in range(1, options.seeds + 1)])
        rows.append(row)
        cells = "".join(
            (f"{row[f'{name}_accuracy']:.3f}" + (f" ({row[f'{name}_seconds_per_symbol'] * 1e6:.1f})" if name != "bidder" else "")
             ).rjust(16) for name in PREDICTORS)
        print(f"{kind:12}{cells}{row['bidder_over_best']:>16.3f}", flush=True)
    path = write_report("predictors", rows)
    missed = [row["case"] for row in rows if row["bidder_over_best"] < GOAL_SHARE]
    print(f"\nBidder within 2 % of the best predictor in {len(rows) - len(missed)} of {len(rows)} rows. "
          f"Written to {path.relative_to(ROOT)}.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
