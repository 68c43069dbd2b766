"""Budgets that the daemon chooses: they follow who trains on the node, and change no bit of anybody's result. And that a budget
holds for what the process really keeps."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

import misa
from tests.python.models import Transformer
from tests.python.processes import MIB, Misad, TrainerProcess, wait_for
from tests.python.small_training import manage, mlp

CAPACITY = 6 * MIB
CHUNK = 4096
SHARED = (CAPACITY - CAPACITY // 10) // CHUNK * CHUNK  # a tenth is kept for those who come


def trainer(folder: Path, misad: Misad, *, budget: object = "auto", weight: float = 1, **settings: object) -> TrainerProcess:
    manage = {"budget": budget, "weight": weight, "runtime_dir": str(misad.runtime_dir), "daemon": "required"}
    return TrainerProcess(folder, manage=manage, **settings)


@functools.cache
def plain_sha256(steps: int) -> str:
    with TrainerProcess(Path("/tmp"), steps=steps) as process:
        sha256 = process.line("sha256")
        process.end()
        process.error_path.unlink()
    return sha256


def budgets(misad: Misad) -> dict[int, int]:
    """By slot."""
    values = {}
    for name, value in misad.metrics().items():
        if name.startswith("misa_session_budget_bytes{"):
            values[int(name.split('"')[1])] = int(value)
    return values


def leased(misad: Misad) -> int:
    return misad.pool()["leased"]


def test_budgets_shift_when_a_trainer_starts_and_when_it_ends(folder):
    with Misad(folder, capacity=CAPACITY) as misad, trainer(folder, misad, pause=0.002) as first:
        first.line("step 5")
        wait_for(lambda: budgets(misad)[0] == SHARED, 10, "all of the memory for the only trainer")
        with trainer(folder, misad, weight=2, pause=0.002) as second:
            second.line("step 5")
            wait_for(lambda: leased(misad) <= SHARED, 10, "what the first trainer gives back")
            wait_for(lambda: abs(budgets(misad)[1] / budgets(misad)[0] - 2) < 0.2, 10, "budgets by weight")
            assert sum(budgets(misad).values()) <= SHARED
            second.line("step")  # and it trains on under it
            second.go_on()
            steps = int(second.line("steps"))
            assert second.line("sha256") == plain_sha256(steps)
            second.end()
        wait_for(lambda: budgets(misad) == {0: SHARED}, 10, "all of the memory for the one that is left")
        first.line("step")
        first.go_on()
        steps = int(first.line("steps"))
        assert first.line("sha256") == plain_sha256(steps)
        assert int(first.line("peak")) <= SHARED
        first.end()
        assert "misa: The budget" not in first.errors()
        assert misad.events().count("budget_changed") >= 2  # down and up again; the second may start with its share
        wait_for(lambda: misad.pool()["free"] == CAPACITY, 5, "all memory free")


def test_a_step_that_needs_more_than_before_waits_for_it(folder):
    """Nobody knows of a larger batch before it is there; the same operators on more rows are the same trace."""
    more = {"more_from": 12, "more_rows": 14, "steps": 16}
    with TrainerProcess(folder, **more) as process:
        sha256 = process.line("sha256")
        process.end()
    with Misad(folder, capacity=CAPACITY) as misad, trainer(folder, misad, pause=0.002, weight=20) as other:
        other.line("step 5")
        with trainer(folder, misad, wait_at=10, **more) as process:
            process.line("step 10")
            before = budgets(misad)[1]
            process.go_on()
            assert process.line("sha256", 60) == sha256
            peak = int(process.line("peak"))
            process.end()
        assert "budget_asked" in misad.events()
        assert before < peak <= SHARED
        other.go_on()
        other.line("released")


def test_a_range_is_kept_to(folder):
    with Misad(folder, capacity=64 * MIB) as misad, trainer(folder, misad, budget=["2MiB", "3MiB"], steps=8) as process:
        process.line("step 4")
        assert budgets(misad)[0] <= 3 * MIB
        assert process.line("sha256") == plain_sha256(8)
        assert int(process.line("peak")) <= 3 * MIB
        process.end()


def test_a_private_daemon_gives_what_was_asked_for(folder):
    disk = folder / "disk"
    disk.mkdir()
    manage = {"budget": ["2MiB", "3MiB"], "runtime_dir": str(folder / "none"), "disk": str(disk)}
    with TrainerProcess(folder, manage=manage, steps=8) as process:
        assert '"budget_bytes": 3145728' in process.line("managed")
        assert process.line("sha256") == plain_sha256(8)
        assert int(process.line("peak")) <= 3 * MIB
        process.end()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"budget": ("3MiB", "2MiB")}, "no range"),
        ({"budget": ("3MiB",)}, "neither a size nor a range"),
        ({"budget": ("0", "2MiB")}, "holds nothing"),
        ({"budget": "auto", "weight": 0}, "weight"),
        ({"budget": "auto", "weight": float("nan")}, "weight"),
    ],
)
def test_refuses_what_is_no_budget(options, sentence):
    import torch

    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(ValueError, match=sentence):
        misa.manage(model, optimizer, **options)
    assert misa.current_run() is None


def anonymous_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the kernel does not say")


def test_small_tensors_that_are_freed_leave_no_memory_behind(shared_misad):
    """Not even in holes between others, of which malloc gives nothing back by itself."""
    model, optimizer = mlp()
    with manage(shared_misad, model, optimizer, budget=misa.memory.live_bytes() + 48 * MIB) as run:
        before = anonymous_bytes()
        small = [torch.ones(25 << 10) for _ in range(320)]  # 32 MB in pieces of 100 KiB
        assert anonymous_bytes() - before > 30 * MIB
        kept = small[::16]
        del small
        large = torch.ones(10 << 20)  # 40 MiB, which fit beside what is kept
        assert anonymous_bytes() - before < 48 * MIB
        assert sum(t.sum().item() for t in kept) == 20 * (25 << 10) and large[-1].item() == 1
    run.release()
