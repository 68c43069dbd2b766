"""The package as people install it. MISA_PACKAGE names the folder that a wheel was installed into (`make package`); without it
the build's own install rules fill one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Iterator

import pytest

ROOT = Path(__file__).resolve().parents[2]

TRAIN = """
import sys
import misa, torch
disk = sys.argv[1]
print("at", misa.__file__)
def train(manage):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
    optimizer = torch.optim.AdamW(model.parameters())
    with manage(model, optimizer):
        for step in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
        return misa.state_sha256(model, optimizer)
import contextlib
plain = train(lambda *_: contextlib.nullcontext())
assert train(lambda m, o: misa.manage(m, o, budget="64MiB", daemon="private", disk=disk)) == plain
print("trained")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the package and nothing else of this checkout."""
    if os.environ.get("MISA_PACKAGE"):
        yield Path(os.environ["MISA_PACKAGE"])
        return
    folder = tmp_path_factory.mktemp("site")
    subprocess.run(["cmake", "--install", ROOT / "build", "--prefix", folder, "--component", "python"], check=True,
                   capture_output=True)
    shutil.copytree(ROOT / "client/python/misa", folder / "misa", dirs_exist_ok=True)
    yield folder


def run(site: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("MISA_DAEMON", "PYTHONPATH")}
    # A PATH without misad: the package has its own.
    environment.update(PYTHONPATH=str(site), PATH="/usr/bin:/bin")
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120, env=environment, cwd=site)


def test_it_trains_with_its_own_daemon(site, tmp_path):
    answer = run(site, "-c", TRAIN, str(tmp_path))
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.split() == ["at", str(site / "misa/__init__.py"), "trained"]


def test_it_brings_what_it_needs(site):
    answer = run(site, "-m", "misa", "doctor", "--json", "--no-measure")
    checks = json.loads(answer.stdout)["checks"]
    for name in ("misad", "misactl"):
        assert checks[name]["ok"] and checks[name]["path"] == str(site / "misa/bin" / name), answer.stdout
    assert checks["extension"]["ok"]
    assert (site / "misa/py.typed").is_file()
    if os.environ.get("MISA_PACKAGE"):
        command = subprocess.run([sys.executable, site / "bin/misa", "--help"], capture_output=True, text=True, timeout=60,
                                 env={**os.environ, "PYTHONPATH": str(site)})
        assert command.returncode == 0 and "doctor" in command.stdout, command.stderr
