"""The command: `misa run` of an unchanged script, `misa doctor`."""

from __future__ import annotations

import gc
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable

import misa
import pytest
import torch
from misa import _cli

from tests.python.processes import ROOT, Misad

SCRIPT = """
import argparse, hashlib, sys
import torch
from torch import nn
from helpers import batch  # beside the script

parser = argparse.ArgumentParser()
parser.add_argument("--out")
parser.add_argument("--kind", default="plain")
arguments = parser.parse_args()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(256, 256), nn.Tanh())])
    def forward(self, x):
        return self.layers(x)

class Trainer:  # holds the model, as trainers do, and is no module
    def __init__(self):
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
    def fit(self):
        for step in range(4):
            self.optimizer.zero_grad()
            self.model(batch(step)).square().mean().backward()
            self.optimizer.step()

if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.manual_seed(3)
    if arguments.kind == "lbfgs":
        model = Net()
        optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
        def closure():
            optimizer.zero_grad()
            loss = model(batch(0)).square().mean()
            loss.backward()
            return loss
        optimizer.step(closure)
    elif arguments.kind == "loose":
        model = nn.Linear(4, 4)
        tensor = torch.ones(4, requires_grad=True)
        optimizer = torch.optim.SGD([tensor], lr=0.1)
        (model(tensor).sum()).backward()
        optimizer.step()
    elif arguments.kind == "nothing":
        sys.exit(0)
    elif arguments.kind == "two":
        one, two = Net(), Net()
        optimizers = [torch.optim.AdamW(one.parameters()), torch.optim.SGD(two.parameters(), lr=0.1, momentum=0.9)]
        for step in range(3):
            for o in optimizers: o.zero_grad()
            two(one(batch(step))).square().mean().backward()
            for o in optimizers: o.step()
        model = nn.ModuleList([one, two])
    else:
        trainer = Trainer()
        trainer.fit()
        model = trainer.model
    torch.save(model.state_dict(), arguments.out)
    print("trained", __name__, __file__)
"""

HELPERS = """
import torch
def batch(step):
    return torch.randn(8, 256, generator=torch.Generator().manual_seed(step))
"""


@pytest.fixture
def script(folder: Path) -> Path:
    (folder / "helpers.py").write_text(HELPERS)
    (folder / "train.py").write_text(SCRIPT)
    return folder / "train.py"


def command(*words: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *map(str, words)], capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.fixture
def misa_run(shared_misad: Misad, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int | str | None]:
    """The command inside this process, which has torch already; gives its exit status."""

    def call(*words: Any) -> int | str | None:
        monkeypatch.setattr(sys, "argv", ["misa"])
        monkeypatch.setattr(sys, "path", [*sys.path])
        sys.modules.pop("helpers", None)
        try:
            return _cli.main(["run", "--daemon", "required", "--runtime-dir", str(shared_misad.runtime_dir), *map(str, words)])
        except SystemExit as end:
            return end.code
        finally:
            sys.modules.pop("helpers", None)
            gc.collect()

    return call


@pytest.mark.parametrize("kind", ["plain", "two"])
def test_an_unchanged_script_trains_to_the_same_bits_within_its_budget(shared_misad, script, folder, monkeypatch, kind):
    monkeypatch.setattr(sys, "argv", [str(script), "--out", str(folder / "plain.pt"), "--kind", kind])
    monkeypatch.syspath_prepend(str(folder))
    runpy.run_path(str(script), run_name="__main__")
    sys.modules.pop("helpers", None)
    # Plain training has 8 or 16 layers of 257 KiB, four times.
    managed = command("-m", "misa", "run", "--daemon", "required", "--runtime-dir", shared_misad.runtime_dir,
                      "--budget", "2600KiB", script, "--out", folder / "managed.pt", "--kind", kind)
    assert managed.returncode == 0, managed.stderr
    assert managed.stdout.split() == ["trained", "__main__", str(script)]
    one, other = torch.load(folder / "plain.pt"), torch.load(folder / "managed.pt")
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert "manages Net" in managed.stderr and "AdamW" in managed.stderr and "mode exact" in managed.stderr
    assert "Warning" not in managed.stderr
    peak = misa._C.parse_byte_size(managed.stderr.split("peak ")[1].split(" of")[0])
    assert peak <= (2600 << 10) + (1 << 20) / 200  # printed with two decimals


@pytest.mark.parametrize(("kind", "words"), [("lbfgs", "LBFGS"), ("loose", "belong to no torch.nn.Module")])
def test_a_script_that_cannot_be_managed_is_refused_or_runs_plainly(misa_run, script, folder, capfd, kind, words):
    assert misa_run("--budget", "64MiB", script, "--out", folder / "never.pt", "--kind", kind) == 3
    said = capfd.readouterr().err
    assert words in said and "Nothing was trained" in said
    assert not (folder / "never.pt").exists()
    assert misa_run("--budget", "64MiB", "--or-plain", script, "--out", folder / "plain.pt", "--kind", kind) == 0
    said = capfd.readouterr().err
    assert words in said and "runs without misa" in said
    assert (folder / "plain.pt").exists()


def test_what_is_wrong_with_the_call_is_a_sentence(misa_run, script, folder, capfd):
    assert misa_run("--budget", "64MiB", script, "--kind", "nothing") == 0
    capfd.readouterr()
    for words, expected in (
        (["--budget", "64MiB", folder / "absent.py"], "there is no script"),
        (["--budget", "plenty", script], "plenty"),
        (["--budget", "64MiB", "--runtime-dir", folder / "absent", script], "No misad"),
    ):
        assert misa_run(*words) == 2
        assert expected in capfd.readouterr().err


def test_the_doctor_finds_what_is_here(misad):
    answer = command("-m", "misa", "doctor", "--json", "--disk", misad.disk, "--runtime-dir", misad.runtime_dir)
    report = json.loads(answer.stdout)
    assert answer.returncode == 0 and report["ok"], answer.stdout
    checks = report["checks"]
    assert checks["torch"]["version"].startswith("2.") and checks["misad"]["path"].endswith("misad")
    assert not checks["daemon"]["limited"]
    assert checks["link"]["load_bytes_per_second"] > 0 and checks["link"]["duplex_unload_bytes_per_second"] > 0


def test_the_doctor_names_what_is_missing(folder):
    """No daemon, no disk tier, and an extension of another torch: exit status 1 and a line for each."""
    package = folder / "misa"
    package.mkdir()
    for file in (ROOT / "build/python/misa").iterdir():
        if file.suffix == ".py":
            (package / file.name).write_bytes(file.read_bytes())
    (package / "_C.py").write_text("torch_version = '1.0.0'\n")
    environment = {**os.environ, "PYTHONPATH": str(folder), "MISA_DAEMON": str(folder / "misad")}
    answer = subprocess.run([sys.executable, "-m", "misa", "doctor", "--no-measure", "--disk", folder / "absent",
                             "--runtime-dir", folder], capture_output=True, text=True, timeout=60, env=environment, cwd=folder)
    assert answer.returncode == 1
    lines = answer.stdout.splitlines()
    for word in ("built for torch 1.0.0", "no such folder", "does not run"):
        assert any(line.startswith("NO") and word in line for line in lines), answer.stdout
    failed = subprocess.run([sys.executable, "-c", "import misa"], capture_output=True, text=True, timeout=60, env=environment,
                            cwd=folder)
    assert failed.returncode == 1 and "ImportError: misa was built for torch 1.0.0" in failed.stderr
