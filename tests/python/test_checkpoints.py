"""Saving, loading and resuming: within the budget, to the bit, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import os
import random
from pathlib import Path
from typing import Any, Iterator

import misa
import numpy
import pytest
import torch
from torch import nn

from tests.python.beside import digest
from tests.python.models import Convolution, Mlp, Transformer, loss_of
from tests.python.processes import Misad, TrainerProcess
from tests.python.small_training import manage, mlp, train

safetensors_torch = pytest.importorskip("safetensors.torch")


@contextlib.contextmanager
def tight(misad: Misad, model: Any, optimizer: Any, room: int = 700 << 10, **options: Any) -> Iterator[misa.Run]:
    """Managed with a budget well below the model and its state (1.4 MB); what happens inside stays within it."""
    gc.collect()
    own = sum(p.numel() * 4 for p in model.parameters())
    state = sum(t.untyped_storage().nbytes() for s in optimizer.state.values() for t in s.values())
    budget = misa.memory.live_bytes() - own - state + room
    run = manage(misad, model, optimizer, budget=budget, **options)
    try:
        yield run
        run.flush()
        assert misa.memory.peak_bytes() <= budget
    finally:
        run.release()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return set(one) == set(other) and all(torch.equal(one[name], other[name]) for name in one)


# ------------------------------------------------------------------------------------------------- torch's own ways


@pytest.mark.parametrize("stress", [False, True])
def test_torch_save_under_a_tight_budget(shared_misad, folder, stress):
    """Deferred steps are due and most of the model is away; what torch writes is what it would write without misa."""
    plain_model, plain_optimizer = mlp()
    train(plain_model, plain_optimizer, range(2))
    torch.save({"model": plain_model.state_dict(), "optimizer": plain_optimizer.state_dict()}, folder / "plain.pt")
    model, optimizer = mlp()
    with tight(shared_misad, model, optimizer, stress=stress):
        train(model, optimizer, range(2))
        torch.save(model.state_dict(), folder / "weights.pt")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, folder / "saved.pt")
        torch.save(model, folder / "whole.pt")
    assert (folder / "saved.pt").stat().st_size == (folder / "plain.pt").stat().st_size
    saved = torch.load(folder / "saved.pt")
    assert same(saved["model"], plain_model.state_dict())
    assert same(torch.load(folder / "weights.pt"), plain_model.state_dict())
    assert same(torch.load(folder / "whole.pt", weights_only=False).state_dict(), plain_model.state_dict())
    for i, state in plain_optimizer.state_dict()["state"].items():
        assert same(saved["optimizer"]["state"][i], state)


def test_torch_save_keeps_tied_weights_one(shared_misad, folder):
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with manage(shared_misad, model, optimizer) as run:
        assert run.unload_all()
        torch.save(model.state_dict(), folder / "tied.pt")
    run.release()
    loaded = torch.load(folder / "tied.pt")
    assert loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
    assert same(loaded, model.state_dict())


@pytest.mark.parametrize("again", [False, True])
def test_load_state_dict_under_a_tight_budget(shared_misad, folder, again):
    """The usual lines of a script that resumes, and then writes over the file that it loaded."""
    model, optimizer = mlp()
    train(model, optimizer, range(2))
    path = folder / "checkpoint.pt"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    train(model, optimizer, range(2, 5))
    expected = digest(model, optimizer)
    torch.manual_seed(8)
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    with tight(shared_misad, model, optimizer):
        if again:  # there is state already, and it goes
            train(model, optimizer, range(3))
            optimizer.zero_grad()
        loaded = torch.load(path)
        model.load_state_dict(loaded["model"])
        optimizer.load_state_dict(loaded["optimizer"])
        train(model, optimizer, range(2, 3))
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
        assert float(loaded["optimizer"]["state"][0]["step"]) == 2  # the loaded one is still what it was
        del loaded
        train(model, optimizer, range(3, 5))
        assert digest(model, optimizer) == expected
    saved = torch.load(path)
    assert float(saved["optimizer"]["state"][0]["step"]) == 3


# -------------------------------------------------------------------------------------------------------- the format


def test_saved_files_are_what_safetensors_reads(shared_misad, folder):
    torch.manual_seed(7)
    model = Convolution().bfloat16()
    model.register_buffer("flags", torch.tensor([True, False, True]))
    model.register_buffer("counts", torch.arange(5).reshape(5, 1).expand(5, 3).t())
    model.register_buffer("nothing", torch.empty(0, 4))
    model.register_buffer("scalar", torch.tensor(3.5, dtype=torch.float64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with manage(shared_misad, model, optimizer) as run:
        assert run.unload_all()
        misa.save(folder / "saved", model=model, optimizer=optimizer)
    run.release()
    loaded = safetensors_torch.load_file(folder / "saved/model.safetensors")
    assert same(loaded, {name: t.contiguous() for name, t in model.state_dict().items()})
    assert all(loaded[name].dtype == t.dtype for name, t in model.state_dict().items())


def test_shards_and_tied_weights_as_hugging_face_has_them(folder):
    torch.manual_seed(7)
    model = Transformer()
    misa.save(folder / "saved", model=model, shard_bytes=200 << 10)
    index = json.loads((folder / "saved/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert "head.weight" not in index["weight_map"] and index["metadata"]["head.weight"] == "embedding.weight"
    loaded: dict[str, torch.Tensor] = {}
    for file in files:
        assert (folder / "saved" / file).stat().st_size <= (200 << 10) + 8192
        loaded.update(safetensors_torch.load_file(folder / "saved" / file))
    assert same(loaded, {n: t for n, t in model.state_dict().items() if n != "head.weight"})
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    misa.load_weights(model, folder / "saved")
    assert same(model.state_dict(), before) and model.head.weight is model.embedding.weight


def test_weights_that_safetensors_wrote(shared_misad, folder):
    torch.manual_seed(7)
    source = Mlp()
    safetensors_torch.save_file(source.state_dict(), folder / "weights.safetensors")
    torch.manual_seed(8)
    model, optimizer = mlp()
    with tight(shared_misad, model, optimizer):
        train(model, optimizer, range(1))
        misa.load_weights(model, folder / "weights.safetensors")
    assert same(model.state_dict(), source.state_dict())


# ----------------------------------------------------------------------------------------------------------- resuming


def loop(model: nn.Module, optimizers: list[Any], steps: range, scheduler: Any = None, scaler: Any = None) -> None:
    for step in steps:
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(model, step)
        (scaler.scale(loss) if scaler else loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer) if scaler else optimizer.step()
        if scaler:
            scaler.update()
        if scheduler:
            scheduler.step()


class Training:
    """A model with dropout, two optimizers, a scheduler and a scaler of gradients."""

    def __init__(self, seed: int = 7) -> None:
        torch.manual_seed(seed)
        self.model = Transformer()
        self.optimizers: list[Any] = [
            torch.optim.AdamW([p for p in self.model.parameters() if p.dim() > 1], lr=3e-3),
            torch.optim.SGD([p for p in self.model.parameters() if p.dim() == 1], lr=1e-2, momentum=0.9),
        ]
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizers[0], max_lr=1e-2, total_steps=8)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)

    def train(self, steps: range) -> None:
        loop(self.model, self.optimizers, steps, self.scheduler, self.scaler)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizers,
                "others": {"scheduler": self.scheduler, "scaler": self.scaler}}

    def digest(self) -> str:
        return f"{digest(self.model, self.optimizers)} {self.scheduler.state_dict()} {self.scaler.state_dict()}"


@pytest.mark.parametrize("step", ["deferred", "eager"])
@pytest.mark.parametrize("stress", [False, True])
def test_resuming_everything_exactly(shared_misad, folder, step, stress):
    plain = Training()
    plain.train(range(6))
    expected = plain.digest()
    first = Training()
    with manage(shared_misad, first.model, first.optimizers, step=step, stress=stress) as run:
        first.train(range(3))
        misa.save(folder / "saved", **{**first.parts(), "others": {**first.parts()["others"], "epoch": 3}})
        assert run.steps == 3
        first.train(range(3, 6))  # saving has changed nothing
        assert first.digest() == expected
    run.release()
    second = Training(seed=99)
    with manage(shared_misad, second.model, second.optimizers, step=step, stress=stress) as run:
        torch.randn(5), random.random(), numpy.random.rand()
        others = misa.load(folder / "saved", **second.parts())
        assert others["epoch"] == 3 and run.steps == 3
        second.train(range(3, 6))
        assert second.digest() == expected and run.steps == 6
    run.release()


def test_resuming_in_memory_of_its_own_and_then_managed(shared_misad, folder):
    """Saved plain, loaded plain, managed afterwards: a checkpoint does not care."""
    plain = Training()
    plain.train(range(2))
    misa.save(folder / "saved", **plain.parts())
    plain.train(range(2, 4))
    second = Training(seed=99)
    misa.load(folder / "saved", **second.parts())
    with manage(shared_misad, second.model, second.optimizers) as run:
        second.train(range(2, 4))
        assert second.digest() == plain.digest()
    run.release()


@pytest.mark.parametrize("again", [False, True])
def test_saving_and_loading_stay_within_a_tight_budget(shared_misad, folder, again):
    model, optimizer = mlp(layers=10)
    train(model, optimizer, range(5))
    expected = digest(model, optimizer)
    model, optimizer = mlp(layers=10)
    with tight(shared_misad, model, optimizer):
        train(model, optimizer, range(2))
        misa.save(folder / "saved", model=model, optimizer=optimizer)
    torch.manual_seed(8)
    model = Mlp(layers=10)
    optimizer = torch.optim.AdamW(model.parameters())
    with tight(shared_misad, model, optimizer):
        if again:
            train(model, optimizer, range(1))
            optimizer.zero_grad()
        misa.load(folder / "saved", model=model, optimizer=optimizer)
        train(model, optimizer, range(2, 5))
        assert digest(model, optimizer) == expected
        assert misa.current_run().report()["notices"] == []


SAMPLED = {"delta": 0.3, "inner_steps": 3, "seed": 3}


@pytest.mark.parametrize("at", [1, 3, 4, 5])
def test_resuming_mode_sampled_in_the_middle_of_a_round(misad, folder, at):
    """The draws go on where they were, in the daemon's mirror as well."""
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with misa.SampledReference(model, optimizer, **SAMPLED):
        train(model, optimizer, range(9))
    expected = digest(model, optimizer)
    options = {"mode": "sampled", "sampled": misa.Sampled(**SAMPLED)}
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with manage(misad, model, optimizer, **options) as run:
        train(model, optimizer, range(at))
        misa.save(folder / "saved", model=model, optimizer=optimizer)
    run.release()
    torch.manual_seed(99)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with manage(misad, model, optimizer, **options) as run:
        misa.load(folder / "saved", model=model, optimizer=optimizer)
        train(model, optimizer, range(at, 9))
        assert digest(model, optimizer) == expected
        assert run.report()["notices"] == []
    run.release()
    kinds = [json.loads(line)["kind"] for line in misad.events().splitlines()]
    assert kinds.count("modules_registered") == 3  # the last one brought the sampler's state
    assert not {"sampler_mismatch", "sampler_unmirrored", "trainer_problem", "plan_failed"} & set(kinds)


