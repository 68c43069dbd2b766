"""Trainers and misad as processes: who may die when, and what is left then."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.python.processes import MIB, Misad, TrainerProcess, wait_for

BUDGET = 2 * MIB
STEPS = 8


def trainer(folder: Path, misad: Misad, *, budget: int = BUDGET, daemon: str = "required", **settings: object) -> TrainerProcess:
    return TrainerProcess(folder, manage={"budget": budget, "runtime_dir": str(misad.runtime_dir), "daemon": daemon},
                          **{"steps": STEPS, **settings})


@functools.cache
def plain_sha256(steps: int = STEPS) -> str:
    with TrainerProcess(Path("/tmp"), steps=steps) as process:
        sha256 = process.line("sha256")
        process.end()
        process.error_path.unlink()
    return sha256


def files_under(*directories: Path) -> set[str]:
    return {str(p) for d in directories for p in d.rglob("*")}


def test_a_killed_trainer_leaves_nothing(folder, misad):
    with trainer(folder, misad) as first:  # whatever misad opens once and keeps
        first.end()
    wait_for(lambda: misad.pool()["leased"] == 0, 2, "the first session's end")
    before, files = misad.open_fds(), files_under(misad.runtime_dir, misad.disk)
    with trainer(folder, misad, hang_at=3) as process:
        process.line("hangs")  # in the middle of a backward
        assert misad.pool()["leased"] == BUDGET
        assert misad.pool("disk")["leased"] > 0
        assert misad.open_fds() > before
        process.kill()
        seconds = wait_for(lambda: misad.pool()["free"] == 512 * MIB, 5, "free device memory")
    assert seconds < 1
    wait_for(lambda: misad.pool("disk")["free"] == 1024 * MIB, 1, "free disk space")
    wait_for(lambda: misad.open_fds() <= before, 1, f"descriptors back to {before}")
    assert misad.sessions() == 0
    assert files_under(misad.runtime_dir, misad.disk) == files
    # And the next one gets it.
    with trainer(folder, misad) as process:
        assert process.line("sha256") == plain_sha256()
        process.end()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_trainer_outlives_its_misad(folder, misad, number):
    with trainer(folder, misad, wait_at=2, pause=0.02) as process:
        process.line("step 2")
        misad.process.send_signal(number)
        if number == signal.SIGKILL:
            misad.process.wait(timeout=10)
        process.go_on()
        assert process.line("sha256") == plain_sha256()
        assert int(process.line("peak")) <= BUDGET
        assert process.line("alive") == "False" or number == signal.SIGTERM
        process.end()
        assert ("misad is gone" if number == signal.SIGKILL else "misad drains") in process.errors()
    misad.process.wait(timeout=10)


def test_a_new_misad_serves_and_tells_of_orphans(folder, misad):
    with trainer(folder, misad, wait_at=2) as orphan:
        orphan.line("step 2")
        misad.kill()
        misad.start()
        wait_for(lambda: misad.pool()["orphaned"] == BUDGET, 2, "the orphan's bytes in the report")
        assert misad.metrics()["misa_orphaned_sessions"] == 1
        with trainer(folder, misad, budget=3 * MIB) as next_one:
            assert next_one.line("sha256") == plain_sha256()
            next_one.end()
        assert misad.pool()["orphaned"] == BUDGET
        orphan.go_on()
        assert orphan.line("sha256") == plain_sha256()
        orphan.end()
        wait_for(lambda: misad.pool()["free"] == 512 * MIB, 2, "the orphan's bytes free")
        assert misad.metrics()["misa_orphaned_sessions"] == 0


def test_two_trainers_share_one_pool_by_their_budgets(folder, misad):
    budgets = (BUDGET, 3 * MIB)
    processes = [trainer(folder, misad, budget=b, wait_at=STEPS - 2) for b in budgets]
    try:
        for process in processes:
            process.line(f"step {STEPS - 2}")
        assert misad.sessions() == 2
        assert misad.pool()["leased"] == sum(budgets)
        for process in processes:
            process.go_on()
        for process, budget in zip(processes, budgets):
            assert process.line("sha256") == plain_sha256()
            assert int(process.line("peak")) <= budget
            process.end()
    finally:
        for process in processes:
            process.__exit__()


def private_trainer(folder: Path, **settings: object) -> tuple[TrainerProcess, dict]:
    import json

    disk = folder / "disk"
    disk.mkdir(exist_ok=True)
    process = TrainerProcess(folder, manage={"budget": BUDGET, "runtime_dir": str(folder / "none"), "disk": str(disk)},
                             **{"steps": STEPS, **settings})
    session = json.loads(process.line("managed"))
    assert session["private_daemon"]
    assert Path(session["runtime_directory"]).is_dir()
    return process, session


def gone(pid: int) -> bool:
    return not os.path.exists(f"/proc/{pid}")


def test_a_private_misad_goes_with_its_trainer(folder):
    process, session = private_trainer(folder)
    with process:
        assert process.line("sha256") == plain_sha256()
        process.end()
        assert "a private one was started" in process.errors()
    wait_for(lambda: gone(session["daemon_pid"]), 2, "the private misad's end")
    assert not Path(session["runtime_directory"]).exists()
    assert list((folder / "disk").iterdir()) == []


def test_a_private_misad_goes_with_its_killed_trainer(folder):
    process, session = private_trainer(folder, hang_at=3)
    with process:
        process.line("hangs")
        process.kill()
    wait_for(lambda: gone(session["daemon_pid"]), 2, "the private misad's end")
    wait_for(lambda: not Path(session["runtime_directory"]).exists(), 2, "its folder's end")
    assert list((folder / "disk").iterdir()) == []


def test_a_trainer_that_is_interrupted_ends_cleanly(folder, misad):
    with trainer(folder, misad, steps=10_000, pause=0.01) as process:
        process.line("step 2")
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(timeout=20) != 0
        assert "KeyboardInterrupt" in process.errors()
        assert "terminate called" not in process.errors()
    wait_for(lambda: misad.pool()["free"] == 512 * MIB, 2, "free device memory")


LOADER = """
import os, sys, torch, misa
from torch.utils.data import DataLoader, Dataset
from tests.python.models import Mlp, batch
from torch.nn import functional as F
torch.set_num_threads(1)
runtime_dir, budget, linger = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3

