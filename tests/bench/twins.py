"""Real trainings on emulated twins of three GPUs, against plain training and against the physical bound.

    python -m tests.bench.twins [--quick] [--twins rtx-3090,…] [--modes exact,sampled] [--calibration out/bench/twins.json]

The compute of this machine is measured once, on a matrix multiplication of the model's size with the threads in use; every
twin's link follows from that one figure and stays fixed for all runs compared.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Callable

import torch

import misa
from demo.data import DataError, prepare

from tests.bench.report import ROOT, write_report
from tests.bench.twin_plan import TwinPlan, compare

# A step of an exact run with nothing resident moves 5 W down the link and 4 W up, and computes 4 W (tokens / tau): from
# about 1.7 tau on it could hide all of it, at 1 tau about half. So the twins lie on both sides.
TOKENS_OVER_TAU = {"rtx-3090": 1.5, "a100-80g": 0.75, "h200": 0.5}
# Of the link of every twin: a direction's rate beside the other one (docs/emulated.md).
DUPLEX_FACTOR = 19 / 26
# Below 0.4 the activations of the longer steps alone are more than the budget.
SHARES = [0.4, 0.5, 0.6, 0.75]
GOAL_STEP_OVER_BOUND = 1.05
GOAL_SPEED = 0.95
GOAL_PEAK = 0.4
GOAL_DEVIATION = 0.2
GOAL_PREDICTION = 0.1


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--twins", default=",".join(TOKENS_OVER_TAU))
    parser.add_argument("--modes", default="exact,sampled")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="budgets as shares of plain's peak")
    parser.add_argument("--width", type=int, default=320)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--micro-batch", type=int, default=2, help="sequences that go through a group of blocks at once")
    parser.add_argument("--group", type=int, default=1, help="blocks whose activations are computed again together")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--demand-steps", type=int, default=2, help="of the runs on demand; 0 leaves them out")
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--delta", type=float, default=0.25, help="sampled: share of parameters trained in a round")
    parser.add_argument("--calibration", help="an earlier report: its figure is used instead of a new measurement")
    parser.add_argument("--quick", action="store_true", help="one budget, fewer tokens and steps: to see that it runs")
    parser.add_argument("--name", default="twins", help="name of the report under out/bench")
    options = parser.parse_args()
    if options.quick:
        options.shares, options.steps, options.warm_up, options.demand_steps = "0.5", 7, 5, 2
        options.width, options.depth = 192, 8
    return options


def calibrate(options: argparse.Namespace) -> float:
    if options.calibration:
        return float(json.loads(Path(options.calibration).read_text(encoding="utf-8"))["calibration"]["compute_flops"])
    torch.set_num_threads(options.threads)
    rows = options.micro_batch * options.context
    return misa.emulated.measure_flops(rows, options.width, 4 * options.width, 3.0)


def run_worker(settings: dict[str, Any], folder: Path) -> list[dict[str, Any]]:
    path = folder / f"{settings['twin']}-{settings['mode']}.json"
    path.write_text(json.dumps(settings), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    results = []
    with subprocess.Popen([sys.executable, "-m", "tests.bench.twins_worker", str(path)], stdout=subprocess.PIPE, text=True,
                          env=environment, cwd=ROOT) as process:
        assert process.stdout is not None
        for line in process.stdout:
            result = json.loads(line)
            results.append(result)
            what = result["run"] + (f" at {result['share']:.2f}" if "share" in result else "")
            seconds = result.get("step_seconds")
            print(f"  {settings['twin']:9} {settings['mode']:8} {what:16} "
                  + (" ".join(f"{s:6.2f}" for s in seconds) + " s" if seconds else result.get("refused", "")), flush=True)
    if process.returncode != 0:
        raise SystemExit(f"the worker for {settings['twin']} {settings['mode']} ended with {process.returncode}")
    return results


def plain_step_seconds(results: list[dict[str, Any]]) -> list[float]:
    """The median step of plain training, at the beginning and at the end. Only its first step is unlike the others."""
    return [statistics.median(r["step_seconds"][1:]) for r in results if r["run"].startswith("plain")]


def rows_of(settings: dict[str, Any], results: list[dict[str, Any]],
            plan: Callable[[int], dict[str, Any]]) -> list[dict[str, Any]]:
    """The report's rows; `plan` gives misactl's answer for a budget."""
    warm_up = settings["warm_up"]
    (plain,) = (r for r in results if r["run"] == "plain")
    plain_seconds = statistics.mean(plain_step_seconds(results))
    demand = {r["share"]: r for r in results if r["run"] == "demand" and "refused" not in r}
    rows: list[dict[str, Any]] = []
    for result in results:
        if result["run"] != "managed":
            continue
        share = result["share"]
        row: dict[str, Any] = {
            "case": f"{settings['twin']}/{settings['mode']}/{share:.2f}",
            "peer": "plain training; the same run on demand with least-recently-used eviction",
            "twin": settings["twin"],
            "mode": settings["mode"],
            "budget_bytes": result["budget_bytes"],
            "budget_over_plain_peak": share,
            "tokens_per_step": settings["tokens_per_step"],
            "tokens_over_tau": settings["tokens_per_step"] / misa.emulated.twins()[settings["twin"]],
            "plain_step_seconds": plain_seconds,
            "plain_step_seconds_first_and_last": plain_step_seconds(results),
            "plain_peak_bytes": plain["device_peak_bytes"],
        }
        rows.append(row)
        if "refused" in result:
            row["refused"] = result["refused"]
            continue
        report = result["report"]
        counted = result["step_seconds"][warm_up:]
        step = statistics.median(counted)
        bound = misa.step_bound(report, plain_seconds)
        largest = result["largest_module_bytes"]
        # The last step is counted when the next one begins.
        moved = {d: statistics.median(report[f"{name}_bytes"][warm_up:]) for d, name in (("h2d", "loaded"), ("d2h", "unloaded"))}
        least = {d: report[f"bound_{d}_bytes_per_step"] for d in ("h2d", "d2h")}
        row.update(
            step_seconds_median=step,
            step_seconds=counted,
            bound_step_seconds=bound,
            bound_link_seconds=report["bound_link_seconds"],
            reported_bound_step_seconds=report["bound_step_seconds"],
            step_over_bound=step / bound,
            speed_over_plain=plain_seconds / step,
            bound_speed_over_plain=plain_seconds / bound,
            bound_allows=plain_seconds / bound >= GOAL_SPEED,
            stall_seconds_median=report["stall_seconds_median"],
            predicted_step_seconds=report["predicted_step_seconds"],
            predicted_over_measured=report["predicted_step_seconds"] / step,
            **{f"{d}_bytes_per_step": moved[d] for d in moved},
            **{f"bound_{d}_bytes_per_step": least[d] for d in least},
            largest_module_bytes=largest,
            modules_over_bound={d: (moved[d] - least[d]) / largest for d in moved},
            device_peak_bytes=result["device_peak_bytes"],
            peak_over_plain=result["device_peak_bytes"] / plain["device_peak_bytes"],
            within_budget=result["device_peak_bytes"] <= result["budget_bytes"],
            identical=result["state_sha256"] == plain["state_sha256"],
            device_stddev_bytes=result["device_stddev_bytes"],
            demand_loads=report["demand_loads"],
            prefetch_loads=report["prefetch_loads"],
            departures=report["departures"],
            plan_version=report["plan_version"],
            device=report["device"],
            notices=report["notices"],
            # misactl knows nothing of what lived before the model.
            **compare(plan(int(share * plain["device_peak_bytes"])), step),
        )
        beside = demand.get(share)
        if beside is not None:
            row["demand_step_seconds"] = beside["step_seconds"][-1]
            row["demand_stddev_bytes"] = beside["device_stddev_bytes"]
            if beside["device_stddev_bytes"] > 0:
                row["stddev_over_demand"] = result["device_stddev_bytes"] / beside["device_stddev_bytes"]
        row["goals"] = {
            "step_over_bound": row["step_over_bound"] <= GOAL_STEP_OVER_BOUND,
            "bytes_over_bound": all(m <= 1 for m in row["modules_over_bound"].values()),
            "identical": row["identical"],
            "within_budget": row["within_budget"],
            "prediction": abs(row["predicted_over_measured"] - 1) <= GOAL_PREDICTION,
            "plan": row["plan_error"] is not None and abs(row["plan_error"]) <= GOAL_PREDICTION,
            "deviation": row.get("stddev_over_demand", 1) <= GOAL_DEVIATION,
            "peak_at_speed": row["peak_over_plain"] <= GOAL_PEAK + 0.005 and row["speed_over_plain"] >= GOAL_SPEED,
        }
    return rows


def answer_for(asked: TwinPlan, mode: str, reached_flops: float, budget_bytes: int) -> dict[str, Any]:
    return asked.ask(mode=mode, reached_flops=reached_flops, budget_bytes=budget_bytes)


def print_rows(rows: list[dict[str, Any]]) -> None:
    print(f"\n{'case':24} {'step':>7} {'/bound':>7} {'speed':>6} {'allows':>6} {'peak':>5} {'in+':>6} {'out+':>6} {'predict':>7} "
          f"{'plan':>6} {'dev':>5}  bits")
    for row in rows:
        if "refused" in row:
            print(f"{row['case']:24} {row['refused'][:110]}")
            continue
        over = row["modules_over_bound"]
        plan = "-" if row["plan_error"] is None else f"{row['plan_error']:+.1%}"
        print(f"{row['case']:24} {row['step_seconds_median']:6.2f}s {row['step_over_bound']:7.3f} {row['speed_over_plain']:6.3f} "
              f"{'yes' if row['bound_allows'] else 'no':>6} {row['peak_over_plain']:5.2f} {over['h2d']:6.2f} {over['d2h']:6.2f} "
              f"{row['predicted_over_measured']:7.3f} {plan:>6} {row.get('stddev_over_demand', float('nan')):5.2f}  "
              f"{'same' if row['identical'] else 'DIFFERENT'}")
    done = [row for row in rows if "goals" in row]
    for goal in done[0]["goals"] if done else ():
        met = [row for row in done if row["goals"][goal]]
        print(f"{goal:16} met in {len(met)} of {len(done)} rows")
    allowed = [row for row in done if row["bound_allows"] and row["peak_over_plain"] <= GOAL_PEAK + 0.005]
    met = [row for row in allowed if row["goals"]["peak_at_speed"]]
    print(f"peak -60 % at {GOAL_SPEED} x plain: {len(met)} of the {len(allowed)} rows whose bound allows it")


def main() -> int:
    options = parse()
    begin = time.monotonic()
    flops = calibrate(options)
    tau = misa.emulated.twins()
    print(f"{flops / 1e9:.1f} GFLOP/s with {options.threads} thread(s)", flush=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="misa-twins-") as name:
        folder = Path(name)
        try:
            corpus = prepare(folder, options.vocabulary)
        except DataError as error:
            print(f"The benchmark has no text: {error}", file=sys.stderr)
            return 1
        for twin in options.twins.split(","):
            unit = options.micro_batch * options.context
            tokens = max(1, round(TOKENS_OVER_TAU[twin] * tau[twin] / unit)) * unit
            if options.quick:
                tokens = max(1, tokens // 3 // unit) * unit
            reached_flops: float | None = None
            for mode in options.modes.split(","):
                settings = {
                    "twin": twin,
                    "mode": mode,
                    "compute_flops": flops,
                    "tokens": str(folder / "tokens.npy"),
                    "tokens_per_step": tokens,
                    "micro_batch": options.micro_batch,
                    "group": options.group,
                    "model": {"vocabulary": options.vocabulary, "width": options.width, "depth": options.depth,
                              "heads": max(1, options.width // 64), "context": options.context, "checkpointing": True},
                    "shares": [float(s) for s in options.shares.split(",")],
                    "steps": options.steps,
                    "demand_steps": options.demand_steps,
                    "warm_up": options.warm_up,
                    "threads": options.threads,
                    "sampling": {"delta": options.delta, "inner_steps": 50, "seed": 0} if mode == "sampled" else {},
                }
                results = run_worker(settings, folder)
                asked = TwinPlan(folder, settings, tau[twin], DUPLEX_FACTOR)
                if reached_flops is None:
                    # Of the first mode; the second one's compute is a prediction.
                    reached_flops = asked.reached_flops(mode, statistics.mean(plain_step_seconds(results)))
                rows.extend(rows_of(settings, results, functools.partial(answer_for, asked, mode, reached_flops)))
                # After each worker: whoever stops it keeps what was measured.
                path = write_report(
                    options.name, rows, threads=options.threads,
                    calibration={"compute_flops": flops, "tokens_that_hide_a_layer": tau, "element_bytes": 4,
                                 "link_bytes_per_second": {t: 2 * flops / tau[t] for t in tau}},
                    model=settings["model"], data=corpus.name, steps=options.steps, warm_up=options.warm_up,
                    quick=options.quick, minutes=(time.monotonic() - begin) / 60)
                print(f"  {(time.monotonic() - begin) / 60:.1f} min so far", flush=True)
    print_rows(rows)
    print(f"\n{path}, after {(time.monotonic() - begin) / 60:.1f} min")
    return 0


if __name__ == "__main__":
    sys.exit(main())