def test_the_plain_reference_resumes_too(folder):
    def start(seed: int) -> tuple[Any, Any, Any]:
        torch.manual_seed(seed)
        model = Transformer()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        return model, optimizer, misa.SampledReference(model, optimizer, **SAMPLED)

    model, optimizer, reference = start(7)
    with reference:
        train(model, optimizer, range(4))
        misa.save(folder / "saved", model=model, optimizer=optimizer, others={"sampling": reference})
        train(model, optimizer, range(4, 8))
        expected = digest(model, optimizer)
    model, optimizer, reference = start(99)
    with reference:
        misa.load(folder / "saved", model=model, optimizer=optimizer, others={"sampling": reference})
        train(model, optimizer, range(4, 8))
        assert digest(model, optimizer) == expected


RESUME = """
import misa, torch
from tests.python.models import Transformer, loss_of
torch.set_num_threads(1)
torch.manual_seed(99)
model = Transformer()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
with misa.manage(model, optimizer, budget="64MiB", runtime_dir="{runtime_dir}", daemon="required", mode="{mode}",
                 sampled=misa.Sampled(delta=0.3, inner_steps=3, seed=3)) as run:
    misa.load("{path}", model=model, optimizer=optimizer)
    for step in range(run.steps, 6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    print("sha256", misa.state_sha256(model, optimizer), flush=True)
"""