class Data(Dataset):
    def __len__(self):
        return 6
    def __getitem__(self, step):
        # Far more than the trainer's budget: a worker's memory is its own.
        scratch = torch.ones(4 << 20)
        inputs, targets = batch(model, step)
        return inputs * scratch[:128], targets

torch.manual_seed(7)
model = Mlp()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
def train(epochs):
    for epoch in range(epochs):
        for inputs, targets in DataLoader(Data(), batch_size=None, num_workers=2, persistent_workers=False):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
if budget:
    with misa.manage(model, optimizer, budget=budget, runtime_dir=runtime_dir, daemon="required") as run:
        train(3)
        print("sha256", misa.state_sha256(model, optimizer), flush=True)
        print("peak", misa.memory.peak_bytes(), flush=True)
    run.release()
else:
    train(3)
    print("sha256", misa.state_sha256(model, optimizer), flush=True)
"""


def test_data_loader_workers(folder, misad):
    def run(budget: int) -> tuple[str, int]:
        program = LOADER.replace("sys.argv[1]", repr(str(misad.runtime_dir))).replace("sys.argv[2]", str(budget))
        with TrainerProcess(folder, program=program) as process:
            sha256 = process.line("sha256")
            peak = int(process.line("peak")) if budget else 0
            process.end()
        return sha256, peak

    budget = 900 << 10
    expected, _ = run(0)
    sha256, peak = run(budget)
    assert sha256 == expected
    assert peak <= budget


CHILD = """
import os, sys, time, torch, misa
from tests.python.models import Mlp, loss_of
torch.set_num_threads(1)
torch.manual_seed(7)
model = Mlp()
optimizer = torch.optim.AdamW(model.parameters())
run = misa.manage(model, optimizer, budget=900 << 10, runtime_dir=RUNTIME_DIR, daemon="required")
loss_of(model, 0).backward()
optimizer.step()
before = misa.state_sha256(model, optimizer)
child = os.fork()
if child == 0:
    try:
        for look in (lambda: model.head.weight.sum(), lambda: model.blocks[0].weight.detach().numpy()):
            try:
                look()
                print("child saw data", flush=True)
            except RuntimeError as error:
                print("child", str(error).splitlines()[0], flush=True)
        big = torch.ones(4 << 20)
        assert misa.current_run() is None
        print("child allocates", big.sum().item(), flush=True)
        if END == "linger":
            print("child lingers", os.getpid(), flush=True)
            time.sleep(3600)
    finally:
        if END == "exit":
            sys.exit(0)  # with every destructor and atexit function
        os._exit(0)
if END != "linger":
    os.waitpid(child, 0)
    assert misa.state_sha256(model, optimizer) == before
    loss_of(model, 1).backward()
    optimizer.step()
    run.flush()
    print("parent alive", run.daemon_alive(), flush=True)
    run.release()
else:
    time.sleep(3600)
"""


@pytest.mark.parametrize("end", ["exit", "_exit"])
def test_a_forked_child_neither_sees_nor_disturbs(folder, misad, end):
    with TrainerProcess(folder, program=CHILD.replace("RUNTIME_DIR", repr(str(misad.runtime_dir))).replace("END", repr(end))) as process:
        for _ in range(2):
            assert "process that was forked from" in process.line("child")
        assert process.line("child allocates") == str(float(4 << 20))
        assert process.line("parent alive") == "True"
        process.end()


def test_a_living_child_does_not_keep_the_lease(folder, misad):
    program = CHILD.replace("RUNTIME_DIR", repr(str(misad.runtime_dir))).replace("END", repr("linger"))
    with TrainerProcess(folder, program=program) as process:
        child = int(process.line("child lingers"))
        try:
            assert misad.pool()["leased"] > 0
            process.process.kill()
            wait_for(lambda: misad.pool()["free"] == 512 * MIB, 1, "free device memory while the child lives")
            assert not gone(child)
        finally:
            os.kill(child, signal.SIGKILL)
