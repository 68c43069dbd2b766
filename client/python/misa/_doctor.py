"""`misa doctor`: what is installed, what would work here, how fast the disk is. Needs neither torch nor the extension."""

from __future__ import annotations

import argparse
import ctypes
import errno
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any, Callable

_SYS_IO_URING_SETUP = 425
_O_DIRECT = os.O_DIRECT
_READY_SECONDS = 30

# (ok, text, more for --json). ok: True, False, or None for "works without, but".
Finding = tuple[bool | None, str, dict[str, Any]]


def _package_folder() -> Path:
    return Path(__file__).resolve().parent


def binary(name: str) -> str:
    """misad or misactl as installed with this package, else built beside it, else on PATH; "" where there is none."""
    if name == "misad" and os.environ.get("MISA_DAEMON"):
        return os.environ["MISA_DAEMON"]
    here = _package_folder()
    for candidate in (here / "bin" / name, here.parents[1] / "bin" / name):
        if candidate.is_file():
            return str(candidate)
    return shutil.which(name) or ""


def _python() -> Finding:
    return sys.version_info >= (3, 10), f"Python {platform.python_version()} at {sys.executable}", {}


def _torch() -> Finding:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return False, "torch is not installed: pip install torch", {}
    return True, f"torch {version}", {"version": version}


def _extension() -> Finding:
    try:
        import misa

        if misa.import_error is None:
            return True, f"misa {misa.__version__} loads with it", {"built_for": misa._C.torch_version}
        problem = misa.import_error
    except ImportError as error:
        problem = str(error)
    return False, problem, {}


def _program(name: str) -> Finding:
    path = binary(name)
    if not path:
        return False, f"{name} is neither beside this package nor on PATH: install misa again, or put it on PATH", {}
    try:
        answer = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return False, f"{path} does not run: {error}", {"path": path}
    if answer.returncode != 0:
        return False, f"{path} does not run: {(answer.stderr or answer.stdout).strip()[:300]}", {"path": path}
    return True, f"{name} {answer.stdout.strip()} at {path}", {"path": path, "version": answer.stdout.strip()}


def _memfd() -> Finding:
    try:
        os.close(os.memfd_create("misa-doctor"))
    except OSError as error:
        return False, f"no memfd ({error.strerror}): the kernel or a filter of system calls forbids it", {}
    return True, "memfd", {}


def _io_uring() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    parameters = ctypes.create_string_buffer(256)
    fd = libc.syscall(_SYS_IO_URING_SETUP, 4, parameters)
    if fd >= 0:
        os.close(fd)
        return True, "io_uring", {}
    code = ctypes.get_errno()
    why = {
        errno.ENOSYS: "the kernel has none",
        errno.EPERM: "forbidden here: see /proc/sys/kernel/io_uring_disabled, and the container's filter of system calls",
    }.get(code, os.strerror(code))
    return False, f"no io_uring ({why}): bytes cannot travel to the disk and back", {}


def _huge_pages() -> Finding:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError:
        return None, "no transparent huge pages: large tensors cost more page faults", {}
    chosen = re.search(r"\[(\w+)\]", text)
    mode = chosen.group(1) if chosen else text.strip()
    return (True if mode in ("always", "madvise") else None), f"transparent huge pages: {mode}", {"mode": mode}


def _cgroup() -> Finding:
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, mount, kind, options = line.split(" ")[:4]
        if (kind == "cgroup" and "memory" in options.split(",")) or (
            kind == "cgroup2" and "memory" in _read(f"{mount}/cgroup.controllers").split()
        ):
            version = 1 if kind == "cgroup" else 2
            writable = os.access(mount, os.W_OK)
            limits = "can be made" if writable else "cannot be made (that takes root)"
            return (True if writable else None), f"memory cgroup version {version}; groups with a limit {limits}", {"version": version}
    return None, "no memory cgroup: peaks are metered by misa alone", {}


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError:
        return ""


def _memory() -> Finding:
    found = re.search(r"MemAvailable:\s+(\d+)", _read("/proc/meminfo"))
    available = int(found.group(1)) * 1024 if found else 0
    return True, f"{available / 2**30:.1f} GiB of memory available, {os.cpu_count()} cores", {"available_bytes": available}


def _disk(folder: str) -> Finding:
    try:
        fd = os.open(folder, os.O_TMPFILE | os.O_RDWR | _O_DIRECT, 0o600)
    except OSError as error:
        why = {
            errno.ENOENT: "there is no such folder",
            errno.EOPNOTSUPP: "its file system has no files without names",
            errno.EISDIR: "its file system has no files without names",
            errno.EINVAL: "its file system has no direct I/O",
        }.get(error.errno or 0, error.strerror)
        return False, f"{folder} cannot be the disk tier: {why}. Choose one on ext4 or xfs with --disk or MISA_DISK_DIR", {}
    os.close(fd)
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    return True, f"{folder}: direct I/O, files without names, {free / 2**30:.1f} GiB free", {"path": folder, "free_bytes": free}