@pytest.mark.parametrize("mode", ["exact", "sampled"])
def test_resuming_in_a_new_process(shared_misad, folder, mode):
    torch.manual_seed(7)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    with manage(shared_misad, model, optimizer, mode=mode, sampled=misa.Sampled(**SAMPLED)) as run:
        train(model, optimizer, range(2))
        misa.save(folder / "saved", model=model, optimizer=optimizer)
        train(model, optimizer, range(2, 6))
        expected = digest(model, optimizer)
    run.release()
    program = RESUME.format(mode=mode, runtime_dir=shared_misad.runtime_dir, path=folder / "saved")
    with TrainerProcess(folder, program=program) as trainer:
        assert trainer.line("sha256") == expected
        trainer.end()


# ------------------------------------------------------------------------------------------------- damage and refusals


def test_a_checkpoint_is_replaced_whole_or_not_at_all(folder, monkeypatch):
    model, optimizer = mlp()
    train(model, optimizer, range(1))
    path = folder / "saved"
    misa.save(path, model=model, optimizer=optimizer)
    before = digest(model, optimizer)
    train(model, optimizer, range(1, 2))
    real = os.write
    written = 0

    def full(fd: int, data: Any) -> int:
        nonlocal written
        written += len(data)
        if written > 300 << 10:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="No space"):
        misa.save(path, model=model, optimizer=optimizer)
    monkeypatch.undo()
    assert [p.name for p in folder.iterdir()] == ["saved"]
    misa.load(path, model=model, optimizer=optimizer)
    assert digest(model, optimizer) == before
    misa.save(path, model=model, optimizer=optimizer)  # over the earlier one
    assert [p.name for p in folder.iterdir()] == ["saved"]


