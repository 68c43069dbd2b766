"""The examples in small: each trains in a third of its memory to the bits of its plain run, and says so by its framework's
own means."""

from __future__ import annotations

import gc
import importlib
import re
import sys
from pathlib import Path
from typing import Any

import pytest

for package in ("transformers", "tokenizers", "accelerate", "lightning", "tensorboard"):
    pytest.importorskip(package, reason=f"{package} is not installed: `make setup` installs it")

import misa  # noqa: E402

SMALL = {"steps": 3, "width": 128, "layers": 8, "rows": 1, "length": 16, "vocabulary": 400}


def run(name: str, folder: Path, capfd: Any, monkeypatch: Any, budget: int | None = None) -> dict[str, str]:
    """What the example prints at its end."""
    arguments = [f"--{key}={value}" for key, value in SMALL.items()] + [f"--out={folder}"]
    if budget is not None:
        arguments.append(f"--budget={budget}B")
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    gc.collect()
    try:
        importlib.import_module(f"examples.{name}").main()
    finally:
        if misa.current_run() is not None:
            misa.current_run().release()
    gc.collect()
    return dict(re.findall(r"^(\w+) (.*)$", capfd.readouterr().out, re.MULTILINE))


@pytest.mark.parametrize("name", ["plain_script", "hugging_face_trainer", "accelerate_loop", "lightning_fit"])
def test_a_third_of_the_memory_and_the_same_bits(shared_misad, folder, capfd, monkeypatch, name):
    monkeypatch.setenv("MISA_RUNTIME_DIR", str(shared_misad.runtime_dir))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    gc.collect()
    base = misa.memory.live_bytes()
    plain = run(name, folder, capfd, monkeypatch)
    budget = base + (int(plain["peak_bytes"]) - base) // 3
    managed = run(name, folder, capfd, monkeypatch, budget)
    assert managed["state_sha256"] == plain["state_sha256"]
    assert managed["loss"] == plain["loss"]
    assert int(managed["peak_bytes"]) <= budget


@pytest.mark.parametrize("name", ["hugging_face_trainer", "accelerate_loop", "lightning_fit"])
def test_tensorboard_has_misas_entries(shared_misad, folder, capfd, monkeypatch, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("MISA_RUNTIME_DIR", str(shared_misad.runtime_dir))
    monkeypatch.setitem(SMALL, "steps", 10)
    run(name, folder, capfd, monkeypatch, misa.memory.live_bytes() + (64 << 20))
    tags = set()
    for file in folder.rglob("events.out.tfevents.*"):
        events = EventAccumulator(str(file.parent)).Reload()
        tags.update(tag.removeprefix("train/") for tag in events.Tags()["scalars"])
    assert {"misa/device_mib", "misa/loads_per_step", "misa/stall_seconds_per_step"} <= tags
