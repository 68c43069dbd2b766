"""`make exactness`: managed training beside plain training over model families, optimizers, loops and budgets.

Writes out/exactness/report.json and fails unless every row ended in the same bits or was refused before its first step.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ROW_SECONDS = 240.0  # then the worker hangs
END_SECONDS = 10.0


class Worker:
    """A process that runs rows; a new one after a row that ended it."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lines: queue.Queue[str] = queue.Queue()
        self._log = open(ROOT / "out/exactness/workers.log", "a", encoding="utf-8")  # noqa: SIM115: as long as the process

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen([sys.executable, "-m", "tests.exactness.worker"], stdin=subprocess.PIPE,
                                   stdout=subprocess.PIPE, stderr=self._log, text=True, cwd=ROOT)
        self._lines = queue.Queue()

        def read(lines: queue.Queue[str]) -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        threading.Thread(target=read, args=(self._lines,), daemon=True).start()
        return process

    def run(self, row: Any) -> dict[str, Any]:
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(row)) + "\n")
        self._process.stdin.flush()
        try:
            answer = self._lines.get(timeout=ROW_SECONDS)
        except queue.Empty:
            self.end()
            return {"error": f"no answer within {ROW_SECONDS:.0f} s"}
        if not answer:
            return {"error": f"the process ended with status {self._process.wait()}"}
        line = json.loads(answer)
        if "trace" in line:
            self._process.wait(timeout=60)
        return line

    def end(self) -> None:
        """Lets the process end, with its daemon; one that hangs is ended."""
        if self._process is None:
            return
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=END_SECONDS)
        except subprocess.TimeoutExpired:
            # First of all so that its daemon goes as well.
            self._process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=END_SECONDS)
            self._process.kill()
            self._process.wait()
        self._process = None


def main() -> int:
    parser = argparse.ArgumentParser(prog="make exactness", description=__doc__)
    parser.add_argument("--rows", type=int, help="only so many rows, a fair sample")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of rows (default 0)")
    parser.add_argument("--workers", type=int, default=int(os.environ.get("MISA_JOBS", 0)) or os.cpu_count() or 1)
    parser.add_argument("--no-witness", action="store_true", help="leave out the rows under a memory cgroup")
    for name in ("family", "optimizer", "loop", "step", "pressure"):
        parser.add_argument(f"--{name}", action="append", help=f"only rows of this {name}")
    arguments = parser.parse_args()

    package = str(ROOT / "build/python")
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (package, os.environ.get("PYTHONPATH")) if p)
    os.environ.setdefault("MISA_DAEMON", str(ROOT / "build/bin/misad"))
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, package)
    from tests.exactness import design
    from tests.exactness.families import FAMILIES

    chosen = design.rows(arguments.seed)
    for name in ("family", "optimizer", "loop", "step", "pressure"):
        if wanted := getattr(arguments, name):
            chosen = [row for row in chosen if getattr(row, name) in wanted]
    chosen = chosen[: arguments.rows]

    folder = ROOT / "out/exactness"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "workers.log").write_text("", encoding="utf-8")
    waiting = list(enumerate(chosen))[::-1]
    lines: dict[int, dict[str, Any]] = {}
    lock = threading.Lock()
    begin = time.monotonic()

    def work() -> None:
        worker = Worker()
        try:
            while True:
                with lock:
                    if not waiting:
                        return
                    number, row = waiting.pop()
                # What the row is, and over it what its process said of it.
                line = {"model": row.family, "kind": FAMILIES[row.family].kind, "optimizer": row.optimizer,
                        "features": [row.loop, f"step={row.step}", row.pressure], "identical": False, "budget_ratio": None,
                        "device_peak_bytes": None, "refused": None} | worker.run(row)
                with lock:
                    lines[number] = line
                    bad = line["identical"] is False
                    if bad or len(lines) % 20 == 0:
                        print(f"{len(lines)}/{len(chosen)} {time.monotonic() - begin:.0f} s"
                              + (f"  NOT IDENTICAL: {row} {line.get('error') or line.get('differences')}" if bad else ""),
                              flush=True)
        finally:
            worker.end()

    threads = [threading.Thread(target=work) for _ in range(max(1, arguments.workers))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    ordered = [lines[number] for number in sorted(lines)]
    if not arguments.no_witness:
        from tests.exactness import witness

        for line in witness.rows():
            ordered.append(line)
            print(f"with the kernel's limit: {line['model']}, {'identical' if line['identical'] else 'NOT IDENTICAL'} "
                  f"{line.get('error') or line.get('differences') or ''}", flush=True)
    identical = sum(line["identical"] is True for line in ordered)
    refused = sum(line["refused"] is not None for line in ordered)
    report = {
        "schema": "misa.exactness/1",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "seed": arguments.seed,
        "seconds": time.monotonic() - begin,
        "identical": identical, "refused": refused, "different": len(ordered) - identical - refused,
        "pairs_not_covered": design.uncovered(chosen),
        "rows": ordered,
    }
    path = folder / "report.json"
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print(f"{len(ordered)} rows: {identical} identical, {refused} refused before the first step, {report['different']} "
          f"different, in {report['seconds']:.0f} s -> {path.relative_to(ROOT)}")
    return 0 if report["different"] == 0 and ordered else 1


def versions() -> dict[str, str]:
    from importlib import metadata

    names = ("torch", "transformers", "torchvision", "peft", "lion-pytorch")
    return {"python": platform.python_version()} | {name: metadata.version(name) for name in names}


if __name__ == "__main__":
    sys.exit(main())
