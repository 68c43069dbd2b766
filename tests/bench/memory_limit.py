"""Training whose state is three and four times its memory limit: misa beside plain training, swap and mapped files.

    python -m tests.bench.memory_limit [--turns 2] [--cases plain,exact,…]

Every case is a process of its own in a memory cgroup of its own, and the cases take turns, so that a change of the machine
meets all of them. The first step of a turn is not counted: between turns a case's disk has been idle.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Callable

from demo.cgroup import CgroupUnavailable, MemoryCgroup

from tests.bench.report import ROOT, write_report

# What a private daemon and the interpreter's small change take beside the measured base line.
MARGIN_BYTES = 56 << 20
DEADLINE_SECONDS = 1800.0
PEERS = {"kernel-swap": "the kernel's swap", "mmap": "memory-mapped files"}


class CaseEnded(Exception):
    """A case's process ended by itself; the message says why."""


@dataclass
class Case:
    name: str
    share: float | None  # of the state; None: no limit
    steps_per_turn: int
    turns: int
    warm_up: int
    swap: bool = False
    recompute: bool = False  # activation checkpointing, block by block
    cgroup: MemoryCgroup | None = None
    process: subprocess.Popen[str] | None = None
    errors: IO[str] | None = None
    seconds: list[float] = field(default_factory=list)
    read_bytes: list[float] = field(default_factory=list)
    written_bytes: list[float] = field(default_factory=list)
    row: dict[str, Any] = field(default_factory=dict)

    def ask(self, command: str) -> dict[str, Any]:
        assert self.process is not None and self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(command + "\n")
        self.process.stdin.flush()
        return self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process is not None and self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            code = self.process.wait(timeout=60)
            assert self.errors is not None
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines()
            raise CaseEnded("the kernel ended it: out of memory in its cgroup" if code == -9 else
                            said[-1] if said else f"it ended with {code}")
        return json.loads(line)


