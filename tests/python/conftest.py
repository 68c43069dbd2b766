"""Fixtures: short folders, a misad process of its own configuration, trainers as processes, runs beside plain runs."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
from pathlib import Path
from typing import Iterator

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "build/python"
# Trainers of these tests use this checkout's build, however the interpreter was set up.
os.environ.setdefault("MISA_DAEMON", str(ROOT / "build/bin/misad"))
os.environ["PYTHONPATH"] = os.pathsep.join(p for p in (str(PACKAGE), os.environ.get("PYTHONPATH")) if p)
if str(PACKAGE) not in sys.path:
    sys.path.insert(0, str(PACKAGE))

import torch  # noqa: E402

from tests.python.processes import Misad  # noqa: E402

torch.set_num_threads(1)
# What was imported is no garbage: the collections between runs need not look at it.
gc.collect()
gc.freeze()


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder under /tmp: the path of a socket has to stay short."""
    with tempfile.TemporaryDirectory(prefix="misa-t-", dir="/tmp") as name:
        yield Path(name)


@pytest.fixture
def misad(folder: Path) -> Iterator[Misad]:
    """A misad of this test alone."""
    with Misad(folder) as daemon:
        yield daemon


@pytest.fixture(scope="session")
def shared_misad() -> Iterator[Misad]:
    """One misad for all tests that only need somebody to attach to."""
    with tempfile.TemporaryDirectory(prefix="misa-t-", dir="/tmp") as name, Misad(Path(name)) as daemon:
        yield daemon


@pytest.fixture(autouse=True)
def nothing_stays_managed() -> Iterator[None]:
    """A test that failed must not take the following ones along."""
    yield
    import misa

    run = misa.current_run()
    if run is not None:
        run.release()
    made = misa._manage._growing
    if made is not None:
        made.manager.release_all()
        misa._manage._growing = None
