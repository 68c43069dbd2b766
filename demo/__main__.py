"""`python -m demo`: four runs of the same training, two of them in a third of the memory, and what came of it."""

from __future__ import annotations

import argparse
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from demo import data, show
from demo.cgroup import CgroupUnavailable, MemoryCgroup
from demo.model_sizes import SIZES

RUN_SECONDS_LIMIT = 1800.0
# For every run alike: threads that wait for each other sleep instead of spinning, so that a busy machine, and the daemon's
# and the disk's work beside the compute, do not multiply the step time.
_WAIT_POLICY = "passive"


class DemoError(Exception):
    """Something the demo cannot go on from, as a sentence."""


@dataclass
class Child:
    """What is left of a run's process."""

    cgroup_peak_bytes: int | None
    usage_bytes: int  # at the moment it said that it was ready


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="make demo DEMO_ARGS=…" if os.environ.get("MAKELEVEL") else "python -m demo",
        description="Trains a language model plainly and with misa in a third of the memory, and compares.",
        epilog="Examples: make demo, make demo DEMO_ARGS='--steps 5', make demo DEMO_ARGS='--budget-share 0.25'",
    )
    parser.add_argument("--steps", type=int, default=24, help="training steps of each run (default: 24)")
    parser.add_argument("--size", choices=sorted(SIZES), default="standard", help="of the model (default: standard)")
    parser.add_argument("--budget-share", type=float, default=1 / 3, help="budget as a share of plain's peak (default: 1/3)")
    parser.add_argument("--batch", type=int, default=4, help="windows of text a step (default: 4)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="compute threads (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and draws (default: 0)")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--delta", type=float, default=0.25, help="sampled: share of parameters trained in a round")
    parser.add_argument("--inner-steps", type=int, default=5, help="sampled: steps of a round")
    parser.add_argument("--out", type=Path, default=Path("out/demo"), help="folder of the report (default: out/demo)")
    parsed = parser.parse_args(arguments)
    if parsed.steps < 1 or parsed.batch < 1 or parsed.threads < 1:
        parser.error("--steps, --batch and --threads must be at least 1")
    if not 0 < parsed.budget_share <= 1:
        parser.error("--budget-share must be above 0 and at most 1")
    return parsed


class Progress:
    """One line a run: rewritten in place on a terminal, else only its start and its end."""

    def __init__(self) -> None:
        self._live = sys.stdout.isatty()

    def update(self, text: str) -> None:
        if self._live:
            print(f"\r\033[K{text}", end="", flush=True)

    def line(self, text: str) -> None:
        print(f"\r\033[K{text}" if self._live else text, flush=True)


class Demo:
    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out: Path = options.out
        self.progress = Progress()
        self.cgroup_note = ""

    def run(self) -> int:
        self.out.mkdir(parents=True, exist_ok=True)
        self.progress.update("reading the text …")
        corpus = data.prepare(self.out, SIZES[self.options.size]["vocabulary"])
        self.progress.line(
            f"text       {corpus.name}, {corpus.text_bytes:,} bytes, {len(corpus.tokens):,} tokens; "
            f"{self.options.steps} steps of {self.tokens_per_step()} tokens, {self.options.threads} threads"
        )
        runs = [self.measure("plain", None, None)]
        budget = int(runs[0]["device_peak_bytes"] * self.options.budget_share)
        baseline = self.measure_baseline(budget)
        limit = baseline + budget
        self.progress.line(
            f"budget     {show.mebibytes(budget)}, {self.options.budget_share:.0%} of plain's peak; limit for trainer and daemon "
            f"together: budget + base line of {show.mebibytes(baseline)} = {show.mebibytes(limit)}"
        )
        runs.append(self.measure("exact", budget, limit))
        runs.append(self.measure("sampled_reference", None, None))
        runs.append(self.measure("sampled", budget, limit))
        runs.sort(key=lambda run: ("plain", "exact", "sampled", "sampled_reference").index(run["name"]))
        return self.conclude(corpus, runs, budget, baseline, limit)

    def tokens_per_step(self) -> int:
        return self.options.batch * SIZES[self.options.size]["context"]

    def settings_file(self, name: str, budget: int | None) -> Path:
        settings = {
            "name": name,
            "result": str(self.out / f"{name}.json"),
            "tokens": str(self.out / "tokens.npy"),
            "steps": self.options.steps,
            "threads": self.options.threads,
            "seed": self.options.seed,
            "batch": self.options.batch,
            "learning_rate": self.options.learning_rate,
            "budget_bytes": budget,
            "model": SIZES[self.options.size],
            "sampling": {
                "delta": self.options.delta,
                "eta": 1.0,
                "alpha": 0.1,
                "inner_steps": self.options.inner_steps,
                "seed": self.options.seed,
            },
        }
        path = self.out / f"{name}.settings.json"
        path.write_text(json.dumps(settings), encoding="utf-8")
        return path

    def cgroup(self, name: str, limit: int | None) -> Any:
        """A cgroup for a run, or a context that gives None where the host does not allow one."""
        try:
            group = MemoryCgroup(name, limit)
        except CgroupUnavailable as reason:
            if not self.cgroup_note:
                self.cgroup_note = f"not limited by the kernel: {reason}"
                self.progress.line(f"cgroup     {self.cgroup_note}")
            return nullcontext(None)
        self.cgroup_note = f"{group.description}, trainer and daemon together"
        return group

    def measure(self, name: str, budget: int | None, limit: int | None) -> dict[str, Any]:
        result_path = self.out / f"{name}.json"
        result_path.unlink(missing_ok=True)
        child = self.run_child(name, budget, limit)
        if not result_path.exists():
            raise DemoError(f"the run {name} ended without a result; see {self.out / name}.log.")
        result = json.loads(result_path.read_text(encoding="utf-8"))
        result["cgroup_peak_bytes"] = child.cgroup_peak_bytes
        result["limit_bytes"] = limit if child.cgroup_peak_bytes is not None else None
        self.progress.line(
            f"{name:<18} {result['steps']} steps, {result['step_seconds_median']:.2f} s each, "
            f"peak {show.mebibytes(result['device_peak_bytes'])}, loss {result['loss_first']:.3f} → {result['loss_last']:.3f}"
        )
        return result

    def measure_baseline(self, budget: int) -> int:
        self.progress.update("measuring the base line …")
        child = self.run_child("baseline", budget, None)
        # Measured as the runs are: by the cgroup's peak, where there is one.
        return child.usage_bytes if child.cgroup_peak_bytes is None else child.cgroup_peak_bytes

    def run_child(self, name: str, budget: int | None, limit: int | None) -> Child:
        settings = self.settings_file(name, budget)
        log_path = self.out / f"{name}.log"
        usage = 0
        with self.cgroup(name, limit) as group, log_path.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "demo.run_one", str(settings)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={"OMP_WAIT_POLICY": _WAIT_POLICY, **os.environ},
                preexec_fn=group.join if group else None,
            )
            try:
                for message in self.messages(process, name, log):
                    if "ready" in message:
                        usage = group.usage_bytes() if group else tree_pss_bytes(process.pid)
                        process.stdin.write(b"\n")
                        process.stdin.flush()
                    else:
                        self.progress.update(
                            f"{name:<18} step {message['step']}/{self.options.steps}, "
                            f"{message['seconds']:.2f} s, loss {message['loss']:.3f}"
                        )
                status = process.wait(timeout=60)
            finally:
                if process.poll() is None:
                    process.kill()
                    process.wait()
            if status != 0:
                raise DemoError(self.explain(name, status, group.oom_kills() if group else 0, limit, log_path))
            return Child(group.peak_bytes() if group else None, usage)

    def messages(self, process: subprocess.Popen, name: str, log: Any) -> Any:
        """Yields the run's JSON lines until its output ends; other lines go into its log."""
        deadline = time.monotonic() + RUN_SECONDS_LIMIT
        selector = selectors.DefaultSelector()
        selector.register(process.stdout, selectors.EVENT_READ)
        pending = b""
        while True:
            if not selector.select(timeout=max(0.0, deadline - time.monotonic())):
                raise DemoError(f"the run {name} was ended: it took longer than {RUN_SECONDS_LIMIT:.0f} s.")
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                return
            *lines, pending = (pending + chunk).split(b"\n")
            for line in lines:
                try:
                    message = json.loads(line)
                except ValueError:
                    message = None
                if isinstance(message, dict):
                    yield message
                else:
                    log.write(line.decode("utf-8", "replace") + "\n")

    def explain(self, name: str, status: int, oom_kills: int, limit: int | None, log_path: Path) -> str:
        last = log_path.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-12:]
        tail = "".join(f"\n  {line}" for line in last)
        if oom_kills:
            return f"the kernel ended the run {name}: it needed more than its limit of {show.mebibytes(limit)}.{tail}"
        how = f"signal {-status}" if status < 0 else f"exit status {status}"
        return f"the run {name} failed with {how}; its log is {log_path}.{tail}"

    def conclude(self, corpus: data.Corpus, runs: list[dict], budget: int, baseline: int, limit: int) -> int:
        timelines = {run["name"]: run.pop("timeline") for run in runs}
        by_name = {run["name"]: run for run in runs}
        exact = by_name["exact"]
        identical = {
            "exact": exact["state_sha256"] == by_name["plain"]["state_sha256"],
            "sampled": by_name["sampled"]["state_sha256"] == by_name["sampled_reference"]["state_sha256"],
        }
        report = {
            "schema": "misa.demo/1",
            "device": exact.pop("device"),
            "model": {
                "parameter_count": exact["parameter_count"],
                "module_count": exact["module_count"],
                "weights_bytes": exact["weights_bytes"],
                "gradients_bytes": exact["gradients_bytes"],
                "optimizer_bytes": exact["optimizer_bytes"],
                "size": SIZES[self.options.size],
            },
            "data": {"name": corpus.name, "bytes": corpus.text_bytes, "tokens_per_step": self.tokens_per_step()},
            "threads": self.options.threads,
            "budget_bytes": budget,
            "baseline_bytes": baseline,
            "baseline_note": "trainer and daemon running the same program around a model of one block of width 64",
            "limit_bytes": limit,
            "cgroup_note": self.cgroup_note,
            "identical": identical,
            "runs": runs,
        }
        for run in runs:
            run.pop("device", None)
        self.write_atomically(self.out / "report.json", json.dumps(report, indent=1) + "\n")
        self.write_atomically(self.out / "timelines.json", json.dumps(timelines) + "\n")
        show.plot(runs, timelines, budget, self.out / "memory.png")

        print(f"\n{show.table(runs)}\n")
        print("\n".join(show.findings(runs, identical)))
        print(f"cgroup: {self.cgroup_note}.\nReport: {self.out / 'report.json'}; plot: {self.out / 'memory.png'}")
        broken = show.problems(runs, identical)
        for sentence in broken:
            print(f"demo: {sentence}", file=sys.stderr)
        return 1 if broken else 0

    @staticmethod
    def write_atomically(path: Path, text: str) -> None:
        temporary = path.with_suffix(".tmp")
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)


def tree_pss_bytes(pid: int) -> int:
    """What a process and its children use, shared pages by their share: the stand-in where there is no cgroup."""
    import psutil

    parent = psutil.Process(pid)
    return sum(process.memory_full_info().pss for process in [parent, *parent.children(recursive=True)])


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    # Asked to stop, the demo ends its run and removes its cgroup just as when it is interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return Demo(options).run()
    except (DemoError, data.DataError) as error:
        print(f"\ndemo: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ndemo: interrupted.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
