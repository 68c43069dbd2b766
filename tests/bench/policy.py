"""What the planner loads beside the lower bound, the known cache policies and, in small cases, the exact optimum.

    python -m tests.bench.policy [--seeds 20]

Five kinds of trace of mixed sizes, each from many seeds, at several capacities; then the known values of equal units; then
small cases beside the exact optimum; then how long a plan of 1,000 modules takes. All counts are of the steady state.
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

KINDS = ["zigzag", "three-pass", "forward-only", "phases", "mixed"]
POLICIES = ["lru", "lru-threshold", "belady", "planner"]
GOAL_RATIO = 1.02
GOAL_SECONDS = 0.010


def program(*parts: str) -> Path:
    path = ROOT.joinpath("build", *parts)
    if not path.exists():
        sys.exit(f"{path.relative_to(ROOT)} is missing; `make build` makes it.")
    return path


def simulate(**options: Any) -> dict[str, Any]:
    command = [str(program("bin", "misactl")), "simulate", "--json"]
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            command.append(flag)
        elif value is not False:
            command += [flag, str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def ratio(row: dict[str, Any]) -> float:
    """Loaded bytes over the bound's; 1 where nothing has to be loaded and nothing is."""
    bound, loaded = row["bound_bytes_per_period"], row["loaded_bytes_per_period"]
    return loaded / bound if bound else (1.0 if loaded == 0 else float("inf"))


def moved_ratio(row: dict[str, Any]) -> float:
    bound = row["bound_bytes_per_period"] + row["bound_unloaded_bytes_per_period"]
    moved = row["loaded_bytes_per_period"] + row["unloaded_bytes_per_period"]
    return moved / bound if bound else (1.0 if moved == 0 else float("inf"))


def policies(kind: str, units: int, share: float, writes: bool, seeds: int) -> dict[str, Any]:
    ratios: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    moved: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    plan_seconds = []
    for seed in range(1, seeds + 1):
        report = simulate(trace=kind, units=units, capacity=units * share, mixed_sizes=True, writes=writes, seed=seed)
        for row in report["rows"]:
            if row["policy"] not in ratios:
                continue
            if "error" in row:
                raise RuntimeError(row["error"])
            ratios[row["policy"]].append(ratio(row))
            moved[row["policy"]].append(moved_ratio(row))
            if row["policy"] == "planner":
                plan_seconds.append(row["plan_seconds"])
    result: dict[str, Any] = {"case": "policies", "trace": kind, "units": units, "capacity_share": share,
                              "writes": writes or kind == "mixed", "seeds": seeds, "goal_ratio": GOAL_RATIO}
    for policy in POLICIES:
        name = policy.replace("-", "_")
        result[f"{name}_loaded_over_bound_mean"] = statistics.fmean(ratios[policy])
        result[f"{name}_loaded_over_bound_most"] = max(ratios[policy])
        result[f"{name}_moved_over_bound_mean"] = statistics.fmean(moved[policy])
    result["plan_seconds_median"] = statistics.median(plan_seconds)
    result["peer"] = "lru, lru-threshold, belady on the same traces"
    return result


def small(kind: str, units: int, share: float, seeds: int) -> dict[str, Any]:
    """Loaded bytes over the exact optimum's; traces without writes, so that loads are all there is to choose."""
    over: dict[str, list[float]] = {policy: [] for policy in POLICIES}
    bound_over: list[float] = []
    exact = 0
    for seed in range(1, seeds + 1):
        try:
            report = simulate(trace=kind, units=units, capacity=units * share, mixed_sizes=True, seed=seed)
        except RuntimeError as refused:
            if "smallest budget that works" in str(refused):
                continue  # one unit of this draw takes nearly all bytes there are
            raise
        rows = {row["policy"]: row for row in report["rows"]}
        if "error" in rows["optimum"]:
            continue
        least = rows["optimum"]["loaded_bytes_per_period"]
        exact += 1
        bound = rows["optimum"]["bound_bytes_per_period"]
        bound_over.append(bound / least if least else 1.0)
        for policy in POLICIES:
            loaded = rows[policy]["loaded_bytes_per_period"]
            over[policy].append(loaded / least if least else (1.0 if loaded == 0 else float("inf")))
    result: dict[str, Any] = {"case": "small", "trace": kind, "units": units, "capacity_share": share, "seeds": exact}
    for policy in POLICIES:
        name = policy.replace("-", "_")
        result[f"{name}_loaded_over_optimum_mean"] = statistics.fmean(over[policy])
        result[f"{name}_loaded_over_optimum_most"] = max(over[policy])
    result["planner_is_optimal_share"] = sum(value <= 1 + 1e-9 for value in over["planner"]) / max(exact, 1)
    result["bound_over_optimum_mean"] = statistics.fmean(bound_over)
    return result


