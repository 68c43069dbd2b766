"""misactl against a real misad, both as processes."""

import json
import os
import pty
import select
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / "build/bin"


@pytest.fixture(scope="module")
def daemon():
    """A misad in a short-named folder of its own (a socket's path has to stay short); gives that folder."""
    with tempfile.TemporaryDirectory(prefix="misa-", dir="/var/tmp") as folder:
        (Path(folder) / "disk").mkdir()
        config = Path(folder) / "misad.yaml"
        config.write_text(
            f"runtime_dir: {folder}\n"
            "device: {capacity: 64MiB}\n"
            f"disk: {{directory: {folder}/disk, capacity: 64MiB, calibrate: false}}\n"
            'metrics: {listen: "127.0.0.1:0"}\n',
            encoding="utf-8",
        )
        process = subprocess.Popen([BIN / "misad", "--config", config], stdout=subprocess.PIPE, text=True)
        try:
            ready, _, _ = select.select([process.stdout], [], [], 30)
            assert ready and "misad ready" in process.stdout.readline()
            yield folder
        finally:
            process.terminate()
            assert process.wait(timeout=30) == 0


def misactl(folder: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [BIN / "misactl", "--runtime-dir", folder, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("command", ["status", "sessions", "modules", "events"])
def test_tables_are_plain_off_a_terminal(daemon, command):
    done = misactl(daemon, command)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip()
    assert "\t" not in done.stdout and "\033" not in done.stdout


def test_titles_are_bold_on_a_terminal_unless_no_color(daemon):
    def on_terminal(environment: dict[str, str]) -> bytes:
        try:
            leader, follower = pty.openpty()
        except OSError as error:  # a chroot or container without /dev/pts
            pytest.skip(f"no terminal can be made here: {error}")
        try:
            subprocess.run([BIN / "misactl", "--runtime-dir", daemon, "events"], stdout=follower, timeout=30, check=True,
                           env={**os.environ, **environment})
            return os.read(leader, 65536)
        finally:
            os.close(leader)
            os.close(follower)

    assert b"\033[1m" in on_terminal({})
    assert b"\033" not in on_terminal({"NO_COLOR": "1"})


def test_json_has_plain_numbers(daemon):
    status = json.loads(misactl(daemon, "status", "--json").stdout)
    assert status["capacity_bytes"] == 64 << 20
    assert status["free_bytes"] + status["leased_bytes"] + status["reclaiming_bytes"] == 64 << 20
    assert json.loads(misactl(daemon, "sessions", "--json").stdout) == {"sessions": []}
    assert json.loads(misactl(daemon, "modules", "--json").stdout) == {"modules": []}
    assert isinstance(json.loads(misactl(daemon, "snapshot").stdout), dict)
    for line in misactl(daemon, "events", "--json").stdout.splitlines():
        assert {"time", "kind", "session", "module", "bytes", "cause"} == set(json.loads(line))


def test_events_are_followed_as_they_happen(daemon):
    follow = [BIN / "misactl", "--runtime-dir", daemon, "events", "--follow", "--backlog", "0", "--json"]
    process = subprocess.Popen(follow, stdout=subprocess.PIPE, text=True)
    try:
        time.sleep(0.5)  # The stream has to stand before the event that it is to carry.
        assert misactl(daemon, "drain", "a test").returncode == 0
        ready, _, _ = select.select([process.stdout], [], [], 20)
        assert ready
        event = json.loads(process.stdout.readline())
        assert (event["kind"], event["cause"]) == ("drain", "a test")
    finally:
        process.terminate()
        process.wait(timeout=20)


def test_health_follows_the_drain(daemon):
    # Draining is asked for here again, so that the test does not lean on the one before it.
    misactl(daemon, "drain")
    done = misactl(daemon, "health")
    assert (done.returncode, done.stdout) == (1, "not serving\n")


def test_a_budget_of_an_unknown_session_is_refused_with_a_sentence(daemon):
    done = misactl(daemon, "budget", "nobody", "1MiB")
    assert done.returncode == 1
    assert "nobody" in done.stderr and done.stdout == ""


def test_no_daemon_is_a_sentence_with_the_socket_and_exit_status_two(tmp_path):
    done = misactl(str(tmp_path), "status")
    assert done.returncode == 2
    assert f"{tmp_path}/misad.sock does not exist" in done.stderr
    assert misactl(str(tmp_path), "health").returncode == 1


def test_help_starts_with_examples():
    done = subprocess.run([BIN / "misactl", "--help"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0
    assert done.stdout.startswith("Examples:")
