"""Emulated devices: real training behind a modelled link, whose host tier is the daemon's memory.

That the link keeps its rate is shown in virtual time by link_model_test; here nothing is timed.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, Iterator

import misa
import pytest
import torch

from tests.python.beside import assert_identical, plain_once
from tests.python.models import Transformer, loss_of
from tests.python.processes import MIB, Misad, TrainerProcess, wait_for

# Fast enough that a test is short, slow enough that copies are under way while the step computes.
EMULATED = ", kind: emulated, latency_seconds: 1e-5"
HOST = 256 * MIB


@pytest.fixture
def emulated(folder: Path) -> Iterator[Misad]:
    with Misad(folder, device=EMULATED, extra=f"host: {{capacity: {HOST}}}\n") as daemon:
        yield daemon


def loop(manage: Any, steps: int = 5) -> tuple[torch.nn.Module, Any, list[float]]:
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    with manage(model, optimizer):
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return model, optimizer, losses


@pytest.mark.parametrize("options", [{}, {"step": "in_backward"}, {"demand_only": True}])
def test_training_behind_the_link_ends_in_the_bits_of_plain(emulated, options):
    result = assert_identical(loop, emulated, "tight", **options)
    device = result.report["device"]
    assert device["kind"] == "emulated"
    # What the configuration says, not what was measured.
    assert device["h2d_bytes_per_second"] == 1.0e9 and device["d2h_bytes_per_second"] == 8.0e8
    assert device["total_bytes_per_second"] == 6.0e8 + 5.0e8
    assert device["late_seconds"] >= 0
    assert result.report["demand_loads"] > 0
    assert not options.get("demand_only") or result.report["prefetch_loads"] == 0


def test_everything_goes_to_the_host_tier_and_comes_back(emulated):
    assert_identical(loop, emulated, "stress")
    wait_for(lambda: emulated.pool("host")["free"] == HOST, 2, "free host memory")
    assert list(emulated.disk.iterdir()) == []


def test_a_killed_trainer_leaves_nothing(folder, emulated):
    def trainer(**settings: Any) -> TrainerProcess:
        return TrainerProcess(folder, steps=6, manage={"budget": 2 * MIB, "runtime_dir": str(emulated.runtime_dir),
                                                       "daemon": "required"}, **settings)

    with trainer() as first:  # whatever misad opens once and keeps
        sha256 = first.line("sha256")
        first.end()
    wait_for(lambda: emulated.pool()["leased"] == 0, 2, "the first session's end")
    before = emulated.open_fds()
    with trainer(hang_at=3) as process:
        process.line("hangs")  # in the middle of a backward
        assert emulated.pool()["leased"] == 2 * MIB
        assert emulated.pool("host")["leased"] > 0
        process.kill()
        wait_for(lambda: emulated.pool()["free"] == 512 * MIB, 5, "free device memory")
    wait_for(lambda: emulated.pool("host")["free"] == HOST, 1, "free host memory")
    wait_for(lambda: emulated.open_fds() <= before, 1, f"descriptors back to {before}")
    with trainer() as process:
        assert process.line("sha256") == sha256
        process.end()


def test_a_full_host_tier_is_a_sentence(folder):
    with Misad(folder, device=EMULATED, extra="host: {capacity: 1MiB}\n") as daemon:
        model = Transformer()
        optimizer = torch.optim.AdamW(model.parameters())
        with pytest.raises(RuntimeError, match="host tier's 1MiB.*raise host.capacity"):
            misa.manage(model, optimizer, budget="64MiB", runtime_dir=str(daemon.runtime_dir), daemon="required")


@pytest.mark.parametrize("twin", ["rtx-3090", "a100-80g", "h200"])
def test_a_twin_keeps_its_proportion(twin):
    """The private daemon's link hides a layer's load behind the forward of the twin's tokens."""
    expected = plain_once(loop)
    budget = misa.memory.live_bytes() + int(0.6 * expected.bytes)
    flops = 4e12  # of a machine that is fast enough for a test
    kept: dict[str, Any] = {}

    @contextlib.contextmanager
    def manage(model: Any, optimizer: Any) -> Iterator[Any]:
        run = misa.manage(model, optimizer, budget=budget, chunk_bytes=4096,
                          device=misa.Emulated(twin=twin, compute_flops=flops))
        yield run
        kept["sha256"] = misa.state_sha256(model, optimizer)
        kept["peak"] = misa.memory.peak_bytes()
        kept["states"] = {residency for _, residency in run.states()}
        kept["report"] = run.report()
        run.release()

    _, _, losses = loop(manage)
    assert losses == expected.seen and kept["sha256"] == expected.sha256
    assert kept["peak"] <= budget
    assert kept["states"] <= {"host", "device", "loading", "unloading", "empty"} and "host" in kept["states"]
    device = kept["report"]["device"]
    assert device["kind"] == "emulated" and device["name"].startswith(f"{twin} twin")
    tokens = misa.emulated.twins()[twin]
    assert device["h2d_bytes_per_second"] == pytest.approx(4 / 2 * flops / tokens)
    assert device["total_bytes_per_second"] == pytest.approx(2 * 19 / 26 * device["h2d_bytes_per_second"])


def test_the_compute_is_measured_where_it_is_not_given(capfd):
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    with misa.manage(model, optimizer, budget="64MiB", device="emulated:a100-80g") as run:
        loss_of(model, 0).backward()
        optimizer.step()
    assert run.report()["device"]["h2d_bytes_per_second"] > 1e5
    assert "a100-80g twin: this process multiplies at" in capfd.readouterr().err


@pytest.mark.parametrize(("options", "sentence"), [
    ({"device": "emulated:rtx-9999"}, "No twin is called 'rtx-9999'; there are rtx-3090, a100-80g, h200"),
    ({"device": "cuda"}, "must be \"cpu\", \"emulated:TWIN\""),
    ({"device": "emulated:h200", "daemon": "required"}, "private daemon's"),
])
def test_what_is_no_emulated_device_is_refused(options, sentence):
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=sentence):
        misa.manage(model, optimizer, budget="64MiB", **options)
    assert misa.current_run() is None


@pytest.mark.parametrize("arguments", [
    {}, {"load_bytes_per_second": 1e9}, {"twin": "h200", "compute_flops": 0}, {"twin": "h200", "duplex_factor": 1.5},
    {"twin": "h200", "latency_seconds": float("nan")},
])
def test_an_impossible_link_is_refused(arguments):
    with pytest.raises(ValueError):
        misa.Emulated(**arguments)
