"""What people pick instead, side by side in one run where no GPU is needed: memory, speed, and whether the result is plain's.

    python -m tests.bench.ecosystem [--steps N] [--width N]

Writes out/bench/ecosystem.json. Memory is the peak of a cgroup around each case's process, less that of a process that
trains next to nothing; `device_peak_bytes` is misa's meter, which counts tensors only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from importlib import metadata
from typing import Any

from demo.cgroup import CgroupUnavailable, MemoryCgroup
from tests.bench.report import ROOT, write_report

CASES = {
    "plain": "torch",
    "misa": "misa",
    "torch mmap": "torch",
    "accelerate disk_offload": "accelerate",
    "deepspeed zero-3": "deepspeed",
}
CASE_SECONDS = 900
# Not among what `make setup` installs: measured where it is there.
OPTIONAL = {"deepspeed"}


def run(settings: dict[str, Any]) -> dict[str, Any]:
    group: Any = contextlib.nullcontext()
    with contextlib.suppress(CgroupUnavailable):
        group = MemoryCgroup("ecosystem-" + settings["case"].replace(" ", "-"), None)
    failed = {"trained": False, "losses": [], "step_seconds": [], "device_peak_bytes": None}
    with group as cgroup:
        try:
            done = subprocess.run([sys.executable, "-m", "tests.bench.ecosystem_worker", json.dumps(settings)], cwd=ROOT, text=True,
                                  capture_output=True, timeout=CASE_SECONDS, preexec_fn=cgroup.join if cgroup else None)
        except subprocess.TimeoutExpired:
            return {**failed, "error": f"it did not end within {CASE_SECONDS} s", "cgroup_peak_bytes": None}
        peak = cgroup.peak_bytes() if cgroup else None
    if done.returncode != 0:
        return {**failed, "error": f"ended with status {done.returncode}: {done.stderr[-500:]}", "cgroup_peak_bytes": peak}
    return {**json.loads(done.stdout.splitlines()[-1]), "cgroup_peak_bytes": peak}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rows", type=int, default=3)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=4000)
    parser.add_argument("--share", type=float, default=0.4, help="misa's budget, of plain's peak")
    parser.add_argument("--disk", default=os.environ.get("MISA_DISK_DIR", "/var/tmp"))
    options = vars(parser.parse_args())
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(ROOT / "build/python"), os.environ.get("PYTHONPATH")) if p)
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("MISA_DAEMON", str(ROOT / "build/bin/misad"))

    base = run({**options, "case": "plain", "width": 64, "layers": 1, "steps": 1, "vocabulary": 100})
    results: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    for case, package in CASES.items():
        if package in OPTIONAL and importlib.util.find_spec(package) is None:
            skipped[case] = f"{package} is not installed in this Python; with `pip install {package}` it is measured as well."
            print(f"{case}: {skipped[case]}", flush=True)
            continue
        settings = {**options, "case": case}
        if case == "misa":
            settings["budget"] = int(options["share"] * results["plain"]["device_peak_bytes"])
        results[case] = run(settings)
        print(case, {k: v for k, v in results[case].items() if k not in ("losses", "step_seconds")}, flush=True)
    plain = results["plain"]
    rows = []
    for case, result in results.items():
        both = result["cgroup_peak_bytes"] is not None and base["cgroup_peak_bytes"] is not None
        rows.append({
            "case": case, "peer": f"{CASES[case]} {metadata.version(CASES[case])}" if CASES[case] != "misa" else "misa",
            "ran_to_the_end": len(result["step_seconds"]) == options["steps"], "trained": result["trained"], "error": result.get("error"),
            "note": result.get("note"),
            # An optimizer that keeps its state in a form of its own is compared by the weights alone.
            "same_bits_as_plain": result["state_sha256"] == plain["state_sha256"] if "state_sha256" in result
            else result.get("weights_sha256") == plain["weights_sha256"],
            "loss_first": result["losses"][0] if result["losses"] else None,
            "loss_last": result["losses"][-1] if result["losses"] else None,
            "step_seconds_median": statistics.median(result["step_seconds"][2:]) if len(result["step_seconds"]) > 2 else None,
            "cgroup_peak_bytes": result["cgroup_peak_bytes"],
            "above_base_line_bytes": result["cgroup_peak_bytes"] - base["cgroup_peak_bytes"] if both else None,
            "device_peak_bytes": result["device_peak_bytes"],
        })
    rows += [{"case": case, "peer": CASES[case], "skipped": why} for case, why in skipped.items()]
    path = write_report("ecosystem", rows, settings=options, base_line_bytes=base["cgroup_peak_bytes"])
    print(f"report: {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