def test_nothing_but_a_checkpoint_is_replaced(folder):
    (folder / "thesis").mkdir()
    (folder / "thesis/chapter1.tex").write_text("years of work")
    with pytest.raises(ValueError, match="not a checkpoint"):
        misa.save(folder / "thesis", model=Mlp())
    assert (folder / "thesis/chapter1.tex").read_text() == "years of work"


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 5)


DAMAGES = {
    "a bit of a weight": lambda p: _flip(p / "model.safetensors", -1000),
    "a bit of a header": lambda p: _flip(p / "model.safetensors", 30),
    "a bit of the optimizer's state": lambda p: _flip(p / "optimizer.safetensors", -1),
    "a bit of the rest": lambda p: _flip(p / "state.pt", 200),
    "weights cut off": lambda p: _cut(p / "model.safetensors"),
    "state cut off": lambda p: _cut(p / "optimizer.safetensors"),
    "a file gone": lambda p: (p / "optimizer.safetensors").unlink(),
    "the list of files gone": lambda p: (p / "checkpoint.json").unlink(),
    "the list of files cut off": lambda p: _cut(p / "checkpoint.json"),
}


@pytest.mark.parametrize("managed", [False, True])
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_changes_nothing(shared_misad, folder, damage, managed):
    model, optimizer = mlp(layers=2)
    train(model, optimizer, range(1))
    misa.save(folder / "saved", model=model, optimizer=optimizer)
    DAMAGES[damage](folder / "saved")
    train(model, optimizer, range(1, 2))
    before = digest(model, optimizer)
    with manage(shared_misad, model, optimizer) if managed else contextlib.nullcontext():
        with pytest.raises((ValueError, FileNotFoundError), match="Nothing was changed"):
            misa.load(folder / "saved", model=model, optimizer=optimizer)
        assert digest(model, optimizer) == before
    if managed:
        assert digest(model, optimizer) == before


