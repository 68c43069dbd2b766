"""A memory cgroup of our own around a process and its children, for versions 1 and 2 of the kernel's interface.

The kernel then counts what the processes really use and ends them when they need more than the limit, so it is a
witness that owes nothing to misa's own accounting.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

_REMOVE_SECONDS = 10.0


class CgroupUnavailable(Exception):
    """No memory cgroup can be made here; the message says why."""


@dataclass(frozen=True)
class _Hierarchy:
    version: int
    mount: Path
    own: Path  # the group of this process


def _own_path(controller: str) -> str:
    """Returns this process's path in a hierarchy: `controller` is "memory" for version 1 and "" for version 2."""
    for line in Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path
    return "/"


def _find_hierarchy() -> _Hierarchy:
    for line in Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines():
        _, mount, kind, options = line.split(" ")[:4]
        root = Path(mount)
        if kind == "cgroup" and "memory" in options.split(",") and root.is_dir():
            return _Hierarchy(1, root, root / _own_path("memory").lstrip("/"))
        if kind == "cgroup2" and (root / "cgroup.controllers").is_file():
            if "memory" in (root / "cgroup.controllers").read_text(encoding="ascii").split():
                return _Hierarchy(2, root, root / _own_path("").lstrip("/"))
    raise CgroupUnavailable("this system shows no memory cgroup hierarchy")


class MemoryCgroup:
    """A child group with an optional limit, removed on leaving the `with` block.

    Processes join it by calling `join` between fork and exec, so that everything they use is charged to it.
    """

    def __init__(self, name: str, limit_bytes: int | None = None) -> None:
        self._hierarchy = _find_hierarchy()
        self._path = self._make(f"misa-demo-{os.getpid()}-{name}")
        try:
            self._configure(limit_bytes)
        except OSError as error:
            self.close()
            raise CgroupUnavailable(f"the memory cgroup {self._path} cannot be limited ({error.strerror})") from None

    def _make(self, name: str) -> Path:
        # The root first: a group beside others is not bound by the limits, nor by the removal, of the one we are in.
        reasons = []
        for parent in dict.fromkeys((self._hierarchy.mount, self._hierarchy.own, self._hierarchy.own.parent)):
            path = parent / name
            try:
                if self._hierarchy.version == 2:
                    enabled = parent / "cgroup.subtree_control"
                    if "memory" not in enabled.read_text(encoding="ascii").split():
                        enabled.write_text("+memory", encoding="ascii")
                path.mkdir()
            except OSError as error:
                reasons.append(f"{parent}: {error.strerror}")
                continue
            return path
        raise CgroupUnavailable(f"no memory cgroup can be made here ({'; '.join(reasons)}); that takes root")

    def _configure(self, limit_bytes: int | None) -> None:
        if limit_bytes is not None:
            self.set_limit(limit_bytes)
        else:
            self._allow_swap(False)

    def _allow_swap(self, allowed: bool) -> None:
        name, value = ("memory.swappiness", "60" if allowed else "0")
        if self._hierarchy.version == 2:
            name, value = ("memory.swap.max", "max" if allowed else "0")
        if (self._path / name).exists():  # Absent where the kernel has no swap accounting.
            self._write(name, value)

    def set_limit(self, limit_bytes: int, swap: bool = False) -> None:
        """Limits the group from now on; with `swap` the kernel may swap what is above."""
        # Swapping first: a group that already uses more than the limit gets under it only by swapping.
        self._allow_swap(swap)
        self._write("memory.limit_in_bytes" if self._hierarchy.version == 1 else "memory.max", str(limit_bytes))

    def reset_peak(self) -> None:
        """Lets `peak_bytes` begin again at the usage now, where the kernel can (version 2: since Linux 6.12, for the one
        who asks only, so not here)."""
        if self._hierarchy.version == 1:
            self._write("memory.max_usage_in_bytes", "0")

    def _write(self, name: str, value: str) -> None:
        (self._path / name).write_text(value, encoding="ascii")

    def _read(self, name: str) -> str:
        return (self._path / name).read_text(encoding="ascii")

    @property
    def description(self) -> str:
        return f"cgroup version {self._hierarchy.version}"

    def join(self) -> None:
        """Moves the calling process into the group."""
        self._write("cgroup.procs", str(os.getpid()))

    def usage_bytes(self) -> int:
        """What the group's processes use now."""
        return int(self._read("memory.usage_in_bytes" if self._hierarchy.version == 1 else "memory.current"))

    def peak_bytes(self) -> int | None:
        """The most they used at once, or None where the kernel does not say (version 2 before Linux 5.19)."""
        name = "memory.max_usage_in_bytes" if self._hierarchy.version == 1 else "memory.peak"
        return int(self._read(name)) if (self._path / name).exists() else None

    def oom_kills(self) -> int:
        """How many processes the kernel ended because the limit left no memory for them."""
        name = "memory.oom_control" if self._hierarchy.version == 1 else "memory.events"
        for line in self._read(name).splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill":
                return int(value)
        return 0

    def close(self) -> None:
        """Removes the group; processes still in it after a grace period are ended, they are all ours."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        while self._path.exists():
            try:
                self._path.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return
                if time.monotonic() > deadline - _REMOVE_SECONDS / 2:
                    for pid in map(int, self._read("cgroup.procs").split()):
                        try:
                            os.kill(pid, signal.SIGKILL)
                        except ProcessLookupError:
                            pass
                time.sleep(0.05)

    def __enter__(self) -> MemoryCgroup:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
