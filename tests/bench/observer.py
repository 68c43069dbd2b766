"""What the touch observer costs: per operator, and per step of a transformer of width 1024 with everything resident.

    python -m tests.bench.observer [--rounds 8]

A plain and a managed process take turns in one run; the figures are the medians' ratio and the fastest times' difference.
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

OPERATORS = 200_000


class Side:
    def __init__(self, side: str, options: argparse.Namespace) -> None:
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.bench.observer_worker", "--side", side, "--layers", str(options.layers), "--tokens",
             str(options.tokens), "--threads", str(options.threads)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT,
        )
        self.seconds: list[float] = []
        self.cpu_seconds: list[float] = []
        self.nanoseconds: list[float] = []

    def ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"a worker ended with {self._process.wait(timeout=60)}")
        return json.loads(line)

    def steps(self, count: int, counted: bool) -> None:
        answer = self.ask(f"steps {count}")
        if counted:
            self.seconds += answer["seconds"]
            self.cpu_seconds += answer["cpu_seconds"]

    def operators(self) -> None:
        self.nanoseconds.append(self.ask(f"operators {OPERATORS}")["nanoseconds"])

    def close(self) -> None:
        if self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.write("finish\n")
            self._process.stdin.close()
            self._process.wait(timeout=60)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024, help="tokens a step")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    plain, managed = Side("plain", options), Side("managed", options)
    try:
        for side in (plain, managed):
            side.steps(4, counted=False)
        for number in range(options.rounds):
            # The order changes, so that neither side always follows the other.
            for side in (plain, managed) if number % 2 == 0 else (managed, plain):
                side.operators()
                side.steps(2, counted=True)
            print(f"  round {number + 1}: plain {plain.seconds[-1]:.3f} s, managed {managed.seconds[-1]:.3f} s a step; "
                  f"{plain.nanoseconds[-1]:.0f} and {managed.nanoseconds[-1]:.0f} ns an operator", flush=True)
    finally:
        plain.close()
        managed.close()
    per_operator = min(managed.nanoseconds) - min(plain.nanoseconds)
    ratio = statistics.median(managed.seconds) / statistics.median(plain.seconds)
    cpu_ratio = statistics.median(managed.cpu_seconds) / statistics.median(plain.cpu_seconds)
    rows = [
        {"case": "operator", "plain_nanoseconds": min(plain.nanoseconds), "managed_nanoseconds": min(managed.nanoseconds),
         "added_nanoseconds": per_operator},
        {"case": "step", "layers": options.layers, "tokens": options.tokens, "threads": options.threads,
         "plain_seconds_median": statistics.median(plain.seconds),
         "managed_seconds_median": statistics.median(managed.seconds), "ratio": ratio,
         "plain_cpu_seconds_median": statistics.median(plain.cpu_seconds),
         "managed_cpu_seconds_median": statistics.median(managed.cpu_seconds), "cpu_ratio": cpu_ratio,
         "peer": "the same model without misa"},
    ]
    path = write_report("observer", rows)
    print(f"An operator: {per_operator:+.0f} ns. A step: {(ratio - 1) * 100:+.2f} % (processor time {(cpu_ratio - 1) * 100:+.2f} %). "
          f"Written to {path.relative_to(ROOT)}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