def test_a_checkpoint_of_another_training_changes_nothing(shared_misad, folder):
    model, optimizer = mlp(layers=2)
    train(model, optimizer, range(1))
    misa.save(folder / "saved", model=model, optimizer=optimizer, others={"epoch": 1})
    other, other_optimizer = mlp(layers=3)
    wide = Mlp(layers=2).double()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    halves = torch.optim.AdamW([{"params": [p]} for p in model.parameters()])
    for what, words in (
        ({"model": other}, "has no blocks.2"),
        ({"model": Mlp(layers=1)}, "has blocks.1"),
        ({"model": wide}, "float64"),
        ({"model": [model, other]}, "holds 1 models"),
        ({"model": model, "optimizer": sgd}, "is of AdamW"),
        ({"model": model, "optimizer": halves}, "groups of"),
        ({"model": model, "optimizer": optimizer, "others": {"scheduler": sgd}}, "nothing saved under the name"),
        ({"model": model, "optimizer": optimizer, "others": {"epoch": 2}}, "has no load_state_dict"),
    ):
        train(model, optimizer, range(1))
        before = digest(model, optimizer)
        with pytest.raises(ValueError, match=words) as caught:
            misa.load(folder / "saved", **what)
        assert "Nothing was" in str(caught.value)
        assert digest(model, optimizer) == before
    with pytest.raises(ValueError, match="others"):
        misa.save(folder / "never", model=model, others={"function": sum})
    assert not (folder / "never").exists()


def test_a_run_of_another_mode_or_other_options_changes_nothing(shared_misad, folder):
    def start() -> tuple[Any, Any]:
        torch.manual_seed(7)
        model = Transformer()
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3)

    model, optimizer = start()
    with manage(shared_misad, model, optimizer, mode="sampled", sampled=misa.Sampled(**SAMPLED)) as run:
        train(model, optimizer, range(2))
        misa.save(folder / "saved", model=model, optimizer=optimizer)
    run.release()
    for options, words in (
        ({}, "mode 'sampled'"),
        ({"mode": "sampled", "sampled": misa.Sampled(**{**SAMPLED, "delta": 0.5})}, "other options"),
        ({"mode": "sampled", "sampled": misa.Sampled(**SAMPLED, always=("norm",))}, "always trained"),
    ):
        model, optimizer = start()
        with manage(shared_misad, model, optimizer, **options) as run:
            train(model, optimizer, range(1))
            before = digest(model, optimizer)
            with pytest.raises(ValueError, match=words):
                misa.load(folder / "saved", model=model, optimizer=optimizer)
            assert digest(model, optimizer) == before
        run.release()
    model, optimizer = start()
    with pytest.raises(ValueError, match="inside misa.manage"):
        misa.load(folder / "saved", model=model, optimizer=optimizer)


BAD_FILES = {
    "empty": b"",
    "short": b"\x05\x00\x00",
    "a header that is too long": (1 << 40).to_bytes(8, "little") + b"{}",
    "no JSON": (8).to_bytes(8, "little") + b"{{{{{{{{",
    "no dict": (8).to_bytes(8, "little") + b"[1,2,3] ",
    "a hole": None,
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_safetensors_file_is_a_sentence(folder, case):
    data = BAD_FILES[case]
    if data is None:
        header = json.dumps({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}).encode()
        data = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "bad.safetensors").write_bytes(data)
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        misa.load_weights(nn.Linear(1, 1), folder / "bad.safetensors")


def test_an_index_that_leads_elsewhere_is_refused(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "../../etc/shadow"}}')
    with pytest.raises(ValueError, match="outside its own folder"):
        misa.load_weights(nn.Linear(1, 1), folder)
