"""misactl simulate sessions: no daemon, one seed a node, the same run for the same seed."""

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def simulate(*arguments: str) -> subprocess.CompletedProcess:
    command = [ROOT / "build/bin/misactl", "simulate", "sessions", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_a_seed_gives_the_same_run():
    first, second = (simulate("--seeds", "25", "--seed", "7", "--json") for _ in range(2))
    assert (first.returncode, first.stderr) == (0, "")
    report = json.loads(first.stdout)
    assert (report["seeds"], report["violation"]) == (25, None)
    assert report["steps"] > 100 and report["sessions"] > 25
    assert report["steps_per_minute"] > 0
    timing = {"seconds", "steps_per_minute", "events_per_second"}
    again = json.loads(second.stdout)
    assert {k: v for k, v in report.items() if k not in timing} == {k: v for k, v in again.items() if k not in timing}


def test_ends_at_the_steps_that_were_asked_for():
    report = json.loads(simulate("--seeds", "1000", "--steps", "500", "--json").stdout)
    assert 500 <= report["steps"] < 5000
    assert report["seeds"] < 100


def test_a_log_tells_what_happened_in_one_seed():
    done = simulate("--seed", "3", "--log")
    assert done.returncode == 0
    assert "LeaseOpened" in done.stdout and "everybody ends" in done.stdout
    assert done.stdout.rstrip().endswith("every invariant held")


def test_refuses_what_is_no_count():
    assert simulate("--seeds", "0").returncode == 2
    assert simulate("--trainers", "1").returncode == 2
    assert simulate("--seed", str(2**64 - 1), "--seeds", "2").returncode == 2
