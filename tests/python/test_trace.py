"""The trace of a real run: recorded from its daemon, split by what the loop did, shown and converted."""

from __future__ import annotations

import gc
import json
import subprocess
from pathlib import Path

import misa
import pytest
import torch

from tests.python.models import loss_of
from tests.python.test_report import wide

MISACTL = Path(__file__).resolve().parents[2] / "build/bin/misactl"


def misactl(misad, *arguments: str) -> str:
    command = [MISACTL, "--runtime-dir", str(misad.runtime_dir), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("step", ["deferred", "eager"])
def test_a_run_with_evaluation_and_accumulation(misad, folder, step):
    def train(model, optimizer, number: int) -> None:
        with torch.no_grad():
            for _ in range(3):
                loss_of(model, number, rows=64)
        optimizer.zero_grad()
        for part in range(3):
            loss_of(model, 10 * number + part, rows=64).backward()
        optimizer.step()

    gc.collect()
    misa.memory.reset_peak()
    before = misa.memory.live_bytes()
    model = wide()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 0)
    train(model, optimizer, 1)
    peak = misa.memory.peak_bytes() - before
    del model, optimizer
    gc.collect()

    model = wide()
    optimizer = torch.optim.AdamW(model.parameters())
    path = folder / "a.trace"
    with misa.manage(model, optimizer, budget=before + int(0.5 * peak), step=step,
                     runtime_dir=str(misad.runtime_dir)) as run:
        for number in range(6):
            train(model, optimizer, number)
        assert run.report()["steps"] == 6
        (session,) = json.loads(misactl(misad, "sessions", "--json"))["sessions"]
        recorded = misactl(misad, "trace", "record", session["session"], "-o", str(path))
    assert "train" in recorded and path.stat().st_size < 20_000

    shown = json.loads(misactl(misad, "trace", "show", str(path), "--json"))
    sections = {section["mode"]: section for section in shown["sections"]}
    assert set(sections) == {"train", "eval", "accumulate"}
    kinds = [facet["kind"] for facet in shown["facets"]]

    def touched(mode: str) -> set[str]:
        return {kinds[facet] for entry in sections[mode]["entries"] for facet, _ in entry["uses"]}

    assert touched("train") == {"weights", "gradients", "optimizer"}
    assert touched("accumulate") == {"weights", "gradients"}
    assert touched("eval") == {"weights"}
    # Three forwards for evaluation, three forwards and backwards, one update.
    assert sections["eval"]["facet_count"] == kinds.count("weights")
    length = {mode: len(section["entries"]) for mode, section in sections.items()}
    assert 2 * length["eval"] + 2 * length["accumulate"] < length["train"]

    timeline = json.loads(misactl(misad, "trace", "convert", str(path), "--to", "perfetto"))
    slices = [event for event in timeline["traceEvents"] if event["ph"] == "X"]
    assert len(slices) == sum(length.values())
    misactl(misad, "trace", "convert", str(path), "--to", "json", "-o", str(folder / "a.json"))
    misactl(misad, "trace", "convert", str(folder / "a.json"), "--to", "binary", "-o", str(folder / "b.trace"))
    assert (folder / "b.trace").read_bytes() == path.read_bytes()