def known() -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS[:3]:
        report = simulate(trace=kind, units=40, capacity=38)
        row: dict[str, Any] = {"case": "known values", "trace": kind, "units": 40, "fit": 38}
        for policy in report["rows"]:
            if "error" not in policy:
                row[f"{policy['policy'].replace('-', '_')}_misses_per_period"] = policy["misses_per_period"]
        rows.append(row)
    return rows


def speed() -> list[dict[str, Any]]:
    done = subprocess.run([str(program("tests", "policy_speed"))], capture_output=True, text=True, timeout=300, check=True)
    return [{**json.loads(line), "case": "plan seconds", "step": json.loads(line)["case"], "goal_seconds": GOAL_SECONDS}
            for line in done.stdout.splitlines()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    print(f"Loaded bytes over the bound, mean (most) of {options.seeds} seeds, mixed sizes")
    print(f"{'trace':14}{'units':>6}{'room':>6}{'writes':>7}" + "".join(f"{policy:>17}" for policy in POLICIES)
          + f"{'planned in':>12}")
    for kind in KINDS:
        for units, share, writes in [(200, 0.3, False), (200, 0.6, False), (200, 0.9, False), (200, 0.6, True), (40, 0.6, False)]:
            if kind == "mixed" and writes:
                continue  # it always writes
            row = policies(kind, units, share, writes, options.seeds)
            rows.append(row)
            cells = "".join(
                f"{row[policy.replace('-', '_') + '_loaded_over_bound_mean']:>9.3f}"
                f" ({row[policy.replace('-', '_') + '_loaded_over_bound_most']:.3f})".rjust(17) for policy in POLICIES)
            print(f"{kind:14}{units:>6}{share:>6.0%}{'yes' if row['writes'] else 'no':>7}{cells}"
                  f"{row['plan_seconds_median'] * 1000:>9.1f} ms", flush=True)

    print("\nMisses a period, 40 equal units of which 38 fit")
    for row in known():
        rows.append(row)
        print(f"{row['trace']:14}" + "".join(
            f"  {policy} {row[policy.replace('-', '_') + '_misses_per_period']:.4g}" for policy in POLICIES))

    print("\nLoaded bytes over the exact optimum, mean (most)")
    print(f"{'trace':14}{'units':>6}" + "".join(f"{policy:>17}" for policy in POLICIES) + f"{'optimal':>9}{'bound':>8}")
    for kind, units in [("zigzag", 10), ("three-pass", 10), ("forward-only", 10), ("phases", 10), ("mixed", 3)]:
        # A training step needs one module's weights, gradients and optimizer state at once.
        row = small(kind, units, 0.8 if kind == "mixed" else 0.6, options.seeds)
        rows.append(row)
        cells = "".join(
            f"{row[policy.replace('-', '_') + '_loaded_over_optimum_mean']:>9.3f}"
            f" ({row[policy.replace('-', '_') + '_loaded_over_optimum_most']:.3f})".rjust(17) for policy in POLICIES)
        print(f"{kind:14}{units:>6}{cells}{row['planner_is_optimal_share']:>9.0%}{row['bound_over_optimum_mean']:>8.3f}",
              flush=True)

    print("\nSeconds of a plan, median (most)")
    for row in speed():
        rows.append(row)
        print(f"{row['modules']} modules, {row['step']}: {row['plan_seconds_median'] * 1000:.1f} "
              f"({row['plan_seconds_most'] * 1000:.1f}) ms; step / bound {row['step_over_bound']:.4f}, "
              f"bytes / bound {row['moved_over_bound']:.4f}")

    mixed = [row for row in rows if row["case"] == "policies"]
    reached = [row for row in mixed if row["planner_loaded_over_bound_mean"] <= GOAL_RATIO]
    path = write_report("policy", rows)
    print(f"\nPlanner within {GOAL_RATIO} of the bound in {len(reached)} of {len(mixed)} rows. "
          f"Written to {path.relative_to(ROOT)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
