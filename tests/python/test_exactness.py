"""A seeded part of `make exactness`: families, optimizers, loops and pressures that the whole compares more of."""

from __future__ import annotations

import functools
from typing import Any

import pytest

for package in ("transformers", "torchvision", "peft", "lion_pytorch"):
    pytest.importorskip(package, reason=f"{package} is not installed: `make setup` installs it")

FAMILIES = ("gpt2", "gemma2", "mixtral", "mamba", "t5", "vit", "wav2vec2", "torchvision resnet", "lstm")
ROWS = 24
# Of every kind something, and another part each time this number is changed.
SEED = 1


@functools.cache
def rows() -> list[Any]:
    from tests.exactness import design

    return design.rows(SEED, FAMILIES)


@pytest.mark.parametrize("number", range(ROWS))
def test_row(shared_misad, number):
    from tests.exactness.run_row import run_row

    line = run_row(rows()[number], shared_misad)
    assert line["identical"] is True, line
    assert line["device_peak_bytes"] <= line["budget_bytes"]


def test_refused_before_the_first_step(shared_misad):
    from tests.exactness.run_row import run_row

    line = run_row(rows()[-1], shared_misad)
    assert line["identical"] is None and "Nothing was changed" in line["refused"], line


def test_the_whole_covers_what_it_says():
    from tests.exactness import design
    from tests.exactness.families import FAMILIES as ALL

    whole = design.rows(0, FAMILIES)
    missing = design.uncovered(whole)
    assert missing["family optimizer"] == missing["family pressure"] == missing["loop pressure"] == 0
    assert missing["loop optimizer"] == len(design.IMPOSSIBLE)
    assert sum(family.needs == ("transformers",) for family in ALL.values()) >= 15