@contextlib.contextmanager
def swap_file(bytes_: int, directory: str) -> Any:
    """A swap file while the context is open; needs root."""
    path = Path(directory) / "misa-bench-swap"
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, bytes_)
    path.chmod(0o600)
    try:
        subprocess.run(["mkswap", str(path)], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        subprocess.run(["swapon", str(path)], check=True)
        try:
            yield
        finally:
            subprocess.run(["swapoff", str(path)], check=False)
    finally:
        path.unlink(missing_ok=True)


def start(case: Case, options: argparse.Namespace, state_bytes: int) -> None:
    limit = None if case.share is None else int(state_bytes * case.share)
    case.cgroup = MemoryCgroup(case.name, None) if options.cgroup else None
    cgroup = case.cgroup
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    case.errors = tempfile.TemporaryFile("w+")
    case.process = subprocess.Popen(
        [sys.executable, "-m", "tests.bench.memory_limit_worker", "--case", case.name, "--width", str(options.width),
         "--hidden", str(options.hidden), "--blocks", str(options.blocks), "--rows", str(options.rows), "--threads",
         str(options.threads), "--disk", options.disk, *(["--recompute"] if case.recompute else [])],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=case.errors, text=True, env=environment, cwd=ROOT,
        preexec_fn=cgroup.join if cgroup is not None else None,
    )
    case.hear()
    # Page cache of the libraries is charged to whoever reads them first; only the process's own memory counts here.
    base_line = own_bytes(case.process.pid)
    budget = 0 if limit is None else limit - base_line - MARGIN_BYTES
    weights = state_bytes // 4
    late = limit is not None and limit < weights + base_line + MARGIN_BYTES + (256 << 20)
    if limit is not None and cgroup is not None and not late:
        cgroup.set_limit(limit, swap=case.swap)
    answer = case.ask(f"prepare {budget}")
    if limit is not None and cgroup is not None and late:
        # The plain constructor makes the whole model first, which alone is as much as the limit.
        cgroup.set_limit(limit, swap=case.swap)
        cgroup.reset_peak()
    case.row = {
        "case": case.name,
        "limit_bytes": limit,
        "base_line_bytes": base_line,
        "budget_bytes": budget or None,
        "limit_from": "after the model was made" if late else "the start",
        "parameter_count": answer["parameters"],
        "state_bytes": state_bytes,
    }
    if case.recompute:
        case.row["recompute"] = True
    if case.name in PEERS:
        case.row["peer"] = PEERS[case.name]


def own_bytes(pid: int) -> int:
    """Private and shared-memory bytes of a process."""
    values = {}
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        key, _, value = line.partition(":")
        if key in ("RssAnon", "RssShmem"):
            values[key] = int(value.split()[0]) * 1024
    return values.get("RssAnon", 0) + values.get("RssShmem", 0)


def turn(case: Case, steps: int, counted: bool) -> None:
    answer = case.ask(f"steps {steps}")
    if counted:
        case.seconds.extend(answer["seconds"][1:] if steps > 1 else answer["seconds"])
        case.read_bytes.append(answer["read_bytes"] / steps)
        case.written_bytes.append(answer["written_bytes"] / steps)
    case.row["device_peak_bytes"] = answer["device_peak_bytes"]
    case.row["loss_last"] = answer["loss"]
    print(f"  {case.name:18} " + " ".join(f"{s:7.2f}" for s in answer["seconds"]) + " s", flush=True)


def finish(case: Case) -> None:
    # Before the state is read once more for its digest.
    case.row["cgroup_peak_bytes"] = case.cgroup.peak_bytes() if case.cgroup is not None else None
    answer = case.ask("finish")
    assert case.process is not None
    case.process.wait(timeout=120)
    if case.cgroup is not None:
        case.row["oom_kills"] = case.cgroup.oom_kills()
        case.cgroup.close()
    case.row.update(
        steps=answer["steps"],
        step_seconds_median=statistics.median(case.seconds),
        step_seconds=case.seconds,
        read_bytes_per_step=statistics.median(case.read_bytes),
        written_bytes_per_step=statistics.median(case.written_bytes),
        state_sha256=answer["state_sha256"],
    )
    report = answer["report"]
    if report is not None:
        case.row.update(
            stall_seconds_median=report["stall_seconds_median"],
            bound_step_seconds=report["bound_step_seconds"],
            h2d_bytes_per_step=report["h2d_bytes_per_step"],
            d2h_bytes_per_step=report["d2h_bytes_per_step"],
            bound_h2d_bytes_per_step=report["bound_h2d_bytes_per_step"],
            bound_d2h_bytes_per_step=report["bound_d2h_bytes_per_step"],
            demand_loads=report["demand_loads"],
            prefetch_loads=report["prefetch_loads"],
            departures=report["departures"],
            plan_version=report["plan_version"],
            read_bytes_per_step=report["h2d_bytes_per_step"],
            written_bytes_per_step=report["d2h_bytes_per_step"],
            device=report["device"],
            notices=report["notices"],
        )


def run_group(cases: list[Case], options: argparse.Namespace, state_bytes: int) -> list[Case]:
    """The cases of one group side by side. One that cannot go on keeps its row, with the reason; the others go on."""
    alive: list[Case] = []

    def attempt(case: Case, action: Callable[[], None]) -> None:
        try:
            action()
        except CaseEnded as error:
            print(f"  {case.name}: {error}", flush=True)
            case.row.setdefault("case", case.name)
            case.row["refused"] = str(error)
            alive.remove(case)

    try:
        for case in cases:
            print(f"  {case.name}: preparing", flush=True)
            alive.append(case)
            attempt(case, lambda: start(case, options, state_bytes))
        for case in list(alive):
            attempt(case, lambda: turn(case, case.warm_up, counted=False))
        for number in range(max(c.turns for c in cases)):
            for case in list(alive):
                if number < case.turns:
                    attempt(case, lambda: turn(case, case.steps_per_turn, counted=True))
        # All of them to the same number of steps, so that the states can be compared.
        total = max(c.warm_up + c.turns * c.steps_per_turn for c in cases)
        for case in list(alive):
            missing = total - (case.warm_up + case.turns * case.steps_per_turn)
            if missing > 0 and not case.swap:
                attempt(case, lambda: turn(case, missing, counted=False))
        for case in list(alive):
            attempt(case, lambda: finish(case))
        return list(cases)
    finally:
        for case in cases:
            if case.process is not None and case.process.poll() is None:
                case.process.kill()
                case.process.wait(timeout=60)
            if case.cgroup is not None:
                case.cgroup.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1536)
    parser.add_argument("--hidden", type=int, default=6144)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--steps-per-turn", type=int, default=3)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--cases", default="", help="comma-separated; default: all that run here")
    parser.add_argument("--disk", default="/var/tmp", help="directory of the disk tier, the mapped file and the swap file")
    parser.add_argument("--name", default="memory-limit", help="name of the report under out/bench")
    options = parser.parse_args()
    parameters = options.blocks * (2 * options.width * options.hidden + options.width + options.hidden)
    state_bytes = parameters * 4 * 4
    options.cgroup = True
    try:
        MemoryCgroup("probe").close()
    except CgroupUnavailable as error:
        options.cgroup = False
        print(f"No memory cgroup ({error}): limits are not enforced by the kernel, cgroup_peak_bytes is null, and the cases "
              "that live by a limit (kernel-swap, mmap) are left out.")
    print(f"{parameters / 1e6:.0f} M parameters, state {state_bytes / 1e9:.2f} GB, {options.rows} rows a step, "
          f"{options.threads} thread(s)", flush=True)

    def managed(name: str, share: float | None, recompute: bool = False) -> Case:
        return Case(name, share, options.steps_per_turn, options.turns, options.warm_up, recompute=recompute)

    # At a quarter, 1024 rows' activations and the interpreter leave next to nothing: there the activations of a block are
    # computed again in the backward pass, in a plain run beside it too.
    groups = [[managed("plain", None), managed("exact", 1 / 3), managed("exact-in-backward", 1 / 3),
               managed("exact-eager", 1 / 3), managed("plain-recompute", None, recompute=True),
               managed("exact-quarter", 1 / 4, recompute=True)]]
    if options.cgroup:
        # Slow, and their write-back disturbs others: alone, and with fewer steps.
        groups.append([Case("mmap", 1 / 3, 2, 1, 1)])
        groups.append([Case("kernel-swap", 1 / 3, 1, 1, 1, swap=True)])
    chosen = {c for c in options.cases.split(",") if c}
    done: list[Case] = []
    for group in groups:
        cases = [c for c in group if not chosen or c.name in chosen]
        if not cases:
            continue
        with contextlib.ExitStack() as stack:
            if cases[0].swap:
                if os.geteuid() != 0:
                    print("  kernel-swap: left out, a swap file needs root")
                    continue
                try:
                    stack.enter_context(swap_file(state_bytes * 3 // 2, options.disk))
                except (OSError, subprocess.CalledProcessError) as error:
                    print(f"  kernel-swap: left out, no swap file can be used here ({error})")
                    continue
            done.extend(run_group(cases, options, state_bytes))
        # After each group: the slow ones come last, and whoever stops them keeps what was measured.
        rows = [case.row for case in done]
        measured = {r["case"]: r for r in rows if "refused" not in r}
        for row in rows:
            row["compared_with"] = "plain-recompute" if row.get("recompute") else "plain"
            plain = measured.get(row["compared_with"])
            if plain is not None and "refused" not in row:
                row["step_seconds_over_plain"] = row["step_seconds_median"] / plain["step_seconds_median"]
                if row["steps"] == plain["steps"]:
                    row["identical"] = row["state_sha256"] == plain["state_sha256"]
        path = write_report(options.name, rows, rows_per_step=options.rows, threads=options.threads, state_bytes=state_bytes)
    if not done:
        print("No case could run.", file=sys.stderr)
        return 1
    print(f"\n{'case':18} {'limit':>9} {'cgroup peak':>12} {'step':>9} {'/ plain':>8} {'in/step':>9} {'out/step':>9}  same bits")
    for row in rows:
        if "refused" in row:
            print(f"{row['case']:18} {row['refused']}")
            continue
        limit = "none" if row["limit_bytes"] is None else f"{row['limit_bytes'] / 1e9:.2f} GB"
        peak = "–" if row["cgroup_peak_bytes"] is None else f"{row['cgroup_peak_bytes'] / 1e9:.2f} GB"
        print(f"{row['case']:18} {limit:>9} {peak:>12} {row['step_seconds_median']:7.2f} s "
              f"{row.get('step_seconds_over_plain', float('nan')):8.3f} {row['read_bytes_per_step'] / 1e9:6.2f} GB "
              f"{row['written_bytes_per_step'] / 1e9:6.2f} GB  {row.get('identical', '(other number of steps)')}")
    print(f"Written to {path.relative_to(ROOT)}.")
    wrong = [r["case"] for r in rows if r.get("identical") is False]
    if wrong:
        print(f"Not bit-identical to plain: {', '.join(wrong)}.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
