"""misad and trainers as processes, and what can be seen of them from outside."""

from __future__ import annotations

import json
import os
import queue
import re
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any, Callable

ROOT = Path(__file__).resolve().parents[2]
MISAD = ROOT / "build/bin/misad"
MIB = 1 << 20


def wait_for(condition: Callable[[], object], seconds: float, what: str) -> float:
    """Waits until the condition holds and gives the seconds it took."""
    start = time.monotonic()
    while not condition():
        if time.monotonic() - start > seconds:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.005)
    return time.monotonic() - start


class Misad:
    """A misad with sockets, disk tier and configuration in `folder`; ends with the context."""

    def __init__(self, folder: Path, *, capacity: int = 512 * MIB, disk_capacity: int = 1024 * MIB, chunk: int = 4096,
                 device: str = "", extra: str = "") -> None:
        self.folder = folder
        self.runtime_dir = folder / "run"
        self.disk = folder / "disk"
        for directory in (self.runtime_dir, self.disk):
            directory.mkdir(exist_ok=True)
        self.config = folder / "misad.yaml"
        self.config.write_text(
            f"runtime_dir: {self.runtime_dir}\n"
            f"device: {{capacity: {capacity}, chunk: {chunk}{device}}}\n"
            f"disk: {{directory: {self.disk}, capacity: {disk_capacity}, calibrate: false}}\n"
            "link: {load_bytes_per_second: 1.0e9, unload_bytes_per_second: 8.0e8, duplex_load_bytes_per_second: 6.0e8, "
            "duplex_unload_bytes_per_second: 5.0e8}\n"
            'metrics: {listen: "127.0.0.1:0"}\n'
            f"events: {{file: {folder}/events.jsonl}}\n" + extra,
            encoding="utf-8",
        )
        self.process: subprocess.Popen[str] | None = None
        self.metrics_url = ""

    def start(self) -> Misad:
        with open(self.folder / "misad.log", "ab") as log:
            self.process = subprocess.Popen([MISAD, "--config", self.config], stdout=subprocess.PIPE, stderr=log, text=True)
        ready, _, _ = select.select([self.process.stdout], [], [], 30)
        line = self.process.stdout.readline() if ready else ""
        found = re.search(r"misad ready: .*metrics=(\S+)", line)
        assert found, f"misad said {line!r}, and in its log: {self.log()}"
        self.metrics_url = found.group(1)
        return self

    def log(self) -> str:
        return (self.folder / "misad.log").read_text(encoding="utf-8")

    def events(self) -> str:
        return (self.folder / "events.jsonl").read_text(encoding="utf-8")

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self, number: int = signal.SIGKILL) -> int:
        """Sends the signal and waits for the end; gives the exit status."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def __enter__(self) -> Misad:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(self.metrics_url, timeout=10) as page:
            lines = page.read().decode().splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}

    def pool(self, tier: str = "device") -> dict[str, int]:
        """Bytes of a tier's pool by state."""
        metrics = self.metrics()
        states = ("free", "leased", "reclaiming", "orphaned")
        return {s: int(metrics[f'misa_pool_bytes{{tier="{tier}",state="{s}"}}']) for s in states}

    def sessions(self) -> int:
        return int(self.metrics()["misa_sessions"])

    def open_fds(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


class TrainerProcess:
    """tests/python/trainer.py with its settings, or a program given as text."""

    def __init__(self, folder: Path, *, program: str | None = None, environment: dict[str, str] | None = None,
                 **settings: Any) -> None:
        self.error_path = folder / f"trainer-{time.monotonic_ns()}.err"
        command = ["-m", "tests.python.trainer", json.dumps(settings)] if program is None else ["-c", program]
        with open(self.error_path, "wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **(environment or {})},
                cwd=ROOT,
            )
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def errors(self) -> str:
        return self.error_path.read_text(encoding="utf-8")

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line)
        self._lines.put(None)

    def line(self, start: str, seconds: float = 60) -> str:
        """The next line that begins so, without that beginning."""
        end = time.monotonic() + seconds
        while True:
            try:
                line = self._lines.get(timeout=max(0.001, end - time.monotonic()))
            except queue.Empty:
                line = None
            if line is None:
                self.process.kill()
                raise AssertionError(f"no line {start!r} from the trainer; stderr: {self.errors()}")
            if line.startswith(start):
                return line[len(start) :].strip()

    def go_on(self) -> None:
        """Answers `wait_at`."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=30)

    def end(self, seconds: float = 60) -> None:
        """Waits for a good end."""
        try:
            status = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(f"the trainer did not end; stderr: {self.errors()}") from None
        assert status == 0, self.errors()

    def __enter__(self) -> TrainerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.kill()
        self._reader.join(timeout=10)