def _daemon(runtime_dir: str) -> Finding:
    misactl = binary("misactl")
    if not misactl:
        return None, "misactl is missing, so a daemon was not asked", {}
    answer = subprocess.run([misactl, "--runtime-dir", runtime_dir, "--json", "status"], capture_output=True, text=True, timeout=30)
    if answer.returncode == 0:
        return True, f"misad serves in {runtime_dir}", {"status": json.loads(answer.stdout)}
    if answer.returncode == 2:
        return None, f"no misad serves in {runtime_dir}: misa.manage starts a private one for each trainer", {}
    return False, f"misad in {runtime_dir}: {(answer.stderr or answer.stdout).strip()[:300]}", {}


def _measure(disk: str) -> Finding:
    """Starts a private daemon on the disk, which measures it as it always does, and asks for what it found."""
    misad, misactl = binary("misad"), binary("misactl")
    if not misad or not misactl:
        return False, "misad or misactl is missing, so nothing was measured", {}
    with tempfile.TemporaryDirectory(prefix="misa-doctor-", dir="/tmp") as folder:
        config = Path(folder) / "misad.yaml"
        config.write_text(
            f"runtime_dir: {json.dumps(folder)}\ndevice: {{kind: cpu, capacity: 64MiB}}\n"
            f"disk: {{directory: {json.dumps(disk)}, calibrate: true}}\nmetrics: {{listen: \"127.0.0.1:0\"}}\n",
            encoding="utf-8",
        )
        log = Path(folder) / "log"
        with open(log, "wb") as errors:
            process = subprocess.Popen([misad, "--private", "--parent-pid", str(os.getpid()), "--config", str(config)],
                                       stdout=subprocess.PIPE, stderr=errors)
        try:
            assert process.stdout is not None
            os.set_blocking(process.stdout.fileno(), False)
            end = time.monotonic() + _READY_SECONDS
            said = b""
            while b"misad ready" not in said and process.poll() is None and time.monotonic() < end:
                said += process.stdout.read() or b""
                time.sleep(0.02)
            if b"misad ready" not in said:
                return False, f"a private misad does not start on {disk}: {_read(str(log)).strip()[-400:]}", {}
            answer = subprocess.run([misactl, "--runtime-dir", folder, "--json", "status"], capture_output=True, text=True,
                                    timeout=30)
            status = json.loads(answer.stdout)
        except (OSError, ValueError, subprocess.TimeoutExpired) as error:
            return False, f"the private misad on {disk} did not answer: {error}", {}
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    rates = {key: float(value) for key, value in _rates(status).items()}
    if not rates:
        return False, "the private misad told no rates", {}
    text = "reads {load:.2f} GB/s, writes {unload:.2f} GB/s, both at once {duplex_load:.2f} + {duplex_unload:.2f} GB/s".format(
        **{key.removesuffix("_bytes_per_second"): value / 1e9 for key, value in rates.items()}
    )
    return True, f"a private misad starts; {disk} {text}", rates


def _rates(status: Any) -> dict[str, Any]:
    """The four rates, wherever in the answer they are."""
    if isinstance(status, dict):
        mine = {key: value for key, value in status.items() if key.endswith("load_bytes_per_second")}
        if len(mine) == 4:
            return mine
        for value in status.values():
            found = _rates(value)
            if found:
                return found
    return {}


def checks(disk: str, runtime_dir: str, measure: bool) -> list[tuple[str, Callable[[], Finding]]]:
    """Names and what to run, in the order they are shown."""
    all_ = [
        ("python", _python),
        ("torch", _torch),
        ("extension", _extension),
        ("misad", lambda: _program("misad")),
        ("misactl", lambda: _program("misactl")),
        ("memfd", _memfd),
        ("io_uring", _io_uring),
        ("huge_pages", _huge_pages),
        ("cgroup", _cgroup),
        ("memory", _memory),
        ("disk", lambda: _disk(disk)),
        ("daemon", lambda: _daemon(runtime_dir)),
    ]
    return all_ + ([("link", lambda: _measure(disk))] if measure else [])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
    parser.add_argument("--disk", default=os.environ.get("MISA_DISK_DIR") or "/var/tmp", metavar="FOLDER",
                        help="of the disk tier; default: $MISA_DISK_DIR, else /var/tmp")
    parser.add_argument("--runtime-dir", default=os.environ.get("MISA_RUNTIME_DIR") or "/run/misa", metavar="FOLDER",
                        help="of the daemon's sockets; default: $MISA_RUNTIME_DIR, else /run/misa")
    parser.add_argument("--no-measure", action="store_true", help="do not measure the disk")


def main(arguments: argparse.Namespace) -> int:
    """0: managed training works here; 1: something that it needs is missing."""
    found: dict[str, Any] = {}
    good = True
    for name, check in checks(arguments.disk, arguments.runtime_dir, not arguments.no_measure):
        ok, text, more = check()
        good = good and ok is not False
        found[name] = {"ok": ok is not False, "limited": ok is None, "text": text, **more}
        if not arguments.json:
            print(f"{ {True: 'ok  ', None: '--  ', False: 'NO  '}[ok] }{name:<12}{text}", flush=True)
    if arguments.json:
        print(json.dumps({"schema": "misa.doctor/1", "ok": good, "checks": found}, indent=2))
    else:
        print("Managed training works here." if good else "Managed training does not work here: see the lines with NO.")
    return 0 if good else 1
