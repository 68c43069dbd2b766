"""The files that operators start from are good."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MISAD = ROOT / "build/bin/misad"
METRICS_SOURCE = ROOT / "server/observe/metrics.cc"


def test_the_example_configuration_is_accepted():
    done = subprocess.run([MISAD, "--check-config", "--config", ROOT / "deploy/misad.yaml"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_every_metric_is_documented():
    named = set(re.findall(r'"(misa_[a-z_]+)"', METRICS_SOURCE.read_text(encoding="utf-8")))
    documented = set(re.findall(r"`(misa_[a-z_]+)`", (ROOT / "docs/operating.md").read_text(encoding="utf-8")))
    assert named and named <= documented


def test_the_unit_stays_hardened():
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--threshold=25", ROOT / "deploy/systemd/misad.service"],
        capture_output=True, text=True, timeout=60,
    )
    assert done.returncode == 0, done.stdout[-500:]
